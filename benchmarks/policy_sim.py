"""What the predictive policy is worth in the simulator, and how far the simulator is from real steps.

    python -m benchmarks.policy_sim            # from the repository root; simulations, then steps on CPU; some minutes
    python -m benchmarks.policy_sim --gpu runs/policies/policies.json   # adds what `moebius bench policies` measured

Writes docs/benchmarks/policy_sim.json. Simulated: nine seeds of 2,048 samples with DeepMath's published lengths, by the
iterations measured in docs/benchmarks/sweep_30b_x2.json, and cases in which the moment matters more. Measured: steps of
a tiny model on two CPU ranks, which calibration has not seen, against what the same costs predict.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.policy_sim_cpu import measure_on_cpu
from benchmarks.policy_sim_gpu import keep_gpu_steps, with_gpu_steps
from moebius.engine.config import PolicyConfig
from moebius.engine.costs import CostModel
from moebius.engine.layout import Layout
from moebius.rollout.bench.results import make_results, read_results
from moebius.rollout.bench.traces import DEEPMATH_CAP, DEEPMATH_PROMPT, deepmath_like
from moebius.rollout.cost_cli import summary
from moebius.rollout.cost_files import HostShare, expected_switch, load_costs
from moebius.rollout.plan_model import H200, expected_points, load_gpu, load_model
from moebius.rollout.simulate import Simulator, Trace, compare

ROOT = Path(__file__).resolve().parents[1]
SWEEP = ROOT / "docs" / "benchmarks" / "sweep_30b_x2.json"
SEEDS, SAMPLES = 9, 2048
CPU_NUMBERS = ("sim_error_cpu_pct", "sim_error_pct", "sim_error_median_pct")
QUIET = 0.25  # cores that others may use in the median run of a step, which is the one that counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-cpu", action="store_true", help="only simulate; sim_error_pct is then left out")
    parser.add_argument("--keep-cpu", action="store_true", help="only simulate, and keep the CPU steps that are there")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks", help="folder for policy_sim.json")
    parser.add_argument("--gpu", type=Path, help="results of `moebius bench policies` on GPUs: only put them in")
    chosen = parser.parse_args()
    if chosen.gpu is not None:
        made = with_gpu_steps(read_results(chosen.out / "policy_sim.json"), read_results(chosen.gpu))
        print(json.dumps(made.results, indent=1))
        print(made.write(chosen.out))
        return
    costs = sweep_costs()
    traces = published(SEEDS)
    threshold = costs.threshold(DEEPMATH_PROMPT + statistics.median(traces[0].lengths))
    rows = compare(traces, costs, threshold)
    results = summary(rows) | {"threshold": float(threshold), "requests": float(SAMPLES)}
    results |= {f"time_{name}_pct": share for name, share in outside(traces, costs, threshold).items()}
    cases = {name: case(*parts) for name, parts in other_cases(costs).items()}
    series: dict[str, Any] = {"steps": rows, "cases": cases}
    notes = [*NOTES, *flat_words(results)]
    earlier = chosen.out / "policy_sim.json"
    if chosen.keep_cpu:
        kept = read_results(earlier)
        series["cpu"] = kept.series["cpu"]
        results |= {name: kept.results[name] for name in CPU_NUMBERS if name in kept.results}
        notes += [note for note in kept.notes if note.startswith(CPU_NUMBERS)]
    elif not chosen.no_cpu:
        measured = measure_on_cpu()
        results["sim_error_cpu_pct"] = results["sim_error_pct"] = measured.pop("sim_error_pct")
        results["sim_error_median_pct"] = measured.pop("sim_error_median_pct")
        series["cpu"] = measured
        busy = max(statistics.median(row["cores_used_by_others"]) for row in measured["steps"])
        if busy > QUIET:
            print(json.dumps(measured["steps"], indent=1))
            raise SystemExit(
                f"others used {busy:.2f} cores in most runs of a step, more than {QUIET}: nothing was written; repeat "
                "it on a quiet machine, or leave the measured part out with --no-cpu"
            )
        notes.append(
            "sim_error_cpu_pct: the largest difference between predicted and measured time over steps on two CPU ranks "
            "that were not used to calibrate (series.cpu): how far the simulator goes wrong with costs measured where "
            "the steps ran."
        )
    made = make_results(
        "policy_sim",
        command="python -m benchmarks.policy_sim"
        + (" --keep-cpu" if chosen.keep_cpu else " --no-cpu" if chosen.no_cpu else ""),
        options={"seeds": SEEDS, "requests": SAMPLES, "costs": SWEEP.name, "prompt": DEEPMATH_PROMPT},
        results=results,
        series=series,
        notes=notes,
    )
    if earlier.exists():
        made = keep_gpu_steps(made, read_results(earlier))
    path = made.write(chosen.out)
    print(json.dumps(made.results, indent=1))
    for name, found in cases.items():
        print(name, found)
    print(path)


def sweep_costs(host: HostShare | None = None) -> CostModel:
    """Iterations as measured on two H200s; contexts and switches as expected there."""
    return load_costs(SWEEP, model=load_model("qwen3-30b-a3b", 2), gpu=load_gpu("h200"), host=host)


def published(seeds: int, count: int = SAMPLES, scale: float = 1.0, cap: int = DEEPMATH_CAP) -> list[Trace]:
    """Steps with DeepMath's published lengths."""
    return [
        Trace(tuple(deepmath_like(count, seed=seed, scale=scale, cap=cap)), DEEPMATH_PROMPT, cap)
        for seed in range(seeds)
    ]


def outside(traces: Sequence[Trace], costs: CostModel, threshold: int) -> dict[str, float]:
    """Per cent of the fixed policy's decoding time in iterations whose batch was not measured, by where it lies."""
    spent = {"below_measured_batches": 0.0, "above_measured_batches": 0.0, "total": 0.0}
    for trace in traces:
        simulator = Simulator(trace, costs)
        run = simulator.run(PolicyConfig(kind="rollout", threshold=threshold))
        at = run.switches[0].iteration if run.switches else len(simulator.live)
        ms = np.concatenate([simulator.ms[Layout.EP][:at], simulator.ms[Layout.TP][at:]])
        low, high = costs.measured_range(Layout.EP)
        spent["below_measured_batches"] += float(ms[simulator.live < low].sum())
        spent["above_measured_batches"] += float(ms[simulator.live > high].sum())
        spent["total"] += float(ms.sum())
    return {name: 100 * value / spent["total"] for name, value in spent.items() if name != "total"}


def other_cases(costs: CostModel) -> dict[str, tuple[str, list[Trace], CostModel, int, bool]]:
    """(what it is, steps, costs, fixed threshold, siblings told) by name: where the choice of the moment matters."""
    context = DEEPMATH_PROMPT + 1510
    crossing = costs.threshold(context)
    dear = [sweep_costs(HostShare(ms)) for ms in (500.0, 2000.0)]
    short = published(SEEDS, 256, 0.2, 512)
    unlucky = [
        Trace(tuple(min(DEEPMATH_CAP, n * (3 if i % 8 == 0 else 1)) for i, n in enumerate(trace.lengths)),
              trace.prompt_tokens, DEEPMATH_CAP)
        for trace in published(SEEDS, 256)
    ]  # fmt: skip
    model, gpu = load_model("qwen3-235b-a22b", 8), load_gpu("h200")
    big = CostModel(
        ranks=8, points=expected_points(model, gpu, 8, H200), switches=expected_switch(model, gpu, 8),
        expected=["iterations", "switch"],
    )  # fmt: skip
    grouped = [Trace(_grouped(seed), DEEPMATH_PROMPT, DEEPMATH_CAP, 16) for seed in range(SEEDS)]
    steps = published(SEEDS)
    small = "256 samples, a fifth of the lengths, cap 512"
    return {
        "threshold_half": ("the fixed threshold at half of the crossing", steps, costs, crossing // 2, False),
        "threshold_fourfold": ("the fixed threshold at four times the crossing", steps, costs, 4 * crossing, False),
        "small_steps": (small, short, costs, crossing, False),
        "small_steps_switch_500_ms": (f"{small}; the host's part of a switch 500 ms", short, dear[0], crossing, False),
        "small_steps_switch_2000_ms": (f"{small}; the host's part 2,000 ms", short, dear[1], crossing, False),
        "unlucky_lengths": ("256 samples, one in eight three times as long", unlucky, costs, crossing, False),
        "grouped": (
            "128 prompts of 16 samples alike in length, whose ends are told", grouped, costs, crossing, True
        ),
        "235b_x8": (
            "Qwen3-235B-A22B on eight GPUs, all costs computed", steps, big, big.threshold(context), False
        ),
    }  # fmt: skip


def _grouped(seed: int) -> tuple[int, ...]:
    """2,048 lengths with the published spread, two thirds of its variance (of logarithms) between prompts."""
    rng = np.random.default_rng(seed)
    sigma = np.log(10386 / 1510) / 2.3263
    own = rng.normal(size=SAMPLES) * sigma * (1 / 3) ** 0.5
    shared = np.repeat(rng.normal(size=SAMPLES // 16), 16) * sigma * (2 / 3) ** 0.5
    return tuple(int(min(DEEPMATH_CAP, max(1, round(1510 * float(np.exp(a)))))) for a in own + shared)


def case(what: str, traces: list[Trace], costs: CostModel, threshold: int, siblings: bool) -> dict[str, Any]:
    """Means over the steps."""
    numbers = summary(compare(traces, costs, threshold, siblings=siblings))
    kept = ("predictive_vs_fixed_mean_pct", "predictive_vs_fixed_worst_pct", "predictive_vs_oracle_pct",
            "predictive_vs_oracle_worst_pct", "fixed_s", "predictive_s", "oracle_single_s", "static_ep_s",
            "static_tp_s")  # fmt: skip
    return {"what": what, "threshold": threshold} | {name: numbers[name] for name in kept}


NOTES = (
    "simulated, not measured: every time but those in series.cpu and series.gpu.",
    (
        "measured in the costs: decode iterations on two H200s at batches 8 to 2,048 in EP and 8 to 1,024 in TP, and a "
        "context of about 41 tokens."
    ),
    (
        "expected in the costs: what longer contexts add (KV bytes at the data sheet's memory rate), and the switch "
        "(bytes at measured shares of the link's rate; 15 ms and 0.1 ms per request assumed for the host)."
    ),
    (
        "extrapolated: below batch 8 iterations are taken to last as long as at 8, above the largest one the curves go "
        "on with their last slope; time_below_measured_batches_pct and time_above_measured_batches_pct say how much "
        "time lies outside EP's."
    ),
    "the oracle may also run in TP from the start without a switch, which no policy that starts in EP can.",
    "235b_x8: nothing of it is measured, see docs/planner.md.",
)


def flat_words(results: dict[str, float]) -> list[str]:
    """How flat the optimum is, in words."""
    return [
        (
            f"the optimum is flat: thresholds from {results['flat_low_mean']:.0f} to {results['flat_high_mean']:.0f} "
            "are within 1 % of the best one on average over the steps."
        )
    ]


if __name__ == "__main__":
    main()
