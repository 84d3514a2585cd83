"""Memory goes back to the system between steps and comes again at the same addresses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from moebius.engine.account import covered
from moebius.engine.config import PolicyConfig
from moebius.engine.memory import BackingError
from moebius.engine.types import MemoryTag
from tests.engine import stock_engine, updating, work
from tests.engine.fleet import Fleet, RankError

REQUESTS = work.rich_requests(6)
BOTH: tuple[MemoryTag, ...] = ("weights", "kv_cache")


@pytest.fixture(scope="module", autouse=True)
def _weights_as_before(fleet: Fleet, models: list[str]) -> Iterator[None]:
    """Other modules use the same engines."""
    yield
    fleet.call(updating.load_checkpoint, models[0], 99, False)


@pytest.fixture(scope="module")
def want(plain_engines: list[Fleet]) -> dict:
    return plain_engines[0].call(stock_engine.plain_run, REQUESTS)[0]


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def fill_and_sleep(engine: Any, tags: tuple[MemoryTag, ...], keep_weights: bool) -> tuple[int, int, Any]:
    """Touch every page of KV, then sleep; returns resident memory before and after, and what sleep says."""
    ep = engine.pair.buffer.regions["kv"]
    engine.pair.buffer.storage[ep[0] : ep[0] + ep[1]] |= 0  # writes every byte
    before = resident()
    change = engine.sleep(tags, keep_weights=keep_weights)
    return before, resident(), change


def wake(engine: Any, tags: tuple[MemoryTag, ...]) -> tuple[Any, bool]:
    """Also: whether all KV is zeros then."""
    change = engine.wake_up(tags)
    start, nbytes = engine.pair.buffer.regions["kv"]
    return change, not engine.pair.buffer.storage[start : start + nbytes].any()


def tokens(fleet: Fleet, policy: PolicyConfig | None = None) -> dict:
    return work.collect(fleet.call(work.run, policy or PolicyConfig(threshold=6), per_rank=work.split(REQUESTS, 2)))


@pytest.mark.parametrize("last", ["EP", "TP"])
def test_memory_is_returned_and_weights_come_back(fleet: Fleet, want: dict, models: list[str], last: str) -> None:
    """With a host copy, whichever layout the experts stand in."""
    fleet.call(updating.pull, 60, "in_place", models[0], None)
    work.assert_same(tokens(fleet, work.EP if last == "EP" else work.TP), want)
    where = fleet.call(work.addresses)
    sizes = fleet.call(regions)
    for (before, after, change), size in zip(fleet.call(fill_and_sleep, BOTH, True), sizes, strict=True):
        assert change.nbytes == size["experts"] + size["kv"] + size["dense"]
        host_copy = size["experts"] + size["dense"]
        assert before - after >= 0.95 * size["kv"] - host_copy, (before, after, size)
        assert abs(change.freed - (before - after)) < 4 << 20
    with pytest.raises(RankError, match=r"given back \(kv_cache, weights\): call wake_up"):
        tokens(fleet)
    assert all(zeros for _, zeros in fleet.call(wake, BOTH))
    assert fleet.call(work.addresses) == where
    work.assert_same(tokens(fleet), want)


def regions(engine: Any) -> dict[str, int]:
    found = {name: nbytes for name, (_, nbytes) in engine.pair.buffer.regions.items()}
    return found | {"dense": sum(tensor.nbytes for tensor in engine.pair.dense.tensors())}


def large_weights(engine: Any) -> tuple[int, int, bool, bool]:
    """Bytes of all weights that are no experts, of those that sleep gives back, and whether these are zeros.

    Last, whether the large matrices of both runtimes are all among them.
    """
    dense = engine.pair.dense.tensors()
    spans = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in dense]
    whole, given = [], {}
    for runtime in (engine.pair.ep, engine.pair.tp):
        for name, weight in runtime.runner.model.named_parameters():
            if engine.pair.buffer.owns(weight):
                continue
            whole.append((weight.data_ptr(), weight.data_ptr() + weight.nbytes))
            if any(first <= weight.data_ptr() < end for first, end in spans):
                given[name, runtime.layout] = weight
    kinds = {name.rsplit(".", 2)[-2] for name, _ in given}
    both = all(
        {f"model.layers.{layer}.self_attn.{kind}.weight" for kind in ("qkv_proj", "o_proj")}
        <= {name for name, layout in given if layout is runtime.layout}
        for runtime in (engine.pair.ep, engine.pair.tp)
        for layer in range(len(runtime.kv))
    )
    zeros = not any(tensor.any() for tensor in dense)
    return covered(whole), sum(tensor.nbytes for tensor in dense), zeros, both and "embed_tokens" in kinds


def test_attention_and_embeddings_go_too(fleet: Fleet, want: dict, models: list[str]) -> None:
    where = fleet.call(work.addresses)
    for whole, dense, zeros, all_large in fleet.call(large_weights):
        assert dense > 0.9 * whole and not zeros and all_large
    fleet.call(fill_and_sleep, BOTH, False)
    fleet.call(wake, BOTH)
    assert all(zeros for _, _, zeros, _ in fleet.call(large_weights)), "their memory was not given back"
    fleet.call(updating.pull, 65, "in_place", models[0], None)
    assert fleet.call(work.addresses) == where
    work.assert_same(tokens(fleet), want)


def test_without_a_copy_a_full_update_is_needed(fleet: Fleet, want: dict, models: list[str]) -> None:
    """In the order of a trainer on the same devices: weights come back and are sent before KV is there."""
    for before, after, change in fleet.call(fill_and_sleep, BOTH, False):
        assert before - after >= 0.95 * change.nbytes - (1 << 20), "what was touched is not in use any more"
        assert change.nbytes > 30 << 20
    with pytest.raises(RankError, match="call wake_up before an update"):
        fleet.call(updating.pull, 70, "in_place", models[0], None)
    fleet.call(wake, ("weights",))
    fleet.call(updating.pull, 70, "staged", models[0], None)
    with pytest.raises(RankError, match=r"given back \(kv_cache\)"):
        tokens(fleet)
    fleet.call(wake, BOTH)
    work.assert_same(tokens(fleet), want)
    fleet.call(fill_and_sleep, ("weights",), False)
    assert [change.nbytes for _, _, change in fleet.call(fill_and_sleep, ("weights",), False)] == [0, 0], (
        "once is enough"
    )
    fleet.call(wake, BOTH)
    with pytest.raises(RankError, match="send a full update"):
        tokens(fleet)
    fleet.call(updating.pull, 71, "in_place", models[0], None)
    work.assert_same(tokens(fleet), want)


@pytest.mark.parametrize("keep_kv", [False, True], ids=["KV dropped", "KV kept"])
def test_parked_samples_outlive_a_sleep(fleet: Fleet, want: dict, keep_kv: bool) -> None:
    parts = [([], 12, part, [], keep_kv) for (part,) in work.split(REQUESTS, 2)]
    first = fleet.call(work.run_and_park, per_rank=parts)
    assert sum(len(outcome.parked) for outcome in first) > 6
    fleet.call(fill_and_sleep, BOTH, True)
    fleet.call(wake, BOTH)
    second = fleet.call(work.run, PolicyConfig(threshold=3), per_rank=[([],), ([],)])
    work.assert_same(work.collect([*first, *second]), want)


def test_all_go_on_sleeping_where_one_rank_lacks_memory(fleet: Fleet, want: dict) -> None:
    fleet.call(fill_and_sleep, BOTH, True)
    for message in fleet.call(wake_in_vain):
        assert message == "rank 1: somebody else has it"
    with pytest.raises(RankError, match=r"given back \(kv_cache, weights\): call wake_up"):
        tokens(fleet)
    fleet.call(wake, BOTH)
    work.assert_same(tokens(fleet), want)


def wake_in_vain(engine: Any) -> str:
    backing = engine.pair.buffer.backing
    restore = backing.restore

    def one_region_only(start: int, nbytes: int) -> int:
        if start and engine.rank == 1:
            raise BackingError("somebody else has it")
        return int(restore(start, nbytes))

    backing.restore = one_region_only
    try:
        with pytest.raises(BackingError) as caught:
            engine.wake_up(BOTH)
    finally:
        del backing.restore
    regions = engine.pair.buffer.regions.values()
    assert not any(backing.release(*region) for region in regions), "memory is still held"
    return str(caught.value)


def test_sleeping_a_hundred_times_leaks_nothing(fleet: Fleet, want: dict) -> None:
    fleet.call(nap, 5)
    before = fleet.call(nap, 1)
    after = fleet.call(nap, 100)
    assert all(b - a < 4 << 20 for a, b in zip(before, after, strict=True)), (before, after)
    work.assert_same(tokens(fleet), want)


def nap(engine: Any, times: int) -> int:
    for _ in range(times):
        engine.sleep(BOTH, keep_weights=True)
        engine.wake_up(BOTH)
    return resident()
