"""Pitched copies of the direct mover against the plan, its checks, and its Triton kernels in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from moebius.kernels.collective import CollectiveMover
from moebius.kernels.cuda_calls import CudaError, checked
from moebius.kernels.direct import DirectMover
from moebius.kernels.experts import expert_moves
from moebius.kernels.kv import PageMover, pages_to_ep
from moebius.kernels.peers import Export, PeerError, export_memory, obstacle
from moebius.rollout.bench import mover as mover_bench
from moebius.rollout.bench.mover_layers import MoverShape, OwnLayers
from tests.unit import direct_model as model
from tests.unit.direct_model import Memory, Recorder, Shape, Slots

CHECKS = Path(__file__).with_name("direct_checks.py")


def storages_of(shape: Shape, layout: str, round_: int = 0) -> list[torch.Tensor]:
    storages = [torch.empty(shape.numel, dtype=torch.int16) for _ in range(shape.ranks)]
    for rank, storage in enumerate(storages):
        model.fill(Slots(shape, storage), layout, rank, round_)
    return storages


@pytest.mark.parametrize("to_tp", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_pitched_copies_do_what_the_plan_says(ranks: int, to_tp: bool) -> None:
    """cudaMemcpy2D is emulated; every byte of all buffers must be as the plan leaves it, poison included."""
    shape = Shape(ranks)
    storages = storages_of(shape, "EP" if to_tp else "TP")
    programs = model.record_experts(shape, storages, to_tp)
    memory = Memory(storages)
    for step in range(shape.layers):
        for rank in range(ranks):
            copies = programs[rank][step]
            # One per tensor and peer; the first goes to the neighbour.
            assert [c.peer for c in copies] == 2 * [(rank + 1 + turn) % ranks for turn in range(ranks)]
            for copy in copies:
                memory.copy_2d(copy)
    for found, wanted in zip(storages, model.reference(shape, to_tp, 0, None), strict=True):
        assert torch.equal(found, wanted)


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from([1, 2, 3, 4, 8]), st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), st.booleans()
)  # fmt: skip
def test_pitched_copies_of_any_shape(ranks: int, local: int, hidden: int, columns: int, to_tp: bool) -> None:
    shape = Shape(ranks, 1, local, hidden, columns, kv_heads=ranks)
    storages = storages_of(shape, "EP" if to_tp else "TP")
    memory = Memory(storages)
    for program in model.record_experts(shape, storages, to_tp):
        for copy in program[0]:
            memory.copy_2d(copy)
    for found, wanted in zip(storages, model.reference(shape, to_tp, 0, None), strict=True):
        assert torch.equal(found, wanted)


def test_the_tp_side_is_contiguous_and_bytes_are_counted() -> None:
    """Thin rows of w2 only appear on the EP side: 768-byte rows for the shape of Qwen3-30B-A3B on two ranks."""
    w13, w2 = expert_moves(128, 2048, 768, 2, 1, 2, True)
    assert (w2.rows, w2.width, w2.src_pitch, w2.dst_pitch) == (64 * 2048, 768, 1536, 768)
    assert (w13.rows, w13.width, w13.src_pitch, w13.dst_pitch) == (128, 384 * 2048 * 2, 768 * 2048 * 2, w13.width)
    back = expert_moves(128, 2048, 768, 2, 1, 2, False)
    assert all(m.src_pitch == m.width for m in back)
    assert sum(m.rows * m.width for m in (w13, w2)) == 301_989_888


def mover_of(shape: Shape, rank: int = 0) -> tuple[DirectMover, Slots, list[torch.Tensor]]:
    storages = storages_of(shape, "EP")
    buffers = model.buffers_of(storages, rank)
    recorder = Recorder(rank, buffers.bases)
    mover = DirectMover(buffers, recorder, PageMover(buffers.bases, rank, buffers.device), recorder)
    return mover, Slots(shape, storages[rank]), storages


def test_bytes_sent_are_those_for_peers() -> None:
    shape = Shape(4)
    mover, slots, _ = mover_of(shape)
    assert model.move_experts(mover, slots, True, 0) == (shape.w13 + shape.w2) * 2 * 3 // 4


def test_wrong_experts_are_refused() -> None:
    mover, slots, _ = mover_of(Shape(2))
    ep, tp = slots.experts("EP", 0), slots.experts("TP", 0)
    with pytest.raises(ValueError, match="overlap in the buffer"):
        mover.experts_ep_to_tp(*ep, *slots.experts("TP", 1))
    with pytest.raises(ValueError, match="must be contiguous with shapes"):
        mover.experts_ep_to_tp(*ep, tp[0][1:], tp[1])
    with pytest.raises(ValueError, match="share one dtype"):
        mover.experts_tp_to_ep(tp[0].view(torch.bfloat16), tp[1], *ep)
    with pytest.raises(ValueError, match="only tensors inside it"):
        mover.experts_ep_to_tp(ep[0].clone(), ep[1], *tp)
    assert mover._signals.steps == [[]], "something was enqueued"  # type: ignore[attr-defined]


def test_wrong_pages_are_refused() -> None:
    shape = Shape(2)
    mover, slots, _ = mover_of(shape)
    ep, tp = slots.kv("EP", 0), slots.kv("TP", 0)
    ranges = [(0, 2), (2, 4)]
    good = [(torch.tensor([0]), torch.tensor([1]))] * 2
    with pytest.raises(ValueError, match="overlap in the buffer"):
        mover.kv_ep_to_tp(ep, slots.kv("TP", 1), good, ranges)
    with pytest.raises(ValueError, match="page lists and head ranges of 2 ranks"):
        mover.kv_ep_to_tp(ep, tp, good[1:], ranges)
    with pytest.raises(ValueError, match="2 target pages"):
        mover.kv_ep_to_tp(ep, tp, [(good[0][0], torch.tensor([1, 2]))] * 2, ranges)
    with pytest.raises(ValueError, match="do not fit 4 KV heads"):
        mover.kv_ep_to_tp(ep, tp, good, [(0, 2), (3, 5)])
    with pytest.raises(ValueError, match="do not fit 4 KV heads"):
        mover.kv_ep_to_tp(ep, tp, good, [(0, 3), (3, 4)])
    with pytest.raises(ValueError, match="does not match EP pool"):
        mover.kv_ep_to_tp(ep, tp[:, :1], good, ranges)
    for bad in ([-1], [shape.ep_pages]):
        with pytest.raises(ValueError, match="source page ids reach from"):
            mover.kv_ep_to_tp(ep, tp, [(torch.tensor(bad), torch.tensor([1]))] * 2, ranges)
    with pytest.raises(ValueError, match="target page ids reach from"):
        mover.kv_tp_to_ep(slots.kv("TP", 1), slots.kv("EP", 1), [(torch.tensor([1]), torch.tensor([12]))] * 2, ranges)
    none = torch.empty(0, dtype=torch.int64)
    assert mover.kv_ep_to_tp(ep, tp, [(none, none)] * 2, ranges) == 0
    assert mover._signals.steps == [[]], "something was enqueued"  # type: ignore[attr-defined]


def test_pages_to_owners_alternate_between_owners() -> None:
    """No rank's link idles while the pages of another are written."""
    ids = [torch.arange(n) for n in (40, 0, 40, 20)]
    listing = pages_to_ep([(i, i) for i in ids], [(r, r + 1) for r in range(4)], 1)
    assert listing.owners is not None
    for start in range(0, 100, 10):
        counts = listing.owners[start : start + 10].bincount(minlength=4).tolist()
        assert counts[1] == 0 and 3 <= counts[0] <= 5 and 3 <= counts[2] <= 5 and 1 <= counts[3] <= 3
    assert listing.peer_heads == 100


def test_ranks_that_cannot_map_each_other_are_told_why() -> None:
    good = Export("host a", "cuda:0", 64, 0, b"x")
    assert obstacle([good, good]) is None
    assert "rank 1 (host b) are on different hosts" in str(obstacle([good, Export("host b", "cuda:0", 64, 0, b"x")]))
    assert "rank 1 (32 bytes) have buffers of different" in str(obstacle([good, Export("host a", "cuda:1", 32)]))
    assert "rank 1 cannot share its memory: because" in str(obstacle([good, Export("b", "c", 1, problem="because")]))
    assert "a tensor on cpu" in str(export_memory(torch.zeros(4)).problem)


def test_one_rank_on_a_cpu(tmp_path: Path) -> None:
    """No peer map without CUDA, in words; the benchmark's slots and tables suit a mover."""
    shape = MoverShape(layers=2, experts=2, hidden=4, intermediate=4, kv_heads=2, page_tokens=2, page_width=4, pages=8)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        with pytest.raises(PeerError, match="rank 0 cannot share its memory: a tensor on cpu"):
            DirectMover.connect(torch.zeros(64), group)
        layers = OwnLayers(shape, group, torch.device("cpu"))
        for what, there, back in layers.moves(CollectiveMover(group), True):
            assert there() == back() == 0, what
    finally:
        dist.destroy_process_group()
    line = mover_bench.table([mover_bench.MoverSpeed("direct", "experts", 2.0, 380.0, 0.95)]).splitlines()[1]
    assert line.split() == ["direct", "experts", "2.000", "380.0", "95.0%"]


def test_cuda_errors_name_the_call() -> None:
    assert checked((0,), "x") is None
    assert checked((0, 5), "x") == 5
    assert checked((0, 5, 6), "x") == (5, 6)
    with pytest.raises(CudaError, match="copying: 700"):
        checked((700,), "copying")


def run_python(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], env=os.environ | env, capture_output=True, text=True, timeout=900, check=False
    )


def test_cpu_hosts_need_neither_triton_nor_cuda_bindings() -> None:
    code = """
import sys
sys.modules["triton"] = sys.modules["cuda"] = None  # importing them raises ImportError
import moebius.kernels.direct
from moebius.kernels.cuda_calls import CudaError, driver
try:
    driver()
except CudaError as error:
    print(error)
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    assert "install cuda-bindings" in done.stdout


def test_triton_kernels_in_the_interpreter() -> None:
    """Experts, KV and flags of 1 to 8 ranks in one process: see `direct_checks.py`."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed, so there is no interpreter to run its kernels in")
    root = str(CHECKS.parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    done = run_python(str(CHECKS), TRITON_INTERPRET="1", PYTHONPATH=path, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("all hold")
