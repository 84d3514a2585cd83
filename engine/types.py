"""What goes into and comes out of one engine step. Plain picklable data: importing this does not import vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class SampleKey(NamedTuple):
    """Identity of one sample within a step."""

    prompt: int
    sample: int


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One sample to decode. `sampling` holds vLLM SamplingParams fields without `n` and `seed`."""

    key: SampleKey
    prompt_token_ids: list[int]
    sampling: dict[str, Any]
    seed: int  # 63-bit; noise is a function of (seed, token position) only


@dataclass(slots=True)
class SampleResult:
    """One finished sample; `logprobs[i]` belongs to `token_ids[i]` (None when not asked for)."""

    key: SampleKey
    token_ids: list[int]
    logprobs: list[float] | None
    text: str | None
    finish_reason: str  # "stop" | "length" | "abort" | "error" (refused; stop_reason says why)
    stop_reason: int | str | None
    policy_version: int
    rank: int
    top_logprobs: list[dict[int, float]] | None = None  # only when sampling["logprobs"] > 0


@dataclass(slots=True)
class Iteration:
    """One engine iteration. `t` in seconds since the step began, `ms` its duration, `live` over all ranks after it."""

    t: float
    layout: str  # "EP" | "TP"
    live: int
    tokens: int  # sampled by this iteration over all ranks
    ms: float


@dataclass(slots=True)
class SwitchRecord:
    """One switch with live requests; phases in ms, bytes as sent by this rank to its peers."""

    to: str  # "TP" | "EP"
    iteration: int
    t: float
    live: int
    live_by_rank: list[int]
    kv_tokens: int
    phases_ms: dict[str, float]  # quiesce decide export gather reshard import front kv activate
    pause_ms: float
    expert_bytes: int
    kv_bytes: int
    kv_use_before: float  # share of pages in use in the source, worst rank
    kv_use_after: float  # the same in the target


@dataclass(slots=True)
class CancelledSwitch:
    """A switch the capacity check refused."""

    iteration: int
    t: float
    live: int
    reason: str


@dataclass(slots=True)
class PolicyDecision:
    """A decision of the policy: where it wanted to go (None: stay), why, what came of it, and the numbers it had."""

    target: str | None  # "TP" | "EP" | None
    reason: str
    outcome: str  # "switched" | "cancelled" | ""
    inputs: dict[str, float | int | str]


@dataclass(slots=True)
class StepStats:
    """What one rank measured in one step."""

    rank: int
    world_size: int
    total_s: float = 0.0
    burst_s: float = 0.0  # EP part
    switch_s: float = 0.0
    tail_s: float = 0.0  # TP part
    return_reshard_ms: float = 0.0  # TP->EP at the start of this step, 0 when weights were updated instead
    iterations: list[Iteration] = field(default_factory=list)
    switches: list[SwitchRecord] = field(default_factory=list)
    cancelled: list[CancelledSwitch] = field(default_factory=list)
    decisions: list[PolicyDecision] = field(default_factory=list)  # the same on all ranks
    admitted: int = 0  # requests this rank was given


@dataclass(slots=True)
class StepOutcome:
    """Results of this rank's own requests, and its measurements."""

    results: list[SampleResult]
    stats: StepStats
