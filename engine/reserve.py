"""KV pages kept for another use at the end of a step: the pool hands them out only when all others are taken.

A switch may be prepared by sending expert bytes ahead of time. They need memory that lies together in every layer's
slot, which only pages with the highest ids are, and those are free late in a step only if they were used last. As many
of them as are free are of use, so the reserve itself is handed out in parts, the one with the highest ids last.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

_PARTS = 4  # of a reserve; each costs every allocation a little


class TieredQueue:
    """vLLM's queue of free blocks in tiers: tier t has ids from `starts[t]` on, popped when lower ones are empty.

    `starts` ascend from 0.
    """

    def __init__(self, blocks: Iterable[KVCacheBlock], starts: Sequence[int]) -> None:
        self._starts = list(starts)
        self.tiers = [FreeKVCacheBlockQueue(part) for part in self._parted(blocks)]

    @property
    def num_free_blocks(self) -> int:
        """Free blocks of all tiers."""
        return sum([tier.num_free_blocks for tier in self.tiers])

    def popleft(self) -> KVCacheBlock:
        """The next block."""
        for tier in self.tiers:
            if tier.num_free_blocks:
                return tier.popleft()
        return self.tiers[-1].popleft()  # raises as vLLM's does

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """The next `n` blocks."""
        found: list[KVCacheBlock] = []
        for tier in self.tiers[:-1]:
            found += tier.popleft_n(min(n - len(found), tier.num_free_blocks))
        return found + self.tiers[-1].popleft_n(n - len(found))  # fails where all are too few

    def remove(self, block: KVCacheBlock) -> None:
        """Take a free block out."""
        self.tier(block).remove(block)

    def append(self, block: KVCacheBlock) -> None:
        """Put a block at its tier's end."""
        self.tier(block).append(block)

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        """Put blocks at their tiers' ends."""
        for tier, part in zip(self.tiers, self._parted(blocks), strict=True):
            tier.append_n(part)

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        """Put blocks at their tiers' fronts."""
        for tier, part in zip(self.tiers, self._parted(blocks), strict=True):
            tier.prepend_n(part)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """Free blocks in the order they are handed out."""
        return [block for tier in self.tiers for block in tier.get_all_free_blocks()]

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        """Free blocks after `cursor` (None: all), in the order they are handed out."""
        first = 0 if cursor is None else self._index(cursor)
        for tier in self.tiers[first:]:
            yield from tier.iter_blocks_after(cursor)
            cursor = None

    def tier(self, block: KVCacheBlock) -> FreeKVCacheBlockQueue:
        """The tier of a block."""
        return self.tiers[self._index(block)]

    def _index(self, block: KVCacheBlock) -> int:
        return bisect_right(self._starts, block.block_id) - 1

    def _parted(self, blocks: Iterable[KVCacheBlock]) -> list[list[KVCacheBlock]]:
        parts: list[list[KVCacheBlock]] = [[] for _ in self._starts]
        for block in blocks:
            parts[self._index(block)].append(block)
        return parts


class Reserve:
    """The `pages` highest ids of a pool, used last; of those the highest can be withdrawn that are not in use."""

    def __init__(self, pool: BlockPool, pages: int) -> None:
        self._pool = pool
        self.pages = pages
        self.total = pool.num_gpu_blocks
        first = self.total - pages
        starts = {first + part * pages // _PARTS for part in range(_PARTS)} - {self.total}
        self._queue = TieredQueue(pool.free_block_queue.get_all_free_blocks(), sorted({0} | starts))
        untyped: Any = pool
        untyped.free_block_queue = self._queue
        self._withdrawn: list[KVCacheBlock] = []

    @property
    def withdrawn(self) -> int:
        """Pages that are out of the pool at present."""
        return len(self._withdrawn)

    def free_run(self) -> int:
        """How many of its pages, from the highest id downwards, are free and in the pool."""
        if self._withdrawn:
            return 0
        run = 0
        for block in reversed(self._pool.blocks[self.total - self.pages :]):
            if block.ref_cnt or block.is_null:
                break
            run += 1
        return run

    def withdraw(self, pages: int) -> None:
        """Take so many pages, at most `free_run`, out of the pool and their contents out of the prefix cache."""
        self._withdrawn = self._pool.blocks[self.total - pages :]
        for block in self._withdrawn:
            self._queue.remove(block)
        if self._pool.enable_caching:
            for block in self._withdrawn:
                self._pool._maybe_evict_cached_block(block)

    def give_back(self) -> None:
        """Put withdrawn pages back; their bytes are whatever was written to them."""
        self._queue.append_n(self._withdrawn)
        self._withdrawn = []
