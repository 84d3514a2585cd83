"""The pool's reserve: used last, withdrawn whole, and otherwise vLLM's queue."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

from moebius.engine.reserve import Reserve, TieredQueue


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 12), st.lists(st.tuples(st.sampled_from("pPnaAfr"), st.integers(0, 5)), max_size=40))
def test_the_queue_against_lists(split: int, steps: list[tuple[str, int]]) -> None:
    """Two plain lists, one after the other, are what the queue must look like."""
    blocks = [KVCacheBlock(i) for i in range(12)]
    queue = TieredQueue(blocks, split)
    model = ([b.block_id for b in blocks if b.block_id < split], [b.block_id for b in blocks if b.block_id >= split])
    taken: list[KVCacheBlock] = []

    def free() -> list[int]:
        return [*model[0], *model[1]]

    def pop() -> int:
        return (model[0] or model[1]).pop(0)

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
                model[block.block_id >= split].append(block.block_id)
            case "A" | "f":
                back, taken = taken[:n], taken[n:]
                (queue.append_n if what == "A" else queue.prepend_n)(list(back))
                for tier in (0, 1):
                    ids = [b.block_id for b in back if (b.block_id >= split) == bool(tier)]
                    model[tier][:] = [*model[tier], *ids] if what == "A" else [*ids, *model[tier]]
            case "r" if free():
                block = blocks[free()[n % len(free())]]
                queue.remove(block)
                model[block.block_id >= split].remove(block.block_id)
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


def test_reserved_pages_are_taken_last_and_withdrawn_whole() -> None:
    pool = BlockPool(num_gpu_blocks=17, enable_caching=True, hash_block_size=16)
    reserve = Reserve(pool, 6)
    assert reserve.first == 11 and reserve.is_free
    used = pool.get_new_blocks(10)
    assert all(0 < block.block_id < 11 for block in used)
    reserve.withdraw()
    assert reserve.withdrawn == 6 and pool.get_num_free_blocks() == 0
    with pytest.raises(ValueError, match="Cannot get 1 free blocks"):
        pool.get_new_blocks(1)
    pool.free_blocks(used)
    assert pool.get_num_free_blocks() == 10
    reserve.give_back()
    assert reserve.is_free and pool.get_num_free_blocks() == 16
    used = pool.get_new_blocks(11)
    assert not reserve.is_free and max(block.block_id for block in used) >= 11
    pool.free_blocks(used)
    assert reserve.is_free
