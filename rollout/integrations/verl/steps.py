"""When a trainer step's burst is over: the account of announced and unfinished trajectories of one replica.

verl sends every turn of every trajectory as a request of its own and expands n itself, so a server sees neither batch
nor step. The agent-loop manager says how many trajectories it sends out, and each agent loop when it has ended. Few
live requests are then the step's tail only when few trajectories are left: between two turns a trajectory has no
request, but it comes back with one. Pure bookkeeping, no Ray.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Trajectories:
    """Of one replica. Announcements for several replicas are split among them, so the account may be a little off."""

    threshold: int  # live requests at which the policy would switch
    to_come: int = 0  # announced, or sent back unfinished, and without a request so far
    unfinished: int = 0  # announced and not ended
    _sent_back: int = 0  # that came back unfinished and are in no announcement
    _ended: bool = False  # one has, since the last announcement

    def begin(self, expected: int) -> int:
        """So many more were sent out. Returns how many more first requests to expect."""
        new, self._sent_back = expected + self._sent_back, 0
        self.to_come += expected
        self.unfinished += expected
        self._ended = False
        return new

    def arrived(self) -> None:
        """A request came."""
        self.to_come = max(0, self.to_come - 1)
        self._sent_back = max(0, self._sent_back - 1)

    def sent_back(self) -> None:
        """A request was ended before its time; its caller will ask again for the rest."""
        self.to_come += 1
        self._sent_back += 1

    def ended(self, trajectories: int) -> None:
        """So many agent loops are over."""
        self.unfinished = max(0, self.unfinished - trajectories)
        self._ended = True

    @property
    def few_left(self) -> bool:
        """Whether so few announced trajectories are left that the burst is over, however many requests have come."""
        started = self._ended or self.to_come == 0
        return started and 0 < self.unfinished <= self.threshold
