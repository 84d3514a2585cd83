"""Qwen3-235B-A22B on eight ranks: two of them hold each KV head in TP, and there are 94 layers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import torch

from moebius.engine.layout import Layout, ModelShape, ShardMap
from moebius.engine.memory import LARGE_SLOT, SlotSizes
from moebius.kernels.kv import pages_to_ep, pages_to_tp
from moebius.kernels.plan import kv_head_ranges, plan_experts_ep_to_tp
from moebius.kernels.rooms import pack_rooms
from moebius.kernels.virtual import GRANULE
from moebius.rollout.config import load_config
from moebius.rollout.plan_model import load_model
from moebius.rollout.planner import staged_layers

ROOT = Path(__file__).parents[2]
RANKS, HEADS, BF16 = 8, 4, 2
CONFIG = load_config(ROOT / "configs" / "shape_235b_x8.yaml").engine
SHAPE = ModelShape.from_hf_config(json.loads((ROOT / CONFIG.model / "config.json").read_text()), RANKS)
SHARD = ShardMap(SHAPE, RANKS)


def test_every_page_and_head_is_written_once_each_way() -> None:
    """To TP both ranks of a pair get the pair's head of every page; back they take turns at its pages."""
    ranges = kv_head_ranges(HEADS, RANKS)
    assert ranges == [(r // 2, r // 2 + 1) for r in range(RANKS)]
    # Rank r owns r + 1 pages; source and target ids differ.
    counts = [r + 1 for r in range(RANKS)]
    pages = [(torch.arange(n) + 10 * r, torch.arange(n) + 100 * r) for r, n in enumerate(counts)]
    to_tp = Counter(
        (peer, int(page), head, at)
        for rank in range(RANKS)
        for listed in [pages_to_tp(pages, ranges, rank)]
        for page in listed.dst_pages
        for peer, head, at in listed.routes
    )
    every = [int(page) for _, target in pages for page in target]
    assert to_tp == Counter((peer, page, peer // 2, 0) for peer in range(RANKS) for page in every)
    back = Counter(
        (int(owner), int(page), head)
        for rank in range(RANKS)
        for listed in [pages_to_ep(pages, ranges, rank)]
        for owner, page in zip(listed.owners, listed.dst_pages, strict=True)
        for _, _, head in listed.routes
    )
    assert back == Counter((r, int(p), h) for r, (_, target) in enumerate(pages) for p in target for h in range(HEADS))
    for rank in range(RANKS):  # what a rank says it sends, in page heads
        leaving = sum(n for r, n in enumerate(counts) if r != rank)
        assert pages_to_tp(pages, ranges, rank).peer_heads == counts[rank] * (RANKS - 1)
        assert abs(pages_to_ep(pages, ranges, rank).peer_heads - leaving / 2) <= RANKS / 2, "half of the pages each"


def test_slots_of_94_layers() -> None:
    expert = SHARD.expert_slot_bytes(BF16)
    assert expert == 16 * 3 * 1536 * 4096 * BF16 == 603_979_776
    sizes = SlotSizes(94, expert, SHAPE.num_layers, CONFIG.kv_cache_bytes // SHAPE.num_layers)
    assert sizes.expert_stride == expert > LARGE_SLOT and expert % GRANULE == 0, "a slot is one chunk, nothing is lost"
    assert sizes.expert_region == 95 * expert and sum(sizes.chunks()) == sizes.total_bytes
    plan = plan_experts_ep_to_tp(SHAPE.num_experts, SHAPE.hidden, SHAPE.intermediate, RANKS)
    assert (
        {plan.numel_sent(rank) * BF16 for rank in range(RANKS)} == {SHARD.expert_bytes_sent(BF16)} == {expert // 8 * 7}
    )
    # Pitches of 2-D copies must stay below 2 GiB.
    assert max(rect.src_pitch for rect in plan.w13) * BF16 < 2**31


def test_tp_holds_half_as_many_tokens_as_ep() -> None:
    slot = CONFIG.kv_cache_bytes // SHAPE.num_layers
    pages = {layout: SHARD.kv_pages(layout, slot, CONFIG.block_size, BF16) for layout in Layout}
    assert SHARD.tp_pages_per_ep_page == 4 and SHARD.kv_replicas == 2
    assert pages[Layout.TP] == 4 * pages[Layout.EP], "in all; EP has so many on each of eight ranks"


def test_half_of_the_kv_memory_holds_a_third_of_the_layers_sent_ahead() -> None:
    """No layer's experts fit into the layer's own KV slot: rooms reach over several."""
    slot, page = CONFIG.kv_cache_bytes // SHAPE.num_layers, SHARD.kv_page_bytes(Layout.EP, CONFIG.block_size, BF16)
    pages = SHARD.kv_pages(Layout.EP, slot, CONFIG.block_size, BF16)
    spans = [(i * slot + pages // 2 * page, i * slot + pages * page) for i in range(SHAPE.num_layers)]
    columns, local = SHAPE.intermediate // RANKS * BF16, SHAPE.num_experts // RANKS
    parts = ((2 * local, columns * SHAPE.hidden), (local * SHAPE.hidden, columns))
    packed = pack_rooms(spans, parts, RANKS, 94, 94)
    sent = SHARD.expert_bytes_sent(BF16)
    assert sent > slot and len(packed) == 32
    free = sum(end - start for start, end in spans)
    assert len(packed) == staged_layers(load_model("qwen3-235b-a22b", RANKS), RANKS, free), "as the planner has it"
    # Rows of w13 are 1.6 MB: what is lost at the ends of slots is little.
    used = sum(piece.rows * parts[piece.part][1] for pieces in packed for piece in pieces)
    assert used == 32 * sent + sent // 7 and free - used < sent + 94 * columns * SHAPE.hidden
    everything = pack_rooms([(0, 94 * sent)], parts, RANKS, 94, 94)
    assert len(everything) == 94 and 94 * sent > 49e9
