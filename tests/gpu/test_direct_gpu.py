"""The direct mover between two processes: every byte against the plan, many times over, with ranks out of step.

With one GPU the processes share it: CUDA IPC works there too, only NVLink does not take part.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from moebius.kernels.direct import DirectMover, ExpertMoverName
from moebius.kernels.plan import kv_head_ranges
from moebius.kernels.rooms import commit_order
from moebius.kernels.signals import How, PeerTimeout
from moebius.rollout.bench.mover import measure, table
from moebius.rollout.bench.mover_layers import MoverShape
from tests.engine.fleet import Fleet, sharing_gpus
from tests.unit import direct_model as model
from tests.unit.direct_model import Shape, Slots

pytestmark = pytest.mark.gpu

RANKS = 2
ROUNDS = int(os.environ.get("MOEBIUS_TEST_ROUNDS", "20"))  # fewer under compute-sanitizer
SHAPE = Shape(
    RANKS, layers=6, experts_per_rank=8, hidden=512, columns_per_rank=128, kv_heads=4, ep_pages=128, page=(16, 256)
)
STAGED = Shape(
    RANKS, layers=6, experts_per_rank=8, hidden=512, columns_per_rank=128, kv_heads=4, ep_pages=512, page=(16, 256)
)
ODD = Shape(RANKS, layers=3, experts_per_rank=3, hidden=30, columns_per_rank=7, kv_heads=2, ep_pages=9, page=(3, 10))
ONE_HEAD = Shape(RANKS, layers=2, kv_heads=1, ep_pages=64, page=(16, 256))


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
    return Rank(dist.get_rank(), device, dist.group.WORLD)


def move_all(own: Rank, mover: DirectMover, slots: Slots, to_tp: bool, seed: int, delays: random.Random) -> int:
    """A whole move of experts, then KV, this rank now and then held up on its device. Returns bytes sent."""
    shape = slots.shape
    table_ = model.page_table(shape, seed, fresh=not to_tp)
    pages = model.page_pairs(table_, to_tp, str(own.device))
    ranges = kv_head_ranges(shape.kv_heads, shape.ranks)
    sent = 0
    for part in ("experts", "kv"):
        for layer in model.layers_of(shape, to_tp):
            if delays.random() < 0.4:
                torch.cuda._sleep(delays.randrange(1_000_000))  # up to half a millisecond
            ep, tp = slots.kv("EP", layer), slots.kv("TP", layer)
            if part == "experts":
                sent += model.move_experts(mover, slots, to_tp, layer)
            elif to_tp:
                sent += mover.kv_ep_to_tp(ep, tp, pages, ranges)
            else:
                sent += mover.kv_tp_to_ep(tp, ep, pages, ranges)
    mover.finish()
    wanted = model.reference(shape, to_tp, seed, table_, slots.tokens_first, str(own.device))[own.rank]
    assert torch.equal(slots.storage, wanted), f"rank {own.rank}, {to_tp=}, round {seed}: bytes differ from the plan"
    return sent


def check_rounds(
    own: Rank, shape: Shape, experts: ExpertMoverName, signals: How, rounds: int, tokens_first: bool
) -> int:
    # The buffer begins within an allocation, as a part of a tensor may.
    storage = torch.zeros(shape.numel + 64, dtype=torch.int16, device=own.device)[64:]
    slots = Slots(shape, storage, tokens_first)
    mover = DirectMover.connect(storage, own.group, experts=experts, signals=signals)
    assert mover.ways == {"experts": experts, "signals": signals, "memory": "plain"}
    mover.warm_up(0, own.device)
    mover.prepare_kv(slots.kv("EP", 0), slots.kv("TP", 0), kv_head_ranges(shape.kv_heads, shape.ranks))
    delays = random.Random(own.rank)
    sent = 0
    for seed in range(rounds):
        for to_tp in (True, False):
            model.fill(slots, "EP" if to_tp else "TP", own.rank, seed)
            torch.cuda.synchronize()
            dist.barrier(own.group)
            sent += move_all(own, mover, slots, to_tp, seed, delays)
            dist.barrier(own.group)
    mover.close()
    return sent


def check_choice(own: Rank) -> dict[str, float]:
    """The measurement at start moves layer 0 into its spare slot and nothing else, and leaves a working mover."""
    storage = torch.zeros(SHAPE.numel, dtype=torch.int16, device=own.device)
    slots = Slots(SHAPE, storage)
    model.fill(slots, "EP", own.rank, 3)
    mover = DirectMover.connect(storage, own.group)
    before = storage.clone()
    times = mover.prepare_experts(slots.experts("EP", 0), slots.experts("TP", 0))
    assert torch.equal(storage[SHAPE.expert_slot :], before[SHAPE.expert_slot :])
    assert not torch.equal(storage[: SHAPE.expert_slot], before[: SHAPE.expert_slot])
    dist.barrier(own.group)
    move_all(own, mover, slots, True, 3, random.Random(own.rank))
    chosen = mover.ways["experts"]
    assert times[chosen] <= 1.04 * min(times.values()), (chosen, times)
    mover.close()
    return times


def check_staged(own: Rank, rounds: int) -> int:
    """PREPARE of any share of layers while this rank works, then COMMIT: the plan's bytes, with ranks out of step."""
    shape = STAGED
    storage = torch.zeros(shape.numel, dtype=torch.int16, device=own.device)
    slots = Slots(shape, storage)
    mover = DirectMover.connect(storage, own.group)
    mover.prepare_experts(slots.experts("EP", 0), slots.experts("TP", 0))
    spans = model.room_spans(shape, shape.ep_pages)
    delays = random.Random(own.rank)
    work = torch.ones(1 << 20, device=own.device)
    sent = 0
    for seed in range(rounds):
        model.fill(slots, "EP", own.rank, seed)
        torch.cuda.synchronize()
        dist.barrier(own.group)
        torch.cuda._sleep(delays.randrange(1_000_000))
        rooms = model.rooms_of(shape, storage, spans, most=shape.layers - seed % (shape.layers + 1))
        mover.begin_staging()
        for layer, room in enumerate(rooms):
            experts = (*slots.experts("EP", layer), *slots.experts("TP", layer))
            sent += mover.stage_experts(*experts, room)
        mover.end_staging()
        for _ in range(delays.randrange(4)):
            work.mul_(1.0)  # the model goes on
        if seed % 5 == 4:
            mover.begin_commit()  # nothing comes of it
            mover.finish()
            dist.barrier(own.group)
            continue
        mover.begin_commit(moves_follow=len(rooms) < shape.layers)
        for layer in commit_order(len(rooms), shape.layers):
            model.commit(mover, slots, rooms, layer)
        mover.end_commit()
        mover.finish()
        wanted = model.reference(shape, True, seed, None, False, str(own.device))[own.rank]
        for found in (storage, wanted):
            for start, end in spans:
                found.view(torch.uint8)[start:end] = 0
        assert torch.equal(storage, wanted), f"rank {own.rank}, round {seed}: bytes differ from the plan"
        dist.barrier(own.group)
    mover.close()
    return sent


def check_timeout(own: Rank, signals: How) -> str:
    """Rank 1 stays behind: rank 0 says so, and its device is free again afterwards."""
    storage = torch.zeros(SHAPE.numel, dtype=torch.int16, device=own.device)
    mover = DirectMover.connect(storage, own.group, signals=signals)
    mover.warm_up(0, own.device)
    dist.barrier(own.group)
    message = ""
    if own.rank == 0:
        mover._signals.barrier()
        with pytest.raises(PeerTimeout) as caught:
            mover.finish(timeout_s=1.0)
        torch.cuda.synchronize()
        message = str(caught.value)
    dist.barrier(own.group)
    mover.close()
    return message


def check_no_host_synchronisation(own: Rank) -> None:
    """torch raises where one of its calls would wait for the device."""
    storage = torch.zeros(SHAPE.numel, dtype=torch.int16, device=own.device)
    slots = Slots(SHAPE, storage)
    mover = DirectMover.connect(storage, own.group)
    mover.prepare_experts(slots.experts("EP", 0), slots.experts("TP", 0))
    pages = model.page_pairs(model.page_table(SHAPE, 1), True, str(own.device))
    ranges = kv_head_ranges(SHAPE.kv_heads, RANKS)
    mover.kv_ep_to_tp(slots.kv("EP", 0), slots.kv("TP", 0), pages, ranges)  # looks at the page ids once
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for layer in range(SHAPE.layers):
            model.move_experts(mover, slots, True, layer)
        for layer in range(SHAPE.layers):
            mover.kv_ep_to_tp(slots.kv("EP", layer), slots.kv("TP", layer), pages, ranges)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    mover.finish()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated, "a move allocated device memory"
    mover.close()


def speeds(own: Rank) -> str:
    return table(measure(own.group, own.device, MoverShape(layers=4, pages=2048), repeats=3))


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    fleet = Fleet(RANKS, make_rank, timeout_s=200)
    yield fleet
    fleet.close()


@pytest.mark.parametrize("signals", ["kernel", "stream"])
@pytest.mark.parametrize("experts", ["copy_engine", "triton"])
def test_bytes_are_exact_both_ways(fleet: Fleet, experts: str, signals: str) -> None:
    assert all(sent > 0 for sent in fleet.call(check_rounds, SHAPE, experts, signals, ROUNDS, False))


@pytest.mark.parametrize("shape", [ODD, ONE_HEAD], ids=["odd", "one head"])
@pytest.mark.parametrize("tokens_first", [False, True])
def test_other_shapes(fleet: Fleet, shape: Shape, tokens_first: bool) -> None:
    for experts in ("copy_engine", "triton"):
        fleet.call(check_rounds, shape, experts, "kernel", 3, tokens_first)


def test_staged_experts_are_exact(fleet: Fleet) -> None:
    assert all(sent > 0 for sent in fleet.call(check_staged, ROUNDS))


def test_choice_by_measurement(fleet: Fleet) -> None:
    times = fleet.call(check_choice)
    assert times[0] == times[1] and min(times[0].values()) > 0


def test_moves_do_not_wait_for_the_device(fleet: Fleet) -> None:
    fleet.call(check_no_host_synchronisation)


@pytest.mark.parametrize("signals", ["kernel", "stream"])
def test_a_missing_peer_is_named(fleet: Fleet, signals: str) -> None:
    message, _ = fleet.call(check_timeout, signals)
    assert "rank 0 waited 1 s for its peers" in message and "{1: " in message


def test_expandable_segments_are_refused(fleet: Fleet) -> None:
    """In a process of its own: the allocator's settings count from its first allocation."""
    code = (
        "import torch; from moebius.kernels.peers import export_memory; "
        "print(export_memory(torch.zeros(1 << 24, device='cuda')).problem)"
    )
    import subprocess
    import sys

    settings = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "take expandable_segments:True" in done.stdout, done.stdout + done.stderr


def test_speed(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints the table. On NVLink the direct mover must come near a contiguous copy."""
    found = fleet.call(speeds)[0]
    with capsys.disabled():
        print("\n" + found)
    if not sharing_gpus(RANKS):
        share = float(next(line for line in found.splitlines() if "copy engine" in line).split()[-1].rstrip("%"))
        assert share > 70, found
