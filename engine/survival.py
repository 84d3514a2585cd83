"""How many of the running samples will still run later: output lengths learnt from samples that ended.

Life tables (the estimator of Kaplan and Meier, 1958, on a grid of ages) of this step and of earlier ones. Everything is
a function of numbers that all ranks share, so that all ranks forecast alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
_RATIO = 1.02  # ages of the grid grow by this, at least by 1
_DECAY = 0.5  # weight of a step against the one after it
_STEPS = 8  # steps that are remembered
_LEAST = 8  # samples that must have ended before anything is forecast
_SPARSE = 10.0  # at risk; below, single samples would decide, and a fitted tail does instead
_TRUST = 50.0  # ended samples at which this step's own pace counts as much as earlier steps'
_SIBLINGS = 2.0  # ended siblings at which a prompt's own pace counts as much as the average's
_SCORES = 48  # points of a fitted tail
_BUCKETS = 16  # prompts of like pace are forecast together


def age_grid(cap: int) -> Array:
    """Ages 0, 1, 2, ... growing by 2 % from where that is more than 1, up to at least `cap`."""
    ages = [0.0]
    while ages[-1] < cap:
        ages.append(max(ages[-1] + 1, math.floor(ages[-1] * _RATIO)))
    return np.asarray(ages)


def kaplan_meier(
    lengths: Sequence[float], ended: Sequence[bool], grid: Array, weights: Sequence[float] | None = None
) -> Array:
    """Share of samples longer than each age of `grid`; `ended[i]` is False for a sample cut off at `lengths[i]`.

    With a grid of all whole ages this is Kaplan and Meier's product limit.
    """
    table = LifeTable(grid)
    weight = [1.0] * len(lengths) if weights is None else weights
    for length, whole, share in zip(lengths, ended, weight, strict=True):
        table.add(length, share, ended=whole)
    return np.exp(-_cumulative(*table.risk()))


class LifeTable:
    """Deaths and cut-offs by age: bin i holds lengths in (grid[i], grid[i + 1]]."""

    def __init__(self, grid: Array) -> None:
        self.grid = grid
        self.deaths: Array = np.zeros(len(grid) - 1)
        self.cut: Array = np.zeros(len(grid) - 1)

    def add(self, length: float, count: float = 1.0, *, ended: bool = True) -> None:
        """`count` samples of about `length` tokens."""
        bin_ = min(len(self.deaths) - 1, max(0, int(np.searchsorted(self.grid, length)) - 1))
        (self.deaths if ended else self.cut)[bin_] += count

    def risk(self, waiting: float = 0.0) -> tuple[Array, Array]:
        """(deaths, at risk) by bin; `waiting` samples are alive beyond the last bin."""
        gone = self.deaths + self.cut
        # Samples cut off within a bin were at risk in it, as Kaplan and Meier count them.
        at_risk = waiting + gone[::-1].cumsum()[::-1]
        return self.deaths, at_risk


def _cumulative(deaths: Array, at_risk: Array) -> Array:
    """Cumulative hazard at the ages of the grid; len(deaths) + 1 values from 0."""
    share = np.divide(deaths, at_risk, out=np.zeros_like(deaths), where=at_risk > 0)
    return np.concatenate([[0.0], np.cumsum(-np.log(np.maximum(1e-12, 1.0 - share)))])


class Survival:
    """P(length > age): a life table as far as it is dense, a lognormal tail from there, nobody beyond `cap`."""

    def __init__(self, grid: Array, deaths: Array, at_risk: Array, cap: float) -> None:
        self.cap = cap
        self._grid, self._hazard = grid, _cumulative(deaths, at_risk)
        dense = np.nonzero((deaths > 0) & (at_risk >= _SPARSE))[0]
        self._join = float(grid[dense[-1] + 1]) if len(dense) else 0.0
        self._mu, self._sigma = self._tail(grid, deaths, at_risk)

    def _tail(self, grid: Array, deaths: Array, at_risk: Array) -> tuple[float, float]:
        """Lognormal through the table's upper half: least squares of normal scores on log age."""
        usable = np.nonzero((deaths > 0) & (at_risk >= min(_SPARSE, at_risk.max(initial=0.0))))[0]
        ages, survival = grid[usable + 1], np.exp(-self._hazard[usable + 1])
        kept = (survival > 1e-6) & (survival < 1 - 1e-6) & (ages >= 1)
        upper = kept & (survival <= 0.5)
        chosen = np.nonzero(upper if upper.sum() >= 3 else kept)[0]
        if len(chosen) < 3:
            return math.nan, math.nan
        chosen = chosen[np.unique(np.linspace(0, len(chosen) - 1, _SCORES).round().astype(int))]
        score = np.asarray([NormalDist().inv_cdf(1.0 - s) for s in survival[chosen]])
        log_age = np.log(ages[chosen])
        centred = log_age - log_age.mean()
        if float((centred**2).sum()) < 1e-9:
            return math.nan, math.nan
        slope = max(0.2, float((centred * score).sum() / (centred**2).sum()))  # sigma of at most 5
        return float(log_age.mean() - score.mean() / slope), 1.0 / slope

    def log_at(self, age: npt.ArrayLike) -> Array:
        """log P(length > age); -inf from `cap` on."""
        x = np.maximum(0.0, np.asarray(age, dtype=np.float64))
        table = -np.interp(x, self._grid, self._hazard)
        if math.isnan(self._mu):
            out = table
        else:
            join = -np.interp(self._join, self._grid, self._hazard)
            tail = join + _log_normal_above(x, self._mu, self._sigma)
            tail -= _log_normal_above(np.asarray([self._join]), self._mu, self._sigma)[0] if self._join > 0 else 0.0
            out = np.where(x > self._join, tail, table)
        found: Array = np.where(x >= self.cap, -np.inf, out)
        return found

    def age_at(self, share: float) -> float:
        """The age that `share` of the samples outlive."""
        ages = self._grid[self._grid < self.cap]
        values = self.log_at(ages)
        return float(np.interp(-math.log(max(share, 1e-12)), -values, ages))


def _log_normal_above(age: Array, mu: float, sigma: float) -> Array:
    """log P(X > age) of a lognormal variable."""
    scores = (np.log(np.maximum(age, 1e-9)) - mu) / sigma / math.sqrt(2.0)
    return np.asarray([_log_erfc_half(score) for score in scores.ravel()]).reshape(scores.shape)


def _log_erfc_half(x: float) -> float:
    """log(erfc(x) / 2), also where erfc underflows (Abramowitz and Stegun 7.1.23)."""
    if x < 25.0:
        return math.log(math.erfc(x) / 2.0)
    return -x * x - math.log(2.0 * x * math.sqrt(math.pi))


@dataclass(frozen=True, slots=True)
class LiveForecast:
    """At each offset: the chance that any sample still runs, and how many do if any does (at least 1)."""

    any: Array
    live: Array


class LengthEstimator:
    """Learns output lengths over steps. Call `begin_step`, `advance` after every iteration, `forecast` when needed.

    With `finished` lengths (and the prompts they belong to) `advance` uses them; without, it takes every sample that
    ended to be as old as running ones are on average: exact when all start together, as in a rollout step.
    """

    def __init__(self) -> None:
        self._history: list[LifeTable] = []  # latest first
        self._grid = age_grid(1)
        self._table = LifeTable(self._grid)
        self._curve: Survival | None = None  # of the history
        self._samples = self._live = self._ended = 0
        self._siblings: dict[int, list[float]] = {}  # prompt -> log lengths of its ended samples
        self._running: dict[int, int] = {}  # prompt -> running samples
        self._cap = 1
        self.age = 0.0  # mean output tokens of running samples

    def begin_step(self, samples: int, cap: int, groups: Mapping[int, int] | None = None) -> None:
        """`samples` start, each of at most `cap` tokens; `groups` says how many belong to each prompt."""
        self.end_step()
        if self._ended >= _LEAST:
            self._history = [self._table, *self._history][:_STEPS]
        if cap > self._cap:
            self._grid = age_grid(cap)
            self._history = [_regrid(table, self._grid) for table in self._history]
        self._cap = cap
        self._curve = self._of_history()
        self._table = LifeTable(self._grid)
        self._samples = self._live = samples
        self._ended, self.age = 0, 0.0
        self._siblings, self._running = {}, dict(groups or {})

    def end_step(self, *, broken_off: bool = False) -> None:
        """Nothing runs any more. What was live at the last count has ended since; or was cut short, if `broken_off`."""
        if self._live:
            self._end(self.age + (0 if broken_off else 1), self._live, ended=not broken_off)
        self._live = 0

    @property
    def ready(self) -> bool:
        """Whether enough samples have ended, in this step or earlier ones."""
        return bool(self._history) or self._ended >= _LEAST

    def advance(
        self,
        live: int,
        tokens: int | None = None,
        finished: Sequence[tuple[int, int, bool]] | None = None,
        came: Mapping[int, int] | None = None,
    ) -> None:
        """An iteration is over: `live` are left, it sampled `tokens` (None: one each), and `finished` ended.

        `finished` has (prompt, output tokens, whether it ended by itself: False for an abort), `came` how many samples
        of each prompt joined the step. They may lag behind `live` by some iterations.
        """
        before = max(self._live, 1)
        self.age += (before if tokens is None else min(tokens, before)) / before
        if finished is not None:
            for prompt, length, ended in finished:
                self._end(max(1, length), 1, ended=ended)
                self._siblings.setdefault(prompt, []).append(math.log(max(1, length)))
                if prompt in self._running:  # below zero where samples end before it is told that they came
                    self._running[prompt] -= 1
            for prompt, count in (came or {}).items():
                self._running[prompt] = self._running.get(prompt, 0) + count
        elif live < self._live:
            self._end(max(1.0, self.age), self._live - live, ended=True)
        if live > self._live:  # new requests in the middle of a step: the mean age falls
            self.age *= self._live / live
            self._samples += live - self._live
        self._live = live

    def _end(self, length: float, count: int, *, ended: bool) -> None:
        self._table.add(length, count, ended=ended)
        self._ended += count if ended else 0

    def survival(self) -> tuple[Survival, float]:
        """The survival curve to use, and by how much this step's samples are longer than it says."""
        if self._curve is None:
            table = self._until_now(*self._table.risk(waiting=float(self._live)))
            return Survival(self._grid, *table, self._cap), 1.0
        curve = self._curve
        share = (self._live + 0.5) / (self._samples + 1.0)
        if self.age < 2 or self._ended == 0:
            return curve, 1.0
        expected = max(1.0, curve.age_at(share))
        trust = self._ended / (self._ended + _TRUST)
        return curve, float(np.exp(trust * math.log(max(self.age, 1.0) / expected)))

    def _of_history(self) -> Survival | None:
        if not self._history:
            return None
        deaths, at_risk = np.zeros(len(self._grid) - 1), np.zeros(len(self._grid) - 1)
        for steps_ago, table in enumerate(self._history, 1):
            past, risk = table.risk()
            deaths += _DECAY**steps_ago * past
            at_risk += _DECAY**steps_ago * risk
        return Survival(self._grid, deaths, at_risk, self._cap)

    def _until_now(self, deaths: Array, at_risk: Array) -> tuple[Array, Array]:
        # The bin of the present age is not over: its samples have not had the time to end in it.
        seen = self._grid[1:] <= self.age
        return np.where(seen, deaths, 0.0), np.where(seen, at_risk, 0.0)

    def forecast(self, offsets: Array) -> LiveForecast:
        """What runs `offsets` iterations from now, of the samples that run now."""
        curve, pace = self.survival()
        log_none = np.zeros(len(offsets))
        mean = np.zeros(len(offsets))
        for own, count in self._paces():
            factor = pace * own
            start = curve.log_at(np.asarray([self.age / factor]))[0]
            if math.isinf(start):  # older than anything possible: it ends with the next iteration
                alive = (offsets <= 0).astype(np.float64)
            else:
                alive = np.exp(np.minimum(0.0, curve.log_at((self.age + offsets) / factor) - start))
            alive = np.where(self.age + offsets >= self._cap, 0.0, alive)
            mean += count * alive
            log_none += count * np.log1p(-np.minimum(alive, 1.0 - 1e-15))
        any_ = -np.expm1(log_none)
        return LiveForecast(any_, np.maximum(1.0, mean / np.maximum(any_, 1e-300)))

    def _paces(self) -> list[tuple[float, float]]:
        """(pace against the average, running samples) of prompts, those of like pace together."""
        running = {prompt: count for prompt, count in self._running.items() if count > 0}
        ended = [value for values in self._siblings.values() for value in values]
        total = sum(running.values())
        if not total or len(ended) < _LEAST:
            return [(1.0, float(self._live))]
        average = math.fsum(ended) / len(ended)
        paces = {}
        for prompt in running:
            own = self._siblings.get(prompt, ())
            weight = len(own) / (len(own) + _SIBLINGS)
            paces[prompt] = weight * (math.fsum(own) / len(own) - average) if own else 0.0
        low, high = min(paces.values()), max(paces.values())
        width = max((high - low) / _BUCKETS, 1e-9)
        buckets: dict[int, tuple[float, float]] = {}
        for prompt, count in running.items():
            index = min(_BUCKETS - 1, int((paces[prompt] - low) / width))
            sum_, members = buckets.get(index, (0.0, 0.0))
            buckets[index] = (sum_ + count * paces[prompt], members + count)
        scale = self._live / total
        # Slow prompts are over-represented among those that still run; the average of what runs is the step's pace.
        mean = math.fsum(count * paces[prompt] for prompt, count in running.items()) / total
        return [(math.exp(sum_ / members - mean), scale * members) for sum_, members in buckets.values()]


def _regrid(table: LifeTable, grid: Array) -> LifeTable:
    new = LifeTable(grid)
    for i, (deaths, cut) in enumerate(zip(table.deaths, table.cut, strict=True)):
        if deaths:
            new.add(table.grid[i + 1], deaths)
        if cut:
            new.add(table.grid[i + 1], cut, ended=False)
    return new
