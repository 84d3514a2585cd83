"""Settings of the engine. Plain data: importing this does not import vLLM."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, field_validator, model_validator


class PolicyConfig(BaseModel):
    """When to switch. docs/policies.md explains each kind."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    kind: Literal["rollout", "interactive", "predictive", "static_ep", "static_tp", "scheduled"] = Field(
        "rollout",
        description="rollout: once when live <= threshold; interactive: to and fro with hysteresis; predictive: once, "
        "when calibrated costs and learnt output lengths say that it pays; static_*: stay in that layout; scheduled: "
        "at given iterations.",
    )
    threshold: int = Field(
        64,
        ge=0,
        description="rollout: switch when unfinished samples over all ranks <= threshold; interactive: T_h, to EP when "
        "they are more; predictive: as rollout until enough lengths are known.",
    )
    threshold_source: Literal["given", "calibrated"] = Field(
        "given", description="calibrated: where the layouts' measured times cross, instead of `threshold`."
    )
    threshold_low: int | None = Field(
        None, ge=0, description="interactive: T_l, to TP when the window's mean is below; None: 0.8 * threshold."
    )
    window: PositiveInt = Field(8, description="interactive: W, iterations that are averaged before going to TP.")
    cooldown_s: float = Field(5.0, ge=0, description="interactive: C, seconds from a switch or refusal to the next.")
    at_iteration: int = Field(0, ge=0, description="scheduled: to TP before this iteration of the step.")
    back_at_iteration: int | None = Field(None, ge=1, description="scheduled: and back to EP before this one.")
    prepare_margin: float = Field(
        0.25, ge=0, description="rollout, predictive: prepare a switch at live samples of (1 + margin) * threshold."
    )
    prepare_iterations: int = Field(
        8, ge=0, description="scheduled: prepare so many iterations before the switch; 0: do not."
    )
    cooldown_iterations: int = Field(32, ge=1, description="Iterations to wait after a cancelled switch.")
    costs: str | None = Field(
        "auto",
        description="What iterations and switches cost. auto: from the cache, or measured at start (and cached) when "
        "the policy needs them, as predictive and threshold_source: calibrated do; else a file of `moebius calibrate`; "
        "null: none.",
    )
    costs_cache: str | None = Field(
        None, description="costs: auto: folder of the cache; None: moebius/costs in $XDG_CACHE_HOME or ~/.cache."
    )
    every: PositiveInt = Field(16, description="predictive: most iterations between two forecasts.")

    @model_validator(mode="after")
    def _bands(self) -> PolicyConfig:
        if self.threshold_low is not None and self.threshold_low > self.threshold:
            raise ValueError(
                f"threshold_low={self.threshold_low} is above threshold={self.threshold}: lower the first, or the "
                "policy would switch to and fro at one load"
            )
        if self.back_at_iteration is not None and self.back_at_iteration <= self.at_iteration:
            raise ValueError(f"back_at_iteration={self.back_at_iteration} must come after at_iteration")
        return self

    @property
    def costs_file(self) -> str | None:
        """The file of costs, if one is named."""
        return None if self.costs == "auto" else self.costs

    @property
    def needs_costs(self) -> bool:
        """Whether the policy cannot decide, or has no threshold, without costs."""
        return self.kind == "predictive" or self.threshold_source == "calibrated"

    @property
    def low(self) -> float:
        """T_l of the interactive policy."""
        return 0.8 * self.threshold if self.threshold_low is None else float(self.threshold_low)


class ProfileConfig(BaseModel):
    """Chrome traces of the iterations around a switch. Profiling slows a step down: take no timings from its report."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: str | None = Field(None, description="Where traces go, on the ranks' host; None: no profiling.")
    steps: PositiveInt | None = Field(None, description="Profile the first so many steps only; None: every step.")
    before: PositiveInt = Field(16, description="At most so many iterations before the switch.")
    after: PositiveInt = Field(8, description="Iterations after the switch.")
    margin: float = Field(0.1, ge=0, description="Begin when live samples are at most (1 + margin) * threshold.")
    at_iteration: int | None = Field(
        None, ge=0, description="Profile from this iteration of a step instead, `after` iterations, switch or not."
    )


class TailConfig(BaseModel):
    """Speculative decoding in the tail, that is in TP only. docs/tail-speculation.md explains it."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    speculation: Literal["off", "ngram", "suffix", "siblings"] = Field(
        "off",
        description="Where drafts come from. ngram: the sample's own prompt and text; suffix: also all samples of the "
        "run that are remembered; siblings: also other samples of the same prompt, of this step and earlier ones.",
    )
    draft_tokens: int = Field(5, ge=1, le=32, description="Most drafted tokens per sample and iteration.")
    adaptive: bool = Field(
        True,
        description="Draft only while it is faster than decoding without drafts, and verify only as many drafted "
        "tokens as pay, by each sample's recent acceptance and the times of iterations; false: always all of them.",
    )
    max_samples: PositiveInt = Field(128, description="No drafts while TP runs more samples than this.")
    max_rows: int = Field(
        768,
        ge=2,
        description="Most tokens of an iteration with drafts, the samples' own included: memory for their logits, "
        "rows x vocabulary, and the largest CUDA graph follow from it.",
    )
    draft_memory_tokens: PositiveInt = Field(
        1 << 21, description="Text that drafts are taken from, in tokens per rank; 52 bytes of host memory each."
    )

    @field_validator("speculation", mode="before")
    @classmethod
    def _off_is_false_in_yaml(cls, value: Any) -> Any:
        return "off" if value is False else value

    @model_validator(mode="after")
    def _room(self) -> TailConfig:
        if self.max_rows <= self.max_samples:
            raise ValueError(
                f"max_rows={self.max_rows} leaves no room for drafts beside the tokens of max_samples="
                f"{self.max_samples} samples: raise the first or lower the second"
            )
        return self

    @property
    def on(self) -> bool:
        """Whether the TP runtime has drafts."""
        return self.speculation != "off"

    @property
    def drafted(self) -> int:
        """Most drafted tokens per sample and iteration; 0 without speculation."""
        return self.draft_tokens if self.on else 0


class EpConfig(BaseModel):
    """What only EP has. docs/deepep.md explains it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    all2all: Literal["auto", "allgather_reducescatter", "deepep_v2", "deepep_low_latency"] = Field(
        "auto",
        description="How tokens go to their experts and back. allgather_reducescatter: NCCL, every rank gets all "
        "tokens; deepep_v2, deepep_low_latency: the kernels of deep_ep, which must be installed; auto: what "
        "`moebius calibrate` found to be faster here, else allgather_reducescatter.",
    )


class EngineConfig(BaseModel):
    """One rank's engine. Byte figures are per rank."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(description="Directory of a Hugging Face MoE checkpoint (or model id the host can load).")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    max_model_len: PositiveInt | None = Field(None, description="Tokens of prompt + output; None: the model's limit.")
    max_num_seqs: PositiveInt = Field(256, description="Samples decoding at once per EP rank, and in all in TP.")
    max_num_batched_tokens: PositiveInt | None = Field(None, description="Tokens per iteration and scheduler.")
    hf_overrides: dict[str, Any] = Field(
        default_factory=dict, description="Replace entries of the model's config.json, e.g. num_hidden_layers: 4."
    )
    block_size: PositiveInt = Field(16, description="Tokens per KV page.")
    kv_cache_bytes: PositiveInt = Field(1 << 30, description="KV memory per rank in bytes, without the spare slot.")
    enable_prefix_caching: bool = True
    routed_experts: bool = Field(
        False, description="Return which experts every token went to, layer by layer, for replay in training."
    )
    park_keeps_kv: bool = Field(
        False,
        description="Parked samples keep their KV pages, also over a weight update, whose KV then comes from older "
        "weights; false: their KV is computed again.",
    )
    enforce_eager: bool = False
    capture_sizes: list[PositiveInt] | None = Field(
        None, min_length=1, description="Batch sizes of CUDA graphs in both layouts; None: chosen from the policy."
    )
    max_capture_size: PositiveInt | None = Field(None, description="Choose no capture size above this one.")
    attention_backend: str | None = Field(
        None,
        description="vLLM's name of a backend, e.g. TRITON_ATTN for exact fp32 on GPUs; None: vLLM's choice.",
    )
    custom_all_reduce: bool = Field(
        True, description="vLLM's all-reduce over peer memory in TP; off where peers cannot map each other's memory."
    )
    mover: Literal["auto", "direct", "collective"] = Field(
        "auto",
        description="How a switch moves bytes. collective: NCCL, on CPU gloo. direct: on GPUs, writes into the peers' "
        "memory over NVLink. auto: direct where ranks can map each other's memory.",
    )
    prepare: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Send expert bytes ahead while EP still decodes, into KV pages that are free, so that a switch to "
        "TP pauses less. auto: where the mover can do it beside the model and half of the KV memory holds at least a "
        "quarter of the layers; on: always, from one layer on, or refuse to start.",
    )
    prepare_layers: PositiveInt | None = Field(
        None,
        description="Send the experts of at most so many layers ahead, from the lowest on; None: of as many as free KV "
        "pages hold.",
    )
    attention_weights: Literal["both", "shared"] = Field(
        "both",
        description="both: each layout has its own attention projections. shared: TP's are views of EP's, in which a "
        "few heads change places at a switch; TP's share of the projections is saved.",
    )
    memory: Literal["auto", "virtual", "plain"] = Field(
        "auto",
        description="Memory of weights and KV on GPUs. virtual: can be given back and returned at the same addresses, "
        "as sleep needs; plain: one allocation; auto: virtual where devices and ranks can do it.",
    )
    async_scheduling: bool = Field(
        True, description="Schedule the next iteration while the last one runs (vLLM's default on GPUs)."
    )
    steady_decode: bool = Field(
        True,
        description="Schedule iterations in which every request gets one token and nothing else happens with a few "
        "operations per request, instead of vLLM's general code. Results are the same.",
    )
    collective_timeout_s: PositiveInt = Field(
        600,
        description="Longest wait in a collective (NCCL, gloo), from the start on; a rank that others wait for longer "
        "counts as hung, and the step is lost.",
    )
    seed: int = 0
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] = "processed_logprobs"
    policy: PolicyConfig = PolicyConfig()
    ep: EpConfig = EpConfig()
    tail: TailConfig = TailConfig()
    profile: ProfileConfig = ProfileConfig()

    @field_validator("prepare", mode="before")
    @classmethod
    def _words_of_yaml(cls, value: Any) -> Any:
        """YAML reads a bare `on` or `off` as true or false."""
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value
