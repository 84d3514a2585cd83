"""Who owns what: shapes from config files, shares of a rank, spreading of samples."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebius.engine.layout import Layout, ModelShape, ShardMap, distribute

QWEN3_30B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_local_experts": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}


def shape_of(**changes: Any) -> ModelShape:
    return ModelShape.from_hf_config(QWEN3_30B | changes, 1)


def test_reads_a_qwen3_config() -> None:
    assert ModelShape.from_hf_config(QWEN3_30B, 8) == ModelShape(
        num_layers=48,
        moe_layers=tuple(range(48)),
        num_experts=128,
        hidden=2048,
        intermediate=768,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        vocab=151936,
    )


def test_reads_a_mixtral_config_with_defaults() -> None:
    shape = ModelShape.from_hf_config(MIXTRAL, 8)
    assert (shape.num_experts, shape.intermediate, shape.head_dim) == (8, 14336, 128)


def test_reads_config_objects_and_nested_text_configs() -> None:
    class Config:
        def to_dict(self) -> dict[str, Any]:
            return {"model_type": "wrapper", "text_config": QWEN3_30B}

    assert ModelShape.from_hf_config(Config(), 4) == ModelShape.from_hf_config(QWEN3_30B, 4)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"decoder_sparse_step": 2}, (1, 3, 5)),
        ({"mlp_only_layers": [0, 4]}, (1, 2, 3, 5)),
        ({"first_k_dense_replace": 1}, (1, 2, 3, 4, 5)),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, (2, 4)),
        ({"moe_layer_freq": [0, 1, 1, 0, 1, 1]}, (1, 2, 4, 5)),
        ({"interleave_moe_layer_step": 3}, (2, 5)),
    ],
)
def test_dense_layers_are_left_out(changes: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert shape_of(num_hidden_layers=6, **changes).moe_layers == expected


@pytest.mark.parametrize(
    ("changes", "ranks", "words"),
    [
        ({"num_experts": None}, 2, "not a mixture-of-experts model"),
        ({"num_experts": 0}, 2, "not a mixture-of-experts model"),
        ({"kv_lora_rank": 512}, 2, "latent attention"),
        ({"mlp_only_layers": list(range(48))}, 2, "every layer dense"),
        ({"num_experts": 129}, 2, "129 experts cannot be split evenly over 2 ranks"),
        ({"num_attention_heads": 30, "num_key_value_heads": 30}, 4, "30 attention heads"),
        ({"moe_intermediate_size": 770}, 4, "770 columns of an expert"),
        ({"num_key_value_heads": 6}, 4, "6 KV heads can be neither split over nor replicated"),
        ({"num_key_value_heads": 3}, 8, "3 KV heads can be neither split over nor replicated"),
        ({"hidden_size": None}, 2, "positive integer 'hidden_size'"),
        ({"moe_layer_freq": [1, 1]}, 2, "2 entries for 48 layers"),
        ({}, 0, "at least one rank"),
        ({"shared_expert_intermediate_size": 5633}, 2, "shared_expert_intermediate_size 5633"),
        ({"mlp_only_layers": [0], "intermediate_size": 6145}, 2, "^intermediate_size 6145"),
    ],
)
def test_refuses_in_words(changes: dict[str, Any], ranks: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ModelShape.from_hf_config(QWEN3_30B | changes, ranks)


def test_shard_map_checks_its_shape() -> None:
    with pytest.raises(ValueError, match="128 experts"):
        ShardMap(shape_of(), 3)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_shares_cover_everything_once(ranks: int) -> None:
    shards = ShardMap(shape_of(), ranks)
    experts = [e for rank in range(ranks) for e in shards.ep_experts(rank)]
    columns = [c for rank in range(ranks) for c in range(768)[shards.tp_intermediate(rank)]]
    heads = [h for rank in range(ranks) for h in shards.tp_heads(rank)]
    assert (experts, columns, heads) == (list(range(128)), list(range(768)), list(range(32)))
    assert all(e in shards.ep_experts(shards.expert_owner(e)) for e in range(128))


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_kv_heads_go_where_their_query_heads_are(heads: int, ranks: int) -> None:
    shards = ShardMap(shape_of(num_key_value_heads=heads), ranks)
    group = 32 // heads  # query heads per KV head
    for rank in range(ranks):
        assert set(shards.tp_kv_heads(rank)) == {h // group for h in shards.tp_heads(rank)}
    held = [h for rank in range(ranks) for h in shards.tp_kv_heads(rank)]
    assert sorted(held) == sorted(list(range(heads)) * shards.kv_replicas)


@pytest.mark.parametrize(("heads", "ranks", "pages"), [(4, 2, 2), (4, 4, 4), (4, 8, 4), (1, 8, 1), (16, 8, 8)])
def test_tp_pages_share_the_bytes_of_an_ep_page(heads: int, ranks: int, pages: int) -> None:
    shards = ShardMap(shape_of(num_key_value_heads=heads), ranks)
    ep = shards.kv_page_bytes(Layout.EP, 16, 2)
    assert ep == heads * 16 * 2 * 128 * 2
    assert shards.tp_pages_per_ep_page == pages
    assert shards.kv_page_bytes(Layout.TP, 16, 2) * pages == ep
    slot = 10 * ep + ep // 2  # a trailing half page is not usable
    assert shards.kv_pages(Layout.EP, slot, 16, 2) == 10
    assert shards.kv_pages(Layout.TP, slot, 16, 2) == 10 * pages


def test_expert_bytes() -> None:
    shards = ShardMap(shape_of(), 2)
    tensors = 64 * 2 * 768 * 2048 + 64 * 2048 * 768  # w13 and w2 of 64 experts
    assert shards.expert_slot_bytes(2) == tensors * 2
    assert shards.expert_bytes_sent(2) == tensors  # half of the bytes stay


def test_ranks_and_experts_outside_are_refused() -> None:
    shards = ShardMap(shape_of(), 4)
    for call in (shards.ep_experts, shards.tp_intermediate, shards.tp_heads, shards.tp_kv_heads):
        for rank in (-1, 4):
            with pytest.raises(ValueError, match=r"outside 0\.\.3"):
                call(rank)
    with pytest.raises(ValueError, match=r"outside 0\.\.127"):
        shards.expert_owner(128)


def loads(costs: list[float], chosen: list[int], ranks: int) -> list[float]:
    return [sum(c for c, rank in zip(costs, chosen, strict=True) if rank == r) for r in range(ranks)]


def test_distribute_by_hand() -> None:
    assert distribute([1, 5, 3, 3, 2], 2) == [1, 0, 1, 1, 0]
    assert distribute([1, 1, 1, 1], 2) == [0, 1, 0, 1]  # ties: the lower rank first
    assert distribute([0, 0, 0], 3) == [0, 1, 2]
    assert distribute([], 4) == []


@given(st.lists(st.integers(0, 50), max_size=7), st.integers(1, 3))
def test_distribute_is_within_four_thirds_of_the_best(costs: list[int], ranks: int) -> None:
    chosen = distribute(costs, ranks)
    best = min(max(loads(costs, list(c), ranks)) for c in itertools.product(range(ranks), repeat=len(costs)))
    assert 3 * max(loads(costs, chosen, ranks)) <= 4 * best


@given(st.integers(0, 200), st.integers(1, 8))
def test_equal_costs_spread_evenly(samples: int, ranks: int) -> None:
    counts = [distribute([7.5] * samples, ranks).count(rank) for rank in range(ranks)]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf")])
def test_distribute_refuses_impossible_costs(cost: float) -> None:
    with pytest.raises(ValueError, match="sample 1"):
        distribute([1.0, cost], 2)


def test_distribute_needs_a_rank() -> None:
    with pytest.raises(ValueError, match="0 ranks"):
        distribute([1.0], 0)
