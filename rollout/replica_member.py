"""One of several replicas, as those that look after all of them see it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Protocol

from moebius.rollout.config import Place
from moebius.rollout.group import RolloutGroup


class Room(Protocol):
    """What `Homes` offers."""

    def place(self, replica: int) -> Place:
        """Where a replica runs."""

    def close(self) -> None:
        """Give it back."""


@dataclass(eq=False)
class Member:
    """One replica."""

    index: int
    group: RolloutGroup
    node: str
    restarts: int = 0  # in a row without a step that ended well
    update: int = 0  # number of the last weight update that its ranks hold; -1: they lack weights
    stale: bool = False  # they hold other weights than the others'
    problem: str | None = None  # why it could not be started again
    life: int = 0  # how often its ranks have been lost, or started again on demand
    reviving: threading.Thread | None = None
    resting: threading.Event = field(default_factory=threading.Event)  # no attempt to start it is under way

    @property
    def in_service(self) -> bool:
        """Whether it takes prompts."""
        return self.reviving is None and self.problem is None and not self.stale and self.group.running

    @property
    def why_not(self) -> str:
        """Why it is out of service."""
        if self.reviving is not None:
            return "it is being started again"
        if self.problem is not None:
            return self.problem
        if not self.group.running:
            return "its ranks are lost"
        if not self.stale and self.group.problem is not None:
            return self.group.problem
        return "it was started again and waits for a weight update"
