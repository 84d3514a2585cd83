"""TP's attention projections as views of EP's: which heads change places, and that they come back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moebius.engine.account import _interval, split
from moebius.engine.attention import AttentionError, SharedAttention, head_moves
from moebius.engine.dense import DenseWeights
from moebius.engine.layout import Layout

EP, TP = Layout.EP, Layout.TP
# Query heads, key-value heads, ranks: more ranks than KV heads (Qwen3-235B on eight), as many, fewer, one.
SHAPES = [
    (64, 4, 8),
    (64, 4, 4),
    (32, 4, 2),
    (32, 4, 8),
    (8, 8, 4),
    (4, 2, 2),
    (6, 3, 3),
    (8, 1, 8),
    (4, 4, 1),
    (16, 2, 16),
]
SIZE, WIDTH, LAYERS = 2, 3, 2


def own_heads(heads: int, kv: int, ranks: int, rank: int) -> list[int]:
    """A rank's heads as vLLM cuts them (QKVParallelLinear), in a matrix of query, key, value heads."""
    share, kv_share, copies = heads // ranks, max(1, kv // ranks), max(1, ranks // kv)
    queries = [rank * share + i for i in range(share)]
    keys = [heads + rank // copies * kv_share + i for i in range(kv_share)]
    return queries + keys + [key + kv for key in keys]


@pytest.mark.parametrize(("heads", "kv", "ranks"), SHAPES)
def test_a_ranks_heads_come_to_lie_together(heads: int, kv: int, ranks: int) -> None:
    for rank in range(ranks):
        first, count, moves = head_moves(heads, kv, ranks, rank)
        order = list(range(heads + 2 * kv))
        for place, head in moves:
            order[place] = head
        assert sorted(order) == list(range(heads + 2 * kv)), "none is lost or double"
        assert order[first : first + count] == own_heads(heads, kv, ranks, rank)
        assert len(moves) <= 4 * max(1, kv // ranks), "only key and value heads move, and those in their way"


def layer(name: str, ranks: int, rank: int, heads: int, kv: int) -> Any:
    return SimpleNamespace(
        prefix=name, tp_size=ranks, tp_rank=rank, total_num_heads=heads, total_num_kv_heads=kv, head_size=SIZE,
        input_size_per_partition=heads * SIZE // ranks,
    )  # fmt: skip


def shared_of(heads: int, kv: int, ranks: int, rank: int) -> tuple[SharedAttention, list[torch.Tensor]]:
    """Of one rank, and by layer: EP's qkv and o, then TP's."""
    shared, views = SharedAttention(DenseWeights(None)), []
    held = (heads // ranks + 2 * max(1, kv // ranks)) * SIZE
    for layout, rows, columns, degree in (
        (TP, held, heads * SIZE // ranks, ranks), (EP, (heads + 2 * kv) * SIZE, heads * SIZE, 1),
    ):  # fmt: skip
        for i in range(LAYERS):
            for name, shape in (
                (f"layers.{i}.attn.qkv_proj", (rows, WIDTH)),
                (f"layers.{i}.attn.o_proj", (WIDTH, columns)),
            ):
                meta = torch.empty(shape, device="meta")
                found = shared.bind(
                    layer(name, degree, rank if degree > 1 else 0, heads, kv), meta, layout, torch.device("cpu")
                )
                assert found.shape == meta.shape
                views.append(found)
    shared.check(LAYERS)
    return shared, views[2 * LAYERS :] + views[: 2 * LAYERS]


@pytest.mark.parametrize(("heads", "kv", "ranks"), [shape for shape in SHAPES if shape[2] > 1])
def test_views_of_both_layouts_over_many_switches(heads: int, kv: int, ranks: int) -> None:
    for rank in range(ranks):
        shared, views = shared_of(heads, kv, ranks, rank)
        ep, tp = views[: 2 * LAYERS], views[2 * LAYERS :]
        addresses = [view.data_ptr() for view in views]
        for update in range(2):  # new weights come in EP's form
            loaded = [
                torch.randn(view.shape, generator=torch.Generator().manual_seed(update * 9 + i))
                for i, view in enumerate(ep)
            ]
            for view, weight in zip(ep, loaded, strict=True):
                view.copy_(weight)
            for _ in range(3):
                shared.to(TP)
                shared.to(TP)
                for i in range(LAYERS):
                    qkv, out = loaded[2 * i], loaded[2 * i + 1]
                    mine = own_heads(heads, kv, ranks, rank)
                    assert torch.equal(tp[2 * i].view(-1, SIZE, WIDTH), qkv.view(-1, SIZE, WIDTH)[mine])
                    assert torch.equal(tp[2 * i + 1], out.chunk(ranks, dim=1)[rank])
                shared.to(EP)
                assert all(torch.equal(view, weight) for view, weight in zip(ep, loaded, strict=True))
        assert [view.data_ptr() for view in views] == addresses
        storages = {view.untyped_storage().data_ptr(): view.untyped_storage().nbytes() for view in views}
        assert sum(storages.values()) == sum(view.numel() * 4 for view in ep), "nothing is held twice"
        held = split([_interval(view) for view in ep], [_interval(view) for view in tp])
        assert held.tp == 0 and held.shared == sum(view.numel() * 4 for view in tp), "as the memory account has it"


def test_other_attention_is_refused_in_words() -> None:
    shared = SharedAttention(DenseWeights(None))
    assert not shared.takes(SimpleNamespace(prefix="layers.0.attn.kv_b_proj", total_num_kv_heads=1))
    assert shared.takes(layer("layers.0.attn.o_proj", 2, 0, 4, 2))
    with pytest.raises(
        AttentionError, match=r"0 qkv_proj and 0 o_proj in 3 layers; set engine.attention_weights: both"
    ):
        shared.check(3)
    uneven = layer("layers.0.attn.qkv_proj", 2, 0, 4, 2)
    uneven.v_head_size = SIZE + 1
    with pytest.raises(AttentionError, match="heads of different sizes"):
        shared.bind(uneven, torch.empty((8, WIDTH), device="meta"), TP, torch.device("cpu"))
    with pytest.raises(AttentionError, match="not what TP's is a part of"):
        shared.bind(
            layer("layers.0.attn.o_proj", 1, 0, 4, 2), torch.empty((3, 8), device="meta"), EP, torch.device("cpu")
        )


def test_a_model_whose_projections_have_other_names_is_refused_at_the_start() -> None:
    """Else each layout would hold its own without a word. Bailing's are named query_key_value and dense."""
    pytest.importorskip("vllm")
    from moebius.engine.runtime import RuntimePair

    kv = [torch.empty(1) for _ in range(LAYERS)]
    pair: Any = object.__new__(RuntimePair)
    pair.shape = SimpleNamespace(moe_layers=())
    pair.buffer = SimpleNamespace(kv_slot=lambda layout, ordinal: kv[ordinal])
    pair.ep, pair.tp = (SimpleNamespace(layout=layout, expert_modules=[], kv=kv) for layout in (EP, TP))
    for shared in (None, shared_of(4, 2, 2, 1)[0]):
        pair.attention = shared
        pair._check_aliasing()
    pair.attention = SharedAttention(DenseWeights(None))
    assert not pair.attention.takes(layer("layers.0.attn.query_key_value", 2, 0, 4, 2))
    with pytest.raises(
        AttentionError, match=r"0 qkv_proj and 0 o_proj in 2 layers; set engine\.attention_weights: both"
    ):
        pair._check_aliasing()
