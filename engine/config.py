"""Settings of the engine. Plain data: importing this does not import vLLM."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt


class PolicyConfig(BaseModel):
    """When to switch from EP to TP within a step."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["rollout", "static_ep", "static_tp", "scheduled"] = Field(
        "rollout",
        description="rollout: once when live <= threshold; scheduled: once at iteration `at_iteration`; "
        "static_*: never leave that layout.",
    )
    threshold: int = Field(64, ge=0, description="rollout: switch when unfinished samples over all ranks <= threshold.")
    at_iteration: int = Field(0, ge=0, description="scheduled: switch before this iteration of the step.")
    cooldown_iterations: int = Field(32, ge=1, description="Iterations to wait after a cancelled switch.")


class EngineConfig(BaseModel):
    """One rank's engine. Byte figures are per rank."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(description="Directory of a Hugging Face MoE checkpoint (or model id the host can load).")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    max_model_len: PositiveInt | None = Field(None, description="Tokens of prompt + output; None: the model's limit.")
    max_num_seqs: PositiveInt = Field(256, description="Samples decoding at once per EP rank, and in all in TP.")
    max_num_batched_tokens: PositiveInt | None = Field(None, description="Tokens per iteration and scheduler.")
    block_size: PositiveInt = Field(16, description="Tokens per KV page.")
    kv_cache_bytes: PositiveInt = Field(1 << 30, description="KV memory per rank in bytes, without the spare slot.")
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    attention_backend: str | None = Field(
        None,
        description="vLLM's name of a backend, e.g. TRITON_ATTN for exact fp32 on GPUs; None: vLLM's choice.",
    )
    seed: int = 0
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] = "processed_logprobs"
    policy: PolicyConfig = PolicyConfig()
