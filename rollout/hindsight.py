"""A finished step in hindsight: what static layouts would have taken, and how well the costs describe what it took."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moebius.engine.costs import CostModel
from moebius.engine.layout import Layout
from moebius.rollout.errors import BadInput
from moebius.rollout.report_types import EndToEnd, StaticTimes, StepReport
from moebius.rollout.simulate import Simulator, Trace, projection

SHARES = (0.65, 0.75, 0.85)  # of a training step's time that rollouts take, as published for RL of long answers
_SAME = 0.02  # by which tokens of samples and of iterations may differ before a step counts as having parked samples


@dataclass(frozen=True, slots=True)
class Counterfactual:
    """Seconds of decoding this step's samples, by the costs."""

    static_ep_s: float
    static_tp_s: float
    best_single_s: float | None  # the best one switch, in hindsight; None where samples joined or were parked
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


def static_times(report: StepReport, costs: CostModel | None, source: str) -> StaticTimes:
    """The report's entry about static layouts; where `counterfactual` cannot tell, its reason in words."""
    if costs is None:
        return StaticTimes(source=None, reason=f"no costs: {source or 'none were given'}")
    try:
        found = counterfactual(report, costs)
    except (BadInput, ValueError) as error:  # ValueError: no switch was measured
        return StaticTimes(source=source, reason=str(error))
    return StaticTimes(
        static_ep_s=found.static_ep_s,
        static_tp_s=found.static_tp_s,
        best_single_s=found.best_single_s,
        gain=found.gain,
        end_to_end=end_to_end(found.gain),
        source=source,
        reason=None,
    )


def end_to_end(gain: float, shares: tuple[float, ...] = SHARES) -> list[EndToEnd]:
    """What a gain makes of whole training steps, by the share that rollouts take of their time (Amdahl)."""
    return [EndToEnd(rollout_share=share, speedup=projection(gain, share)) for share in shares]


def told(report: StepReport) -> Counterfactual | None:
    """What a report itself says; None where it says that there is nothing."""
    static, durations = report.counterfactual, report.durations_s
    if static.static_ep_s is None or static.static_tp_s is None:
        return None
    measured = durations.burst + durations.switch + durations.tail
    return Counterfactual(static.static_ep_s, static.static_tp_s, static.best_single_s, measured)


def counterfactual(report: StepReport, costs: CostModel) -> Counterfactual:
    """What static layouts would have taken for this very step.

    Where all samples began together they are simulated one by one. Where samples joined, or were parked or resumed, the
    step is gone through point by point of its timeline instead, with as many samples as decoded then: in time, samples
    would have come at other moments of a faster or slower step, which is left out. Raises BadInput for a step without
    tokens, or costs of another number of ranks, ValueError for costs without a switch.
    """
    trace = _trace(report, costs)
    durations = report.durations_s
    measured = durations.burst + durations.switch + durations.tail
    if not _began_together(report):
        ep, tp = (_by_timeline(report, costs, layout) for layout in (Layout.EP, Layout.TP))
        return Counterfactual(ep, tp, None, measured)
    simulator = Simulator(trace, costs)
    return Counterfactual(
        static_ep_s=simulator.static(Layout.EP).seconds,
        static_tp_s=simulator.static(Layout.TP).seconds,
        best_single_s=simulator.oracle_single().seconds,
        measured_s=measured,
    )


def _began_together(report: StepReport) -> bool:
    times = report.sample_times
    if times is not None and any(times.arrived_s):
        return False
    sampled = sum(point.tokens for point in report.timeline)
    return abs(sampled - report.counts.output_tokens) <= _SAME * max(1, report.counts.output_tokens)


def _by_timeline(report: StepReport, costs: CostModel, layout: Layout) -> float:
    """Seconds of the timeline's iterations in a layout."""
    points = [point for point in report.timeline if point.tokens]
    decoding = np.array([point.tokens / point.iterations for point in points])
    count = np.array([point.iterations for point in points], dtype=np.float64)
    fullest = costs.fullest(decoding) if layout is Layout.EP else None
    held = _contexts(report, np.array([point.t for point in points]))
    return float((count * costs.ms(layout, decoding, held, fullest)).sum()) / 1e3


def _contexts(report: StepReport, at: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Mean tokens that running samples hold at these seconds, each sample taken to grow evenly while it runs."""
    prompts = np.array([s.prompt_tokens for s in report.samples], dtype=np.float64)
    lengths = np.array([s.output_tokens for s in report.samples], dtype=np.float64)
    mean = float((prompts + lengths / 2).mean())
    times = report.sample_times
    if times is None:
        return np.full(len(at), mean)
    begin, end = np.array(times.arrived_s), np.array(times.ended_s)
    found = np.full(len(at), mean)
    for i, t in enumerate(at):
        running = (begin <= t) & (t < end)
        if running.any():
            share = (t - begin[running]) / np.maximum(1e-9, end[running] - begin[running])
            found[i] = float((prompts[running] + share * lengths[running]).mean())
    return found


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
        held = min(live * costs.ranks, max(live, fullest * costs.ranks)) if layout is Layout.EP else None
        ms = float(costs.ms(layout, live, trace.prompt_tokens + age, held))
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
    return Trace(tuple(lengths), round(prompt), ranks=tuple(sample.rank for sample in report.samples))
