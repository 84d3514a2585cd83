"""Copy plans against plain torch slicing. Targets are poisoned with NaN, so a gap or a stray write shows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moebius.kernels.plan import (
    CopyRect,
    ExpertPlan,
    KvRequest,
    PageTable,
    apply_kv,
    apply_rects,
    kv_head_ranges,
    plan_experts_ep_to_tp,
    plan_kv_ep_to_tp,
    plan_kv_tp_to_ep,
)

NAN = float("nan")
PAGE = (3, 4)  # tokens per page, 2 * head dim
Tensors = list[torch.Tensor]


def expert_tensors(experts: int, hidden: int, inter: int, ranks: int) -> tuple[Tensors, Tensors, Tensors, Tensors]:
    """Random experts as every rank holds them: EP w13, EP w2, TP w13, TP w2. Made by slicing the whole model."""
    gate_up, down = torch.randn(experts, 2, inter, hidden), torch.randn(experts, hidden, inter)
    local, part = experts // ranks, inter // ranks
    ep13 = [gate_up[r * local : (r + 1) * local].reshape(local, 2 * inter, hidden) for r in range(ranks)]
    ep2 = [down[r * local : (r + 1) * local].clone() for r in range(ranks)]
    gates = [gate_up[:, 0, r * part : (r + 1) * part] for r in range(ranks)]
    ups = [gate_up[:, 1, r * part : (r + 1) * part] for r in range(ranks)]
    tp13 = [torch.cat(pair, dim=1).contiguous() for pair in zip(gates, ups, strict=True)]
    tp2 = [down[:, :, r * part : (r + 1) * part].contiguous() for r in range(ranks)]
    return ep13, ep2, tp13, tp2


def poisoned(like: Tensors) -> Tensors:
    return [torch.full_like(t, NAN) for t in like]


def assert_all_equal(found: Tensors, wanted: Tensors) -> None:
    for rank, (f, w) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(f.nan_to_num(nan=9e9), w.nan_to_num(nan=9e9)), f"rank {rank}"


def run(plan: ExpertPlan, src: tuple[Tensors, Tensors], like: tuple[Tensors, Tensors]) -> tuple[Tensors, Tensors]:
    w13, w2 = poisoned(like[0]), poisoned(like[1])
    apply_rects(plan.w13, src[0], w13)
    apply_rects(plan.w2, src[1], w2)
    return w13, w2


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_experts_both_ways_and_back(ranks: int) -> None:
    experts, hidden, inter = 2 * ranks, 5, 3 * ranks
    ep13, ep2, tp13, tp2 = expert_tensors(experts, hidden, inter, ranks)
    plan = plan_experts_ep_to_tp(experts, hidden, inter, ranks)

    to_tp = run(plan, (ep13, ep2), (tp13, tp2))
    assert_all_equal(to_tp[0], tp13)
    assert_all_equal(to_tp[1], tp2)
    to_ep = run(plan.reversed(), (tp13, tp2), (ep13, ep2))
    assert_all_equal(to_ep[0], ep13)
    assert_all_equal(to_ep[1], ep2)
    there_and_back = run(plan.reversed(), to_tp, (ep13, ep2))
    assert_all_equal(there_and_back[0], ep13)
    assert_all_equal(there_and_back[1], ep2)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), st.integers(1, 6))
def test_expert_plans_of_any_shape(ranks: int, local: int, part: int, hidden: int) -> None:
    ep13, ep2, tp13, tp2 = expert_tensors(local * ranks, hidden, part * ranks, ranks)
    plan = plan_experts_ep_to_tp(local * ranks, hidden, part * ranks, ranks)
    for found, wanted in zip(run(plan, (ep13, ep2), (tp13, tp2)), (tp13, tp2), strict=True):
        assert_all_equal(found, wanted)
    for found, wanted in zip(run(plan.reversed(), (tp13, tp2), (ep13, ep2)), (ep13, ep2), strict=True):
        assert_all_equal(found, wanted)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_element_is_written_once_and_tp_blocks_are_contiguous(ranks: int) -> None:
    experts, hidden, inter = 2 * ranks, 5, 3 * ranks
    plan = plan_experts_ep_to_tp(experts, hidden, inter, ranks)
    per_rank = {"w13": experts * 2 * inter * hidden // ranks, "w2": experts * hidden * inter // ranks}
    for rects, numel in ((plan.w13, per_rank["w13"]), (plan.w2, per_rank["w2"])):
        for rank in range(ranks):  # with full coverage shown above, an equal count means once
            assert sum(r.numel for r in rects if r.dst_rank == rank) == numel
        assert all(r.dst_pitch == r.width for r in rects)
        assert {(r.src_rank, r.dst_rank) for r in rects} == {(s, d) for s in range(ranks) for d in range(ranks)}
    total = sum(per_rank.values())
    assert [plan.numel_sent(rank) for rank in range(ranks)] == [total // ranks * (ranks - 1)] * ranks
    assert plan.reversed().numel_sent(0) == plan.numel_sent(0)


def test_slots_inside_a_larger_buffer() -> None:
    """Views with a storage offset are addressed relative to themselves."""
    ep13, _, tp13, _ = expert_tensors(4, 3, 4, 2)
    plan = plan_experts_ep_to_tp(4, 3, 4, 2)
    memory = [torch.full((2, ep13[0].numel()), NAN) for _ in range(2)]
    for rank in range(2):
        memory[rank][1] = ep13[rank].flatten()
    sources = [m[1].view(ep13[0].shape) for m in memory]
    targets = [m[0].view(tp13[0].shape) for m in memory]
    apply_rects(plan.w13, sources, targets)
    assert_all_equal(targets, tp13)
    assert_all_equal(sources, ep13)


def test_bad_expert_plans_are_refused() -> None:
    for experts, inter, ranks in ((3, 4, 2), (4, 3, 2), (4, 4, 0)):
        with pytest.raises(ValueError, match="spread evenly"):
            plan_experts_ep_to_tp(experts, 8, inter, ranks)
    tensor = [torch.zeros(8)]
    with pytest.raises(ValueError, match="does not fit"):
        apply_rects([CopyRect(0, 0, 0, 4, 0, 4, 4, 3)], tensor, tensor)
    with pytest.raises(ValueError, match="does not fit"):
        apply_rects([CopyRect(0, 0, 0, 2, 0, 2, 2, 2)], [torch.zeros(4, 4).t()], [torch.zeros(16)])


def kv_model(requests: list[KvRequest], heads: int, ranks: int, ep_pool: int) -> tuple[Tensors, list[torch.Tensor]]:
    """EP pools with random live pages and poison elsewhere, and each request's KV (pages, heads, *PAGE)."""
    pools = [torch.full((ep_pool, heads, *PAGE), NAN) for _ in range(ranks)]
    for r in requests:
        for page in r.ep_pages[: r.pages]:
            if pools[r.owner][page].isnan().any():  # a shared page keeps its content
                pools[r.owner][page] = torch.randn(heads, *PAGE)
    return pools, [pools[r.owner][torch.as_tensor(r.ep_pages[: r.pages], dtype=torch.int64)] for r in requests]


def expected_tp(requests: list[KvRequest], kv: list[torch.Tensor], heads: int, ranks: int, pool: int) -> Tensors:
    wanted = []
    for rank in range(ranks):
        first, count = rank * heads // ranks, max(1, heads // ranks)
        target = torch.full((pool, count, *PAGE), NAN)
        for r, content in zip(requests, kv, strict=True):
            for i in range(r.pages):
                target[r.tp_pages[i]] = content[i, first : first + count]
        wanted.append(target)
    return wanted


@st.composite
def page_tables(draw: st.DrawFn) -> tuple[int, int, int, list[KvRequest]]:
    """(ranks, KV heads, pool size, requests) with random owners, lengths, reserved-but-empty pages and page orders."""
    ranks = draw(st.sampled_from([1, 2, 4, 8]))
    heads = draw(st.sampled_from([1, 2, 4, 8]))
    sizes = draw(st.lists(st.tuples(st.integers(0, ranks - 1), st.integers(0, 3), st.integers(0, 1)), max_size=6))
    pool = 30
    ids = st.permutations(range(pool))
    tp_free = list(draw(ids))
    ep_free = [list(draw(ids)) for _ in range(ranks)]
    requests = []
    for owner, pages, spare in sizes:
        ep = [ep_free[owner].pop() for _ in range(pages + spare)]
        requests.append(KvRequest(owner, ep, [tp_free.pop() for _ in range(pages + spare)], pages))
    return ranks, heads, pool, requests


@settings(deadline=None, max_examples=150)
@given(page_tables())
def test_kv_to_tp_and_back_to_fresh_pages(case: tuple[int, int, int, list[KvRequest]]) -> None:
    ranks, heads, pool, requests = case
    ep, kv = kv_model(requests, heads, ranks, pool)
    tp = [torch.full((pool, max(1, heads // ranks), *PAGE), NAN) for _ in range(ranks)]
    table = PageTable.from_requests(requests, ranks)
    assert table.pages == sum(r.pages for r in requests)
    apply_kv(plan_kv_ep_to_tp(table, heads), ep, tp)
    assert_all_equal(tp, expected_tp(requests, kv, heads, ranks, pool))

    # Back into other pages of the owner (its own ids mirrored), nothing else touched.
    back = [r._replace(ep_pages=[pool - 1 - p for p in r.ep_pages]) for r in requests]
    fresh = [torch.full((pool, heads, *PAGE), NAN) for _ in range(ranks)]
    apply_kv(plan_kv_tp_to_ep(PageTable.from_requests(back, ranks), heads), tp, fresh)
    assert_all_equal(fresh, [pool_.flip(0) for pool_ in ep])


@pytest.mark.parametrize(("heads", "ranks"), [(2, 8), (1, 4), (4, 8)])
def test_replicas_share_the_way_back(heads: int, ranks: int) -> None:
    request = KvRequest(1, list(range(8)), list(range(10, 18)), 8)
    copies = plan_kv_tp_to_ep(PageTable.from_requests([request], ranks), heads)
    sent = [sum(c.src_pages.size for c in copies if c.src_rank == rank) for rank in range(ranks)]
    assert sent == [8 * heads // ranks] * ranks
    written = sorted((int(p), h) for c in copies for p in c.dst_pages for h in range(*c.dst_heads))
    assert written == [(p, h) for p in range(8) for h in range(heads)]  # each page and head once


def test_prefix_sharing_copies_a_source_page_twice() -> None:
    requests = [KvRequest(0, [5, 1], [0, 1], 2), KvRequest(0, [5, 2], [2, 3], 2)]
    ep, kv = kv_model(requests, 2, 2, 6)
    tp = [torch.full((4, 1, *PAGE), NAN) for _ in range(2)]
    table = PageTable.from_requests(requests, 2)
    apply_kv(plan_kv_ep_to_tp(table, 2), ep, tp)
    assert_all_equal(tp, expected_tp(requests, kv, 2, 2, 4))
    assert torch.equal(tp[0][0], tp[0][2])
    with pytest.raises(ValueError, match="page 5 of the EP rank 0 pool"):
        plan_kv_tp_to_ep(table, 2)


def test_page_tables_are_int64_in_request_order() -> None:
    requests = [KvRequest(1, [3, 4], [9, 8], 2), KvRequest(0, [7], [1], 1), KvRequest(1, np.array([0]), [2], 1)]
    table = PageTable.from_requests(requests, 3)
    assert [ids.tolist() for ids in table.ep_pages] == [[7], [3, 4, 0], []]
    assert [ids.tolist() for ids in table.tp_pages] == [[1], [9, 8, 2], []]
    assert {ids.dtype for ids in table.ep_pages + table.tp_pages} == {np.dtype(np.int64)}


def test_bad_page_tables_are_refused() -> None:
    for request, words in (
        (KvRequest(2, [0], [0], 1), "owner 2"),
        (KvRequest(0, [0], [0, 1], 2), "2 computed pages but lists 1 EP and 2 TP"),
        (KvRequest(0, [-1], [0], 1), "must not be negative"),
    ):
        with pytest.raises(ValueError, match=words):
            PageTable.from_requests([request], 2)
    table = PageTable.from_requests([KvRequest(0, [0], [4], 1), KvRequest(1, [0], [4], 1)], 2)
    with pytest.raises(ValueError, match="page 4 of the TP pool"):
        plan_kv_ep_to_tp(table, 2)


def test_head_ranges() -> None:
    assert kv_head_ranges(4, 2) == [(0, 2), (2, 4)]
    assert kv_head_ranges(2, 4) == [(0, 1), (0, 1), (1, 2), (1, 2)]
    for heads, ranks in ((3, 2), (2, 3), (0, 2)):
        with pytest.raises(ValueError, match="neither split"):
            kv_head_ranges(heads, ranks)
