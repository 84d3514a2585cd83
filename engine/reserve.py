"""KV pages kept for another use at the end of a step: the pool hands them out only when all others are taken.

A switch may be prepared by sending expert bytes ahead of time. They need memory that lies together in every layer's
slot, which only pages with the highest ids are, and those are free late in a step only if they were used last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock


class TieredQueue:
    """vLLM's queue of free blocks in two tiers: blocks from id `split` on are popped only when no other is left."""

    def __init__(self, blocks: Iterable[KVCacheBlock], split: int) -> None:
        self.split = split
        below, above = self._parted(blocks)
        self.below, self.above = FreeKVCacheBlockQueue(below), FreeKVCacheBlockQueue(above)

    @property
    def num_free_blocks(self) -> int:
        """Free blocks of both tiers."""
        return self.below.num_free_blocks + self.above.num_free_blocks

    def popleft(self) -> KVCacheBlock:
        """The next block."""
        return (self.below if self.below.num_free_blocks else self.above).popleft()

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """The next `n` blocks."""
        first = min(n, self.below.num_free_blocks)
        return self.below.popleft_n(first) + self.above.popleft_n(n - first)

    def remove(self, block: KVCacheBlock) -> None:
        """Take a free block out."""
        self._tier(block).remove(block)

    def append(self, block: KVCacheBlock) -> None:
        """Put a block at its tier's end."""
        self._tier(block).append(block)

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        """Put blocks at their tiers' ends."""
        below, above = self._parted(blocks)
        self.below.append_n(below)
        self.above.append_n(above)

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        """Put blocks at their tiers' fronts."""
        below, above = self._parted(blocks)
        self.below.prepend_n(below)
        self.above.prepend_n(above)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """Free blocks in the order they are handed out."""
        return self.below.get_all_free_blocks() + self.above.get_all_free_blocks()

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        """Free blocks after `cursor` (None: all), in the order they are handed out."""
        if cursor is None or cursor.block_id < self.split:
            yield from self.below.iter_blocks_after(cursor)
            cursor = None
        yield from self.above.iter_blocks_after(cursor)

    def _tier(self, block: KVCacheBlock) -> FreeKVCacheBlockQueue:
        return self.above if block.block_id >= self.split else self.below

    def _parted(self, blocks: Iterable[KVCacheBlock]) -> tuple[list[KVCacheBlock], list[KVCacheBlock]]:
        parts: tuple[list[KVCacheBlock], list[KVCacheBlock]] = ([], [])
        for block in blocks:
            parts[block.block_id >= self.split].append(block)
        return parts


class Reserve:
    """The `pages` highest ids of a pool, used last, which can be withdrawn while none of them is in use."""

    def __init__(self, pool: BlockPool, pages: int) -> None:
        self._pool = pool
        self.pages = pages
        self.first = pool.num_gpu_blocks - pages
        self._queue = TieredQueue(pool.free_block_queue.get_all_free_blocks(), self.first)
        untyped: Any = pool
        untyped.free_block_queue = self._queue
        self._withdrawn: list[KVCacheBlock] = []

    @property
    def is_free(self) -> bool:
        """Whether all of its pages are free and in the pool."""
        return self._queue.above.num_free_blocks == self.pages

    @property
    def withdrawn(self) -> int:
        """Pages that are out of the pool at present."""
        return len(self._withdrawn)

    def withdraw(self) -> None:
        """Take the pages out of the pool and their contents out of the prefix cache. They must all be free."""
        self._withdrawn = self._queue.above.popleft_n(self.pages)
        if self._pool.enable_caching:
            for block in self._withdrawn:
                self._pool._maybe_evict_cached_block(block)

    def give_back(self) -> None:
        """Put withdrawn pages back; their bytes are whatever was written to them."""
        self._queue.append_n(self._withdrawn)
        self._withdrawn = []
