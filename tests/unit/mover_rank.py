"""One rank of the mover tests, run as a program: `mover_rank.py RANK RANKS STORE`. Exits non-zero if a check fails.

Every rank makes the tensors of all ranks from the same seeds, lets the reference plan act on them in its own memory,
and compares its share with what the mover brought.
"""

from __future__ import annotations

import random
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from moebius.kernels.collective import CollectiveMover
from moebius.kernels.plan import (
    KvRequest,
    PageTable,
    apply_kv,
    apply_rects,
    kv_head_ranges,
    plan_experts_ep_to_tp,
    plan_kv_ep_to_tp,
    plan_kv_tp_to_ep,
)
from moebius.kernels.rooms import Room, commit_order, pack_rooms
from moebius.rollout.bench.overlap import OverlappedMover

PAGE = (4, 6)  # tokens per page, 2 * head dim
Pages = list[tuple[torch.Tensor, torch.Tensor]]


def poison(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def check_experts(mover: CollectiveMover, rank: int, ranks: int, dtype: torch.dtype) -> None:
    """Three layers in four shifted slots: EP -> TP against the plan, then back to the same bytes."""
    layers, experts, hidden, inter = 3, 2 * ranks, 5, 3 * ranks
    local, part = experts // ranks, inter // ranks
    generator = torch.Generator().manual_seed(7)
    size13, size2 = local * 2 * inter * hidden, local * hidden * inter
    slots = poison((layers + 1, size13 + size2), dtype)

    def views(slot: int, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
        w13, w2 = slots[slot].split([size13, size2])
        if layout == "EP":
            return w13.view(local, 2 * inter, hidden), w2.view(local, hidden, inter)
        return w13.view(experts, 2 * part, hidden), w2.view(experts, hidden, part)

    plan = plan_experts_ep_to_tp(experts, hidden, inter, ranks)
    originals, wanted = [], []
    for layer in range(layers):
        ep13 = [torch.randn(local, 2 * inter, hidden, generator=generator).to(dtype) for _ in range(ranks)]
        ep2 = [torch.randn(local, hidden, inter, generator=generator).to(dtype) for _ in range(ranks)]
        for view, tensor in zip(views(layer + 1, "EP"), (ep13[rank], ep2[rank]), strict=True):
            view.copy_(tensor)
        originals.append((ep13[rank], ep2[rank]))
        tp13 = [poison((experts, 2 * part, hidden), dtype) for _ in range(ranks)]
        tp2 = [poison((experts, hidden, part), dtype) for _ in range(ranks)]
        apply_rects(plan.w13, ep13, tp13)
        apply_rects(plan.w2, ep2, tp2)
        wanted.append((tp13[rank], tp2[rank]))

    expected_bytes = plan.numel_sent(rank) * dtype.itemsize
    for layer in range(layers):
        assert mover.experts_ep_to_tp(*views(layer + 1, "EP"), *views(layer, "TP")) == expected_bytes
    if isinstance(mover, OverlappedMover):
        mover.flush()
    for layer in range(layers):
        for view, tensor in zip(views(layer, "TP"), wanted[layer], strict=True):
            assert torch.equal(bits(view), bits(tensor)), f"TP layer {layer}"
    for layer in reversed(range(layers)):
        assert mover.experts_tp_to_ep(*views(layer, "TP"), *views(layer + 1, "EP")) == expected_bytes
    if isinstance(mover, OverlappedMover):
        mover.flush()
    for layer in range(layers):
        for view, tensor in zip(views(layer + 1, "EP"), originals[layer], strict=True):
            assert torch.equal(bits(view), bits(tensor)), f"EP layer {layer}"

    # Refused before anything is sent, on every rank.
    with pytest.raises(ValueError, match="overlap"):
        mover.experts_ep_to_tp(*views(1, "EP"), *views(1, "TP"))
    with pytest.raises(ValueError, match="overlap"):
        mover.experts_tp_to_ep(*views(1, "TP"), *views(1, "EP"))
    w13, w2 = views(0, "TP")
    with pytest.raises(ValueError, match="shapes"):
        mover.experts_ep_to_tp(*views(1, "EP"), w13[1:], w2)
    with pytest.raises(ValueError, match="dtype"):
        mover.experts_ep_to_tp(*views(1, "EP"), w13.double(), w2)


def check_staging(mover: CollectiveMover, rank: int, ranks: int) -> None:
    """Staged and committed, upwards over shifted slots, experts stand as after a move at once: any share of layers."""
    layers, experts, hidden, inter = 4, 2 * ranks, 5, 3 * ranks
    local, part = experts // ranks, inter // ranks
    size13, size2 = local * 2 * inter * hidden, local * hidden * inter
    parts = ((2 * local, part * hidden * 4), (local * hidden, part * 4))
    leaving = (size13 + size2) * 4 // ranks * (ranks - 1)

    def views(memory: torch.Tensor, slot: int, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
        w13, w2 = memory[slot].split([size13, size2])
        if layout == "EP":
            return w13.view(local, 2 * inter, hidden), w2.view(local, hidden, inter)
        return w13.view(experts, 2 * part, hidden), w2.view(experts, hidden, part)

    def of(memory: torch.Tensor, layer: int) -> tuple[torch.Tensor, ...]:
        return *views(memory, layer + 1, "EP"), *views(memory, layer, "TP")

    rng, counts = random.Random(ranks), set()
    for turn in range(6):
        # Runs of free memory, not a multiple of anything, the same on all ranks.
        size = [0, layers * leaving, layers * leaving // 2][turn] if turn < 3 else rng.randrange(layers * leaving + 1)
        memory, spans, at = poison((2 * size + 1024,), torch.float32).view(torch.uint8), [], 0
        while sum(end - start for start, end in spans) < size:
            at += 4 * rng.randrange(1, 9)
            length = min(size - sum(end - start for start, end in spans), 4 * rng.randrange(60, 400))
            spans.append((at, at + length))
            at += length
        packed = pack_rooms(spans, parts, ranks, layers, layers)
        staged = len(packed)
        rooms = [Room(memory, parts, i + 1 == staged < layers, pieces) for i, pieces in enumerate(packed)]
        slots = torch.randn(layers + 1, size13 + size2, generator=torch.Generator().manual_seed(11 + rank + turn))
        moved, before = slots.clone(), slots.clone()
        mover.begin_staging()
        sent = [mover.stage_experts(*of(slots, layer), rooms[layer]) for layer in range(staged)]
        mover.end_staging()
        assert torch.equal(slots, before), "staging changed the experts"
        whole = [mover.experts_ep_to_tp(*of(moved, layer)) for layer in range(layers)]
        mover.begin_commit(moves_follow=staged < layers)
        for layer in commit_order(staged, layers):
            if layer < staged:
                mover.commit_experts(*of(slots, layer), rooms[layer])
            else:
                sent.append(mover.experts_ep_to_tp(*of(slots, layer)))
        mover.end_commit()
        assert torch.equal(slots, moved) and sum(sent) == sum(whole) == layers * leaving
        counts.add(staged)
        if ranks > 1 and staged:
            short = Room(memory, parts, False, rooms[0].pieces[:-1])
            with pytest.raises(ValueError, match="room for staging"):
                mover.stage_experts(*of(slots, 0), short)
    assert ranks == 1 or len(counts) >= 3, counts


def make_requests(counts: list[int], shared: bool = True) -> list[KvRequest]:
    """`counts[r]` pages on rank r, scattered over pools of 16 and 64 pages; the last one is `shared` by two."""
    generator = torch.Generator().manual_seed(sum(counts))
    free = torch.randperm(64, generator=generator).tolist()
    requests = []
    for owner, count in enumerate(counts):
        ep = torch.randperm(16, generator=generator)[:count].tolist()
        requests.append(KvRequest(owner, ep, [free.pop() for _ in ep], count))
        if count and shared:
            requests.append(KvRequest(owner, [ep[-1]], [free.pop()], 1))
    return requests


def check_kv(
    mover: CollectiveMover, rank: int, ranks: int, heads: int, counts: list[int], dtype: torch.dtype, heads_first: bool
) -> None:
    """`heads_first`: pages stored as (heads, tokens, 2D) in memory, else (tokens, heads, 2D) seen through strides."""
    generator = torch.Generator().manual_seed(heads)

    def pool(pages: int, count: int) -> torch.Tensor:
        if heads_first:
            return poison((pages, count, *PAGE), dtype)
        return poison((pages, PAGE[0], count, PAGE[1]), dtype).transpose(1, 2)

    sources = [pool(16, heads) for _ in range(ranks)]
    for source in sources:
        source.copy_(torch.randn(16, heads, *PAGE, generator=generator))
    table = PageTable.from_requests(make_requests(counts), ranks)
    ranges = kv_head_ranges(heads, ranks)
    targets = [pool(64, stop - start) for start, stop in ranges]
    apply_kv(plan_kv_ep_to_tp(table, heads), sources, targets)

    found = pool(64, ranges[rank][1] - ranges[rank][0])
    pages: Pages = [
        (torch.from_numpy(ep), torch.from_numpy(tp)) for ep, tp in zip(table.ep_pages, table.tp_pages, strict=True)
    ]
    before = bits(sources[rank]).clone()
    sent = mover.kv_ep_to_tp(sources[rank], found, pages, ranges)
    assert torch.equal(bits(found), bits(targets[rank])), "live pages differ, or another page was written"
    assert torch.equal(bits(sources[rank]), before), "the source changed"
    peers = sum(stop - start for peer, (start, stop) in enumerate(ranges) if peer != rank)
    assert sent == table.ep_pages[rank].size * peers * PAGE[0] * PAGE[1] * dtype.itemsize


def check_kv_back(mover: CollectiveMover, rank: int, ranks: int, heads: int, counts: list[int]) -> None:
    """TP->EP against plain torch; all replicas of a head hold the same bytes, as after EP->TP."""
    generator = torch.Generator().manual_seed(100 + heads)
    table = PageTable.from_requests(make_requests(counts, shared=False), ranks)
    ranges = kv_head_ranges(heads, ranks)
    whole = torch.randn(64, heads, *PAGE, generator=generator)
    sources = [whole[:, start:stop].contiguous() for start, stop in ranges]
    targets = [poison((16, heads, *PAGE), torch.float32) for _ in range(ranks)]
    apply_kv(plan_kv_tp_to_ep(table, heads), sources, targets)

    found = poison((16, heads, *PAGE), torch.float32)
    pages: Pages = [
        (torch.from_numpy(tp), torch.from_numpy(ep)) for tp, ep in zip(table.tp_pages, table.ep_pages, strict=True)
    ]
    before = bits(sources[rank]).clone()
    sent = mover.kv_tp_to_ep(sources[rank], found, pages, ranges)
    assert torch.equal(bits(found), bits(targets[rank])), "live pages differ, or another page was written"
    assert torch.equal(bits(sources[rank]), before), "the source changed"
    copies = max(1, ranks // heads)
    others = sum(len(tp[rank % copies :: copies]) for owner, tp in enumerate(table.tp_pages) if owner != rank)
    assert sent == others * (ranges[rank][1] - ranges[rank][0]) * PAGE[0] * PAGE[1] * 4


def check_kv_refusals(mover: CollectiveMover, ranks: int) -> None:
    ranges = kv_head_ranges(ranks, ranks)
    source, target = torch.zeros(4, ranks, *PAGE), torch.zeros(4, 1, *PAGE)
    one = torch.zeros(1, dtype=torch.int64)
    good: Pages = [(one, one)] * ranks
    with pytest.raises(ValueError, match="overlap"):
        mover.kv_ep_to_tp(source, source[:, :1], good, ranges)
    with pytest.raises(ValueError, match="page lists"):
        mover.kv_ep_to_tp(source, target, good[1:], ranges)
    with pytest.raises(ValueError, match="2 target pages"):
        mover.kv_ep_to_tp(source, target, [(one, one.repeat(2))] * ranks, ranges)
    with pytest.raises(ValueError, match="do not fit"):
        mover.kv_ep_to_tp(source, target, good, [(0, ranks + 1)] * ranks)
    with pytest.raises(ValueError, match="does not match"):
        mover.kv_ep_to_tp(source, target.double(), good, ranges)


def check_no_pages_means_no_collective(mover: CollectiveMover, ranks: int) -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    target = torch.zeros(4, 1, *PAGE)
    real = dist.all_to_all_single

    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("a collective was called though no rank has pages")

    dist.all_to_all_single = forbidden
    try:
        ranges = kv_head_ranges(ranks, ranks)
        assert mover.kv_ep_to_tp(torch.ones(4, ranks, *PAGE), target, [(empty, empty)] * ranks, ranges) == 0
    finally:
        dist.all_to_all_single = real
    assert not target.any()


def main() -> None:
    rank, ranks, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=30)
    )
    mover = CollectiveMover(dist.group.WORLD)
    mover.warm_up(1 << 20, "cpu")
    addresses = {name: memory.data_ptr() for name, memory in mover._staging.items()}
    with torch.inference_mode():
        check_experts(mover, rank, ranks, torch.float32)
    check_experts(mover, rank, ranks, torch.bfloat16)
    check_staging(mover, rank, ranks)
    check_experts(OverlappedMover(dist.group.WORLD), rank, ranks, torch.bfloat16)
    uneven = [3, 0, 5, 1][:ranks]
    last_only = [0] * (ranks - 1) + [4]
    for heads in (1, 2, 4, 8):
        for counts in (uneven, last_only, [2] * ranks):
            for heads_first in (True, False):
                check_kv(mover, rank, ranks, heads, counts, torch.float32, heads_first)
        check_kv(mover, rank, ranks, heads, uneven, torch.bfloat16, True)
        for counts in (uneven, last_only, [2] * ranks, [0] * ranks):
            check_kv_back(mover, rank, ranks, heads, counts)
    check_no_pages_means_no_collective(mover, ranks)
    check_kv_refusals(mover, ranks)
    assert addresses == {name: memory.data_ptr() for name, memory in mover._staging.items()}, "staging was reallocated"

    grown = CollectiveMover(dist.group.WORLD)  # nothing reserved: staging made inside inference mode must serve outside
    with torch.inference_mode():
        check_kv(grown, rank, ranks, 4, uneven, torch.float32, True)
    check_kv(grown, rank, ranks, 4, uneven, torch.float32, True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
