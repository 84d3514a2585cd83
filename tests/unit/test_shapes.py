"""Model shapes that come with the repository, and the capture sizes that follow from a configuration."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebius.engine.capture import capture_sizes, draft_rows, draft_sizes, tp_batched_tokens
from moebius.engine.config import EngineConfig, PolicyConfig, TailConfig
from moebius.engine.layout import Layout, ModelShape, ShardMap
from moebius.rollout.checkpoint import check_model

SHAPES = Path(__file__).parents[2] / "configs" / "shapes"
FACTS = {
    "qwen3-30b-a3b": ModelShape(48, tuple(range(48)), 128, 2048, 768, 32, 4, 128, 151936),
    "qwen3-235b-a22b": ModelShape(94, tuple(range(94)), 128, 4096, 1536, 64, 4, 128, 151936),
    "olmoe-1b-7b": ModelShape(16, tuple(range(16)), 64, 2048, 1024, 16, 16, 128, 50304),
}
# Normalised router weights, base of the rotary embedding, longest sequence; billions of parameters.
DETAILS = {
    "qwen3-30b-a3b": (True, 1e6, 40960, 30.5),
    "qwen3-235b-a22b": (True, 1e6, 40960, 235.1),
    "olmoe-1b-7b": (False, 1e4, 4096, 6.92),
}


def test_every_shape_is_checked():
    assert {path.parent.name for path in SHAPES.glob("*/config.json")} == set(FACTS)


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("name", FACTS)
def test_shapes(name, ranks):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(SHAPES / name)
    assert ModelShape.from_hf_config(config.to_dict(), ranks) == FACTS[name]
    assert ModelShape.from_hf_config(json.loads((SHAPES / name / "config.json").read_text()), ranks) == FACTS[name]
    assert config.num_experts_per_tok == 8 and not config.tie_word_embeddings
    details = (config.norm_topk_prob, config.rope_parameters["rope_theta"], config.max_position_embeddings)
    assert details == DETAILS[name][:3]
    assert str(config.dtype) == "torch.bfloat16"
    assert ShardMap(FACTS[name], ranks).experts_per_rank == FACTS[name].num_experts // ranks


@pytest.mark.parametrize("name", FACTS)
def test_parameters_add_up(name):
    """To what the models' cards say."""
    s = FACTS[name]
    attention = s.hidden * s.head_dim * (2 * s.num_heads + 2 * s.num_kv_heads)
    layer = attention + s.num_experts * (3 * s.hidden * s.intermediate + s.hidden)
    billions = (s.num_layers * layer + 2 * s.vocab * s.hidden) / 1e9
    assert billions == pytest.approx(DETAILS[name][3], rel=0.002)


@pytest.mark.parametrize("name", FACTS)
def test_fewer_layers(name):
    transformers = pytest.importorskip("transformers")
    engine = EngineConfig(model=str(SHAPES / name), load_format="dummy", hf_overrides={"num_hidden_layers": 3})
    config = transformers.AutoConfig.from_pretrained(engine.model, **engine.hf_overrides)
    assert ModelShape.from_hf_config(config.to_dict(), 2).moe_layers == (0, 1, 2)
    assert check_model(engine, 2) == SHAPES / name


def test_overrides_are_checked_before_anything_starts():
    engine = EngineConfig(model=str(SHAPES / "qwen3-30b-a3b"), load_format="dummy", hf_overrides={"num_experts": 127})
    with pytest.raises(ValueError, match="127 experts cannot be split evenly over 2 ranks"):
        check_model(engine, 2)


def engine(**changes):
    policy = PolicyConfig(kind=changes.pop("kind", "rollout"), threshold=changes.pop("threshold", 64))
    return EngineConfig(model="m", policy=policy, **changes)


def test_sizes_follow_the_policy():
    config = engine(max_num_seqs=1024, threshold=128)
    ep, tp = (capture_sizes(layout, config) for layout in (Layout.EP, Layout.TP))
    assert ep[:6] == [1, 2, 4, 8, 16, 24] and ep[-3:] == [992, 1008, 1024]
    assert tp == [size for size in ep if size <= 128]
    assert capture_sizes(Layout.TP, engine(max_num_seqs=1024, threshold=100))[-1] == 104  # the step above
    assert capture_sizes(Layout.TP, engine(max_num_seqs=1024, threshold=300))[-2:] == [288, 304]
    for kind in ("static_tp", "scheduled"):
        assert capture_sizes(Layout.TP, engine(kind=kind, max_num_seqs=1024)) == ep
    assert max(capture_sizes(Layout.TP, engine(kind="static_ep", max_num_seqs=1024))) <= 8
    assert capture_sizes(Layout.TP, engine(threshold=0)) == [1]


def test_drafts_add_few_sizes_to_tp_only():
    """Batches without drafts have the graphs of an engine without drafts; the others a few, however many may run."""
    tail = TailConfig(speculation="ngram", draft_tokens=4)
    plain = EngineConfig(model="m", max_num_seqs=1024, policy=PolicyConfig(threshold=64))
    config = plain.model_copy(update={"tail": tail})
    for layout in Layout:
        assert capture_sizes(layout, config) == capture_sizes(layout, plain)
    assert draft_sizes(plain) == [] and draft_rows(plain) == 0
    sizes = draft_sizes(config)
    assert draft_rows(config) == sizes[-1] == 5 * 128 and len(sizes) <= 24
    assert sizes == sorted(set(sizes)) and all(b - a <= max(8, a / 3) for a, b in itertools.pairwise(sizes))
    long = config.model_copy(update={"tail": TailConfig(speculation="ngram", draft_tokens=32)})
    assert draft_sizes(long)[-1] == 768, "memory of logits is bounded whatever the drafts' length"
    few = config.model_copy(update={"max_num_seqs": 8})
    assert draft_sizes(few) == [8, 16, 24, 32, 40]


def test_an_iteration_has_room_for_drafts():
    tail = TailConfig(speculation="ngram", draft_tokens=4)
    config = EngineConfig(model="m", max_num_seqs=256, tail=tail)
    tight = config.model_copy(update={"max_num_batched_tokens": 512})
    assert tp_batched_tokens(tight) == 5 * 128 and tp_batched_tokens(config) is None
    assert tp_batched_tokens(tight.model_copy(update={"tail": TailConfig()})) == 512
    with pytest.raises(ValueError, match="leaves no room for drafts"):
        TailConfig(max_rows=64, max_samples=64)


def test_speculation_off_as_yaml_reads_it():
    assert TailConfig(speculation=False) == TailConfig() and TailConfig().drafted == 0
    with pytest.raises(ValueError, match="speculation"):
        TailConfig(speculation=True)


def test_given_sizes_and_caps():
    assert capture_sizes(Layout.TP, engine(capture_sizes=[8, 1, 8, 3])) == [1, 3, 8]
    assert capture_sizes(Layout.EP, engine(max_num_seqs=1024, max_capture_size=100))[-2:] == [96, 100]
    assert capture_sizes(Layout.EP, engine(max_num_seqs=100))[-2:] == [96, 100]  # no batch is larger
    with pytest.raises(ValueError, match="at least 1 item"):
        engine(capture_sizes=[])


@given(
    seqs=st.integers(1, 2100),
    threshold=st.integers(0, 2100),
    cap=st.none() | st.integers(1, 2100),
    kind=st.sampled_from(["rollout", "static_ep", "static_tp", "scheduled"]),
)
def test_sizes_cover_every_batch_with_little_padding(seqs, threshold, cap, kind):
    config = engine(kind=kind, threshold=threshold, max_num_seqs=seqs, max_capture_size=cap)
    for layout in Layout:
        sizes = capture_sizes(layout, config)
        assert sizes[0] == 1 and all(a < b <= max(2 * a, a + 16) for a, b in itertools.pairwise(sizes))
        assert sizes[-1] <= min(seqs, cap or seqs)
        largest = seqs
        if layout is Layout.TP and kind == "rollout":
            largest = min(seqs, threshold)
        if cap is None and not (layout is Layout.TP and kind == "static_ep"):
            assert sizes[-1] >= largest
