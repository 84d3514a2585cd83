"""When to switch. Pure: the same inputs give the same decision on every rank, so no rank needs to be told."""

from __future__ import annotations

from moebius.engine.config import PolicyConfig


class SwitchPolicy:
    """One EP->TP switch per rollout step; a refused switch is tried again after the cooldown."""

    def __init__(self, config: PolicyConfig) -> None:
        self.config = config
        self._not_before = 0
        self._done = False

    def begin_step(self) -> None:
        """Forget the previous step."""
        self._not_before = 0
        self._done = False

    def wants_tp(self, iteration: int, live: int) -> bool:
        """Whether to switch before `iteration` (0-based, of this step), with `live` unfinished samples in all."""
        if self._done or live == 0 or iteration < self._not_before:
            return False
        match self.config.kind:
            case "rollout":
                return live <= self.config.threshold
            case "scheduled":
                return iteration >= self.config.at_iteration
            case "static_tp":
                return True
            case "static_ep":
                return False

    def switched(self) -> None:
        """The switch happened: none follows in this step."""
        self._done = True

    def cancelled(self, iteration: int) -> None:
        """The switch was refused before `iteration`."""
        self._not_before = iteration + self.config.cooldown_iterations
