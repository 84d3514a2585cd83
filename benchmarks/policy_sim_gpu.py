"""Puts steps that ran on GPUs (`moebius bench policies`) into the results of `benchmarks.policy_sim`."""

from __future__ import annotations

from typing import Any

from moebius.rollout.bench.results import Results, portable
from moebius.rollout.errors import BadInput

TAKEN = (
    "sim_error_pct", "sim_error_median_pct", "cost_error_pct", "predictive_vs_fixed_measured_pct",
    "predictive_vs_fixed_simulated_pct", "sign_agrees_fixed", "predictive_vs_fixed_low_measured_pct",
    "predictive_vs_fixed_low_simulated_pct", "sign_agrees_fixed_low", "predictive_vs_better_static_pct",
)  # fmt: skip
_NOTE = (
    "sim_error_pct, cost_error_pct and whatever has measured in its name: steps on GPUs (series.gpu has machine, "
    "command and every step), which neither calibration nor any tuning has seen; simulated beforehand from their "
    "lengths alone by costs that were calibrated in the same run."
)


def with_gpu_steps(results: Results, measured: Results) -> Results:
    """`results` with the numbers and steps of `measured`. Raises BadInput unless those are of GPUs."""
    if measured.benchmark != "policies":
        raise BadInput(f"these are results of bench {measured.benchmark}: give those of `moebius bench policies`")
    if measured.options.get("setup", {}).get("device") != "cuda":
        raise BadInput("these steps did not run on GPUs; times on CPU are those of `python -m benchmarks.policy_sim`")
    source = portable(measured).model_dump(mode="json")
    part = {name: source[name] for name in ("machine", "versions", "command", "date", "options", "results", "notes")}
    return _put(results, part | {"steps": source["series"]["steps"], "costs": source["series"]["costs"]})


def keep_gpu_steps(results: Results, earlier: Results) -> Results:
    """`results` with the steps on GPUs that an earlier file had, if any."""
    part = earlier.series.get("gpu")
    return results if part is None else _put(results, part)


def _put(results: Results, part: dict[str, Any]) -> Results:
    numbers = results.results | {name: part["results"][name] for name in TAKEN}
    if "sim_error_cpu_pct" not in numbers and "sim_error_pct" in results.results and "gpu" not in results.series:
        numbers["sim_error_cpu_pct"] = results.results["sim_error_pct"]
    notes = [*(note for note in results.notes if note != _NOTE), _NOTE]
    notes = [note.replace(" No step on GPUs is compared here.", "") for note in notes]
    notes = [f"sim_error_cpu_pct{note.removeprefix('sim_error_pct')}" if _is_old(note) else note for note in notes]
    return results.model_copy(update={"results": numbers, "series": results.series | {"gpu": part}, "notes": notes})


def _is_old(note: str) -> bool:
    """Written when the CPU's steps were the only ones."""
    return note.startswith("sim_error_pct: the largest difference")
