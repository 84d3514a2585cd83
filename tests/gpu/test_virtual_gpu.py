"""Virtual memory between two processes: as ordinary memory for all who use it, and gone and back again over a sleep.

With one GPU the processes share it; what they free is then counted together.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from moebius.engine.backing import make_backing
from moebius.engine.dense import DenseWeights
from moebius.engine.layout import Layout
from moebius.engine.memory import PlainBacking, RegionName, SlotSizes, UnifiedBuffer
from moebius.kernels.cuda_calls import CudaError
from moebius.kernels.direct import DirectMover, ExpertMoverName
from moebius.kernels.experts import Copy2d, copy_2d
from moebius.kernels.peers import PeerError, export_memory, gather_of
from moebius.kernels.plan import kv_head_ranges
from moebius.kernels.signals import How
from moebius.kernels.virtual import GRANULE, VirtualMemory, chunk_sizes
from moebius.kernels.virtual_peers import VirtualPeers
from moebius.rollout.bench import memory_map
from tests.engine.fleet import Fleet, sharing_gpus
from tests.unit import direct_model as model
from tests.unit.direct_model import Shape, Slots

pytestmark = pytest.mark.gpu

RANKS = 2
ROUNDS = int(os.environ.get("MOEBIUS_TEST_ROUNDS", "4"))  # fewer under compute-sanitizer
# Slots of 6 and 4 MiB.
SHAPE = Shape(
    RANKS, layers=6, experts_per_rank=8, hidden=512, columns_per_rank=128, kv_heads=4, ep_pages=128, page=(16, 256)
)
SIZES = SlotSizes(expert_layers=7, expert_bytes=96 << 20, kv_layers=5, kv_bytes=(70 << 20) + 512)
TENSOR_BYTES = 512 << 20
SLACK = 64 << 20  # bytes that may come and go beside the buffer


@dataclass
class Rank:
    """What a rank process keeps between calls."""

    rank: int
    device: torch.device
    group: dist.ProcessGroup


def make_rank() -> Rank:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    assert dist.group.WORLD is not None
    return Rank(dist.get_rank(), device, dist.group.WORLD)


def free_bytes(own: Rank) -> int:
    """Free on this rank's device while no rank does anything."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    dist.barrier(own.group)
    free = torch.cuda.mem_get_info(own.device)[0]
    dist.barrier(own.group)
    return int(free)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def chunks_of(shape: Shape) -> list[int]:
    """Two slots per chunk, and one at the end of each region, as the engine has it with larger slots."""
    experts, kv = 2 * shape.expert_slot, 2 * shape.kv_slot  # elements have two bytes
    sizes = chunk_sizes(shape.layers + 1, experts, 2 * experts) + chunk_sizes(shape.layers + 1, kv, 2 * kv)
    assert len(sizes) == 8 and sum(sizes) == 2 * shape.numel
    return sizes


# ---- calls on the ranks ----------------------------------------------------------------------------------------------


def use_as_a_tensor(own: Rank) -> None:
    """Views, torch's kernels and copies over the ends of chunks; freed with the last view, not before."""
    _use_as_a_tensor(own)  # loads the kernels
    before = free_bytes(own)
    view = _use_as_a_tensor(own)
    assert before - free_bytes(own) > TENSOR_BYTES - SLACK
    view.add_(1.0)
    assert bool((view == 3.0).all()), "a view keeps the memory"
    del view
    assert abs(free_bytes(own) - before) < SLACK


def _use_as_a_tensor(own: Rank) -> torch.Tensor:
    memory = VirtualMemory([GRANULE] * 6 + [TENSOR_BYTES], own.device)
    storage = memory.as_tensor()
    assert (storage.data_ptr(), storage.numel(), storage.device) == (memory.address, memory.nbytes, own.device)
    assert not storage.any(), "new memory must be zeros"
    small = storage[: 6 * GRANULE]
    numbers = small.view(torch.int32)
    numbers.copy_(torch.arange(numbers.numel(), dtype=torch.int32))
    assert torch.equal(numbers.cpu(), torch.arange(numbers.numel(), dtype=torch.int32))
    strided = small[512:].unfold(0, GRANULE // 2 + 512, GRANULE)[:, ::4]
    assert torch.equal(strided.contiguous().cpu(), small.cpu()[512:].unfold(0, GRANULE // 2 + 512, GRANULE)[:, ::4])
    problem = export_memory(storage).problem
    assert problem is not None and "cudaMalloc" in problem, "CUDA IPC cannot share it"
    view = small[GRANULE : 2 * GRANULE].view(torch.bfloat16).view(64, -1)
    assert view.data_ptr() == memory.address + GRANULE
    return view.fill_(2.0)


def check_moves(own: Rank, shape: Shape, experts: ExpertMoverName, signals: How, tokens_first: bool) -> None:
    """Byte-exact moves both ways over virtual memory; every other round after a sleep."""
    memory = VirtualMemory(chunks_of(shape), own.device)
    slots = Slots(shape, memory.as_tensor().view(torch.int16), tokens_first)
    mover = DirectMover.connect(memory, own.group, experts=experts, signals=signals)
    assert mover.ways == {"experts": experts, "signals": signals, "memory": "virtual"}
    mover.warm_up(0, own.device)
    heads = kv_head_ranges(shape.kv_heads, shape.ranks)
    mover.prepare_kv(slots.kv("EP", 0), slots.kv("TP", 0), heads)
    bases = mover.buffers.bases
    delays = random.Random(own.rank)
    for seed in range(ROUNDS):
        if seed % 2:
            mover.before_release()
            memory.release(0, memory.nbytes)
            dist.barrier(own.group)
            memory.restore(0, memory.nbytes)
            mover.after_restore()
            assert not slots.storage.any(), "restored memory must be zeros"
        for to_tp in (True, False):
            model.fill(slots, "EP" if to_tp else "TP", own.rank, seed)
            torch.cuda.synchronize()
            dist.barrier(own.group)
            move_all(own, mover, slots, to_tp, seed, delays)
            dist.barrier(own.group)
    assert mover.buffers.bases == bases == mover._peers.addresses  # type: ignore[union-attr]
    mover.close()
    memory.close()


def move_all(own: Rank, mover: DirectMover, slots: Slots, to_tp: bool, seed: int, delays: random.Random) -> None:
    shape = slots.shape
    pages_table = model.page_table(shape, seed, fresh=not to_tp)
    pages = mover.place_pages(model.page_pairs(pages_table, to_tp), own.device)
    ranges = kv_head_ranges(shape.kv_heads, shape.ranks)
    for part in ("experts", "kv"):
        for layer in model.layers_of(shape, to_tp):
            if delays.random() < 0.4:
                torch.cuda._sleep(delays.randrange(1_000_000))
            ep, tp = slots.kv("EP", layer), slots.kv("TP", layer)
            if part == "experts":
                model.move_experts(mover, slots, to_tp, layer)
            elif to_tp:
                mover.kv_ep_to_tp(ep, tp, pages, ranges)
            else:
                mover.kv_tp_to_ep(tp, ep, pages, ranges)
    mover.finish()
    wanted = model.reference(shape, to_tp, seed, pages_table, slots.tokens_first, str(own.device))[own.rank]
    assert torch.equal(slots.storage, wanted), f"rank {own.rank}, {to_tp=}, round {seed}: bytes differ from the plan"


class Used:
    """A buffer in use: a graph over views of it, and peers that write into it."""

    def __init__(self, own: Rank, buffer: UnifiedBuffer, mover: DirectMover) -> None:
        self.own, self.buffer, self.mover = own, buffer, mover
        self.expert = buffer.expert_slot(Layout.EP, 2).view(torch.float32)
        self.kv = buffer.kv_slot(Layout.TP, 1).view(torch.float32)
        self.other = buffer.kv_slot(Layout.TP, 4).view(torch.float32)
        self.graph = torch.cuda.CUDAGraph()
        self._run()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            self._run()
        self.addresses = self.look()

    def _run(self) -> None:
        self.kv.copy_(self.expert[: self.kv.numel()])  # a copy and two kernels
        self.kv.mul_(2)
        self.other.copy_(self.kv + 1)

    def look(self) -> tuple[object, ...]:
        """All addresses that somebody may have written down."""
        views = (self.expert, self.kv, self.other, self.buffer.storage)
        return (*(view.data_ptr() for view in views), self.mover.buffers.bases, self.mover._peers.addresses)  # type: ignore[union-attr]

    def replay(self, value: float) -> None:
        """The graph of the start, whose result depends on what is in the buffer now."""
        self.expert.fill_(value)
        self.graph.replay()
        torch.cuda.synchronize()
        assert bool((self.other == 2 * value + 1).all()), f"rank {self.own.rank}, value {value}"

    def write_to_peer(self, value: int) -> None:
        """Every rank writes the last slot of the next one, by address, without its help."""
        rank, bases, stream = self.own.rank, self.mover.buffers.bases, torch.cuda.current_stream()
        slot = self.buffer.expert_slot(Layout.EP, SIZES.expert_layers - 1)
        source = torch.full((1 << 20,), value + rank, dtype=torch.uint8, device=self.own.device)
        peer = (rank + 1) % RANKS
        target = bases[peer] + slot.data_ptr() - bases[rank]
        dist.barrier(self.own.group)
        copy_2d(Copy2d(peer, target, 1 << 10, source.data_ptr(), 1 << 10, 1 << 10, 1 << 10), stream)
        torch.cuda.synchronize()
        dist.barrier(self.own.group)
        sender = (rank - 1) % RANKS
        assert bool((slot[: 1 << 20] == value + sender).all()), f"rank {rank}: the bytes of {sender} did not come"


def sleep_of_a_buffer(own: Rank) -> dict[str, int]:
    """A buffer's regions go and come one by one. Returns bytes by what was taken and given back."""
    before = free_bytes(own)
    buffer = UnifiedBuffer(SIZES, own.device, make_backing("virtual", SIZES, own.device, own.rank, RANKS))
    memory = buffer.backing
    assert isinstance(memory, VirtualMemory) and len(memory.chunks) == 3
    found = {"taken": before - free_bytes(own)}
    mover = DirectMover.connect(memory, own.group)
    mover.warm_up(0, own.device)
    used = Used(own, buffer, mover)
    used.replay(1.5)
    used.write_to_peer(11)
    awake = free_bytes(own)
    naps: list[list[RegionName]] = [["kv"], ["experts"], ["experts", "kv"]]
    for turn, names in enumerate(naps):
        mover.before_release()
        nbytes = buffer.release(names)
        assert buffer.release(names) == 0, "released twice"
        found["+".join(names)] = free_bytes(own) - awake
        if names == ["kv"]:
            assert bool((used.expert == 1.5).all()), "the other region must stay"
        # What is free is really free for others: as much can be allocated.
        torch.empty(nbytes - (4 << 20), dtype=torch.uint8, device=own.device).fill_(1)
        free_bytes(own)
        assert buffer.restore(names) == nbytes
        mover.after_restore()
        assert abs(free_bytes(own) - awake) < SLACK
        assert used.look() == used.addresses
        if "kv" in names:
            assert not used.kv.any() and not used.other.any(), "restored memory must be zeros"
        used.replay(2.0 + turn)
        used.write_to_peer(20 + 4 * turn)
    mover.close()
    memory.close()
    del used, buffer, mover, memory
    assert abs(free_bytes(own) - before) < SLACK
    return found


def repeated_sleeps(own: Rank, times: int) -> None:
    """Neither memory nor file descriptors nor handles grow."""
    memory = VirtualMemory([8 * GRANULE] * 8, own.device)
    peers = VirtualPeers.open(memory, own.rank, gather_of(own.group))

    def cycle() -> None:
        peers.unmap()
        peers.barrier()
        memory.release(0, memory.nbytes)
        memory.restore(0, memory.nbytes)
        peers.map()

    cycle()
    free, files = free_bytes(own), open_files()
    for _ in range(times):
        cycle()
    assert open_files() == files and abs(free_bytes(own) - free) < (32 << 20)
    peers.close()
    memory.close()


def too_large(own: Rank) -> str:
    """Where memory is short, restoring fails in words and can be repeated. One rank at a time: they may share a GPU."""
    memory = VirtualMemory([256 * GRANULE] * 2, own.device)
    memory.release(0, memory.nbytes)
    message = ""
    for turn in range(RANKS):
        free_bytes(own)
        if turn == own.rank:
            hog = torch.empty(torch.cuda.mem_get_info()[0] - (600 << 20), dtype=torch.uint8, device=own.device)
            with pytest.raises(CudaError) as caught:
                memory.restore(0, memory.nbytes)
            message = str(caught.value)
            assert not memory.resident
            del hog
            torch.cuda.empty_cache()
            assert memory.restore(0, memory.nbytes) == memory.nbytes
            memory.release(0, memory.nbytes)
    free_bytes(own)
    memory.close()
    return message


def unlike_memory(own: Rank) -> str:
    memory = VirtualMemory([GRANULE] * (2 + own.rank), own.device)
    with pytest.raises(PeerError) as caught:
        DirectMover.connect(memory, own.group)
    memory.close()
    return str(caught.value)


def plain_fallback(own: Rank) -> None:
    """engine.memory: plain has one allocation, which a direct mover maps by CUDA IPC and nobody can release."""
    sizes = SlotSizes(2, 5000, 2, 4096)
    backing = make_backing("plain", sizes, own.device, own.rank, RANKS)
    assert isinstance(backing, PlainBacking)
    mover = DirectMover.connect(UnifiedBuffer(sizes, own.device, backing).storage, own.group)
    assert mover.ways["memory"] == "plain"
    mover.before_release()
    mover.after_restore()
    mover.close()


def times_of_calls(own: Rank) -> dict[str, float]:
    gather = gather_of(own.group)
    return memory_map.slowest(gather(memory_map.row(own.device, own.rank, gather, 256 << 20, 4 << 30)))


# ---- tests -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    fleet = Fleet(RANKS, make_rank, timeout_s=200)
    yield fleet
    fleet.close()


def test_it_is_memory_like_any_other(fleet: Fleet) -> None:
    fleet.call(use_as_a_tensor)


@pytest.mark.parametrize(("experts", "signals"), [("copy_engine", "stream"), ("triton", "kernel")])
def test_bytes_are_exact_both_ways(fleet: Fleet, experts: str, signals: str) -> None:
    fleet.call(check_moves, SHAPE, experts, signals, False)


def test_tokens_first(fleet: Fleet) -> None:
    fleet.call(check_moves, SHAPE, "copy_engine", "kernel", True)


def test_a_sleep_gives_memory_back_and_keeps_addresses(fleet: Fleet) -> None:
    on_device = RANKS if sharing_gpus(RANKS) else 1
    for told in fleet.call(sleep_of_a_buffer):
        assert abs(told["taken"] - on_device * SIZES.total_bytes) < SLACK, told
        for names, nbytes in {
            "kv": SIZES.kv_region,
            "experts": SIZES.expert_region,
            "experts+kv": SIZES.total_bytes,
        }.items():
            assert abs(told[names] - on_device * nbytes) < SLACK, (names, told)


def test_nothing_grows_over_sleeps(fleet: Fleet) -> None:
    fleet.call(repeated_sleeps, 20)


def test_memory_that_is_taken_is_told(fleet: Fleet) -> None:
    for message in fleet.call(too_large):
        assert "GB of cuda:" in message and "before waking up" in message


def test_unlike_memory_is_refused_on_all_ranks(fleet: Fleet) -> None:
    messages = fleet.call(unlike_memory)
    assert messages[0] == messages[1] and "buffers of different sizes" in messages[0]


def test_plain_memory_still_works(fleet: Fleet) -> None:
    fleet.call(plain_fallback)


def dense_weights(own: Rank) -> dict[str, int]:
    """Weights beside a buffer, used, given back and had again, in bytes of the device."""
    calls = VirtualMemory([GRANULE], own.device)
    dense = DenseWeights.beside(calls, own.device)
    before = torch.cuda.mem_get_info(own.device)[0]
    weights = [dense.zeros((8192, 4096), torch.bfloat16, own.device) for _ in range(4)]
    small = dense.zeros((128, 2048), torch.bfloat16, own.device)
    parameter = torch.nn.Parameter(
        torch.empty(4096, 8192, dtype=torch.bfloat16, device=own.device), requires_grad=False
    )
    dense.adopt(parameter)
    where = [weight.data_ptr() for weight in (*weights, parameter)]
    assert [weight.data_ptr() for weight in dense.tensors()] == where and not small.any()
    x = torch.randn(16, 4096, device=own.device, dtype=torch.bfloat16)
    values = torch.randn(8192, 4096, device=own.device, dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    for weight in weights:
        weight.copy_(values)
    torch.nn.functional.linear(x, weights[3])  # cuBLAS makes its workspace
    with torch.cuda.graph(graph):
        y = torch.nn.functional.linear(x, weights[3])
    graph.replay()
    expected = torch.nn.functional.linear(x, values)
    assert torch.equal(y, expected)
    torch.cuda.empty_cache()
    held = torch.cuda.mem_get_info(own.device)[0]
    released = dense.release()
    dist.barrier(own.group)
    freed = torch.cuda.mem_get_info(own.device)[0] - held
    dist.barrier(own.group)
    restored = dense.restore()
    assert [weight.data_ptr() for weight in dense.tensors()] == where
    assert not any(weight.any() for weight in dense.tensors())
    weights[3].copy_(values)
    y.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, expected), "the graph reads the same addresses"
    return {"taken": before - held, "released": released, "freed": freed, "restored": restored}


def test_dense_weights_come_and_go(fleet: Fleet) -> None:
    nbytes = 5 * 8192 * 4096 * 2
    on_device = RANKS if sharing_gpus(RANKS) else 1
    for told in fleet.call(dense_weights):
        assert told["released"] == told["restored"] == nbytes
        assert abs(told["freed"] - on_device * nbytes) < SLACK, told


def test_times(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    line = fleet.call(times_of_calls)[0]
    with capsys.disabled():
        print("\n" + memory_map.table([line]))
    assert line["restore_total_ms"] > 0
    if not sharing_gpus(RANKS):  # else one rank may take memory again while the other gives its own back
        assert line["freed_gib"] >= 3.9


def test_a_killed_rank_takes_its_memory_along() -> None:
    """Of a rank that is killed, only what a peer maps stays, and that goes with the peer's own close."""
    fleet = Fleet(RANKS, make_rank, timeout_s=100)
    try:
        fleet.call(hold_memory)
        device = int(os.environ.get("LOCAL_RANK", "0"))
        held = torch.cuda.mem_get_info(device)[0]
        fleet.kill()
    finally:
        fleet.close()
    assert torch.cuda.mem_get_info(device)[0] - held > (900 << 20)


_kept: list[object] = []


def hold_memory(own: Rank) -> None:
    memory = VirtualMemory(chunk_sizes(4, 256 << 20), own.device)
    _kept.extend([memory, VirtualPeers.open(memory, own.rank, gather_of(own.group))])
