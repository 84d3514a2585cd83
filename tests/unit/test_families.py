"""Families that a switch cannot carry are refused by their config, in words, before anything starts."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from moebius.engine.config import EngineConfig
from moebius.engine.families import CHECKED, refusal, warn_if_unchecked
from moebius.engine.layout import ModelShape
from moebius.rollout.checkpoint import check_model
from moebius.rollout.errors import BadInput

transformers = pytest.importorskip("transformers")

PLAIN: dict[str, Any] = {"model_type": "qwen3_moe", "head_dim": 128}


@pytest.mark.parametrize("name", ["Qwen3Moe", "Qwen2Moe", "Olmoe", "Mixtral", "Glm4Moe"])
def test_checked_families_pass(name):
    config = getattr(transformers, f"{name}Config")()
    assert refusal(config.to_dict()) is None
    assert ModelShape.from_hf_config(config, 2).num_experts > 1
    assert config.model_type in CHECKED


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("DeepseekV3", "latent attention"),
        ("GptOss", "attend to a window only"),
        ("Llama4Text", "attend to a window only"),
        ("Qwen3Next", "layer_types has linear_attention"),
        ("MiniMax", "layer_types has linear_attention"),
        ("GraniteMoeHybrid", "layer_types has mamba"),
        ("Jamba", "mamba_d_state"),
        ("GraniteMoe", "names that weight updates do not know"),
    ],
)
def test_other_families_are_refused(name, words):
    """By the defaults of transformers' config classes."""
    config = getattr(transformers, f"{name}Config")()
    with pytest.raises(ValueError, match=f"model type '{config.model_type}' .*{words}"):
        ModelShape.from_hf_config(config, 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized"),
        ({"sliding_window": 4096}, "window"),
        ({"sliding_window": 4096, "use_sliding_window": True}, "sliding_window=null"),
        ({"attention_chunk_size": 8192}, "window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "window"),
        ({"v_head_dim": 96}, "v_head_dim 96, head_dim 128"),
        ({"linear_num_key_heads": 16}, "linear_num_key_heads"),
    ],
)
def test_one_key_is_enough(changes, words):
    reason = refusal(PLAIN | changes)
    assert reason is not None and words in reason


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sliding_window": 32768, "use_sliding_window": False},
        {"sliding_window": None},
        {"sliding_window": 4096, "layer_types": ["full_attention"] * 2},
        {"v_head_dim": 128},
    ],
)
def test_what_is_turned_off_does_no_harm(changes):
    assert refusal(PLAIN | changes) is None


def test_a_window_can_be_turned_off_by_an_override(tmp_path):
    config = transformers.MixtralConfig(sliding_window=4096).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = EngineConfig(model=str(tmp_path), load_format="dummy")
    with pytest.raises(BadInput, match=r"config\.json: model type 'mixtral' .*hf_overrides\.sliding_window=null"):
        check_model(engine, 2)
    check_model(engine.model_copy(update={"hf_overrides": {"sliding_window": None}}), 2)


def test_unchecked_families_are_named_in_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        warn_if_unchecked("qwen3_moe")
        assert not caplog.records
        warn_if_unchecked("minimax_m2")
    assert "'minimax_m2'" in caplog.text and "glm4_moe" in caplog.text
