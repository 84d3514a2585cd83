"""How a group gives its ranks' memory to a trainer on the same devices, and takes it back."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from moebius.engine.types import MemoryChange, MemoryTag
from moebius.rollout.errors import BadInput, MoebiusError, RankDied
from moebius.rollout.group_life import MEMORY_TAGS
from moebius.rollout.ranks import RankError
from moebius.rollout.recovery import GroupRecovery

MEMORY_CALL_S = 600.0


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """What `sleep` gave back, or `wake_up` took."""

    ranks: list[MemoryChange]
    seconds: float  # of the whole call

    @property
    def nbytes(self) -> int:
        """Bytes of the slots, over all ranks."""
        return sum(rank.nbytes for rank in self.ranks)

    @property
    def freed(self) -> int:
        """Bytes by which memory in use became less, over all ranks, as the system counts; negative: more."""
        return sum(rank.freed for rank in self.ranks)


class GroupMemory(GroupRecovery):
    """The part of a `RolloutGroup` that sleeps."""

    def sleep(self, tags: Iterable[MemoryTag] = MEMORY_TAGS, keep_weights: bool = False) -> MemoryReport:
        """Give memory back, between steps; addresses stay, so that CUDA graphs do too.

        Args:
            tags: weights (experts, attention, embeddings) and kv_cache. What is asleep already stays so.
            keep_weights: keep a copy in host memory and put it back on waking. Otherwise `generate` refuses
                after waking until a full update has come.

        Parked samples stay; such as held KV pages compute their KV again. Until `wake_up`, `generate` raises
        GroupNotReady.

        Raises:
            BadInput: an unknown tag.
            GroupNotReady, RankDied, MoebiusError: as in `generate`; also where memory cannot be given back.
        """
        asked = _checked("sleep", tags)
        with self._exclusively("sleep"):
            try:
                return self._all("sleep", (asked, keep_weights))
            except MoebiusError:
                asked = ()
                raise
            finally:  # after Ctrl-C, too: the ranks have been asked, and do it all the same, unless they are lost
                if self.running:
                    if "weights" in set(asked) - self._asleep and not keep_weights:
                        self._problem = (
                            "the weights were given back by sleep; send them with update_weights after wake_up"
                        )
                    self._asleep |= set(asked)

    def wake_up(self, tags: Iterable[MemoryTag] | None = None) -> MemoryReport:
        """Take memory again; None: all of it. Raises as `sleep`."""
        asked = _checked("wake_up", MEMORY_TAGS if tags is None else tags)
        with self._exclusively("wake_up"):
            report = self._all("wake_up", (asked,))
            self._asleep -= set(asked)
            return report

    def _all(self, method: str, arguments: tuple[Any, ...]) -> MemoryReport:
        started = time.perf_counter()
        while True:
            ranks = self._alive()
            try:
                changes = ranks.call(method, [arguments] * self.config.ranks, what=method, timeout_s=MEMORY_CALL_S)
            except (RankDied, RankError) as error:
                if isinstance(error, RankError) and error.by_all and "BackingError" in str(error.cause):
                    raise
                # Memory may be back on some ranks and not on others. New ones are awake, and have the weights.
                self.recover(ranks, error, method)
                continue
            return MemoryReport(changes, time.perf_counter() - started)


def _checked(name: str, tags: Iterable[MemoryTag]) -> Sequence[MemoryTag]:
    asked: list[Any] = [tags] if isinstance(tags, str) else list(tags)
    unknown = [tag for tag in asked if tag not in MEMORY_TAGS]
    if unknown:
        raise BadInput(f"{name}: unknown tag {unknown[0]!r}; there are {', '.join(MEMORY_TAGS)}")
    return tuple(asked)
