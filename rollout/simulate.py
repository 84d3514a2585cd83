"""Replays output lengths through calibrated costs: static layouts, policies, and the best that hindsight could do.

The policies are the engine's own objects, called before every iteration as the step loop calls them. What is not
simulated: prefill beyond a fixed rate, and samples that wait for KV memory; a note says when they would have to.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from moebius.engine.config import PolicyConfig
from moebius.engine.costs import Array, CostModel
from moebius.engine.layout import Layout
from moebius.engine.policy import Finished, Observation, StepStart, SwitchPolicy
from moebius.engine.predict import Forecaster
from moebius.engine.survival import LiveForecast
from moebius.rollout.errors import BadInput

_FLAT = 0.01  # thresholds within this share of the best one count as equally good


@dataclass(frozen=True, slots=True)
class Trace:
    """Samples that start together. Sample i belongs to prompt i // group and, in EP, to rank `ranks[i]`."""

    lengths: tuple[int, ...]  # output tokens, at least 1
    prompt_tokens: int = 0  # of every sample
    cap: int | None = None  # longest output allowed; None: as long as the longest here
    group: int = 1  # samples per prompt
    ranks: tuple[int, ...] | None = None  # None: sample i is on rank i modulo their number

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise BadInput("a trace needs at least one sample, and every length must be at least 1 token")
        if self.cap is not None and max(self.lengths) > self.cap:
            raise BadInput(f"the trace's longest output is {max(self.lengths)} tokens, its cap {self.cap}")

    @property
    def longest(self) -> int:
        """Longest output allowed."""
        return self.cap or max(self.lengths)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a layout can hold; None: anything."""

    kv_tokens: Mapping[Layout, int] | None = None  # over all ranks
    tp_live: int | None = None  # max_num_seqs

    def refusal(self, to: Layout, live: int, kv_tokens: float) -> str | None:
        """Why a switch does not fit; None when it does."""
        room = (self.kv_tokens or {}).get(to)
        if room is not None and kv_tokens > room:
            return f"{kv_tokens:.0f} tokens of KV, {to.value} holds {room}"
        if to is Layout.TP and self.tp_live is not None and live > self.tp_live:
            return f"{live} live samples, TP runs {self.tp_live} at once"
        return None


@dataclass(frozen=True, slots=True)
class SwitchAt:
    """A switch of a simulated step."""

    iteration: int
    to: Layout
    live: int
    ms: float


@dataclass(slots=True)
class Run:
    """One simulated step."""

    name: str
    seconds: float
    switches: list[SwitchAt] = field(default_factory=list)
    cancelled: int = 0
    policy: SwitchPolicy | None = None  # with the log of its decisions


@dataclass(frozen=True, slots=True)
class Flatness:
    """Thresholds (live samples) whose single switch is within 1 % of the best one's time."""

    best: int
    low: int
    high: int


class Simulator:
    """One trace under one set of costs. Times are seconds of the whole step."""

    def __init__(self, trace: Trace, costs: CostModel, limits: Limits | None = None, *, lag: int = 1) -> None:
        """`lag`: iterations by which the counts a policy sees are old; the step loop's are one old."""
        self.trace, self.costs, self.limits, self.lag = trace, costs, limits or Limits(), lag
        lengths = np.asarray(trace.lengths, dtype=np.float64)
        ages = np.arange(lengths.max())
        self.live = _live(lengths, ages)
        places = np.arange(len(lengths)) % costs.ranks if trace.ranks is None else np.asarray(trace.ranks)
        fullest = np.max([_live(lengths[places == rank], ages) for rank in range(costs.ranks)], axis=0)
        context = trace.prompt_tokens + ages
        self.kv_tokens: Array = self.live * context
        self.ms: dict[Layout, Array] = {
            Layout.EP: costs.ms(Layout.EP, self.live, context, fullest * costs.ranks),
            Layout.TP: costs.ms(Layout.TP, self.live, context),
        }
        self.switch_ms = {to: costs.switch_ms(to, self.live, self.kv_tokens) for to in (Layout.EP, Layout.TP)}
        self.fits = {
            to: np.asarray(
                [
                    self.limits.refusal(to, int(live), tokens) is None
                    for live, tokens in zip(self.live, self.kv_tokens, strict=True)
                ]
            )
            for to in (Layout.EP, Layout.TP)
        }
        prompt = len(trace.lengths) * trace.prompt_tokens
        self.prefill_s = {
            layout: prompt * costs.prefill_us_per_token.get(layout, 0.0) / 1e6 for layout in (Layout.EP, Layout.TP)
        }

    def notes(self) -> list[str]:
        """What the simulation leaves out for this trace."""
        room = (self.limits.kv_tokens or {}).get(Layout.EP)
        if room is not None and self.kv_tokens.max() > room:
            return [f"samples hold up to {self.kv_tokens.max():.0f} tokens of KV, EP has room for {room}: they wait"]
        return []

    # ---- references -----------------------------------------------------------------------------------------------

    def static(self, layout: Layout) -> Run:
        """The whole step in one layout, without any switch."""
        return Run(f"static_{layout.value.lower()}", self.prefill_s[layout] + float(self.ms[layout].sum()) / 1e3)

    def best_static(self) -> Run:
        """The better static layout, which only hindsight knows."""
        return min((self.static(Layout.EP), self.static(Layout.TP)), key=lambda run: run.seconds)

    def oracle_single(self) -> Run:
        """The best step that starts in EP and switches to TP at most once, or that runs in TP from the start."""
        totals = self._single_totals()
        at = int(np.argmin(totals))
        never, tp = self.static(Layout.EP).seconds, self.static(Layout.TP).seconds
        if min(never, tp) <= totals[at]:
            return Run("oracle_single", min(never, tp))
        switch = SwitchAt(at, Layout.TP, int(self.live[at]), float(self.switch_ms[Layout.TP][at]))
        return Run("oracle_single", float(totals[at]), [switch])

    def oracle(self) -> Run:
        """The best of all, with any number of switches and a free choice of the first layout (dynamic programming)."""
        ep, tp = self.ms[Layout.EP].tolist(), self.ms[Layout.TP].tolist()
        to_ep, to_tp = (np.where(self.fits[to], self.switch_ms[to], math.inf).tolist() for to in (Layout.EP, Layout.TP))
        best_ep = best_tp = 0.0  # from iteration k to the end, when it begins in that layout
        for k in range(len(ep) - 1, -1, -1):
            stay_ep, stay_tp = ep[k] + best_ep, tp[k] + best_tp
            best_ep, best_tp = min(stay_ep, to_tp[k] + stay_tp), min(stay_tp, to_ep[k] + stay_ep)
        return Run("oracle", min(self.prefill_s[Layout.EP] + best_ep / 1e3, self.prefill_s[Layout.TP] + best_tp / 1e3))

    def flatness(self) -> Flatness:
        """How much the choice of a fixed threshold matters."""
        totals = self._single_totals()
        first = np.concatenate([[True], self.live[1:] < self.live[:-1]])  # where a threshold takes effect
        counts, seconds = self.live[first], totals[first]
        counts = np.append(counts, 0)
        seconds = np.append(seconds, self.static(Layout.EP).seconds)
        good = counts[seconds <= (1 + _FLAT) * seconds.min()]
        return Flatness(int(counts[np.argmin(seconds)]), int(good.min()), int(good.max()))

    def _single_totals(self) -> Array:
        """Seconds when the one switch comes before iteration k, for every k; infinite where it does not fit."""
        before = np.concatenate([[0.0], np.cumsum(self.ms[Layout.EP])[:-1]])
        after = np.cumsum(self.ms[Layout.TP][::-1])[::-1]
        total: Array = self.prefill_s[Layout.EP] + (before + self.switch_ms[Layout.TP] + after) / 1e3
        return np.where(self.fits[Layout.TP], total, math.inf)

    # ---- policies -------------------------------------------------------------------------------------------------

    def run(
        self,
        config: PolicyConfig,
        *,
        name: str | None = None,
        policy: SwitchPolicy | None = None,
        exact: bool = False,
        siblings: bool = False,
    ) -> Run:
        """The step under a policy, which starts in EP.

        Args:
            policy: one that has run steps before and knows their lengths; None: a fresh one.
            exact: forecast with the trace itself, to tell estimates' faults from the rule's.
            siblings: tell the policy which prompts' samples end.
        """
        policy = policy or SwitchPolicy(config, self.costs)
        policy.config, policy.costs = config, self.costs
        truth = ExactLengths(self.live) if exact else None
        policy.forecaster = truth
        trace = self.trace
        groups = Counter(i // trace.group for i in range(len(trace.lengths)))
        policy.begin_step(
            StepStart(len(trace.lengths), trace.prompt_tokens, trace.longest, groups if siblings else None)
        )
        ends = self._ends() if siblings else None
        run = Run(name or config.kind, 0.0, policy=policy)
        layout, elapsed = Layout.EP, 1e3 * self.prefill_s[Layout.EP]
        live, ms = self.live.tolist(), {key: values.tolist() for key, values in self.ms.items()}
        for k in range(len(live)):
            known = max(0, k - self.lag)
            if truth is not None:
                truth.now = k
            decision = policy.decide(
                Observation(
                    k,
                    live[known],
                    layout,
                    seconds=elapsed / 1e3,
                    tokens=live[known - 1] if known else (0 if k else None),
                    finished=None if ends is None else ends.get(known, ()),
                )
            )
            if (to := decision.target) is not None:
                if self.fits[to][k]:
                    policy.switched()
                    cost = float(self.switch_ms[to][k])
                    run.switches.append(SwitchAt(k, to, live[k], cost))
                    elapsed += cost
                    layout = to
                else:
                    policy.cancelled(k)
                    run.cancelled += 1
            elapsed += ms[layout][k]
        run.seconds = elapsed / 1e3
        return run

    def _ends(self) -> dict[int, tuple[Finished, ...]]:
        """Samples by the iteration at whose beginning they have ended."""
        ends: dict[int, list[Finished]] = {}
        for i, length in enumerate(self.trace.lengths):
            ends.setdefault(length, []).append(Finished(i // self.trace.group, length))
        return {k: tuple(samples) for k, samples in ends.items()}


class ExactLengths(Forecaster):
    """What will really run: `live[k]` samples in iteration k; `now` is the present iteration."""

    def __init__(self, live: Array) -> None:
        self._live = np.asarray(live, dtype=np.float64)
        self.now = 0

    def forecast(self, offsets: Array) -> LiveForecast:
        """The truth, 0 beyond the last iteration."""
        at = self.now + np.floor(np.asarray(offsets)).astype(int)
        live = np.where(at < len(self._live), self._live[np.minimum(at, len(self._live) - 1)], 0.0)
        return LiveForecast((live > 0).astype(np.float64), np.maximum(1.0, live))


def _live(lengths: Array, ages: Array) -> Array:
    """How many of `lengths` are above each of `ages`."""
    ordered = np.sort(lengths)
    found: Array = (len(ordered) - np.searchsorted(ordered, ages, side="right")).astype(np.float64)
    return found


def projection(gain: float, share: float) -> float:
    """Speed-up of a whole training step when its rollout, `share` of the time, is `gain` times as fast (Amdahl).

    Raises BadInput for a gain that is not positive or a share outside 0..1.
    """
    if gain <= 0 or not 0 <= share <= 1:
        raise BadInput(f"a projection needs a positive gain and a share from 0 to 1, got {gain} and {share}")
    return 1.0 / (1.0 - share + share / gain)


def compare(
    traces: Sequence[Trace], costs: CostModel, threshold: int, limits: Limits | None = None, *, siblings: bool = False
) -> list[dict[str, float]]:
    """Every trace under all layouts and policies, one row each, as consecutive steps: predictive keeps what it learns.

    Seconds by name; `switch_live_<policy>` is the live count at its switch (0: none).
    """
    keeps: SwitchPolicy | None = None
    rows = []
    for trace in traces:
        simulator = Simulator(trace, costs, limits)
        fixed = simulator.run(PolicyConfig(kind="rollout", threshold=threshold), name="fixed")
        adaptive = PolicyConfig(kind="predictive", threshold=threshold)
        predictive = simulator.run(adaptive, policy=keeps, siblings=siblings)
        keeps = predictive.policy
        exact = simulator.run(adaptive, name="predictive_exact", exact=True)
        flat = simulator.flatness()
        runs = [
            simulator.static(Layout.EP), simulator.static(Layout.TP), fixed, predictive, exact,
            simulator.oracle_single(), simulator.oracle(),
        ]  # fmt: skip
        row = {run.name: run.seconds for run in runs}
        for run in (fixed, predictive, exact):
            row[f"switch_live_{run.name}"] = float(run.switches[0].live) if run.switches else 0.0
        row |= {"best_threshold": float(flat.best), "flat_low": float(flat.low), "flat_high": float(flat.high)}
        rows.append(row)
    return rows
