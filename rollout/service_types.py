"""What the service hands out and keeps: its settings, requests in flight, pieces of streamed samples, its state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from moebius.rollout.types import Rollout, Sample, Sampling

if TYPE_CHECKING:
    from moebius.rollout.report_types import StepReport

Mode = Literal["park", "abort", "finish"]


class ServiceSettings(BaseModel):
    """How a service opens and closes steps, and what it takes in. docs/serving.md explains them."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    max_pending: int = Field(
        65536, ge=1, description="Most unfinished samples, waiting ones included; more are refused."
    )
    quiet_s: float = Field(
        0.5,
        gt=0,
        description="Without announcement a step is in its tail when samples have ended and none came for this.",
    )
    idle_s: float = Field(1.0, ge=0, description="A step with nothing to do is closed after this many seconds.")
    step_max_s: float = Field(
        600, gt=0, description="A step that nobody announced is closed after this; what is live goes on in the next."
    )
    on_update: Mode = Field("park", description="What becomes of live samples at a weight update or before sleeping.")
    on_loss: Literal["replay", "raise"] = Field(
        "replay", description="After the loss of a rank: restart the group and repeat what was live, or fail it."
    )
    max_restarts: int = Field(3, ge=0, description="Restarts in a row without a step that ended well.")
    max_losses: int = Field(2, ge=1, description="A request that was live when ranks were lost so often is given up.")
    reports: str | None = Field(None, description="Folder for step reports; None: none are written.")


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of one sample, in order. `finish_reason` is set on its last one only, which may hold no tokens."""

    sample_index: int
    token_ids: list[int]
    logprobs: list[float] | None
    top_logprobs: list[dict[int, float]] | None
    text: str | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(slots=True)
class _Sent:
    """How much of a sample has been passed on."""

    tokens: int = 0
    chars: int = 0


@dataclass(eq=False, slots=True)
class Ticket:
    """One request: a prompt with all its samples."""

    request_id: str
    prompt: list[int]
    n: int
    sampling: Sampling
    seeds: list[int] | None  # of the samples; None: from the step and the prompt's number when it is submitted
    sink: Callable[[Delta], None] | None = None
    done: Future[Rollout] = field(default_factory=Future)
    samples: dict[int, Sample] = field(default_factory=dict)
    sent: dict[int, _Sent] = field(default_factory=dict)
    place: tuple[int, int] | None = None  # step and prompt number, once submitted
    losses: int = 0
    aborted: bool = False

    @property
    def missing(self) -> list[int]:
        """Indices of samples that have not ended."""
        return [index for index in range(self.n) if index not in self.samples]

    def piece(
        self,
        index: int,
        start: int,
        token_ids: list[int],
        logprobs: list[float] | None,
        top_logprobs: list[dict[int, float]] | None,
        text_start: int,
        text: str | None,
    ) -> None:
        """Pass on what is new in a piece that begins at token `start` and character `text_start`.

        Pieces may overlap what was passed on before: a front begins anew after it took a sample over.
        """
        self._pass_on(index, start, token_ids, logprobs, top_logprobs, text_start, text, None, None)

    def end(self, sample: Sample) -> None:
        """Take a finished sample, and pass on what is left of it."""
        if sample.sample_index in self.samples:  # of a replay
            return
        self.samples[sample.sample_index] = sample
        self._pass_on(
            sample.sample_index, 0, sample.token_ids, sample.logprobs, sample.top_logprobs, 0, sample.text,
            sample.finish_reason, sample.stop_reason,
        )  # fmt: skip

    def _pass_on(
        self,
        index: int,
        start: int,
        token_ids: list[int],
        logprobs: list[float] | None,
        top_logprobs: list[dict[int, float]] | None,
        text_start: int,
        text: str | None,
        finish_reason: str | None,
        stop_reason: int | str | None,
    ) -> None:
        if self.sink is None:
            return
        sent = self.sent.setdefault(index, _Sent())
        new, chars = max(0, sent.tokens - start), max(0, sent.chars - text_start)
        delta = Delta(
            index,
            token_ids[new:],
            None if logprobs is None else logprobs[new:],
            None if top_logprobs is None else top_logprobs[new:],
            None if text is None else text[chars:],
            finish_reason,
            stop_reason,
        )
        sent.tokens = max(sent.tokens, start + len(token_ids))
        sent.chars = max(sent.chars, text_start + len(text or ""))
        if delta.token_ids or delta.text or finish_reason is not None:
            self.sink(delta)


@dataclass(slots=True)
class ServiceStats:
    """What a service does at present and has done since it began."""

    live: int = 0  # samples in the running step
    waiting: int = 0  # samples that are not in a step
    parked: int = 0  # samples kept by the ranks while no step runs
    layout: str = "EP"
    iteration_ms: float = 0.0  # of the last iterations
    kv_use: float = 0.0  # share of KV pages in use, worst rank
    step_tokens: int = 0  # sampled by the running step
    version: int = 0
    step: int | None = None  # the open one
    paused: bool = False
    asleep: list[str] = field(default_factory=list)
    blocked: str | None = None  # why nothing can be sampled at present
    dead: str | None = None  # why nothing can be sampled any more
    restarts: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    requests: Counter[str] = field(default_factory=Counter)  # ended requests: ok, aborted, failed, refused
    samples: Counter[str] = field(default_factory=Counter)  # ended samples by finish reason
    switches: Counter[str] = field(default_factory=Counter)  # by the layout they went to, of steps that are closed
    cancelled_switches: int = 0
    phase_ms: Counter[tuple[str, str]] = field(default_factory=Counter)  # (to, phase): milliseconds in all
    pause_ms_max: float = 0.0
    updates: int = 0
    update_s: float = 0.0  # of the last one


def note_report(stats: ServiceStats, report: StepReport) -> None:
    """Count the switches of a step."""
    for switch in report.switches:
        stats.switches[switch.to] += 1
        stats.pause_ms_max = max(stats.pause_ms_max, switch.pause_ms)
        for phase, ms in switch.phases_ms.model_dump(by_alias=True).items():
            stats.phase_ms[(switch.to, phase)] += ms
    stats.cancelled_switches += len(report.cancelled)
