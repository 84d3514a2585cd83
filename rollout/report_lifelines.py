"""When each sample of a step began and ended: as recorded, or else told from its length and the step's timeline.

A report without times by sample still knows how many had ended at a time: it is what the live count has fallen by.
Samples that decode together, a token each per iteration, end in the order of their lengths; so the r-th shortest sample
ended where the live count fell by the r-th. That is exact, as far as the timeline is, when all samples decode from the
first iterations on; the timeline itself shows whether they did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moebius.rollout.report_types import Layout, StepReport, TimelinePoint

Array = npt.NDArray[np.float64]
FULL = 0.98  # share of the live samples that must get a token in an iteration for all to count as decoding


@dataclass(frozen=True, slots=True)
class Span:
    """Seconds from `start` to `end` of a step in one layout, switches between them left out."""

    start: float
    end: float
    layout: Layout


@dataclass(frozen=True, slots=True)
class Lifelines:
    """`start[i]` and `end[i]` in seconds of the i-th sample of the report; `prefill`: iterations until all decoded."""

    start: Array
    end: Array
    prefill: int
    waited: bool  # samples waited for room or were preempted: lines are approximate
    recorded: bool = False  # by the ranks; a line begins when its sample came, with its prefill

    @property
    def note(self) -> str:
        """How far the lines can be trusted, in a sentence."""
        if self.recorded:
            return "from arrival to end, as the ranks recorded them"
        if self.waited:
            return "approximate: samples waited for room, and the report has no times by sample"
        exact = "one iteration" if self.prefill <= 1 else f"the {self.prefill} iterations with prefill"
        return f"derived from lengths and live counts; exact to {exact}"


def spans(series: Sequence[TimelinePoint]) -> list[Span]:
    """The layouts of a step in order, one span for each time it stayed in one."""
    out: list[Span] = []
    for point, first in zip(series, _begins(series), strict=True):
        if out and out[-1].layout == point.layout:
            out[-1] = Span(out[-1].start, point.t, point.layout)
        else:
            out.append(Span(float(first), point.t, point.layout))
    return out


def prefill_points(report: StepReport) -> int:
    """Points of the timeline before all live samples decode: they hold prefill, so their times are not of decoding."""
    before = len(report.samples)
    for i, point in enumerate(report.timeline):
        if point.tokens >= FULL * before * point.iterations > 0:
            return i
        before = point.live
    return len(report.timeline)


def lifelines(report: StepReport) -> Lifelines | None:
    """Begin and end of every sample; None when the timeline cannot tell: samples joined later, or there are none."""
    series, count = report.timeline, len(report.samples)
    if (times := report.sample_times) is not None and count:
        arrived, ended = np.array(times.arrived_s), np.array(times.ended_s)
        return Lifelines(arrived, np.maximum(arrived, ended), prefill_points(report), False, recorded=True)
    live = np.array([count, *(p.live for p in series)])
    if not series or not count or np.any(np.diff(live) > 0) or live[-1] > 0:
        return None
    first, last = _begins(series), np.array([p.t for p in series])
    merged = np.array([p.iterations for p in series], dtype=np.float64)
    until = np.cumsum(merged)
    lengths = np.array([max(1, sample.output_tokens) for sample in report.samples])
    ranks = np.empty(count)
    ranks[np.argsort(lengths, kind="stable")] = np.arange(1, count + 1)

    ended = count - live[1:]
    at = np.searchsorted(ended, ranks)  # the first point by whose end so many had ended
    before = np.concatenate([[0], ended[:-1]])[at]
    share = np.ceil((ranks - before) / np.maximum(1, ended[at] - before) * merged[at]) / merged[at]
    end = first[at] + share * (last - first)[at]
    end_iteration = until[at] - merged[at] * (1 - share)

    begin = np.clip(end_iteration - lengths, 0, None)  # iterations that came before the sample's first one
    at = np.minimum(np.searchsorted(until, begin, side="right"), len(series) - 1)
    share = np.clip((begin - until[at] + merged[at]) / merged[at], 0, 1)
    start = first[at] + share * (last - first)[at]

    prefill = prefill_points(report)
    later = series[prefill:]
    # Samples that had ended before the last one began made room for it.
    waited = prefill == len(series) or (prefill > 0 and series[prefill - 1].live < FULL * count)
    waited = waited or any(p.tokens < FULL * p.live * p.iterations for p in later)
    iterations = sum(p.iterations for p in series[: prefill + 1])
    return Lifelines(start, np.maximum(start, end), iterations, waited)


def _begins(series: Sequence[TimelinePoint]) -> Array:
    """When the first iteration of each point began: never before the end of the point before."""
    last = np.array([0.0, *(p.t for p in series)])
    length = np.array([p.iteration_ms * p.iterations / 1e3 for p in series])
    begins: Array = np.clip(last[1:] - length, last[:-1], last[1:]) if len(series) else np.zeros(0)
    return begins
