"""The pool's reserve: used last, withdrawn whole, and otherwise vLLM's queue."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

from moebius.engine.reserve import Reserve, TieredQueue
from moebius.engine.staging import Staging
from moebius.engine.tail_modes import AheadScheduler
from tests.unit import steady_world


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 11), max_size=3, unique=True),
    st.lists(st.tuples(st.sampled_from("pPnaAfr"), st.integers(0, 5)), max_size=40),
)
def test_the_queue_against_lists(splits: list[int], steps: list[tuple[str, int]]) -> None:
    """Plain lists, one after the other, are what the queue must look like."""
    blocks = [KVCacheBlock(i) for i in range(12)]
    starts = [0, *sorted(splits)]
    queue = TieredQueue(blocks, starts)
    bounds = list(zip(starts, [*starts[1:], 12], strict=True))
    model = [list(range(*bound)) for bound in bounds]
    taken: list[KVCacheBlock] = []

    def free() -> list[int]:
        return [block_id for tier in model for block_id in tier]

    def pop() -> int:
        return next(tier for tier in model if tier).pop(0)

    def of(block: KVCacheBlock) -> list[int]:
        return model[next(t for t, (first, end) in enumerate(bounds) if first <= block.block_id < end)]

    for what, n in steps:
        match what:
            case "p" if free():
                taken.append(queue.popleft())
                assert taken[-1].block_id == pop()
            case "P" if len(free()) >= n:
                found = queue.popleft_n(n)
                assert [b.block_id for b in found] == [pop() for _ in range(n)]
                taken += found
            case "a" if taken:
                block = taken.pop()
                queue.append(block)
                of(block).append(block.block_id)
            case "A" | "f":
                back, taken = taken[:n], taken[n:]
                (queue.append_n if what == "A" else queue.prepend_n)(list(back))
                for tier in model:
                    ids = [b.block_id for b in back if of(b) is tier]
                    tier[:] = [*tier, *ids] if what == "A" else [*ids, *tier]
            case "r" if free():
                block = blocks[free()[n % len(free())]]
                queue.remove(block)
                of(block).remove(block.block_id)
                taken.append(block)
        assert [b.block_id for b in queue.get_all_free_blocks()] == free()
        assert queue.num_free_blocks == len(free())
        assert [b.block_id for b in queue.iter_blocks_after(None)] == free()
        for index, block_id in enumerate(free()):
            assert [b.block_id for b in queue.iter_blocks_after(blocks[block_id])] == free()[index + 1 :]


def test_it_has_all_of_vllms_methods() -> None:
    """vLLM may call any of them."""
    wanted = {name for name in vars(FreeKVCacheBlockQueue) if not name.startswith("_")}
    assert wanted <= set(dir(TieredQueue))


def test_reserved_pages_are_taken_last_and_withdrawn_from_the_top() -> None:
    pool = BlockPool(num_gpu_blocks=17, enable_caching=True, hash_block_size=16)
    reserve = Reserve(pool, 6)
    assert reserve.free_run() == 6
    used = pool.get_new_blocks(10)
    assert all(0 < block.block_id < 11 for block in used)
    reserve.withdraw(6)
    assert reserve.withdrawn == 6 and reserve.free_run() == pool.get_num_free_blocks() == 0
    with pytest.raises(ValueError, match="Cannot get 1 free blocks"):
        pool.get_new_blocks(1)
    pool.free_blocks(used)
    assert pool.get_num_free_blocks() == 10
    reserve.give_back()
    assert reserve.free_run() == 6 and pool.get_num_free_blocks() == 16


def test_what_is_free_at_the_top_can_be_withdrawn() -> None:
    """The reserve's own parts are used from below, in whatever order pages had come back."""
    pool = BlockPool(num_gpu_blocks=17, enable_caching=True, hash_block_size=16)
    reserve = Reserve(pool, 8)
    everything = pool.get_new_blocks(16)
    pool.free_blocks(list(reversed(everything)))
    used = pool.get_new_blocks(11)  # three of the reserve: two of its first part, one of its second
    assert max(block.block_id for block in used) == 12 and reserve.free_run() == 4
    reserve.withdraw(3)
    assert {block.block_id for block in pool.free_block_queue.get_all_free_blocks()} == {11, 13}
    reserve.give_back()
    pool.free_blocks(used)
    assert reserve.free_run() == 8 and pool.get_num_free_blocks() == 16


@pytest.mark.parametrize(
    ("pages", "reserve", "requests", "tokens", "at", "most"), [(41, 20, 1, 150, 60, 160), (121, 60, 6, 70, 30, 80)]
)
def test_pages_come_back_when_a_request_waits_for_them(
    pages: int, reserve: int, requests: int, tokens: int, at: int, most: int
) -> None:
    """vLLM preempts a request without a page; it then waits for all of its pages at once, perhaps for ever."""
    steady_world.engine_config.cache_clear()
    steady_world.engine_config().model_config.max_model_len = 200
    try:
        world = steady_world.World(AheadScheduler, pages, is_steady=True)
        pool = world.scheduler.kv_cache_manager.block_pool
        kept = Reserve(pool, reserve)
        ep = SimpleNamespace(scheduler=world.scheduler, page_size=steady_world.PAGE, free_pages=0)
        staging: Any = Staging.__new__(Staging)
        staging._pair, staging._reserve, staging.layers = SimpleNamespace(ep=ep), kept, 0
        for number in range(requests):
            sampling = {"max_tokens": tokens, "ignore_eos": True, "temperature": 1.0}
            world.add(number, [1, 2, 3, 4], sampling, own=True)
        iterations = 0
        while world.front.finished < requests and iterations < 600:
            if iterations == at:
                kept.withdraw(min(kept.free_run(), pool.get_num_free_blocks() - 4 * requests))
                staging.layers = 1
            world.schedule()
            world.take()
            iterations += 1
            ep.free_pages = pool.get_num_free_blocks()
            if staging.is_short:
                kept.give_back()
                staging.layers = 0
        assert world.front.finished == requests and iterations <= most
        assert world.preempted and staging.layers == 0
    finally:
        steady_world.engine_config.cache_clear()
