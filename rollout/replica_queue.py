"""Which replica gets which prompts of the queue that all share. Plain arithmetic.

Prompts wait here, not in the engines, until a replica can decode them: so a replica that runs dry takes what another
one would have begun later, and nobody's tail waits behind work that has not begun.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from moebius.rollout.backlog import PromptGroup

FULL = 0.9  # share of KV pages in use from which a replica gets no more
_OVERSHOOT = 4  # a prompt may exceed the room but for a quarter of it


@dataclass(slots=True)
class Load:
    """How much a replica has."""

    live: int = 0  # unfinished samples
    tokens: int = 0  # of the prompts it got in this deal
    room: int = 1  # samples that it decodes at once
    kv_use: float = 0.0  # of its fullest rank, as last heard

    def takes(self, samples: int) -> bool:
        """Whether it should get a prompt of so many samples now."""
        if self.live == 0:  # nothing holds pages; what was heard of them is old
            return True
        return self.kv_use < FULL and self.live + min(samples, max(1, self.room // _OVERSHOOT)) <= self.room


def deal(queue: deque[PromptGroup], loads: Sequence[Load]) -> list[list[PromptGroup]]:
    """Take prompts off the queue for replicas with room, always the emptiest one; a prompt's samples stay together.

    Returns the prompts of each, and changes `loads` accordingly.
    """
    shares: list[list[PromptGroup]] = [[] for _ in loads]
    while queue:
        samples = len(queue[0].missing)
        able = [i for i, load in enumerate(loads) if load.takes(samples)]
        if not able:
            break
        chosen = min(able, key=lambda i: (loads[i].live, loads[i].tokens, i))
        group = queue.popleft()
        loads[chosen].live += samples
        loads[chosen].tokens += len(group.ids)
        shares[chosen].append(group)
    return shares
