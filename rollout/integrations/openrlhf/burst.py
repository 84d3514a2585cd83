"""When a step's burst is over, where prompts come one call after another and nobody says how many there will be.

OpenRLHF sends each prompt with its number of samples, all within moments; with dynamic filtering others follow later.
So the burst is in when no call has come for a while. Agents of several turns come back with further requests: theirs
is in only when few trajectories are left. Pure bookkeeping, on one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Burst:
    """Of one engine. `begin(n)` says that n more samples come, `filled()` that the burst is in."""

    def __init__(
        self, begin: Callable[[int], None], filled: Callable[[], None], *, quiet_s: float, threshold: int, turns: bool
    ) -> None:
        """`threshold`: live requests at which the policy would switch. `turns`: trajectories may have several turns."""
        self._begin, self._filled = begin, filled
        self._quiet_s, self._threshold, self._turns = quiet_s, threshold, turns
        self._timer: asyncio.TimerHandle | None = None
        self.unfinished = 0  # trajectories

    def came(self, trajectories: int) -> None:
        """A call with so many trajectories."""
        self.unfinished += trajectories
        self._begin(trajectories)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(self._quiet_s, self._quiet)

    def ended(self) -> None:
        """One of them is over, with or without success."""
        self.unfinished -= 1
        if self._turns and self._timer is None and 0 < self.unfinished <= self._threshold:
            self._filled()

    def _quiet(self) -> None:
        self._timer = None
        if not self._turns or self.unfinished <= self._threshold:
            self._filled()
