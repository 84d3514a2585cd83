"""A finished step in hindsight: what static layouts would have taken, and how well the costs describe what it took."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moebius.engine.costs import CostModel
from moebius.engine.layout import Layout
from moebius.rollout.errors import BadInput
from moebius.rollout.report_types import StepReport
from moebius.rollout.simulate import Simulator, Trace


@dataclass(frozen=True, slots=True)
class Counterfactual:
    """Seconds of decoding this step's samples, by the costs. `switches_s` is what its switches really took."""

    static_ep_s: float
    static_tp_s: float
    best_single_s: float  # the best one switch, in hindsight
    measured_s: float  # what it took: burst, switch and tail

    @property
    def gain(self) -> float:
        """The better static layout over what was measured; above 1 the step won."""
        return min(self.static_ep_s, self.static_tp_s) / self.measured_s if self.measured_s else 1.0


@dataclass(frozen=True, slots=True)
class Check:
    """Costs against a measured step: seconds of its decode iterations, prefill and switches left out."""

    predicted_s: float
    measured_s: float
    iterations: int
    by_layout_pct: dict[str, float]  # predicted over measured, in per cent, of each layout that ran

    @property
    def error_pct(self) -> float:
        """Predicted over measured, in per cent; negative: too short."""
        return 100 * (self.predicted_s / self.measured_s - 1)


def counterfactual(report: StepReport, costs: CostModel) -> Counterfactual:
    """What static layouts would have taken for this very step.

    Raises BadInput for a step without tokens, or costs of another number of ranks.
    """
    simulator = Simulator(_trace(report, costs), costs)
    durations = report.durations_s
    return Counterfactual(
        static_ep_s=simulator.static(Layout.EP).seconds,
        static_tp_s=simulator.static(Layout.TP).seconds,
        best_single_s=simulator.oracle_single().seconds,
        measured_s=durations.burst + durations.switch + durations.tail,
    )


def check(report: StepReport, costs: CostModel) -> Check:
    """How far the costs are off for a step that was measured, best one that was not used to calibrate.

    Iteration by iteration from the step's timeline; those before every live sample had sampled a token (prefill) and
    the points without a live sample are left out. Raises BadInput when nothing is left.
    """
    trace = _trace(report, costs)
    by_rank: dict[int, list[int]] = {}
    for sample in report.samples:
        by_rank.setdefault(sample.rank, []).append(sample.output_tokens)
    lengths = {rank: np.sort(values) for rank, values in by_rank.items()}
    before, age, decoding = len(trace.lengths), 0.0, False
    predicted: dict[str, float] = {}
    measured: dict[str, float] = {}
    iterations = 0
    for point in report.timeline:
        live = max(1.0, point.tokens / point.iterations)  # every one that decodes samples one token
        decoding = decoding or point.tokens >= before * point.iterations * 0.98 > 0
        age += point.tokens / max(1, before)
        before_this, before = before, point.live
        if not decoding or before_this == 0 or point.tokens == 0:
            continue
        layout = Layout(point.layout)
        fullest = max(len(values) - int(np.searchsorted(values, age)) for values in lengths.values())
        batch = min(live * costs.ranks, max(live, fullest * costs.ranks)) if layout is Layout.EP else live
        ms = float(costs.ms(layout, batch, trace.prompt_tokens + age))
        predicted[point.layout] = predicted.get(point.layout, 0.0) + ms * point.iterations / 1e3
        measured[point.layout] = measured.get(point.layout, 0.0) + point.iteration_ms * point.iterations / 1e3
        iterations += point.iterations
    if not measured:
        raise BadInput(f"step {report.step} has no decode iteration with all samples running: nothing to compare")
    return Check(
        predicted_s=sum(predicted.values()),
        measured_s=sum(measured.values()),
        iterations=iterations,
        by_layout_pct={name: 100 * (predicted[name] / measured[name] - 1) for name in measured},
    )


def _trace(report: StepReport, costs: CostModel) -> Trace:
    if costs.ranks != report.ranks:
        raise BadInput(
            f"the costs are of {costs.ranks} ranks, step {report.step} ran on {report.ranks}: calibrate there"
        )
    lengths = [max(1, sample.output_tokens) for sample in report.samples]
    if not lengths:
        raise BadInput(f"step {report.step} has no samples")
    prompt = sum(sample.prompt_tokens for sample in report.samples) / len(lengths)
    return Trace(tuple(lengths), round(prompt))
