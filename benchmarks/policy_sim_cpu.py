"""Steps of a tiny model on CPU ranks against what calibrated costs predict for them."""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from moebius.engine.calibrate import Grid, calibrate
from moebius.engine.config import PolicyConfig
from moebius.engine.costs import CostModel
from moebius.engine.layout import Layout
from moebius.engine.types import SampleKey, SampleRequest
from moebius.rollout.bench.policies import decoding_s
from moebius.rollout.bench.traces import deepmath_like
from moebius.rollout.demo import make_tiny_model
from moebius.rollout.hindsight import check
from moebius.rollout.report import build_report
from moebius.rollout.report_types import StepReport
from moebius.rollout.simulate import Simulator, Trace
from tests.engine.fleet import Fleet
from tests.engine.work import config, make_engine

RANKS = 2
ROUNDS = 3  # calibration and every step in turn, so that a change of the machine's load meets both
GRID = Grid(batches=(1, 2, 4, 8, 16, 32), contexts=(16, 320), iterations=16)
PROMPT = 40
# Samples, policy and seed of each step: none of the batches that were calibrated, lengths that spread.
STEPS = (
    (27, PolicyConfig(kind="rollout", threshold=7), 1),
    (22, PolicyConfig(kind="rollout", threshold=12), 2),
    (30, PolicyConfig(kind="static_ep"), 3),
    (19, PolicyConfig(kind="static_tp"), 4),
    (29, PolicyConfig(kind="predictive", threshold=7), 5),
    (25, PolicyConfig(kind="predictive", threshold=7), 6),
)


def measure_on_cpu() -> dict[str, Any]:
    """Calibrate, run STEPS, and compare each with its prediction; `sim_error_pct` is the largest difference.

    Costs are medians over ROUNDS of calibrations, a step's measured time is the median of its ROUNDS runs.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_tiny_model(Path(folder) / "model"))
        fleet = Fleet(RANKS, make_engine, config(model, enable_prefix_caching=False), timeout_s=900)
        try:
            waited = wait_until_quiet()
            fleet.call(_calibrate, Grid(batches=(8,), contexts=(16,), iterations=8))  # everything is warm after this
            found, runs = [], []
            costs: CostModel | None = None
            for _ in range(ROUNDS):
                found.append(fleet.call(_calibrate, GRID)[0])
                costs = costs or found[0]  # by which the predictive policy decides
                runs.append([_measure(fleet, costs, *step) for step in STEPS])
        finally:
            fleet.close()
    costs = median_of(found)
    rows = [compared(costs, *step, [of_round[i] for of_round in runs]) for i, step in enumerate(STEPS)]
    errors = [abs(row["error_pct"]) for row in rows]
    return {
        "sim_error_pct": max(errors),
        "sim_error_median_pct": statistics.median(errors),
        "rounds": ROUNDS,
        "niceness": os.nice(0),
        "model": "tiny random Qwen3-MoE in fp32, two ranks on CPU, eager",
        "calibrated": {"batches": list(GRID.batches), "contexts": list(GRID.contexts), "iterations": GRID.iterations},
        "waited_for_a_quiet_machine_s": waited,
        "costs": [point.model_dump(mode="json") for point in costs.points],
        "switches": [point.model_dump(mode="json") for point in costs.switches],
        "steps": rows,
    }


def wait_until_quiet(limit_s: float = 60.0) -> float:
    """Seconds waited until others have used less than a tenth of a core for five seconds, at most `limit_s`."""
    begin = time.monotonic()
    while time.monotonic() - begin < limit_s:
        before = busy_cores_s()
        time.sleep(5.0)
        if busy_cores_s() - before < 0.5:
            break
    return time.monotonic() - begin


def busy_cores_s() -> float:
    """Core seconds that this machine has worked since it booted."""
    fields = [int(field) for field in Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / os.sysconf("SC_CLK_TCK")


def median_of(models: list[CostModel]) -> CostModel:
    """Costs whose times are the medians of those of the same points."""
    points = [
        same[0].model_copy(update={"ms": statistics.median(point.ms for point in same)})
        for same in zip(*(model.points for model in models), strict=True)
    ]
    switches = [
        same[0].model_copy(update={"ms": statistics.median(point.ms for point in same)})
        for same in zip(*(model.switches for model in models), strict=True)
    ]
    return models[0].model_copy(update={"points": points, "switches": switches})


def _calibrate(engine: Any, grid: Grid) -> CostModel:
    return calibrate(engine, grid, key={})[0]


def _run(engine: Any, policy: PolicyConfig, costs: CostModel, requests: list[SampleRequest]) -> Any:
    used = time.process_time()
    engine.policy.config, engine.policy.costs = policy, costs
    return engine.run_step(requests), time.process_time() - used


def _measure(fleet: Fleet, costs: CostModel, count: int, policy: PolicyConfig, seed: int) -> tuple[StepReport, float]:
    """A real step, and how many cores others used while it ran."""
    lengths = [max(8, n) for n in deepmath_like(count, seed=seed, scale=0.04, cap=300)]
    rng = random.Random(seed)
    requests = [
        SampleRequest(
            SampleKey(i, 0),
            [rng.randrange(20, 500) for _ in range(PROMPT)],
            {"temperature": 1.0, "max_tokens": length, "ignore_eos": True},
            i,
        )
        for i, length in enumerate(lengths)
    ]
    busy, begin = busy_cores_s(), time.monotonic()
    answers = fleet.call(_run, policy, costs, per_rank=[(requests[rank::RANKS],) for rank in range(RANKS)])
    seconds = time.monotonic() - begin
    others = (busy_cores_s() - busy - sum(used for _, used in answers)) / seconds
    report = build_report(
        [outcome for outcome, _ in answers], step=seed, policy_version=0, model="tiny", device="cpu",
        prompt_tokens=[PROMPT] * count,
    )  # fmt: skip
    return report, max(0.0, others)


def compared(
    costs: CostModel, count: int, policy: PolicyConfig, seed: int, runs: list[tuple[StepReport, float]]
) -> dict[str, Any]:
    """Seconds of a step from the first iteration in which all samples decode, switches included.

    `predicted_s` is the sum over its iterations and its switches by the costs, with live counts as they were in the run
    of median length; `simulated_s` what the simulator makes of the lengths alone, with a switch at the same live count.
    """
    ordered = sorted(runs, key=lambda run: decoding_s(run[0]))
    report = ordered[len(ordered) // 2][0]
    measured = decoding_s(report)
    found = check(report, costs)
    switches = sum(float(costs.switch_ms(Layout(s.to), s.live, s.kv_tokens)) for s in report.switches) / 1e3
    predicted = found.predicted_s + switches
    trace = Trace(tuple(s.output_tokens for s in report.samples), PROMPT, ranks=tuple(s.rank for s in report.samples))
    at = report.switches[0].iteration if report.switches else 10**6
    simulated = Simulator(trace, costs).run(PolicyConfig(kind="scheduled", at_iteration=at))
    return {
        "samples": count,
        "policy": policy.kind,
        "threshold": policy.threshold,
        "seed": seed,
        "longest": max(s.output_tokens for s in report.samples),
        "iterations": found.iterations,
        "switch_live": [s.live for s in report.switches],
        "measured_s": measured,
        "measured_shortest_s": decoding_s(ordered[0][0]),
        "measured_longest_s": decoding_s(ordered[-1][0]),
        "predicted_s": predicted,
        "error_pct": 100 * (predicted / measured - 1),
        "simulated_s": simulated.seconds,
        "simulated_error_pct": 100 * (simulated.seconds / measured - 1),
        "by_layout_pct": found.by_layout_pct,
        "cores_used_by_others": [round(others, 2) for _, others in runs],
    }
