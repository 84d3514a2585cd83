"""Virtual memory and its mapping by peers, against a driver that keeps strict books; sockets and threads are real."""

from __future__ import annotations

import gc
import os
import resource
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
from moebius.kernels import fd_links, virtual
from moebius.kernels.cuda_calls import CudaError
from moebius.kernels.fd_links import FdLinks
from moebius.kernels.peers import Gather, PeerError
from moebius.kernels.virtual import GRANULE, Chunk, VirtualMemory, chunk_sizes, runs
from moebius.kernels.virtual_peers import VirtualPeers, sharing_obstacle
from moebius.rollout.bench import memory_map
from tests.engine.fleet import free_port
from tests.unit.fake_driver import INVALID, NO_PEER, FakeCalls, FakeDriver, FakeMachine

CUDA = torch.device("cuda", 0)
SIZES = [2 * GRANULE, GRANULE, 3 * GRANULE]  # the first two are "experts", the last is "kv"
EXPERTS, KV = (0, 3 * GRANULE), (3 * GRANULE, 3 * GRANULE)
current = threading.local()  # .driver: of the rank that this thread plays


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMachine]:
    monkeypatch.setattr("moebius.kernels.cuda_memory.driver", lambda: current.driver)
    monkeypatch.setattr(virtual, "MemoryCalls", lambda device: FakeCalls(current.driver))
    machine = FakeMachine()
    yield machine
    machine.close()


@pytest.fixture
def driver(machine: FakeMachine) -> FakeDriver:
    current.driver = FakeDriver(machine)
    return current.driver


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def mib(number: int) -> int:
    return number << 20


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


# ---- peers -----------------------------------------------------------------------------------------------------------


class Ranks:
    """Plays every rank in a thread of its own."""

    def __init__(self, machine: FakeMachine, ranks: int) -> None:
        self.drivers = [FakeDriver(machine, rank) for rank in range(ranks)]
        self._values: list[Any] = [None] * ranks
        self._barrier = threading.Barrier(ranks, timeout=20)

    def gather(self, rank: int) -> Gather:
        def gather(value: Any) -> list[Any]:
            self._values[rank] = value
            self._barrier.wait()
            found = list(self._values)
            self._barrier.wait()
            return found

        return gather

    def call(self, function: Callable[..., Any], *per_rank: list[Any]) -> list[Any]:
        """Results by rank; a PeerError is a result."""

        def run(rank: int) -> Any:
            current.driver = self.drivers[rank]
            try:
                return function(rank, *(values[rank] for values in per_rank))
            except PeerError as error:
                return error

        with ThreadPoolExecutor(len(self.drivers)) as pool:
            return list(pool.map(run, range(len(self.drivers))))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_peers_keep_their_addresses_over_a_sleep(machine: FakeMachine, ranks: int) -> None:
    everyone = Ranks(machine, ranks)
    sizes = [GRANULE] * (fd_links.BATCH + 9) + SIZES
    whole = (0, sum(sizes))
    memories = everyone.call(lambda rank: VirtualMemory(sizes, CUDA))
    files = open_files()
    peers = everyone.call(lambda rank, memory: VirtualPeers.open(memory, rank, everyone.gather(rank)), memories)

    def check_mapped() -> None:
        for own, driver in zip(peers, everyone.drivers, strict=True):
            assert driver.allowed == set(driver.maps)
            for peer, there in enumerate(memories):
                for chunk in there.chunks:
                    mapped = driver.maps[own.addresses[peer] + chunk.start][1]
                    assert mapped is there.handle(chunk), "a chunk of a peer lies in the wrong place"

    check_mapped()
    assert open_files() == files, "file descriptors are left open"
    addresses = [own.addresses for own in peers]
    assert all(len(set(of_rank)) == ranks for of_rank in addresses)
    everyone.call(lambda rank, own: own.unmap(), peers)
    assert machine.used() == ranks * whole[1]
    everyone.call(lambda rank, memory: memory.release(*whole), memories)
    assert machine.used() == 0, "memory is still held by somebody"
    everyone.call(lambda rank, memory: memory.restore(*whole), memories)
    everyone.call(lambda rank, own: own.map(), peers)
    assert [own.addresses for own in peers] == addresses
    check_mapped()
    everyone.call(lambda rank, own: own.close(), peers)
    everyone.call(lambda rank, memory: memory.close(), memories)
    assert machine.used() == 0 and not any(driver.reserved for driver in everyone.drivers)


def test_memory_that_a_peer_still_maps_is_not_free(machine: FakeMachine) -> None:
    """Why peers unmap first; and a rank that died gives back what it alone had, the rest when its peers let go."""
    everyone = Ranks(machine, 2)
    memories = everyone.call(lambda rank: VirtualMemory(SIZES, CUDA))
    peers = everyone.call(lambda rank, memory: VirtualPeers.open(memory, rank, everyone.gather(rank)), memories)
    everyone.call(lambda rank, memory: memory.release(*EXPERTS), memories)
    assert machine.used() == 2 * memories[0].nbytes
    everyone.call(lambda rank, own: own.unmap(), peers)
    assert machine.used() == 2 * KV[1]
    told = everyone.call(lambda rank, own: own.map(), peers)  # maps what there is
    assert told == [None, None] and len(everyone.drivers[0].maps) == 2
    everyone.call(lambda rank, own: own.close(), peers)
    everyone.call(lambda rank, memory: memory.close(), memories)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("call", "after", "status", "words"),
    [
        ("reserve", 0, INVALID, "rank 1 has no addresses left"),
        ("export", 1, INVALID, "exporting memory: CUDA_ERROR_INVALID_VALUE"),
        ("take", 2, INVALID, "importing a peer's memory"),
        ("map", 1, INVALID, "mapping memory"),
        ("allow", 0, NO_PEER, "getting access to memory: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"),
    ],
)
def test_one_rank_that_fails_fails_all(
    machine: FakeMachine, ranks: int, call: str, after: int, status: Any, words: str
) -> None:
    everyone = Ranks(machine, ranks)
    memories = everyone.call(lambda rank: VirtualMemory(SIZES, CUDA))
    everyone.drivers[1].fail[call] = (after, status)
    files = open_files()
    told = everyone.call(lambda rank, memory: VirtualPeers.open(memory, rank, everyone.gather(rank)), memories)
    assert all(isinstance(error, PeerError) for error in told), told
    assert len({str(error) for error in told}) == 1
    assert words in str(told[0]) and "rank 1" in str(told[0])
    assert "closed its connection" not in str(told[0]), "a consequence is told as a cause"
    assert open_files() == files
    for memory, driver in zip(memories, everyone.drivers, strict=True):
        assert driver.reserved == {memory.address: memory.nbytes} and len(driver.maps) == len(SIZES)
    everyone.call(lambda rank, memory: memory.close(), memories)
    assert machine.used() == 0, "handles of peers were not given back"


def test_failure_after_a_sleep_can_be_repeated(machine: FakeMachine) -> None:
    everyone = Ranks(machine, 2)
    memories = everyone.call(lambda rank: VirtualMemory(SIZES, CUDA))
    peers = everyone.call(lambda rank, memory: VirtualPeers.open(memory, rank, everyone.gather(rank)), memories)
    assert "mapped already" in str(everyone.call(lambda rank, own: own.map(), peers)[0])
    everyone.call(lambda rank, own: own.unmap(), peers)
    current.driver = everyone.drivers[0]
    memories[0].release(*KV)
    assert all("where others have none" in str(e) for e in everyone.call(lambda rank, own: own.map(), peers))
    memories[0].restore(*KV)
    everyone.drivers[0].fail["take"] = (0, INVALID)
    assert all(isinstance(e, PeerError) for e in everyone.call(lambda rank, own: own.map(), peers))
    del everyone.drivers[0].fail["take"]
    assert everyone.call(lambda rank, own: own.map(), peers) == [None, None]
    everyone.call(lambda rank, own: own.close(), peers)
    everyone.call(lambda rank, memory: memory.close(), memories)
    assert machine.used() == 0


def test_ranks_must_have_like_memory(machine: FakeMachine) -> None:
    everyone = Ranks(machine, 2)
    for second, words in (
        ([GRANULE, *SIZES], "have buffers of different sizes"),
        ([*SIZES[::-1]], "divided their memory into different chunks"),
    ):
        memories = everyone.call(lambda rank, sizes: VirtualMemory(sizes, CUDA), [SIZES, second])
        told = everyone.call(lambda rank, memory: VirtualPeers.open(memory, rank, everyone.gather(rank)), memories)
        assert all(words in str(error) for error in told)
        everyone.call(lambda rank, memory: memory.close(), memories)


def test_sharing_is_tried_with_little(machine: FakeMachine) -> None:
    everyone = Ranks(machine, 2)

    def check(rank: int) -> str | None:
        return sharing_obstacle(CUDA, rank, everyone.gather(rank), GRANULE)

    assert everyone.call(check) == [None, None] and machine.used() == 0
    everyone.drivers[1].fail["allow"] = (1, NO_PEER)
    told = everyone.call(check)
    assert told[0] == told[1] and "peer access" in str(told[0]) and machine.used() == 0
    everyone.drivers[1].supported = 0
    assert everyone.call(check) == ["rank 1: cuda:0 does not support virtual memory management"] * 2
    assert machine.used() == 0 and not any(driver.reserved for driver in everyone.drivers)


# ---- file descriptors ------------------------------------------------------------------------------------------------


def test_too_few_files_are_told(machine: FakeMachine) -> None:
    everyone = Ranks(machine, 2)
    links = everyone.call(lambda rank: FdLinks.open(rank, everyone.gather(rank)))
    fds = [os.memfd_create("test") for _ in range(20)]
    files = open_files()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def swap(rank: int, own: FdLinks) -> str:
        try:
            own.swap(fds)
        except OSError as error:
            return str(error)
        return ""

    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 9, limits[1]))
    filling = []
    try:
        try:
            while True:
                filling.append(os.dup(0))
        except OSError:
            pass  # every number below the limit is taken now
        for _ in range(5):
            os.close(filling.pop())
        told = everyone.call(swap, links)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in filling:
            os.close(fd)
    assert any("raise the limit of open files" in words for words in told), told
    for link in links:
        link.close()
    for fd in fds:
        os.close(fd)
    assert open_files() == files - len(fds) - 2


def test_ranks_that_cannot_reach_each_other_are_told(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in another network namespace, where the name does not exist."""
    everyone = Ranks(machine, 2)
    files = open_files()

    def open_links(rank: int) -> Any:
        gather = everyone.gather(rank)

        def elsewhere(value: Any) -> list[Any]:
            return [(b"\0moebius-nobody" if isinstance(name, bytes) else name, told) for name, told in gather(value)]

        return FdLinks.open(rank, elsewhere)

    told = everyone.call(open_links)
    assert all("rank 1 cannot reach rank 0 over a Unix socket" in str(error) for error in told)
    assert open_files() == files


def test_other_users_are_not_let_in(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fd_links, "_same_user", lambda link: False)
    everyone = Ranks(machine, 2)
    told = everyone.call(lambda rank: FdLinks.open(rank, everyone.gather(rank), timeout_s=0.2))
    assert all("rank 0 was not called by all other ranks" in str(error) for error in told)


def test_the_benchmark_times_every_call(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moebius.kernels.cuda_memory.MemoryCalls", lambda device: FakeCalls(current.driver))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (machine.capacity - machine.used(), machine.capacity))
    everyone = Ranks(machine, 2)

    def run(rank: int) -> list[dict[str, float]]:
        gather = everyone.gather(rank)
        return [memory_map.row(CUDA, rank, gather, mib(chunk), mib(64)) for chunk in (2, 16)]

    by_rank = everyone.call(run)
    assert machine.used() == 0 and not any(driver.reserved for driver in everyone.drivers)
    rows = [memory_map.slowest([of_rank[index] for of_rank in by_rank]) for index in range(2)]
    for line, chunks in zip(rows, (32, 4), strict=True):
        assert line["chunks"] == chunks and line["freed_gib"] == line["again_freed_gib"] == round(2 * 64 / 1024, 2)
    assert all(by_rank[0][0][name] > 0 for name in by_rank[0][0]), "a call was not timed"
    results = memory_map.summarise(rows, {"gib": 0.06, "malloc_ms": 1.0}, {"ranks": 2}, "bench")
    assert "again_restore_total_ms_16_mib" in results.results
    assert memory_map.table(rows).splitlines()[0].split() == ["MiB", "per", "chunk", "2", "16"]


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
