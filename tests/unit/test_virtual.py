"""Virtual memory of one rank, and what an engine gets, against a driver that keeps strict books."""

from __future__ import annotations

import gc
import os
from multiprocessing import get_context
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from moebius.engine import backing
from moebius.engine.backing import make_backing, store_gather
from moebius.engine.memory import BackingError, HostBacking, SlotSizes, UnifiedBuffer
from moebius.kernels import virtual
from moebius.kernels.cuda_calls import CudaError
from moebius.kernels.virtual import GRANULE, Chunk, VirtualMemory, chunk_sizes, runs
from tests.engine.fleet import free_port
from tests.unit.fake_driver import INVALID, FakeCalls, FakeDriver, FakeMachine
from tests.unit.virtual_world import CUDA, EXPERTS, KV, SIZES, current, mib

# ---- chunks ----------------------------------------------------------------------------------------------------------


def test_chunks_of_real_shapes() -> None:
    assert chunk_sizes(49, mib(576)) == [mib(576)] * 49  # experts of Qwen3-30B-A3B on two ranks
    assert chunk_sizes(7, mib(172)) == [mib(344)] * 3 + [mib(172)]
    assert chunk_sizes(3, 5000) == [GRANULE]


@given(st.integers(1, 200), st.integers(1, 600), st.booleans(), st.integers(1, 1024))
def test_no_slot_is_in_two_chunks(slots: int, granules: int, odd: bool, target: int) -> None:
    slot = granules * GRANULE - (4096 if odd else 0)
    sizes = chunk_sizes(slots, slot, mib(target))
    assert 0 <= sum(sizes) - slots * slot < GRANULE
    assert all(size % GRANULE == 0 for size in sizes)
    ends = {sum(sizes[: i + 1]) for i in range(len(sizes) - 1)}
    assert all(end % slot == 0 for end in ends)
    assert all(size <= max(mib(target), slot) for size in sizes) or len(sizes) == 1


def test_the_buffers_regions_are_whole_chunks() -> None:
    for sizes in (
        SlotSizes(48, mib(576), 48, (8 << 30) // 48),
        SlotSizes(3, 5000, 4, 4096),
        SlotSizes(16, mib(90) + 512, 16, mib(30)),
    ):
        ends = [sum(sizes.chunks()[: i + 1]) for i in range(len(sizes.chunks()))]
        assert sizes.expert_region in ends and ends[-1] == sizes.total_bytes
    assert runs([Chunk(0, 4), Chunk(4, 2), Chunk(8, 1)]) == [Chunk(0, 6), Chunk(8, 1)]


# ---- one rank's memory -----------------------------------------------------------------------------------------------


def test_release_and_restore(machine: FakeMachine, driver: FakeDriver) -> None:
    memory = VirtualMemory(SIZES, CUDA)
    address = memory.address
    assert machine.used() == memory.nbytes == 6 * GRANULE
    assert memory.release(*KV) == KV[1] and machine.used() == EXPERTS[1]
    assert memory.release(*KV) == 0, "released twice"
    assert memory.resident == memory.chunks[:2]
    assert memory.release(0, memory.nbytes) == EXPERTS[1] and machine.used() == 0 and not driver.maps
    assert memory.restore(*KV) == KV[1] and memory.restore(*KV) == 0
    assert memory.restore(0, memory.nbytes) == EXPERTS[1]
    assert memory.address == address and sorted(driver.maps) == [address + c.start for c in memory.chunks]
    assert all(physical.content == 0 for _, physical in driver.maps.values()), "memory must be zeroed"
    assert driver.allowed == set(driver.maps)
    memory.close()
    assert (machine.used(), driver.reserved, driver.maps) == (0, {}, {})
    memory.close()


def test_the_device_is_idle_before_memory_goes(machine: FakeMachine, driver: FakeDriver) -> None:
    memory = VirtualMemory(SIZES, CUDA)
    assert driver.calls.index("idle") < driver.calls.index("reserve")  # the context must exist
    driver.calls.clear()
    memory.release(*EXPERTS)
    assert driver.calls == ["idle", "unmap", "drop", "drop"]
    driver.calls.clear()
    memory.restore(*EXPERTS)
    assert driver.calls == ["idle", "create", "create", "map", "map", "allow", "zero", "synchronize"]
    memory.close()


@pytest.mark.parametrize("bad", [(GRANULE, GRANULE), (0, GRANULE), (0, 7 * GRANULE), (2 * GRANULE, -GRANULE)])
def test_parts_of_chunks_cannot_be_released(driver: FakeDriver, bad: tuple[int, int]) -> None:
    memory = VirtualMemory(SIZES, CUDA)
    for call in (memory.release, memory.restore):
        with pytest.raises(ValueError, match="does not begin and end with chunks"):
            call(*bad)
    memory.close()


def test_too_little_memory_is_told_and_nothing_changes(machine: FakeMachine, driver: FakeDriver) -> None:
    memory = VirtualMemory(SIZES, CUDA)
    memory.release(*EXPERTS)
    machine.capacity = memory.nbytes - 1
    with pytest.raises(CudaError, match=r"0\.01 GB of cuda:0 are free for the buffer .*OUT_OF_MEMORY"):
        memory.restore(*EXPERTS)
    assert memory.resident == memory.chunks[2:] and machine.used() == KV[1]
    assert isinstance(memory.calls, FakeCalls) and memory.calls.dropped_caches == 1
    machine.capacity = memory.nbytes
    assert memory.restore(*EXPERTS) == EXPERTS[1]
    memory.close()


def test_what_torch_caches_makes_room(machine: FakeMachine, driver: FakeDriver) -> None:
    class Cached(FakeCalls):
        def drop_caches(self) -> None:
            machine.capacity = 6 * GRANULE

    machine.capacity = GRANULE
    VirtualMemory(SIZES, CUDA, Cached(driver)).close()


@pytest.mark.parametrize("call", ["create", "map", "allow"])
def test_a_failed_start_leaves_nothing(machine: FakeMachine, driver: FakeDriver, call: str) -> None:
    driver.fail[call] = (0 if call == "allow" else 2, INVALID)
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        VirtualMemory(SIZES, CUDA)
    assert (machine.used(), driver.reserved, driver.maps) == (0, {}, {})


def test_what_does_not_suit_is_refused(machine: FakeMachine) -> None:
    current.driver = FakeDriver(machine, granularity=4 << 20)
    with pytest.raises(CudaError, match="allocates in steps of 4194304"):
        VirtualMemory([4 << 20], CUDA)
    current.driver = FakeDriver(machine)
    current.driver.supported = 0
    with pytest.raises(CudaError, match="cuda:0 does not support virtual memory management"):
        VirtualMemory(SIZES, CUDA)
    for sizes in ([], [GRANULE + 1], [0]):
        with pytest.raises(ValueError, match="multiples of"):
            VirtualMemory(sizes, CUDA)
    with pytest.raises(ValueError, match="one CUDA device"):
        VirtualMemory(SIZES, torch.device("cpu"))
    assert machine.used() == 0


def test_memory_goes_with_its_last_user(machine: FakeMachine, driver: FakeDriver) -> None:
    memory = VirtualMemory(SIZES, CUDA)
    interface = virtual._Interface(memory)  # what a tensor keeps
    assert interface.__cuda_array_interface__["data"] == (memory.address, False)
    assert interface.__cuda_array_interface__["shape"] == (memory.nbytes,)
    del memory
    gc.collect()
    assert machine.used() > 0
    del interface
    gc.collect()
    assert (machine.used(), driver.reserved) == (0, {})


# ---- which memory an engine gets -------------------------------------------------------------------------------------


def test_choice_of_memory(machine: FakeMachine, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = SlotSizes(3, 5000, 4, 4096)
    assert isinstance(make_backing("virtual", sizes, torch.device("cpu"), 0, 1), HostBacking)
    memory = make_backing("auto", sizes, CUDA, 0, 1)
    assert isinstance(memory, VirtualMemory) and memory.nbytes == sizes.total_bytes
    memory.close()
    machine.capacity = GRANULE
    with pytest.raises(BackingError, match=r"GB of cuda:0 are free for the buffer"):
        make_backing("auto", sizes, CUDA, 0, 1)
    for plain in ("PlainBacking", "default_backing"):
        monkeypatch.setattr(backing, plain, lambda nbytes, device: ("plain", nbytes))
    driver.supported = 0
    assert make_backing("auto", sizes, CUDA, 0, 1) == ("plain", sizes.total_bytes)
    assert make_backing("plain", sizes, CUDA, 0, 1) == ("plain", sizes.total_bytes)
    with pytest.raises(BackingError, match="does not work here: rank 0: cuda:0 does not support"):
        make_backing("virtual", sizes, CUDA, 0, 1)


class Noted:
    """Memory that notes what it is asked."""

    def __init__(self, nbytes: int) -> None:
        self.tensor = torch.zeros(nbytes, dtype=torch.uint8)
        self.asked: list[Any] = []

    def as_tensor(self) -> torch.Tensor:
        return self.tensor

    def release(self, start: int, nbytes: int) -> int:
        self.asked.append(("release", start, nbytes))
        return nbytes

    def restore(self, start: int, nbytes: int) -> int:
        self.asked.append(("restore", start, nbytes))
        return nbytes


def test_the_buffer_names_its_regions() -> None:
    sizes = SlotSizes(3, 5000, 4, 4096)
    memory = Noted(sizes.total_bytes)
    buffer = UnifiedBuffer(sizes, torch.device("cpu"), memory)
    assert buffer.release(["kv"]) == GRANULE and buffer.restore() == 2 * GRANULE
    assert memory.asked == [("release", GRANULE, GRANULE), ("restore", 0, GRANULE), ("restore", GRANULE, GRANULE)]
    with pytest.raises(ValueError, match="the buffer needs"):
        UnifiedBuffer(sizes, torch.device("cpu"), Noted(5))


def _meet(rank: int, port: int, results: Any) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    first = store_gather(rank, 2)
    found = [first((rank, "a")), first(rank), store_gather(rank, 2)("again")]
    dist.init_process_group("gloo")  # on the same port, as the engine does afterwards
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    dist.destroy_process_group()
    results.put((rank, found, int(total)))


def test_ranks_talk_before_there_are_process_groups() -> None:
    context = get_context("spawn")
    results, port = context.Queue(), free_port()
    processes = [context.Process(target=_meet, args=(rank, port, results), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    told = sorted(results.get(timeout=100) for _ in processes)
    for process in processes:
        process.join(20)
    assert told == [(rank, [[(0, "a"), (1, "a")], [0, 1], ["again", "again"]], 3) for rank in range(2)]
