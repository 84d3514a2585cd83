"""From verl's settings to a group's: what goes where, what is refused, and the keys under `engine_kwargs.moebius`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from moebius.engine.config import EngineConfig
from moebius.rollout.config import Place, RolloutConfig
from moebius.rollout.errors import BadInput, validate
from moebius.rollout.integrations import memory
from moebius.rollout.integrations.settings import TrainerSettings
from moebius.rollout.types import Sampling

WHERE = "actor_rollout_ref.rollout.engine_kwargs.moebius"

# Fields of EngineConfig that follow from verl's own settings, and which.
_FROM_VERL = {
    "model": "actor_rollout_ref.model.path",
    "dtype": "rollout.dtype",
    "load_format": "rollout.load_format",
    "max_model_len": "rollout.max_model_len",
    "max_num_seqs": "rollout.max_num_seqs",
    "max_num_batched_tokens": "rollout.max_num_batched_tokens",
    "enable_prefix_caching": "rollout.enable_prefix_caching",
    "enforce_eager": "rollout.enforce_eager",
    "capture_sizes": "rollout.cudagraph_capture_sizes",
    "logprobs_mode": "rollout.logprobs_mode",
    "routed_experts": "rollout.enable_rollout_routing_replay",
    "seed": "rollout.seed",
    "policy": f"{WHERE}.policy",
}


class VerlSettings(TrainerSettings):
    """What stands under `actor_rollout_ref.rollout.engine_kwargs.moebius`."""

    trainer = "verl's settings"
    follows = _FROM_VERL

    announce: bool = Field(True, description="Let the agent-loop manager say how many trajectories a step has.")
    calls: str | None = Field(
        None, description="File that every call of the trainer is written to, as JSON lines. For debugging: slow."
    )


def read_settings(rollout: Any) -> VerlSettings:
    """Our settings in verl's RolloutConfig. Raises BadInput."""
    kwargs = rollout.engine_kwargs or {}
    return validate(VerlSettings, plain(kwargs.get("moebius") or {}), WHERE)


def refusals(rollout: Any, model: Any, gpus_per_node: int) -> list[str]:
    """What the user asked for and this rollout cannot do, one sentence each.

    `rollout` is verl's RolloutConfig, `model` its HFModelConfig.
    """
    ranks = rollout.tensor_model_parallel_size * rollout.data_parallel_size
    lora = _get(model, "lora", {}) or {}
    rank = int(lora.get("rank", 0) or 0) or int(_get(model, "lora_rank", 0) or 0)
    mtp = _get(rollout, "mtp", None) or _get(model, "mtp", None)
    hf_config = _get(model, "hf_config", None)
    qat = _get(rollout, "qat", None) or {}
    found = {
        "rollout.pipeline_model_parallel_size is above 1: a switch group has no pipeline stages; set it to 1": (
            rollout.pipeline_model_parallel_size > 1
        ),
        "a group needs two GPUs or more: set rollout.data_parallel_size and rollout.expert_parallel_size to the GPUs "
        "of a replica, and rollout.tensor_model_parallel_size=1": ranks < 2,
        f"a replica of {ranks} GPUs does not fit on a node with {gpus_per_node}: a group lives on one node; use "
        "smaller replicas, verl spreads prompts over them": ranks > gpus_per_node,
        "LoRA adapters are not loaded by the rollout: set model.lora.merge=True, merged weights are sent then": (
            rank > 0 and not lora.get("merge", False)
        ),
        "models with images, video or audio are not supported: use a text model": _is_multimodal(model, hf_config),
        "multi-token prediction (MTP) is not used in rollouts: set model.mtp.enable_rollout=False": bool(
            mtp and _get(mtp, "enable", False) and _get(mtp, "enable_rollout", False)
        ),
        "quantised rollouts are not supported: set rollout.quantization=null and rollout.qat.enable=False, and use "
        "weights in bfloat16, float16 or float32": bool(
            rollout.quantization or qat.get("enable", False) or getattr(hf_config, "quantization_config", None)
        ),
        "delta weights are not understood: set rollout.checkpoint_engine.backend to naive, nccl or nixl": (
            rollout.checkpoint_engine.backend == "delta_sharded"
        ),
        "splitting prefill from decode is not supported: set rollout.disaggregation.enabled=False": bool(
            _get(_get(rollout, "disaggregation", None), "enabled", False)
        ),
        f"rollout.logprobs_mode={rollout.logprobs_mode}: set processed_logprobs or raw_logprobs": (
            rollout.logprobs_mode not in ("processed_logprobs", "raw_logprobs")
        ),
        "rollout.full_determinism asks for kernels that give the same bits in every batch; no switch between layouts "
        "can promise that: set it to False": bool(rollout.full_determinism),
        f"rollout.scheduling_policy={rollout.scheduling_policy}: requests are served first come, first served; set "
        "fcfs": rollout.scheduling_policy != "fcfs",
    }
    return [sentence for sentence, applies in found.items() if applies]


def check(rollout: Any, model: Any, gpus_per_node: int) -> VerlSettings:
    """`read_settings`, after all refusals. Raises BadInput that lists them."""
    problems = refusals(rollout, model, gpus_per_node)
    if problems:
        raise BadInput("rollout.name=moebius cannot do what is asked for:\n  " + "\n  ".join(problems))
    return read_settings(rollout)


def group_config(
    settings: VerlSettings, rollout: Any, model: Any, place: Place, *, device_bytes: int | None
) -> RolloutConfig:
    """Settings of a replica's group, which runs where `place` says.

    `device_bytes` is a GPU's memory, None on CPU; together with rollout.gpu_memory_utilization it gives the KV's size
    where `engine.kv_cache_bytes` is not set. Raises BadInput.
    """
    ranks = rollout.tensor_model_parallel_size * rollout.data_parallel_size
    engine: dict[str, Any] = {
        "model": model.local_path,
        "dtype": rollout.dtype,
        "load_format": rollout.load_format,
        "max_model_len": max_model_len(rollout, model),
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "enforce_eager": rollout.enforce_eager,
        "capture_sizes": plain(rollout.cudagraph_capture_sizes) or None,
        "logprobs_mode": rollout.logprobs_mode,
        "routed_experts": rollout.enable_rollout_routing_replay,
        "seed": rollout.seed,
        "policy": settings.policy,
        **settings.engine,
    }
    if "kv_cache_bytes" not in engine and device_bytes is not None:
        share = rollout.gpu_memory_utilization
        engine["kv_cache_bytes"] = kv_bytes(model.hf_config.to_dict(), model.local_path, ranks, device_bytes, share)
    return RolloutConfig(
        ranks=ranks,
        engine=validate(EngineConfig, engine, f"{WHERE}.engine"),
        sampling=Sampling(max_tokens=1),  # every request brings its own
        device="cpu" if device_bytes is None else "cuda",
        place=place,
        startup_timeout_s=settings.startup_timeout_s,
    )


def kv_bytes(hf_config: Mapping[str, Any], name: str, ranks: int, device_bytes: int, share: float) -> int:
    """KV memory of a rank, if the rollout may use this share of a GPU. Raises BadInput when nothing is left for it."""
    return memory.kv_bytes(
        hf_config, name, ranks, device_bytes, share,
        share_setting="rollout.gpu_memory_utilization", kv_setting=f"{WHERE}.engine.kv_cache_bytes",
    )  # fmt: skip


def max_model_len(rollout: Any, model: Any) -> int:
    """Most tokens of prompt and output: as set, else what verl's own lengths allow, within the model's limit."""
    longest = getattr(model.hf_config, "max_position_embeddings", None)
    asked = rollout.max_model_len or rollout.prompt_length + rollout.response_length
    if longest is not None and rollout.max_model_len and asked > longest:
        raise BadInput(f"rollout.max_model_len={asked} is above the model's {longest} positions; lower it")
    return int(asked if longest is None else min(asked, longest))


# Names that verl sends and Sampling shares with vLLM.
_SAMPLING = frozenset(Sampling.model_fields) - {"logprobs", "max_tokens", "seed"}


def sampling_of(params: Mapping[str, Any], prompt_tokens: int, rollout: Any, limit: int) -> Sampling:
    """One request's settings, from what verl's agent loop sends. `limit` is the engine's max_model_len.

    The most output tokens are, as with verl's own rollouts: what the request says, else response_length, less what a
    multi-turn prompt has taken of it. Raises BadInput.
    """
    params = dict(params)
    room = limit - prompt_tokens
    if room < 1:
        raise BadInput(
            f"a prompt of {prompt_tokens} tokens leaves no room to generate in {limit} tokens: raise "
            "rollout.max_model_len, or lower data.max_prompt_length"
        )
    most = params.pop("max_tokens", None)
    also = params.pop("max_new_tokens", None)
    most = also if most is None else most
    if most is None:
        most = min(rollout.response_length, rollout.prompt_length + rollout.response_length - prompt_tokens)
    wants = params.pop("logprobs", False)
    fields: dict[str, Any] = {
        "repetition_penalty": rollout.repetition_penalty,
        "ignore_eos": rollout.ignore_eos,
        "detokenize": bool(params.get("stop")),  # verl takes token ids and makes its own text
        "max_tokens": max(1, min(int(most), room)),
        # verl sends a bool: whether the sampled tokens' logprobs are wanted.
        "logprobs": (0 if wants is True else wants) if wants not in (False, None) else None,
    }
    unknown = sorted(key for key in params if key not in _SAMPLING)
    if unknown:
        raise BadInput(f"sampling parameters {unknown} are not supported by rollout.name=moebius; leave them out")
    return Sampling.parse(fields | params)


def plain(value: Any) -> Any:
    """Containers of omegaconf as Python's own."""
    if isinstance(value, Mapping) or hasattr(value, "items"):
        return {key: plain(value[key]) for key in value}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(part) for part in value]
    return value


def _get(holder: Any, name: str, default: Any) -> Any:
    value = getattr(holder, name, default)
    return default if value is None else value


def _is_multimodal(model: Any, hf_config: Any) -> bool:
    parts = ("vision_config", "audio_config", "video_config")
    processor = getattr(model, "processor", None)
    return any(getattr(hf_config, part, None) for part in parts) or hasattr(processor, "image_processor")
