"""The report of a step that several replicas drew: theirs put together, and taken apart again for what is by group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import get_args

from moebius.engine.costs import CostModel
from moebius.rollout.errors import validate
from moebius.rollout.hindsight import Counterfactual, counterfactual, end_to_end
from moebius.rollout.report import installed_versions
from moebius.rollout.report_drafts import merged_drafts
from moebius.rollout.report_startup import RankStart
from moebius.rollout.report_types import (
    Counts,
    Durations,
    FinishReason,
    Lane,
    Layout,
    Percentiles,
    SampleEntry,
    SampleTimes,
    StaticTimes,
    StepReport,
    TimelinePoint,
)
from moebius.rollout.timeline import MAX_POINTS, thin
from moebius.rollout.types import Sample

DECISIONS = 256  # kept, over all replicas


@dataclass(frozen=True, slots=True)
class LaneOutcome:
    """What one replica did in a step. `report` is the one of its group; None: it was lost, for the reason `lost`."""

    replica: int
    node: str
    began_s: float
    prompts: int
    later: int
    lost: str | None
    report: StepReport | None


def merge(
    lanes: Sequence[LaneOutcome],
    ended: Sequence[tuple[int, Sample, int]],
    *,
    step: int,
    policy_version: int,
    model: str,
    device: str,
    ranks: int,
    replicas: int,
    update_weights_s: float | None = None,
    update_ended_at: float | None = None,
    startup: Sequence[RankStart] | None = None,
    created: datetime | None = None,
) -> StepReport:
    """One report of a step from those of its replicas.

    `ended` are all its samples, with the prompt's number in the report, ranks numbered through, and the prompt's
    tokens: what a lost replica had finished is in no report. `ranks` are those of one replica.
    """
    found = [(lane, lane.report) for lane in lanes if lane.report is not None]
    samples = [
        _entry(number, sample, tokens)
        for number, sample, tokens in sorted(ended, key=lambda e: (e[0], e[1].sample_index))
    ]
    reasons = Counter(sample.finish_reason for sample in samples)
    total = max((lane.began_s + report.durations_s.total for lane, report in found), default=0.0)
    sampled = sum(report.tokens_per_s * report.durations_s.total for _, report in found)
    switches = [
        s.model_copy(update={"t": s.t + lane.began_s, "replica": lane.replica}) for lane, r in found for s in r.switches
    ]
    cancelled = [
        c.model_copy(update={"t": c.t + lane.began_s, "replica": lane.replica})
        for lane, r in found
        for c in r.cancelled
    ]
    decisions = [d.model_copy(update={"replica": lane.replica}) for lane, r in found for d in r.decisions]
    now = (created or datetime.now(UTC)).astimezone(UTC)
    return StepReport(
        step=step,
        policy_version=policy_version,
        model=model,
        ranks=ranks * replicas,
        device=device,
        created=now.isoformat(timespec="seconds"),
        began_at=max(0.0, round(now.timestamp() - total, 6)),
        versions=installed_versions(),
        counts=Counts(
            prompts=len({sample.prompt for sample in samples}),
            samples=len(samples),
            prompt_tokens=sum({sample.prompt: sample.prompt_tokens for sample in samples}.values()),
            output_tokens=sum(sample.output_tokens for sample in samples),
            resumed=sum(report.counts.resumed for _, report in found),
            parked=sum(report.counts.parked for _, report in found),
            finish_reasons={reason: reasons[reason] for reason in get_args(FinishReason)},
        ),
        samples=samples,
        sample_times=_times(found, samples),
        timeline=merged_timeline([(lane.began_s, report.timeline) for lane, report in found], total),
        durations_s=_durations(found, total),
        switches=sorted(switches, key=lambda s: s.t),
        cancelled=sorted(cancelled, key=lambda c: c.t),
        decisions=decisions[-DECISIONS:],
        counterfactual=_static(lanes),
        tokens_per_s=sampled / total if total > 0 else 0.0,
        iteration_ms=_slowest([report for _, report in found]),
        update_weights_s=update_weights_s,
        update_ended_at=update_ended_at,
        return_reshard_ms=max((report.return_reshard_ms for _, report in found), default=0.0),
        startup=None if startup is None else list(startup),
        drafts=merged_drafts([report.drafts for _, report in found if report.drafts is not None]),
        lanes=[_lane(lane, samples, ranks, MAX_POINTS // max(1, len(lanes))) for lane in lanes],
    )


def _entry(number: int, sample: Sample, prompt_tokens: int) -> SampleEntry:
    fields = {
        "prompt": number, "sample": sample.sample_index, "rank": sample.rank, "prompt_tokens": prompt_tokens,
        "output_tokens": len(sample.token_ids), "finish_reason": sample.finish_reason,
    }  # fmt: skip
    return validate(SampleEntry, fields, f"prompt {number}, sample {sample.sample_index}")


def _lane(lane: LaneOutcome, samples: Sequence[SampleEntry], ranks: int, limit: int) -> Lane:
    own = [s for s in samples if s.rank // ranks == lane.replica]
    report = lane.report
    idle = None
    if report is not None and report.sample_times is not None:
        idle = max(0.0, report.durations_s.total - max(report.sample_times.ended_s, default=0.0))
    return Lane(
        replica=lane.replica,
        node=lane.node,
        ranks=ranks,
        began_s=lane.began_s,
        prompts=lane.prompts,
        later=lane.later,
        samples=len(own),
        output_tokens=sum(s.output_tokens for s in own),
        resumed=0 if report is None else report.counts.resumed,
        parked=0 if report is None else report.counts.parked,
        durations_s=None if report is None else report.durations_s,
        idle_s=idle,
        timeline=[] if report is None else thin(report.timeline, max(16, limit)),
        tokens_per_s=0.0 if report is None else report.tokens_per_s,
        iteration_ms={} if report is None else report.iteration_ms,
        counterfactual=StaticTimes(reason="the replica was lost") if report is None else report.counterfactual,
        lost=lane.lost,
    )


def _times(found: Sequence[tuple[LaneOutcome, StepReport]], samples: Sequence[SampleEntry]) -> SampleTimes | None:
    """Of all samples, in seconds since the step began; None where a replica has not told of one."""
    known: dict[tuple[int, int], tuple[float, float, int]] = {}
    for lane, report in found:
        times = report.sample_times
        if times is None:
            return None
        rows = zip(times.arrived_s, times.ended_s, times.ended_iteration, strict=True)
        for sample, (arrived, ended, iteration) in zip(report.samples, rows, strict=True):
            # Those that a replica began with came when the step did; it was only told later.
            came = round(lane.began_s + arrived, 4) if arrived else 0.0
            known[(sample.prompt, sample.sample)] = (came, round(lane.began_s + ended, 4), iteration)
    if any((s.prompt, s.sample) not in known for s in samples):
        return None
    rows_found = [known[(s.prompt, s.sample)] for s in samples]
    return SampleTimes(
        arrived_s=[row[0] for row in rows_found],
        ended_s=[row[1] for row in rows_found],
        ended_iteration=[row[2] for row in rows_found],
    )


def _durations(found: Sequence[tuple[LaneOutcome, StepReport]], total: float) -> Durations:
    """Parts of the replica that decoded longest; the rest of the whole step is `other`."""
    if not found:
        return Durations(total=0.0, burst=0.0, switch=0.0, tail=0.0, other=0.0)
    parts = max((report.durations_s for _, report in found), key=lambda d: d.burst + d.switch + d.tail)
    decoding = parts.burst + parts.switch + parts.tail
    return Durations(
        total=max(total, decoding), burst=parts.burst, switch=parts.switch, tail=parts.tail,
        other=max(0.0, total - decoding),
    )  # fmt: skip


def merged_timeline(
    lanes: Sequence[tuple[float, Sequence[TimelinePoint]]], total: float, limit: int = MAX_POINTS
) -> list[TimelinePoint]:
    """All replicas' timelines as one, by equal slices of time. Each is given with its begin in seconds.

    Live samples and tokens are sums; the layout is EP as long as one of those that decode is in EP; `iterations` are
    those of the replica with most of them in the slice.
    """
    slices = min(limit, max((len(series) for _, series in lanes), default=0))
    if not slices or total <= 0:
        return []
    at = [0] * len(lanes)  # next point of each
    live = [0] * len(lanes)
    in_ep = [True] * len(lanes)
    merged: list[TimelinePoint] = []
    layout: Layout = "EP"
    waiting_s = 0.0  # slices without an iteration go to the next one
    for k in range(slices):
        end = total * (k + 1) / slices
        waiting_s += total / slices
        tokens, most, decoding = 0, 0, []
        for i, (began, series) in enumerate(lanes):
            iterations = 0
            while at[i] < len(series) and (began + series[at[i]].t <= end or k == slices - 1):
                point = series[at[i]]
                at[i] += 1
                tokens, iterations = tokens + point.tokens, iterations + point.iterations
                live[i], in_ep[i] = point.live, point.layout == "EP"
            most = max(most, iterations)
            if iterations or live[i]:
                decoding.append(in_ep[i])
        if not most:
            continue
        layout = "EP" if any(decoding) else "TP"
        ms = 1e3 * waiting_s / most
        merged.append(
            TimelinePoint(t=end, layout=layout, live=sum(live), tokens=tokens, iteration_ms=ms, iterations=most)
        )
        waiting_s = 0.0
    return merged


def _slowest(reports: Sequence[StepReport]) -> dict[Layout, Percentiles]:
    """By layout, those of the replica whose median is highest."""
    slowest: dict[Layout, Percentiles] = {}
    for report in reports:
        for layout, found in report.iteration_ms.items():
            if layout not in slowest or found.p50 > slowest[layout].p50:
                slowest[layout] = found
    return slowest


def _static(lanes: Sequence[LaneOutcome]) -> StaticTimes:
    if any(lane.report is None for lane in lanes):
        return StaticTimes(reason="a replica was lost, and with it what its part took")
    busy = [lane.report for lane in lanes if lane.report is not None and lane.report.counts.output_tokens]
    found = []
    for report in busy:
        static, d = report.counterfactual, report.durations_s
        if static.static_ep_s is None or static.static_tp_s is None:
            return StaticTimes(source=static.source, reason=static.reason)
        found.append(
            Counterfactual(static.static_ep_s, static.static_tp_s, static.best_single_s, d.burst + d.switch + d.tail)
        )
    if not found:
        return StaticTimes(reason="the step has no samples")
    together = slowest_of(found)
    return StaticTimes(
        static_ep_s=together.static_ep_s,
        static_tp_s=together.static_tp_s,
        best_single_s=together.best_single_s,
        gain=together.gain,
        end_to_end=end_to_end(together.gain),
        source=busy[0].counterfactual.source,
        reason=None,
    )


def slowest_of(found: Sequence[Counterfactual]) -> Counterfactual:
    """Of replicas that run at the same time, each with the prompts that it had: a step lasts as long as the slowest."""
    best = [f.best_single_s for f in found if f.best_single_s is not None]
    return Counterfactual(
        max(f.static_ep_s for f in found),
        max(f.static_tp_s for f in found),
        max(best) if len(best) == len(found) else None,
        max(f.measured_s for f in found),
    )


# ---- taking apart ---------------------------------------------------------------------------------------------------


def views(report: StepReport) -> list[StepReport]:
    """The report as one per group: itself, or one per replica that was not lost."""
    return [_view(report, lane) for lane in report.lanes if lane.durations_s is not None] if report.lanes else [report]


def _view(report: StepReport, lane: Lane) -> StepReport:
    rows = [i for i, s in enumerate(report.samples) if s.rank // lane.ranks == lane.replica]
    samples = [report.samples[i].model_copy(update={"rank": report.samples[i].rank % lane.ranks}) for i in rows]
    times = report.sample_times
    if times is not None:
        times = SampleTimes(
            arrived_s=[max(0.0, times.arrived_s[i] - lane.began_s) for i in rows],
            ended_s=[max(0.0, times.ended_s[i] - lane.began_s) for i in rows],
            ended_iteration=[times.ended_iteration[i] for i in rows],
        )
    prompts = {s.prompt: s.prompt_tokens for s in samples}
    counts = {
        "prompts": len(prompts), "samples": len(samples), "prompt_tokens": sum(prompts.values()),
        "output_tokens": lane.output_tokens, "resumed": lane.resumed, "parked": lane.parked,
    }  # fmt: skip
    return report.model_copy(
        update={
            "ranks": lane.ranks,
            "counts": report.counts.model_copy(update=counts),
            "samples": samples,
            "sample_times": times,
            "timeline": lane.timeline,
            "durations_s": lane.durations_s,
            "switches": [
                s.model_copy(update={"t": max(0.0, s.t - lane.began_s)})
                for s in report.switches
                if s.replica == lane.replica
            ],
            "cancelled": [
                c.model_copy(update={"t": max(0.0, c.t - lane.began_s)})
                for c in report.cancelled
                if c.replica == lane.replica
            ],
            "decisions": [d for d in report.decisions if d.replica == lane.replica],
            "counterfactual": lane.counterfactual,
            "tokens_per_s": lane.tokens_per_s,
            "iteration_ms": lane.iteration_ms,
            "startup": None,
            "lanes": [],
        }
    )


def in_hindsight(report: StepReport, costs: CostModel) -> Counterfactual:
    """What static layouts would have taken, also of a step of several replicas. Raises as `counterfactual`."""
    return slowest_of([counterfactual(view, costs) for view in views(report) if view.counts.output_tokens])
