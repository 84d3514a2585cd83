"""RolloutGroup: one switch group of ranks behind a few calls, above all `generate` and `update_weights`."""

from __future__ import annotations

from types import TracebackType

from moebius.rollout.group_memory import GroupMemory
from moebius.rollout.group_steps import GroupSteps
from moebius.rollout.group_weights import GroupWeights
from moebius.rollout.stream import OnProgress

__all__ = ["OnProgress", "RolloutGroup"]


class RolloutGroup(GroupSteps, GroupWeights, GroupMemory):
    """A started switch group. One call at a time; only `abort` and `shutdown` may come from another thread.

    Ranks are Ray actors on one node, started from `config` (Ray itself too, if there is none). Ranks live and die
    together: when one is lost, all are started again and go on where they were, as `config.failures` says. Use it as a
    context manager or call `shutdown()`.

    Raises:
        BadInput: the model folder or a setting is wrong; found before anything is started.
        MoebiusError: Ray cannot be reached, a resource is missing, or a rank could not start.
    """

    def __enter__(self) -> RolloutGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.shutdown()
