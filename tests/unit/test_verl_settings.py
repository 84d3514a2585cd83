"""What verl's settings become, and what is refused in words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moebius.rollout.config import Place
from moebius.rollout.demo_assets import make_tiny_model
from moebius.rollout.errors import BadInput
from moebius.rollout.integrations.verl.settings import (
    check,
    group_config,
    kv_bytes,
    max_model_len,
    read_settings,
    refusals,
    sampling_of,
)


def rollout(**changes: Any) -> Any:
    """The fields of verl's RolloutConfig that matter, with its defaults."""
    fields = {
        "tensor_model_parallel_size": 1, "data_parallel_size": 2, "expert_parallel_size": 2,
        "pipeline_model_parallel_size": 1, "dtype": "bfloat16", "load_format": "dummy", "max_model_len": None,
        "prompt_length": 64, "response_length": 32, "max_num_seqs": 16, "max_num_batched_tokens": 512,
        "enable_prefix_caching": True, "enforce_eager": True, "cudagraph_capture_sizes": None,
        "logprobs_mode": "processed_logprobs", "seed": 42, "gpu_memory_utilization": 0.5, "engine_kwargs": {},
        "quantization": None, "qat": None, "mtp": None, "full_determinism": False, "scheduling_policy": "fcfs",
        "enable_rollout_routing_replay": False, "disaggregation": SimpleNamespace(enabled=False),
        "checkpoint_engine": SimpleNamespace(backend="naive"), "repetition_penalty": 1.0, "ignore_eos": False,
    }  # fmt: skip
    assert not set(changes) - set(fields)
    return SimpleNamespace(**fields | changes)


def model(**changes: Any) -> Any:
    """The fields of verl's HFModelConfig that matter."""
    hf_config = SimpleNamespace(max_position_embeddings=512)
    return SimpleNamespace(
        **{"lora": {}, "lora_rank": 0, "mtp": None, "processor": None, "hf_config": hf_config} | changes
    )


def test_nothing_is_refused_by_default() -> None:
    assert refusals(rollout(), model(), 2) == []
    assert read_settings(rollout()).announce


MTP = SimpleNamespace(enable=True, enable_rollout=True)


@pytest.mark.parametrize(
    ("rollout_changes", "model_changes", "words"),
    [
        ({"pipeline_model_parallel_size": 2}, {}, "pipeline"),
        ({"data_parallel_size": 1, "expert_parallel_size": 1}, {}, "two GPUs or more"),
        ({"data_parallel_size": 16}, {}, "does not fit on a node"),
        ({}, {"lora_rank": 8}, "model.lora.merge=True"),
        ({}, {"lora": {"rank": 8}}, "model.lora.merge=True"),
        ({}, {"hf_config": SimpleNamespace(vision_config={"depth": 2})}, "use a text model"),
        ({}, {"processor": SimpleNamespace(image_processor=object())}, "use a text model"),
        ({"mtp": MTP}, {}, "enable_rollout=False"),
        ({}, {"mtp": MTP}, "enable_rollout=False"),
        ({"quantization": "fp8"}, {}, "quantised"),
        ({"qat": {"enable": True}}, {}, "quantised"),
        ({}, {"hf_config": SimpleNamespace(quantization_config={"quant_method": "fp8"})}, "quantised"),
        ({"checkpoint_engine": SimpleNamespace(backend="delta_sharded")}, {}, "delta weights"),
        ({"disaggregation": SimpleNamespace(enabled=True)}, {}, "disaggregation"),
        ({"logprobs_mode": "raw_logits"}, {}, "logprobs_mode=raw_logits"),
        ({"full_determinism": True}, {}, "full_determinism"),
        ({"scheduling_policy": "priority"}, {}, "fcfs"),
    ],
)
def test_what_cannot_be_done_is_refused_in_words(
    rollout_changes: dict[str, Any], model_changes: dict[str, Any], words: str
) -> None:
    [sentence] = refusals(rollout(**rollout_changes), model(**model_changes), 8)
    assert words in sentence
    with pytest.raises(BadInput, match="cannot do what is asked for"):
        check(rollout(**rollout_changes), model(**model_changes), 8)


def test_merged_lora_and_training_of_mtp_are_no_matter_of_the_rollout() -> None:
    mtp = SimpleNamespace(enable=True, enable_rollout=False)
    assert refusals(rollout(), model(lora={"rank": 8, "merge": True}, lora_rank=8, mtp=mtp), 8) == []


def test_all_refusals_come_at_once() -> None:
    with pytest.raises(BadInput, match=r"(?s)fcfs.*|quantised") as caught:
        check(rollout(quantization="fp8", scheduling_policy="priority"), model(), 8)
    assert "quantised" in str(caught.value)
    assert "fcfs" in str(caught.value)


def test_an_unknown_key_names_the_nearest() -> None:
    with pytest.raises(BadInput, match=r"engine_kwargs\.moebius.*'polcy'.*'policy'"):
        read_settings(rollout(engine_kwargs={"moebius": {"polcy": {}}}))
    with pytest.raises(BadInput, match=r"'treshold'.*'threshold'"):
        read_settings(rollout(engine_kwargs={"moebius": {"policy": {"treshold": 3}}}))


def test_what_verl_sets_is_not_set_twice() -> None:
    with pytest.raises(BadInput, match=r"set rollout\.dtype instead"):
        read_settings(rollout(engine_kwargs={"moebius": {"engine": {"dtype": "float32"}}}))


def test_the_groups_settings_follow_from_verls(tmp_path: Any) -> None:
    folder = make_tiny_model(tmp_path / "model", num_layers=1)
    own = {"policy": {"threshold": 7}, "engine": {"kv_cache_bytes": 1 << 24}, "startup_timeout_s": 9}
    config = rollout(engine_kwargs={"moebius": own}, dtype="float32")
    place = Place(node="n", devices=[])
    group = group_config(read_settings(config), config, model(local_path=str(folder)), place, device_bytes=None)
    assert (group.ranks, group.device, group.place, group.startup_timeout_s) == (2, "cpu", place, 9)
    engine = group.engine
    assert (engine.model, engine.dtype, engine.load_format, engine.seed) == (str(folder), "float32", "dummy", 42)
    assert (engine.max_model_len, engine.max_num_seqs, engine.kv_cache_bytes) == (96, 16, 1 << 24)
    assert engine.policy.threshold == 7
    assert not engine.routed_experts
    replay = rollout(engine_kwargs={"moebius": own}, enable_rollout_routing_replay=True)
    assert group_config(
        read_settings(replay), replay, model(local_path="x"), place, device_bytes=None
    ).engine.routed_experts


def test_a_wrong_engine_setting_is_found() -> None:
    config = rollout(engine_kwargs={"moebius": {"engine": {"kv_cache_byte": 1}}})
    with pytest.raises(BadInput, match=r"moebius\.engine.*kv_cache_bytes"):
        group_config(read_settings(config), config, model(local_path="x"), Place(), device_bytes=None)


QWEN3_30B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "intermediate_size": 6144, "vocab_size": 151936, "tie_word_embeddings": False,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
H200 = 150_000_000_000


def test_kv_gets_what_the_rollouts_share_of_a_gpu_leaves() -> None:
    small, large = (kv_bytes(QWEN3_30B, "30b", 2, H200, share) for share in (0.5, 0.6))
    # 29.6 GB of expert slots, under 6 GB of other weights, 6 GiB set aside, of 75 GB; a spare slot of KV.
    assert 30e9 < small < 36e9
    assert large - small == pytest.approx(0.1 * H200 * 48 / 49, rel=1e-6)


def test_no_room_for_kv_is_said() -> None:
    with pytest.raises(BadInput, match=r"gpu_memory_utilization=0\.25.*no room for KV"):
        kv_bytes(QWEN3_30B, "30b", 2, H200, 0.25)


def test_the_longest_sequence_is_what_verls_lengths_allow() -> None:
    assert max_model_len(rollout(), model()) == 96
    assert max_model_len(rollout(prompt_length=500, response_length=500), model()) == 512
    assert max_model_len(rollout(max_model_len=128), model()) == 128
    with pytest.raises(BadInput, match="above the model's 512"):
        max_model_len(rollout(max_model_len=1024), model())


def test_sampling_of_a_first_turn() -> None:
    sent = {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    sampling = sampling_of(sent, 10, rollout(), 96)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.9, -1)
    assert (sampling.max_tokens, sampling.logprobs) == (32, 0)
    assert sent["logprobs"] is True  # the caller uses its dict again


def test_greedy_without_logprobs() -> None:
    sampling = sampling_of({"temperature": 0, "logprobs": False}, 10, rollout(), 96)
    assert (sampling.temperature, sampling.logprobs) == (0, None)


@pytest.mark.parametrize(
    ("sent", "prompt", "tokens"),
    [
        ({}, 64, 32),
        ({}, 80, 16),  # a later turn: the response has used some up
        ({}, 95, 1),
        ({"max_tokens": 5}, 10, 5),
        ({"max_new_tokens": 6}, 10, 6),
        ({"max_tokens": 500}, 90, 6),
        ({"max_tokens": 0}, 10, 1),
    ],
)
def test_how_many_tokens_a_turn_may_have(sent: dict[str, Any], prompt: int, tokens: int) -> None:
    assert sampling_of(sent, prompt, rollout(), 96).max_tokens == tokens


def test_no_room_and_unknown_parameters_are_refused() -> None:
    with pytest.raises(BadInput, match="no room to generate"):
        sampling_of({}, 96, rollout(), 96)
    with pytest.raises(BadInput, match="prompt_logprobs"):
        sampling_of({"prompt_logprobs": 1}, 10, rollout(), 96)
