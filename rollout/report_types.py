"""The fields of a step report, and how one is written and read. `docs/reports.md` explains each field."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from moebius.rollout.errors import BadInput, validate
from moebius.rollout.report_drafts import DraftsEntry
from moebius.rollout.report_startup import RankStart

SCHEMA_VERSION = 1
Layout = Literal["EP", "TP"]
FinishReason = Literal["stop", "length", "abort", "failed"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Counts(_Part):
    """Totals of the step."""

    prompts: int = Field(ge=0, description="Prompts with at least one sample.")
    samples: int = Field(ge=0, description="Samples, all of them finished.")
    prompt_tokens: int = Field(ge=0, description="Tokens of the prompts, each prompt counted once.")
    output_tokens: int = Field(ge=0, description="Tokens of all samples.")
    resumed: int = Field(0, ge=0, description="Samples of earlier steps that this one went on with.")
    parked: int = Field(0, ge=0, description="Samples it has left unfinished, for the next step.")
    finish_reasons: dict[FinishReason, int] = Field(description="Samples by finish reason; reasons not seen are 0.")


class SampleEntry(_Part):
    """One sample, without its tokens."""

    prompt: int = Field(ge=0, description="Index of the prompt in the step.")
    sample: int = Field(ge=0, description="Index of the sample within the prompt.")
    rank: int = Field(ge=0, description="Rank that admitted it.")
    prompt_tokens: int = Field(ge=0, description="Tokens of its prompt.")
    output_tokens: int = Field(ge=0, description="Tokens it got.")
    finish_reason: FinishReason = Field(description="stop, length, abort or failed.")


class TimelinePoint(_Part):
    """One or more iterations in a row, as rank 0 saw them."""

    t: float = Field(ge=0, description="Seconds since the step began, of the last of the iterations.")
    layout: Layout = Field(description="Layout they ran in.")
    live: int = Field(ge=0, description="Unfinished samples over all ranks after the last of them.")
    tokens: int = Field(ge=0, description="Tokens sampled over all ranks, summed over the iterations.")
    iteration_ms: float = Field(ge=0, description="Mean duration of an iteration in ms.")
    iterations: int = Field(ge=1, description="Iterations merged into this point.")


class Durations(_Part):
    """Seconds of the step, of the rank that took longest. burst + switch + tail + other = total."""

    total: float = Field(ge=0, description="The whole step.")
    burst: float = Field(ge=0, description="Decoding in EP.")
    switch: float = Field(ge=0, description="Switching with live requests.")
    tail: float = Field(ge=0, description="Decoding in TP.")
    other: float = Field(ge=0, description="The rest: admission, return to EP, collecting results.")


class Phases(_Part):
    """Milliseconds of each phase of a switch, each the longest over the ranks (so their sum may exceed the pause)."""

    drain: float = Field(0.0, ge=0, description="The pass in flight, still decoding: no part of the pause.")
    quiesce: float = Field(0.0, ge=0, description="Agreeing on what is left, until nothing runs on the device.")
    decide: float = Field(0.0, ge=0, description="Placing requests on ranks, and capacity check.")
    reshard: float = Field(0.0, ge=0, description="Moving expert bytes, or starting their move.")
    export: float = Field(0.0, ge=0, description="Taking live requests out of the source runtime.")
    gather: float = Field(0.0, ge=0, description="Exchanging request records between ranks.")
    import_: float = Field(0.0, ge=0, alias="import", description="Entering requests into the target runtime.")
    front: float = Field(0.0, ge=0, description="Handing requests to another rank's front (to EP only).")
    kv: float = Field(0.0, ge=0, description="Moving KV pages, or starting their move.")
    wait: float = Field(0.0, ge=0, description="Waiting for moves that go on while the host works.")
    activate: float = Field(0.0, ge=0, description="Making the target runtime the running one.")

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, validate_by_alias=True, serialize_by_alias=True
    )


class SwitchEntry(_Part):
    """One switch with live requests, over all ranks."""

    to: str = Field("TP", description="Layout it went to: TP or EP.")
    iteration: int = Field(ge=0, description="Iteration of the step it came before.")
    t: float = Field(ge=0, description="Seconds since the step began, at its start.")
    live: int = Field(ge=0, description="Live samples it moved.")
    live_by_rank: list[int] = Field(description="The same by EP rank: before a switch to TP, after one to EP.")
    kv_tokens: int = Field(ge=0, description="KV entries of the live samples, in tokens.")
    phases_ms: Phases = Field(description="Milliseconds by phase.")
    pause_ms: float = Field(ge=0, description="Milliseconds without decoding, longest over the ranks.")
    device_ms: dict[str, float] = Field(
        default_factory=dict, description="Milliseconds the moves of experts and kv took, beside the host's phases."
    )
    expert_bytes: int = Field(ge=0, description="Expert bytes sent between ranks, summed over the ranks.")
    staged_bytes: int = Field(0, ge=0, description="Of expert_bytes, those that were sent ahead, while EP decoded.")
    staged_layers: int = Field(0, ge=0, description="Layers whose experts were sent ahead; 0: it was not prepared.")
    expert_layers: int = Field(0, ge=0, description="Layers with experts; 0 in reports that do not tell.")
    kv_bytes: int = Field(ge=0, description="KV bytes sent between ranks, summed over the ranks.")
    kv_use_before: float = Field(ge=0, le=1, description="Share of KV pages in use before, worst rank.")
    kv_use_after: float = Field(ge=0, le=1, description="Share of KV pages in use after, worst rank.")
    replica: int | None = Field(None, ge=0, description="Replica whose switch it was; null: there is one group.")


class CancelledEntry(_Part):
    """A switch that was refused (no room, or a rank not at rest); the step went on in the layout it was in."""

    iteration: int = Field(ge=0, description="Iteration of the step.")
    t: float = Field(ge=0, description="Seconds since the step began.")
    live: int = Field(ge=0, description="Live samples then.")
    reason: str = Field(description="Why it was refused.")
    replica: int | None = Field(None, ge=0, description="Replica that refused; null: there is one group.")


class DecisionEntry(_Part):
    """A change of mind of the switch policy, or a wish to switch; the same on all ranks."""

    target: str | None = Field(description="Layout it wanted: TP or EP; null to stay.")
    reason: str = Field(description="Why.")
    outcome: str = Field(description="switched, cancelled, or empty when nothing was to be done.")
    inputs: dict[str, float | int | str] = Field(description="The numbers it rests on.")
    replica: int | None = Field(None, ge=0, description="Replica whose policy it was; null: there is one group.")


class LossEntry(_Part):
    """The ranks were lost during the step, and started again; all else in the report is of the last start."""

    why: str = Field(description="The error, one line.")
    rank: int | None = Field(description="Rank that is to blame, where that is known.")
    phase: str | None = Field(description="What it did then, likewise.")
    seconds: float = Field(ge=0, description="From when it was seen until the new ranks were ready.")
    replayed: int = Field(ge=0, description="Samples that were drawn anew.")
    given_up: list[list[int]] = Field(description="[step, prompt] of prompts that were not tried again.")


class SampleTimes(_Part):
    """When samples came and ended, in seconds since the step began by their rank's clock; in the order of `samples`."""

    arrived_s: list[float] = Field(description="When it was handed to its rank; 0 for those the step began with.")
    ended_s: list[float] = Field(description="When its last token was taken in.")
    ended_iteration: list[int] = Field(description="The iteration of the step that ended it, from 0.")


class EndToEnd(_Part):
    """A whole training step, of which the rollout takes a share of the time in the better static layout."""

    rollout_share: float = Field(ge=0, le=1, description="That share.")
    speedup: float = Field(gt=0, description="Of the whole step: 1 / (1 - share + share / gain).")


class StaticTimes(_Part):
    """What static layouts would have taken for this very step, by calibrated costs. All null where there are none."""

    static_ep_s: float | None = Field(None, ge=0, description="Seconds of decoding the same samples in EP.")
    static_tp_s: float | None = Field(None, ge=0, description="Seconds of decoding the same samples in TP.")
    best_single_s: float | None = Field(
        None, ge=0, description="With the best single switch, in hindsight; null where samples joined while it ran."
    )
    gain: float | None = Field(None, gt=0, description="The better static layout over burst + switch + tail.")
    end_to_end: list[EndToEnd] = Field([], description="What the gain makes of a whole training step.")
    source: str | None = Field(None, description="Where the costs come from.")
    reason: str | None = Field("the report was made without costs", description="Why there is nothing; else null.")


class Percentiles(_Part):
    """Percentiles of iteration durations in ms, over every iteration of a layout."""

    p50: float = Field(ge=0, description="Median.")
    p90: float = Field(ge=0, description="90th percentile.")
    p99: float = Field(ge=0, description="99th percentile.")
    count: int = Field(ge=1, description="Iterations.")


class Lane(_Part):
    """One replica's part of a step; its switches, refusals and decisions are in the step's lists, its samples by rank.

    Seconds are since the replica began, which is `began_s` after the step did.
    """

    replica: int = Field(ge=0, description="Number of the replica.")
    node: str = Field(description="Ray's id of its node.")
    ranks: int = Field(ge=1, description="Its ranks: replica * ranks is the number of its first one.")
    began_s: float = Field(ge=0, description="When it began, in seconds since the first replica did.")
    prompts: int = Field(ge=0, description="Prompts it was given.")
    later: int = Field(ge=0, description="Of them, taken from the shared queue after it had begun.")
    samples: int = Field(ge=0, description="Samples that ended on it.")
    output_tokens: int = Field(ge=0, description="Tokens of these samples.")
    resumed: int = Field(0, ge=0, description="Samples of earlier steps that it went on with.")
    parked: int = Field(0, ge=0, description="Samples that it has left unfinished.")
    durations_s: Durations | None = Field(description="Seconds by part; null: it was lost.")
    idle_s: float | None = Field(None, ge=0, description="Within other: from its last sample's end to the step's end.")
    timeline: list[TimelinePoint] = Field(description="Its iterations, thinned to 512 points over all replicas.")
    tokens_per_s: float = Field(ge=0, description="Tokens that it sampled by its total.")
    iteration_ms: dict[Layout, Percentiles] = Field(description="Iteration durations by layout used.")
    counterfactual: StaticTimes = Field(StaticTimes(), description="What static layouts would have taken for its part.")
    lost: str | None = Field(None, description="Why its ranks were lost; its unfinished prompts went to others.")


class StepReport(_Part):
    """What one rollout step did and how long each part took."""

    schema_version: Literal[1] = Field(1, description="Version of this format.")
    step: int = Field(ge=0, description="Number of the step.")
    policy_version: int = Field(ge=0, description="Version of the weights.")
    model: str = Field(description="Model as configured.")
    ranks: int = Field(ge=1, description="Ranks of the switch group, or of all replicas together.")
    device: str = Field(description="cpu or cuda.")
    created: str = Field(description="When the report was made, ISO 8601 in UTC.")
    began_at: float | None = Field(
        None, ge=0, description="When it began (after a loss: its last start), in Unix seconds; null: not recorded."
    )
    versions: dict[str, str] = Field(description="Versions of python and, where installed, torch, vllm and ray.")
    counts: Counts = Field(description="Totals.")
    samples: list[SampleEntry] = Field(description="Every sample, by prompt and sample index.")
    timeline: list[TimelinePoint] = Field(description="Iterations in order, thinned to at most 512 points.")
    durations_s: Durations = Field(description="Seconds by part.")
    switches: list[SwitchEntry] = Field(description="Switches with live requests.")
    cancelled: list[CancelledEntry] = Field(description="Switches that were refused.")
    decisions: list[DecisionEntry] = Field(default=[], description="What the switch policy decided and why.")
    losses: list[LossEntry] = Field(default=[], description="Times that ranks were lost and started again.")
    sample_times: SampleTimes | None = Field(None, description="When each sample came and ended; null: not recorded.")
    counterfactual: StaticTimes = Field(StaticTimes(), description="What static layouts would have taken.")
    tokens_per_s: float = Field(
        ge=0, description="Tokens sampled in this step / durations_s.total; 0 for an empty step."
    )
    iteration_ms: dict[Layout, Percentiles] = Field(description="Iteration durations by layout used.")
    update_weights_s: float | None = Field(
        None, ge=0, description="Seconds of the weight update before this step, null when there was none."
    )
    update_ended_at: float | None = Field(
        None, ge=0, description="When that update ended, in Unix seconds; null: there was none, or not recorded."
    )
    return_reshard_ms: float = Field(
        0.0, ge=0, description="Milliseconds to move experts TP to EP at the start, longest over the ranks."
    )
    startup: list[RankStart] | None = Field(
        None, description="How each rank started, in the first report after a start; null in all others."
    )
    drafts: DraftsEntry | None = Field(None, description="Speculative decoding in TP; null: it is off.")
    lanes: list[Lane] = Field(default=[], description="Each replica's part; empty where there is one group.")

    def write(self, directory: str | Path) -> Path:
        """Write step_NNNN.json into `directory`, made if missing; returns its path. Readers never see half a file."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"step_{self.step:04d}.json"
        temporary = directory / f".{path.name}.{os.getpid()}.tmp"
        try:
            temporary.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        return path

    @classmethod
    def load(cls, path: str | Path) -> StepReport:
        """Read what `write` wrote. Raises BadInput for a missing or broken file or another schema version."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise BadInput(f"{path}: not valid JSON: {error}") from error
        version = data.get("schema_version") if isinstance(data, dict) else None
        if version != SCHEMA_VERSION:
            raise BadInput(f"{path}: schema_version is {version}, this version reads {SCHEMA_VERSION}")
        return validate(cls, data, str(path))


def json_schema() -> dict[str, Any]:
    """JSON schema of a step report file."""
    return StepReport.model_json_schema(mode="serialization")


def schema_text() -> str:
    """The schema as kept in docs/step_report.schema.json."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    print(schema_text(), end="")
