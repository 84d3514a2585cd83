"""Bytes by formula against the plan's own lists of copies, for every rank, both directions and several shapes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebius.kernels.experts import expert_moves
from moebius.kernels.plan import (
    KvRequest,
    PageTable,
    kv_head_ranges,
    plan_experts_ep_to_tp,
    plan_kv_ep_to_tp,
    plan_kv_tp_to_ep,
)
from moebius.rollout.bench.traffic import (
    ExpertShape,
    KvShape,
    Traffic,
    expert_traffic,
    kv_traffic_to_ep,
    kv_traffic_to_tp,
)


def listed(copies: list[tuple[int, int, int]], rank: int) -> Traffic:
    """What (source rank, target rank, bytes) cost `rank` in one pass."""
    return Traffic(
        hbm_read=sum(n for src, _, n in copies if src == rank),
        hbm_written=sum(n for _, dst, n in copies if dst == rank),
        link_sent=sum(n for src, dst, n in copies if src == rank != dst),
        staging=0,
    )


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("back", [False, True])
def test_experts_are_the_plans(ranks: int, back: bool) -> None:
    shape = ExpertShape(layers=3, experts=2 * ranks, hidden=5, intermediate=3 * ranks, itemsize=2)
    plan = plan_experts_ep_to_tp(shape.experts, shape.hidden, shape.intermediate, ranks)
    plan = plan.reversed() if back else plan
    copies = [(r.src_rank, r.dst_rank, 2 * r.numel * shape.layers) for r in plan.w13 + plan.w2]
    found = expert_traffic("direct", shape, ranks)
    for rank in range(ranks):
        assert found == listed(copies, rank)
        moves = expert_moves(shape.experts, shape.hidden, shape.intermediate, ranks, rank, 2, not back)
        assert found.hbm_read == shape.layers * ranks * sum(m.rows * m.width for m in moves)
        assert found.link_sent == 2 * shape.layers * plan.numel_sent(rank)
    # Packed, exchanged: everything is read and written once more; what leaves the rank is the same.
    other = expert_traffic("all_to_all", shape, ranks)
    assert (other.hbm_read, other.hbm_written) == (2 * found.hbm_read, 2 * found.hbm_written)
    assert other.link_sent == found.link_sent and other.staging == max(shape.tensors(ranks))
    # Staged: what leaves goes through other memory, so it is read and written once more.
    prepare, commit = (expert_traffic(way, shape, ranks) for way in ("prepare", "commit"))
    assert prepare == Traffic(*[found.link_sent] * 4)
    assert commit == Traffic(found.hbm_read, found.hbm_written, 0, found.link_sent)


def test_staging_of_the_235b_shape_on_eight_ranks() -> None:
    shape = ExpertShape(layers=94, experts=128, hidden=4096, intermediate=1536, itemsize=2)
    assert expert_traffic("prepare", shape, 8).staging == pytest.approx(57e9 * 7 / 8, rel=0.01)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4, 8]),
    st.lists(st.integers(0, 9), min_size=8, max_size=8),
    st.integers(1, 3),
)
def test_kv_is_the_plans(ranks: int, kv_heads: int, counts: list[int], layers: int) -> None:
    pages = counts[:ranks]
    ranges = kv_head_ranges(kv_heads, ranks)
    shape = KvShape(layers, ranges, kv_heads, head_bytes=24)
    starts = np.cumsum([0, *pages])
    requests = [
        KvRequest(rank, list(range(count)), list(range(starts[rank], starts[rank] + count)), count)
        for rank, count in enumerate(pages)
    ]
    table = PageTable.from_requests(requests, ranks)
    for plan, formula in ((plan_kv_ep_to_tp, kv_traffic_to_tp), (plan_kv_tp_to_ep, kv_traffic_to_ep)):
        copies = [
            (c.src_rank, c.dst_rank, layers * 24 * c.src_pages.size * (c.src_heads[1] - c.src_heads[0]))
            for c in plan(table, kv_heads)
        ]
        for rank in range(ranks):
            direct = formula("direct", shape, pages, rank)
            assert direct == listed(copies, rank)
            other = formula("all_to_all", shape, pages, rank)
            assert other.link_sent == direct.link_sent
            assert other.hbm_read == 2 * direct.hbm_read + direct.hbm_written
            assert other.hbm_written == direct.hbm_read + 2 * direct.hbm_written
            assert other.staging * layers == direct.hbm_read + direct.hbm_written
    with pytest.raises(ValueError, match="KV is not moved by prepare"):
        kv_traffic_to_tp("prepare", shape, pages, 0)
