"""`moebius bench policies`: the simulator against steps that ran, and the predictive policy against fixed thresholds.

Costs are calibrated on the running engine. Then fresh steps, whose lengths calibration has not seen, are decoded under
both static layouts, fixed thresholds and the predictive policy in turn, and each is compared with what the simulator
makes of its lengths and the costs. Times are decoding: from the first iteration in which all samples decode, switches
included.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from moebius.engine.calibrate import Grid
from moebius.engine.config import PolicyConfig
from moebius.engine.costs import CostModel
from moebius.engine.layout import Layout
from moebius.engine.policy import SwitchPolicy
from moebius.engine.types import StepOutcome
from moebius.rollout.bench import traces
from moebius.rollout.bench.engines import Engines
from moebius.rollout.bench.fleet import Fleet
from moebius.rollout.bench.results import Curve, Picture, Results, make_results
from moebius.rollout.bench.traces import Workload
from moebius.rollout.errors import BadInput, MoebiusError
from moebius.rollout.hindsight import check
from moebius.rollout.report import build_report
from moebius.rollout.report_lifelines import prefill_points
from moebius.rollout.report_types import StepReport
from moebius.rollout.simulate import Simulator, Trace

FLAT_PCT = 1.0  # differences below it are no more than steps differ from run to run
_LOW = 8  # the second fixed threshold is this part of the first, as a guess without calibration may be


class PoliciesOptions(BaseModel):
    """What to run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    requests: int = Field(512, ge=2, description="Samples per step.")
    prompt: int = Field(traces.DEEPMATH_PROMPT, ge=1, description="Prompt tokens of every sample.")
    scale: float = Field(0.1, gt=0, description="Factor on DeepMath's lengths.")
    cap: int = Field(896, ge=1, description="Longest output.")
    steps: int = Field(3, ge=1, description="Fresh steps, each under every policy.")
    threshold: int | None = Field(None, ge=1, description="Of the fixed policy; None: where the costs cross.")
    batches: list[int] = Field(default=[1, 2, 8, 32, 64, 128, 256, 512], min_length=1, description="To calibrate.")
    contexts: list[int] = Field(default=[128, 1024], min_length=1, description="To calibrate: prompt tokens.")
    iterations: int = Field(32, ge=4, description="To calibrate: iterations per layout and point.")
    seed: int = 0


@dataclass(slots=True)
class Played:
    """A step that ran under a policy, and what was predicted for it."""

    policy: str
    step: int
    measured_s: float
    simulated_s: float  # by its lengths, before it ran
    by_costs_s: float  # by the live counts it really had
    switch_live: list[int] = field(default_factory=list)
    simulated_switch_live: list[int] = field(default_factory=list)
    iterations: int = 0
    by_layout_pct: dict[str, float] = field(default_factory=dict)

    @property
    def error_pct(self) -> float:
        """Simulated over measured; negative: too short."""
        return 100 * (self.simulated_s / self.measured_s - 1)

    @property
    def cost_error_pct(self) -> float:
        """The same without errors in when samples end and when the policy switches."""
        return 100 * (self.by_costs_s / self.measured_s - 1)


def policies_of(threshold: int) -> dict[str, PolicyConfig]:
    """What every step runs under, by name."""
    return {
        "static_ep": PolicyConfig(kind="static_ep"),
        "static_tp": PolicyConfig(kind="static_tp"),
        "fixed": PolicyConfig(kind="rollout", threshold=threshold),
        "fixed_low": PolicyConfig(kind="rollout", threshold=max(1, threshold // _LOW)),
        "predictive": PolicyConfig(kind="predictive", threshold=threshold),
    }


def run_policies(engines: Engines, options: PoliciesOptions, command: str = "bench policies") -> Results:
    """Calibrate the running engine, run the steps, and compare."""
    if "moebius" not in {spec.name for spec in engines.specs}:
        raise BadInput("bench policies needs the engine moebius; add it to --engines")
    fleet, capacity, say, ranks = (
        engines.fleet("moebius"),
        engines.capacity("moebius"),
        engines.say,
        engines.setup.ranks,
    )
    steps = [_lengths(options, step) for step in range(-1, options.steps)]  # of the first, lengths are learnt
    longest = options.prompt + max(map(max, steps))
    if longest > capacity.max_model_len:
        raise BadInput(
            f"the longest sample has {longest} tokens, the engine takes {capacity.max_model_len}: lower --cap or "
            "--scale, or raise engine.max_model_len"
        )
    notes = engines.notes()
    peak = max(traces.peak_tokens(lengths, options.prompt) for lengths in steps)
    room = 0.9 * capacity.page_tokens * min(capacity.pages["EP"] * ranks, capacity.pages["TP"])
    if peak > room or options.requests > capacity.max_num_seqs:
        notes.append(
            f"steps hold up to {peak} tokens of KV with {options.requests} samples, there is room for {room:.0f} and "
            f"{capacity.max_num_seqs}: samples had to wait, which is not simulated"
        )
    grid = Grid(tuple(options.batches), tuple(options.contexts), options.iterations, options.seed)
    say("calibrating ...")
    # Kept in no cache: made on engines that share their GPUs.
    costs, left_out = fleet.call(_calibrate, grid)[0]
    notes += left_out
    context = options.prompt + statistics.median(steps[1])
    threshold = options.threshold or costs.threshold(context)
    configs = policies_of(max(1, threshold))
    say(f"the layouts cross at {costs.threshold(context)} live samples; the fixed policy switches at {threshold}")
    simulated = SwitchPolicy(configs["predictive"], costs)  # learns what the real one learns, step by step
    played: list[Played] = []
    with _lent(fleet):
        for number, lengths in enumerate(steps, start=-1):
            load = Workload((options.prompt,) * len(lengths), tuple(lengths), options.seed + 1 + number, capacity.vocab)
            trace = Trace(tuple(lengths), options.prompt, options.cap, ranks=_owners(load, ranks))
            simulator = Simulator(trace, costs)
            names = ["predictive"] if number < 0 else _turn(list(configs), number)
            expected = {name: simulate(simulator, name, configs[name], simulated) for name in configs}
            for name in names:
                outcomes = fleet.call(_run, load, configs[name], costs)
                if number < 0:
                    continue
                report = build_report(
                    outcomes, step=number, policy_version=0, model="bench", device=engines.setup.device,
                    prompt_tokens=[options.prompt] * len(lengths), costs_from="",
                )  # fmt: skip
                played.append(compared(report, costs, name, *expected[name]))
                say(f"step {number} {name}: {played[-1].measured_s:.3f} s, simulated {played[-1].simulated_s:.3f} s")
    return _summarise(engines, options, costs, context, threshold, steps[1:], played, notes, command)


@contextmanager
def _lent(fleet: Fleet) -> Iterator[None]:
    """Within, the engine's policy is the benchmark's. After it, failed or not, the engine has its own costs again."""
    try:
        yield
    finally:
        if fleet.problem is None:
            fleet.call(_restore)


def _lengths(options: PoliciesOptions, step: int) -> list[int]:
    seed = 1000 * (options.seed + 1) + step
    return traces.deepmath_like(options.requests, seed=seed, scale=options.scale, cap=options.cap)


def _owners(load: Workload, ranks: int) -> tuple[int, ...]:
    owner = {i: rank for rank in range(ranks) for i in load.indices(rank, ranks)}
    return tuple(owner[i] for i in range(len(load.lengths)))


def _turn(names: list[str], step: int) -> list[str]:
    """Another order in each step, so that slow drift meets all alike."""
    return names[step % len(names) :] + names[: step % len(names)]


def simulate(simulator: Simulator, name: str, config: PolicyConfig, learning: SwitchPolicy) -> tuple[float, list[int]]:
    """Seconds of the step under a policy, and live counts at its switches. `learning` goes on with this step."""
    if name.startswith("static"):
        return simulator.static(Layout.EP if name == "static_ep" else Layout.TP).seconds, []
    learns = config.kind == "predictive"
    run = simulator.run(config, policy=learning if learns else None, siblings=learns)
    return run.seconds, [switch.live for switch in run.switches]


def decoding_s(report: StepReport) -> float:
    """Seconds of burst, switches and tail, without the iterations before all samples decode."""
    prefill = report.timeline[: prefill_points(report)]
    durations = report.durations_s
    total = durations.burst + durations.switch + durations.tail
    return total - sum(p.iteration_ms * p.iterations for p in prefill) / 1e3


def compared(
    report: StepReport, costs: CostModel, policy: str, simulated_s: float, simulated_live: Sequence[int]
) -> Played:
    """A step beside its predictions. The empty switch with which static TP begins belongs to neither."""
    if policy == "static_tp" and not report.switches:
        raise MoebiusError("the engine did not get into TP for the static step; see the ranks' logs")
    switches = [] if policy == "static_tp" else report.switches
    found = check(report, costs)
    by_costs = sum(float(costs.switch_ms(Layout(s.to), s.live, s.kv_tokens)) for s in switches) / 1e3
    measured = decoding_s(report)
    if policy == "static_tp":
        measured -= report.durations_s.switch
    return Played(
        policy=policy,
        step=report.step,
        measured_s=measured,
        simulated_s=simulated_s,
        by_costs_s=found.predicted_s + by_costs,
        switch_live=[s.live for s in switches],
        simulated_switch_live=list(simulated_live),
        iterations=found.iterations,
        by_layout_pct=found.by_layout_pct,
    )


def numbers_of(played: Sequence[Played], notes: list[str]) -> dict[str, float]:
    """Errors over all steps, means by policy, and what the predictive policy gains, measured and simulated."""
    by_policy: dict[str, list[Played]] = {}
    for one in played:
        by_policy.setdefault(one.policy, []).append(one)
    errors = [abs(one.error_pct) for one in played]
    numbers = {
        "sim_error_pct": max(errors),
        "sim_error_median_pct": statistics.median(errors),
        "cost_error_pct": max(abs(one.cost_error_pct) for one in played),
        "steps": float(len(by_policy["fixed"])),
    }
    for name, runs in by_policy.items():
        numbers[f"{name}_s"] = statistics.fmean(one.measured_s for one in runs)
        numbers[f"{name}_simulated_s"] = statistics.fmean(one.simulated_s for one in runs)
    better = [
        min(ep.measured_s, tp.measured_s) for ep, tp in zip(by_policy["static_ep"], by_policy["static_tp"], strict=True)
    ]
    numbers["predictive_vs_better_static_pct"] = _gain(better, [one.measured_s for one in by_policy["predictive"]])
    for other in ("fixed", "fixed_low"):
        real, expected = (
            _gain(
                [getattr(one, what) for one in by_policy[other]],
                [getattr(one, what) for one in by_policy["predictive"]],
            )
            for what in ("measured_s", "simulated_s")
        )
        numbers |= {f"predictive_vs_{other}_measured_pct": real, f"predictive_vs_{other}_simulated_pct": expected}
        if abs(expected) < FLAT_PCT:
            notes.append(
                f"predictive against {other}: {expected:+.2f} % expected, {real:+.2f} % measured; below "
                f"{FLAT_PCT:.0f} % the sign says nothing"
            )
        numbers[f"sign_agrees_{other}"] = float(agrees(real, expected))
    return numbers


def agrees(real: float, expected: float) -> bool:
    """Whether a measured gain in per cent has the expected one's sign, or both are too small to have one."""
    if abs(expected) < FLAT_PCT:
        return abs(real) < FLAT_PCT
    return real * expected > 0


def _gain(others: Sequence[float], own: Sequence[float]) -> float:
    """Mean of the steps' gains in per cent; positive: `own` took less time."""
    return 100 * statistics.fmean(other / mine - 1 for other, mine in zip(others, own, strict=True))


def _summarise(
    engines: Engines,
    options: PoliciesOptions,
    costs: CostModel,
    context: float,
    threshold: int,
    steps: Sequence[Sequence[int]],
    played: list[Played],
    notes: list[str],
    command: str,
) -> Results:
    numbers = numbers_of(played, notes)
    numbers |= {
        "threshold": float(threshold),
        "crossover": float(costs.threshold(context)),
        "output_tokens": float(sum(map(sum, steps))),
    }
    names = list(policies_of(threshold))
    rows = [
        {
            "policy": one.policy, "step": one.step, "measured_s": one.measured_s, "simulated_s": one.simulated_s,
            "by_costs_s": one.by_costs_s, "error_pct": one.error_pct, "cost_error_pct": one.cost_error_pct,
            "switch_live": one.switch_live, "simulated_switch_live": one.simulated_switch_live,
            "iterations": one.iterations, "by_layout_pct": one.by_layout_pct,
        }
        for one in played
    ]  # fmt: skip
    return make_results(
        "policies",
        command=command,
        options=options.model_dump() | {"setup": engines.setup.model_dump(mode="json")},
        results=numbers,
        curves=[
            Curve(name="measured", x=list(names), y=[numbers[f"{name}_s"] for name in names]),
            Curve(name="simulated", x=list(names), y=[numbers[f"{name}_simulated_s"] for name in names]),
        ],
        picture=Picture(
            kind="bars",
            title=f"{options.requests} samples, {options.steps} steps, {engines.setup.ranks} ranks",
            y_label="seconds of decoding (mean of the steps)",
        ),
        series={"steps": rows, "costs": costs.model_dump(mode="json"), "lengths": [list(lengths) for lengths in steps]},
        notes=notes,
    )


# ---- called in every rank -------------------------------------------------------------------------------------------


def _calibrate(subject: Any, grid: Grid) -> tuple[CostModel, list[str]]:
    from moebius.engine.calibrate import calibrate

    engine = subject.engine
    policy = engine.policy
    subject.policy_before = (policy.config, policy.costs, policy.lengths)
    subject.lessons = type(policy.lengths)()
    return calibrate(engine, grid, key={})


def _run(subject: Any, load: Workload, policy: PolicyConfig, costs: CostModel) -> StepOutcome:
    """One step; experts that an earlier one left in TP go back before, as a weight update would have it."""
    engine = subject.engine
    estimator = type(engine.policy.lengths)
    engine.policy.config, engine.policy.costs = PolicyConfig(kind="static_ep"), costs
    engine.policy.lengths = estimator()
    subject.step(Workload((1,), (1,), load.seed, load.vocab))
    # Only what it decoded itself is a lesson for it: other policies run steps of the very same lengths.
    engine.policy.lengths = subject.lessons if policy.kind == "predictive" else estimator()
    engine.policy.config = policy
    outcome: StepOutcome = subject.step(load)
    return outcome


def _restore(subject: Any) -> None:
    policy = subject.engine.policy
    policy.config, policy.costs, policy.lengths = subject.policy_before
