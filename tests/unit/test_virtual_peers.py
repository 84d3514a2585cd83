"""Virtual memory that peers map, against a driver that keeps strict books; sockets and threads are real."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from moebius.kernels import fd_links
from moebius.kernels.fd_links import FdLinks
from moebius.kernels.peers import Gather, PeerError
from moebius.kernels.virtual import GRANULE, VirtualMemory
from moebius.kernels.virtual_peers import VirtualPeers, sharing_obstacle
from moebius.rollout.bench import memory_map
from tests.unit.fake_driver import INVALID, NO_PEER, FakeCalls, FakeDriver, FakeMachine
from tests.unit.virtual_world import CUDA, EXPERTS, KV, SIZES, current, mib, open_files


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
