"""From OpenRLHF's settings to a group's: what goes where, what is refused, and the options `--moebius.*`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import yaml

from moebius.engine.config import EngineConfig
from moebius.rollout.config import Place, RolloutConfig
from moebius.rollout.errors import BadInput, validate
from moebius.rollout.integrations.memory import kv_bytes
from moebius.rollout.integrations.settings import TrainerSettings
from moebius.rollout.types import Sampling

if TYPE_CHECKING:
    from vllm import SamplingParams

PREFIX = "--moebius."

# Fields of EngineConfig that follow from OpenRLHF's own options, and which.
_FROM_OPENRLHF = {
    "model": "--actor.model_name_or_path",
    "max_model_len": "--data.max_len",
    "enable_prefix_caching": "--vllm.enable_prefix_caching",
    "enforce_eager": "--vllm.enforce_eager",
    "logprobs_mode": "--algo.advantage.is_correction_level",
    "seed": "--train.seed",
    "policy": "--moebius.policy.*",
}


class OpenRlhfSettings(TrainerSettings):
    """The options `--moebius.*`."""

    trainer = "OpenRLHF's options"
    follows = _FROM_OPENRLHF


def split_options(argv: Sequence[str]) -> tuple[OpenRlhfSettings, list[str]]:
    """Our options, `--moebius.policy.threshold=32` or `--moebius.policy.threshold 32`, and all others as they are.

    Values are read as YAML. Raises BadInput.
    """
    data: dict[str, Any] = {}
    others: list[str] = []
    words = iter(argv)
    for word in words:
        if not word.startswith(PREFIX):
            others.append(word)
            continue
        key, equals, value = word.removeprefix(PREFIX).partition("=")
        if not equals:
            value = next(words, "")
        if not value or value.startswith("--"):
            raise BadInput(f"{PREFIX}{key}: give a value, for example {PREFIX}policy.threshold=32")
        _put(data, key, value)
    return validate(OpenRlhfSettings, data, f"options {PREFIX}*"), others


def _put(data: dict[str, Any], key: str, value: str) -> None:
    *parents, last = key.split(".")
    for part in parents:
        data = data.setdefault(part, {})
        if not isinstance(data, dict):
            raise BadInput(f"{PREFIX}{key}: {part} has been given a value of its own; leave one of the two out")
    try:
        data[last] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise BadInput(f"{PREFIX}{key}={value}: not a value: {error}") from error


def refusals(argv: Sequence[str]) -> list[str]:
    """What OpenRLHF's command line asks for and this rollout cannot do, one sentence each."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--vllm.num_engines", type=int, default=0)
    parser.add_argument("--vllm.tensor_parallel_size", type=int, default=1)
    parser.add_argument("--vllm.sync_backend", default="nccl")
    parser.add_argument("--vllm.sync_with_ray", action="store_true")
    parser.add_argument("--ds.lora.rank", type=int, default=0)
    parser.add_argument("--ds.load_in_4bit", action="store_true")
    parser.add_argument("--data.max_images_per_prompt", type=int, default=0)
    parser.add_argument("--train.full_determinism_enable", action="store_true")
    asked = vars(parser.parse_known_args(list(argv))[0])
    found = {
        "--vllm.num_engines: without an engine there is nothing to do here; set it to the number of groups": (
            asked["vllm.num_engines"] < 1
        ),
        ONE_GPU: asked["vllm.tensor_parallel_size"] < 2,
        "--vllm.sync_with_ray with --vllm.sync_backend gloo: Ray's gloo groups cannot be joined by an engine, which "
        "has a process group already; use nccl": asked["vllm.sync_with_ray"] and asked["vllm.sync_backend"] == "gloo",
        "--ds.lora.rank: OpenRLHF sends adapters and base weights under names of their own, which no engine loads; "
        "train all weights": asked["ds.lora.rank"] > 0,
        "--ds.load_in_4bit: quantised weights are not supported in rollouts; leave it out": asked["ds.load_in_4bit"],
        IMAGES: asked["data.max_images_per_prompt"] > 0,
        DETERMINISM: asked["train.full_determinism_enable"],
    }
    return [sentence for sentence, applies in found.items() if applies]


ONE_GPU = (
    "--vllm.tensor_parallel_size: a group needs two GPUs or more, which become its ranks; set it to the GPUs of an "
    "engine"
)
IMAGES = "--data.max_images_per_prompt: models with images are not supported; use a text model"
DETERMINISM = (
    "--train.full_determinism_enable asks for kernels that give the same bits in every batch; no switch between "
    "layouts can promise that: leave it out"
)


def check(engine: Mapping[str, Any]) -> None:
    """Refuse what `create_vllm_engines` may ask an engine for. Raises BadInput that lists everything."""
    found = {
        ONE_GPU: engine["tensor_parallel_size"] < 2,
        IMAGES: bool(engine.get("limit_mm_per_prompt")),
        DETERMINISM: bool(engine.get("full_determinism")),
    }
    refuse([sentence for sentence, applies in found.items() if applies])


def refuse(problems: Sequence[str]) -> None:
    """Raises BadInput when there are any."""
    if problems:
        raise BadInput("the rollout cannot do what is asked for:\n  " + "\n  ".join(problems))


def group_config(
    settings: OpenRlhfSettings, engine: Mapping[str, Any], place: Place, *, device_bytes: int | None
) -> RolloutConfig:
    """Settings of an engine's group, which runs where `place` says.

    `engine` are the arguments that `create_vllm_engines` gives an engine. `device_bytes` is a GPU's memory, None on
    CPU; together with gpu_memory_utilization it gives the KV's size where `engine.kv_cache_bytes` is not set. Raises
    BadInput.
    """
    check(engine)
    ranks = engine["tensor_parallel_size"]
    fields: dict[str, Any] = {
        "model": engine["model"],
        "dtype": engine["dtype"],
        "max_model_len": engine["max_model_len"],
        "enable_prefix_caching": engine["enable_prefix_caching"],
        "enforce_eager": engine["enforce_eager"],
        "seed": engine["seed"],
        "policy": settings.policy,
        **({"logprobs_mode": engine["logprobs_mode"]} if engine.get("logprobs_mode") else {}),
        **settings.engine,
    }
    if "kv_cache_bytes" not in fields and device_bytes is not None:
        from transformers import AutoConfig

        hf_config = AutoConfig.from_pretrained(engine["model"]).to_dict()
        fields["kv_cache_bytes"] = kv_bytes(
            hf_config, engine["model"], ranks, device_bytes, engine.get("gpu_memory_utilization") or 0.9,
            share_setting="--vllm.gpu_memory_utilization", kv_setting="--moebius.engine.kv_cache_bytes",
        )  # fmt: skip
    return RolloutConfig(
        ranks=ranks,
        engine=validate(EngineConfig, fields, "OpenRLHF's options with --moebius.engine.*"),
        sampling=Sampling(max_tokens=1),  # every request brings its own
        device="cpu" if device_bytes is None else "cuda",
        place=place,
        service=settings.service,
        startup_timeout_s=settings.startup_timeout_s,
    )


# Of vLLM's SamplingParams: said otherwise here, or of no consequence for tokens.
_ASIDE = frozenset(
    {
        "n", "max_tokens", "min_tokens", "logprobs", "detokenize", "output_kind", "skip_clone",
        "spaces_between_special_tokens", "skip_reading_prefix_cache",
    }
)  # fmt: skip
_SAMPLING = frozenset(Sampling.model_fields) - _ASIDE


def sampling_of(params: SamplingParams, prompt_tokens: int, limit: int) -> Sampling:
    """One request's settings, from vLLM's. `limit` is the engine's max_model_len. Raises BadInput."""
    room = limit - prompt_tokens
    if room < 1:
        raise BadInput(
            f"a prompt of {prompt_tokens} tokens leaves no room to generate in {limit} tokens: raise --data.max_len, "
            "or leave longer prompts out"
        )
    if params.n != 1:
        raise BadInput(f"sampling parameters with n={params.n}: ask for one sample at a time, as OpenRLHF does")
    plain = type(params)()
    changed = {
        name: getattr(params, name)
        for name in params.__struct_fields__
        if not name.startswith("_") and name not in _ASIDE and getattr(params, name) != getattr(plain, name)
    }
    unknown = sorted(set(changed) - _SAMPLING)
    if unknown:
        raise BadInput(f"sampling parameters {', '.join(unknown)} cannot be asked for here: leave them out")
    most = room if params.max_tokens is None else min(params.max_tokens, room)
    least = min(params.min_tokens, most)
    own = {"max_tokens": most, "min_tokens": least, "logprobs": params.logprobs}
    return Sampling.parse(changed | own)
