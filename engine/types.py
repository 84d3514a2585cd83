"""What goes into and comes out of one engine step. Plain picklable data: importing this does not import vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

MemoryTag = Literal["weights", "kv_cache"]


class SampleKey(NamedTuple):
    """Identity of one sample. `step` is the one it was asked for in; a parked sample goes on in a later one."""

    prompt: int
    sample: int
    step: int = 0

    def __str__(self) -> str:
        return f"prompt {self.prompt}, sample {self.sample}" + (f" of step {self.step}" if self.step else "")


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One sample to decode. `sampling` holds vLLM SamplingParams fields without `n` and `seed`."""

    key: SampleKey
    prompt_token_ids: list[int]
    sampling: dict[str, Any]
    seed: int  # 63-bit; noise is a function of (seed, token position) only
    stream: bool = False  # pieces of it are wanted while it runs


@dataclass(slots=True)
class SampleResult:
    """One finished sample; `logprobs[i]` belongs to `token_ids[i]` (None when not asked for)."""

    key: SampleKey
    token_ids: list[int]
    logprobs: list[float] | None
    text: str | None
    finish_reason: str  # "stop" | "length" | "abort" | "error" (refused; stop_reason says why)
    stop_reason: int | str | None
    policy_version: int  # that the last token was sampled under
    rank: int
    top_logprobs: list[dict[int, float]] | None = None  # only when sampling["logprobs"] > 0
    arrived_s: float = 0.0  # when its rank got it, seconds since the step began; 0 for those it began with
    first_s: float = 0.0  # when its first token was taken in; 0 if that was in an earlier step, or there is none
    ended_s: float = 0.0  # when its last token was taken in
    ended_iteration: int = -1  # of the step; -1: not recorded
    # Policy version and how many tokens were sampled under it, in the order of the tokens.
    versions: list[tuple[int, int]] = field(default_factory=list)
    layouts: list[tuple[str, int]] = field(default_factory=list)  # "EP" | "TP", likewise
    drafted: int = 0  # tokens of drafts that were verified for it in this step, and how many of them were right
    accepted: int = 0
    # [tokens, layers, experts per token], small unsigned ints: of the prompt and all output tokens but the last, which
    # no forward pass has seen. Only with `routed_experts` in the engine's settings.
    routed_experts: Any = None


@dataclass(frozen=True, slots=True)
class SamplePiece:
    """Part of an unfinished sample that is streamed, from token `start` and character `text_start` of its output on.

    After a sample has moved to another rank, pieces begin at its first token again. Text that may yet turn out to be
    part of a stop string is held back.
    """

    key: SampleKey
    start: int
    token_ids: list[int]
    logprobs: list[float] | None
    top_logprobs: list[dict[int, float]] | None
    text_start: int
    text: str | None


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
    # Of the host: drain quiesce decide reshard export gather import front kv wait activate
    phases_ms: dict[str, float]
    pause_ms: float  # all of them but drain, in which the pass in flight still decodes
    expert_bytes: int
    kv_bytes: int
    kv_use_before: float  # share of pages in use in the source, worst rank
    kv_use_after: float  # the same in the target
    device_ms: dict[str, float] = field(default_factory=dict)  # experts, kv: their moves, beside the host's phases
    prepared: bool = False  # experts' bytes had been sent before
    staged_layers: int = 0  # so many layers of them, out of expert_layers
    staged_bytes: int = 0  # of expert_bytes
    expert_layers: int = 0


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
class DraftStats:
    """What speculative decoding in TP came to in one step; the same on all ranks."""

    mode: str  # ngram | suffix | siblings
    verified: list[int]  # by position in a draft: tokens verified there behind accepted ones only
    accepted: list[int]  # and were right
    drafted: int  # verified tokens in all, also those behind a wrong one
    iterations: int  # in TP
    with_drafts: int  # of them with a draft
    tokens: int  # sampled in TP
    rows: int  # requests that got tokens, summed over the iterations: tokens / rows per request and iteration
    plain_s: float | None = None  # the same tokens in TP without drafts: by costs, on the scale of timed iterations
    ahead: int = 0  # iterations that decoded ahead, none drafting
    changes: int = 0  # of the mode, between ahead and drafting
    problem: str | None = None  # why there are no drafts any more


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
    prepared_at: list[int] = field(default_factory=list)  # iterations before which expert bytes began to be sent ahead
    decisions: list[PolicyDecision] = field(default_factory=list)  # the same on all ranks
    drafts: DraftStats | None = None  # None: TP has no drafts
    admitted: int = 0  # requests this rank was given
    resumed: int = 0  # samples parked on this rank that the step went on with
    parked: int = 0  # samples on this rank that the step left unfinished
    began: float = 0.0  # time.perf_counter() when the step began, by which ranks of one host can be compared


@dataclass(slots=True)
class StepOutcome:
    """Results of this rank's own requests, its measurements, and what it has parked."""

    results: list[SampleResult]
    stats: StepStats
    parked: list[SampleKey] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class UpdateStats:
    """A weight update on one rank."""

    version: int
    mode: str  # "in_place" | "staged"
    nbytes: int  # that came to this rank
    seconds: float  # from begin to commit


@dataclass(frozen=True, slots=True)
class MemoryChange:
    """Memory that a rank gave back or took again."""

    rank: int
    nbytes: int  # of the slots
    freed: int  # by which the process's memory in use became less, as the system counts (negative: more)
    seconds: float
