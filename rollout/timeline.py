"""Iterations of a step as a bounded number of points, and percentiles of their durations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from moebius.engine.types import Iteration
from moebius.rollout.errors import BadInput
from moebius.rollout.report_types import Layout, Percentiles, TimelinePoint

MAX_POINTS = 512
AROUND = 2  # iterations kept as they are on each side of a change of layout
MAX_CHANGES = 100  # with more changes of layout than this, the iterations around the later ones are merged too


def points(iterations: Sequence[Iteration]) -> list[TimelinePoint]:
    """One point per iteration."""
    return [
        TimelinePoint(t=i.t, layout=_layout(i), live=i.live, tokens=i.tokens, iteration_ms=i.ms, iterations=1)
        for i in iterations
    ]


def thin(series: Sequence[TimelinePoint], limit: int = MAX_POINTS, around: int = AROUND) -> list[TimelinePoint]:
    """At most `limit` points (at least 16) that keep the sums of tokens, iterations and time.

    The first and last point and `around` points on each side of a change of layout stay as they are; the points
    between are merged in runs of about equal length: tokens are summed, durations averaged, `t` and `live` are those
    of the last.
    """
    n = len(series)
    if n <= limit:
        return list(series)
    changes = [i for i in range(1, n) if series[i].layout != series[i - 1].layout]
    keep = {0, n - 1}
    for change in changes[: min(MAX_CHANGES, max(1, (limit - 3) // (2 * around + 1)))]:
        keep.update(range(max(0, change - around), min(n, change + around)))
    kept = sorted(keep)
    gaps = [(a + 1, b) for a, b in pairwise(kept) if b - a > 1]
    # Every gap gets one point, and of the points left a share by its length; sums never exceed the limit.
    left = limit - len(kept) - len(gaps)
    length = sum(end - start - 1 for start, end in gaps)
    out = [series[0]]
    for a, b in pairwise(kept):
        if b - a > 1:
            parts = 1 + (b - a - 2) * left // length
            edges = [a + 1 + (b - a - 1) * i // parts for i in range(parts + 1)]
            out += [_merge(series[start:end]) for start, end in pairwise(edges)]
        out.append(series[b])
    return out


def _merge(series: Sequence[TimelinePoint]) -> TimelinePoint:
    last, count = series[-1], sum(p.iterations for p in series)
    return TimelinePoint(
        t=last.t,
        layout=last.layout,
        live=last.live,
        tokens=sum(p.tokens for p in series),
        iteration_ms=sum(p.iteration_ms * p.iterations for p in series) / count,
        iterations=count,
    )


def percentiles(iterations: Sequence[Iteration]) -> dict[Layout, Percentiles]:
    """p50, p90 and p99 of iteration durations in ms for each layout used (linear interpolation)."""
    by_layout: dict[Layout, list[float]] = {}
    for iteration in iterations:
        by_layout.setdefault(_layout(iteration), []).append(iteration.ms)
    result = {}
    for layout, ms in sorted(by_layout.items()):
        p50, p90, p99 = (float(value) for value in np.percentile(ms, [50, 90, 99]))
        result[layout] = Percentiles(p50=p50, p90=p90, p99=p99, count=len(ms))
    return result


def _layout(iteration: Iteration) -> Layout:
    if iteration.layout == "EP":
        return "EP"
    if iteration.layout == "TP":
        return "TP"
    raise BadInput(f"iteration at {iteration.t} s: layout must be EP or TP, got {iteration.layout!r}")
