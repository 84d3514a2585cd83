"""Arithmetic of the benchmarks: windows, spreads, crossovers and the time of an ideal switch. Pure; no engine here."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

# Two-sided 95 % quantiles of Student's t by degrees of freedom (1 to 30; above, the normal's 1.96 is near enough).
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_FINE = 8  # live counts below this have a bin each
_RATIO = 1.15  # width of the bins above


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and spread of measured values, in their unit."""

    n: int
    median: float
    p10: float
    p90: float
    iqr: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Quantiles by linear interpolation. Raises ValueError without values."""
        if not values:
            raise ValueError("no values to take a median of")
        p10, p25, p50, p75, p90 = (float(q) for q in np.percentile(values, [10, 25, 50, 75, 90]))
        return cls(len(values), p50, p10, p90, p75 - p25)

    @classmethod
    def pooled(cls, rounds: Sequence[Sequence[float]]) -> Spread:
        """Of the values of all rounds together."""
        return cls.of([value for values in rounds for value in values])


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and its 95 % confidence interval (Student's t); the interval of one value is that value."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, mean, mean
    t = _T95[len(values) - 2] if len(values) <= len(_T95) + 1 else 1.96
    half = t * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def full_durations(ends: Sequence[float], tokens: Sequence[int], full: int, settle: int, most: int) -> list[float]:
    """Seconds of iterations in which the whole batch decoded: the last `most` of them, in order.

    Iteration i ended at `ends[i]` seconds and gave `tokens[i]` tokens; a whole batch gives `full`. The first `settle`
    whole ones are left out, because with asynchronous scheduling the pass that prefilled last runs beside the first of
    them. The last ones are taken, because then all requests have decoded for about equally long.
    """
    whole = [i for i, count in enumerate(tokens) if count == full and i > 0]
    durations = [ends[i] - ends[i - 1] for i in whole[settle:] if tokens[i - 1] == full]
    return durations[-most:]


def window_means(durations: Sequence[float], size: int) -> list[float]:
    """Means of consecutive windows of `size` values; a remainder shorter than that is left out."""
    return [statistics.fmean(durations[i : i + size]) for i in range(0, len(durations) - size + 1, size)]


def slowest_rank(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Window by window the longest time over the ranks; windows that not all ranks have are left out."""
    return [max(values) for values in zip(*by_rank, strict=False)]


def crossover(batches: Sequence[int], ep: Sequence[float], tp: Sequence[float]) -> float | None:
    """The largest batch at which TP's time, below EP's for smaller ones, reaches EP's; None if that never happens.

    Log-linear interpolation of the ratio between neighbouring batches, which must ascend.
    """
    gaps = [math.log(a / b) for a, b in zip(ep, tp, strict=True)]  # positive: TP is faster
    found = None
    for (b0, g0), (b1, g1) in pairwise(zip(batches, gaps, strict=True)):
        if g0 > 0 >= g1:
            share = g0 / (g0 - g1)
            found = math.exp(math.log(b0) + share * (math.log(b1) - math.log(b0)))
    return found


def bin_of(live: int) -> int:
    """Index of the bin of a live count (at least 1): single counts first, then bins that grow by 15 %."""
    return live if live < _FINE else _FINE + int(math.log(live / _FINE) / math.log(_RATIO))


class LiveCurve:
    """Mean milliseconds of an iteration against the number of live requests, in bins."""

    def __init__(self, iterations: Sequence[tuple[int, float]]) -> None:
        """`iterations` are (live requests, ms) of at least one iteration."""
        if not iterations:
            raise ValueError("no iterations to make a curve of")
        bins: dict[int, list[tuple[int, float]]] = {}
        for live, ms in iterations:
            bins.setdefault(bin_of(live), []).append((live, ms))
        self._ms = {index: statistics.fmean(ms for _, ms in members) for index, members in bins.items()}
        self._live = {index: statistics.fmean(live for live, _ in members) for index, members in bins.items()}

    def at(self, live: int) -> float:
        """Mean ms of the live count's bin; of the nearest bin where this one saw no iteration."""
        index = bin_of(live)
        if index not in self._ms:
            index = min(self._ms, key=lambda known: abs(known - index))
        return self._ms[index]

    def points(self) -> list[tuple[float, float]]:
        """(mean live count, mean ms) of each bin, ascending."""
        return [(self._live[index], self._ms[index]) for index in sorted(self._ms)]


def ideal_ms(live: Sequence[int], ep: LiveCurve, tp: LiveCurve) -> float:
    """Time of the iterations with these live counts if each ran in its faster layout and a switch cost nothing.

    The minimum of two noisy curves lies below the minimum of the true ones, so this errs to the side of a better ideal.
    """
    return sum(min(ep.at(count), tp.at(count)) for count in live)


def best_switch(live: Sequence[int], ep: LiveCurve, tp: LiveCurve) -> tuple[int, float]:
    """The best single free switch: (threshold, ms), with TP where the live count is at most `threshold`; 0 is never."""
    best = (0, sum(ep.at(count) for count in live))
    for threshold in sorted(set(live)):
        total = sum(tp.at(count) if count <= threshold else ep.at(count) for count in live)
        if total < best[1]:
            best = (threshold, total)
    return best


def split_prefill(tokens: Sequence[int], live_before: Sequence[int]) -> int:
    """Number of leading iterations until every live request sampled a token; 0 if that never happens (queueing)."""
    for i, (count, live) in enumerate(zip(tokens, live_before, strict=True)):
        if count >= live > 0:
            return i
    return 0
