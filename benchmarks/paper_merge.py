"""Results of `benchmarks/paper.sh` as one file: the figures that were measured, and what the planner says of each.

A figure whose step was not run is not in the file.
"""

from __future__ import annotations

import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.paper_steps import Setting, model_config, plan_model, steps_of
from moebius.engine.costs import CostModel
from moebius.engine.layout import Layout
from moebius.rollout.bench.mover import DIRECTIONS
from moebius.rollout.bench.results import Results, make_results, portable, read_results
from moebius.rollout.bench.stats import crossover, mean_interval
from moebius.rollout.cost_files import expected_switch
from moebius.rollout.errors import BadInput
from moebius.rollout.plan_model import H200, Gpu, PlanModel, expected_points, load_gpu
from moebius.rollout.planner import PAPER
from moebius.rollout.simulate import Simulator, Trace

GIB = 2**30
# The paper's figures for Qwen3-235B-A22B on eight H200s (arXiv:2606.26607, sections 2.1 and 6).
PUBLISHED = {
    "reshard_pct_nominal": "70",
    "switch_drained_ms": "152",
    "switch_live_min_ms": "215",
    "switch_live_max_ms": "434",
    "rollout_ratio_vs_better_static": f"{PAPER['gain_low']} to {PAPER['gain_high']}",
    "memory_overhead_pct": "2.4",
    "crossover_batch": "128 to 256",
    "ep_over_tp_8": "1.5",
    "tp_over_ep_2048": "1.5",
}


def merge(setting: Setting, folder: Path, to: Path) -> Path:
    """Write `<to>/<setting>.json`; returns its path. Raises BadInput when no step has results."""
    found = {
        step.name: read_results(folder / step.file) for step in steps_of(setting) if (folder / step.file).is_file()
    }
    if not found:
        raise BadInput(f"{folder}: no step has results yet")
    model, gpu = plan_model(setting, folder), load_gpu("h200")
    plan = expected_costs(model, gpu, setting.gpus)
    notes = [f"not measured: {step.name}" for step in steps_of(setting) if step.name not in found]
    numbers: dict[str, float] = {}
    beside: list[dict[str, Any]] = []
    if "switch" in found:
        numbers |= switch_figures(found["switch"], gpu if setting.device == "cuda" else None, notes)
        _beside(beside, "switch_drained_ms", float(plan.switch_ms(Layout.TP, 0, 0)), numbers["switch_drained_ms"])
        for row in (row for row in by_fill(found["switch"]) if not row["prepared"]):
            expected = statistics.fmean(float(plan.switch_ms(to, row["live"], row["kv_tokens"])) for to in Layout)
            _beside(beside, f"switch_live_{row['fill']}_ms", expected, row["ms"])
    numbers |= memory_figures(found)
    numbers |= sweep_figures(found, plan, beside)
    numbers |= rollout_figures([found[name] for name in sorted(found) if name.startswith("rollout_")], plan, beside)
    if setting.device != "cuda":
        notes.append("on CPU with a tiny model: times mean nothing, and neither does what an H200 would take of them")
    elif not all("H200" in name for results in found.values() for name in results.machine["gpus"]):
        notes.append("the planner's figures are those of H200s; these are others")
    config = model_config(setting, folder)
    options: dict[str, Any] = {
        "gpus": setting.gpus,
        "model": setting.shape,
        "layers": model.shape.num_layers,
        "all_layers": setting.layers is None,
        "weights": "random",
        "dtype": str(config.get("torch_dtype", config.get("dtype", ""))) if setting.device == "cuda" else "float32",
        "kv_gib_per_rank": setting.kv_gib,
        "kv_heads": model.shape.num_kv_heads,
        "kv_head_copies_in_tp": max(1, setting.gpus // model.shape.num_kv_heads),
        "kv_bytes_per_token": {layout.value: model.kv_bytes(layout, setting.gpus) for layout in Layout},
    }
    series = {
        "steps": {name: _source(results) for name, results in found.items()},
        "live": by_fill(found["switch"]) if "switch" in found else [],
        "planner": beside,
        "published": {name: value for name, value in PUBLISHED.items() if name in numbers}
        if _is_papers(setting)
        else {},
    }
    made = make_results(
        setting.name,
        command=f"benchmarks/paper.sh merge {folder.name}",
        options=options,
        results=dict(sorted(numbers.items())),
        series=series,
        notes=notes,
    )
    first = next(iter(found.values()))
    machines = Counter(str(results.machine) for results in found.values())
    if len(machines) > 1:
        made.notes.append("steps ran on more than one machine: series.steps says which")
    # Of the machine that measured, not of the one that put the file together.
    made = made.model_copy(update={"machine": first.machine, "versions": first.versions})
    made.date = max(results.date for results in found.values())
    return portable(made).write(to)


def _is_papers(setting: Setting) -> bool:
    return setting.gpus == 8 and setting.shape == "235b" and setting.layers is None


def _source(results: Results) -> dict[str, Any]:
    """Where a step's figures come from, and all of them."""
    return {
        "machine": results.machine, "versions": results.versions, "command": results.command, "date": results.date,
        "results": results.results, "notes": results.notes,
    }  # fmt: skip


def _beside(rows: list[dict[str, Any]], name: str, planned: float, measured: float) -> None:
    rows.append({"figure": name, "planned": planned, "measured": measured, "off_pct": 100 * (planned / measured - 1)})


def expected_costs(model: PlanModel, gpu: Gpu, ranks: int) -> CostModel:
    """What `moebius plan` goes by before anything was measured on this machine."""
    return CostModel(
        ranks=ranks,
        points=expected_points(model, gpu, ranks, H200),
        switches=expected_switch(model, gpu, ranks),
        expected=["iterations", "context", "switch"],
    )


# ---- the figures of each part ---------------------------------------------------------------------------------------


def by_fill(results: Results) -> list[dict[str, Any]]:
    """Live switches by fill and by whether they were prepared: median pause over both directions, KV held."""
    groups: dict[tuple[int, bool], list[dict[str, Any]]] = {}
    for switch in results.series["live"]:
        groups.setdefault((switch["fill"], bool(switch["prepared"])), []).append(switch)
    rows = []
    for (fill, prepared), switches in sorted(groups.items()):
        row: dict[str, Any] = {"fill": fill, "prepared": prepared, "switches": len(switches)}
        row["ms"] = statistics.median(switch["pause_ms"] for switch in switches)
        for to, name in (("TP", "to_tp_ms"), ("EP", "to_ep_ms")):
            if pauses := [switch["pause_ms"] for switch in switches if switch["to"] == to]:
                row[name] = statistics.median(pauses)
        row["live"] = round(statistics.median(switch["live"] for switch in switches))
        row["kv_tokens"] = round(statistics.median(switch["kv_tokens"] for switch in switches))
        row["kv_gb_sent"] = statistics.median(switch["kv_bytes"] for switch in switches) / 1e9
        row["kv_use_pct"] = 100 * max(switch["kv_use_before"] for switch in switches)
        rows.append(row)
    return rows


def switch_figures(results: Results, gpu: Gpu | None, notes: list[str]) -> dict[str, float]:
    """Start-up, switches, movers against the link; against its nominal rate only where there is a `gpu`."""
    given = results.results
    names = ("startup_s", "switch_drained_ms", "switch_drained_tp_ep_ms", "ceiling_gbps", "reshard_nccl_ratio",
             "kv_pct", "kv_nccl_ratio", "prepare_slowdown_pct")  # fmt: skip
    numbers = {name: given[name] for name in names if name in given}
    rates = {
        short: speed["gb_per_s"]
        for speed in results.series["movers"]["speeds"]
        for direction, short in zip(DIRECTIONS, ("ep_tp", "tp_ep"), strict=True)
        # Of all movers in the file, the one that the results are of.
        if speed["what"] == f"experts {direction}" and speed["ms"] == given.get(f"reshard_{short}_ms")
    }
    for short in rates:
        numbers[f"reshard_{short}_pct_ceiling"] = given[f"reshard_{short}_pct"]
    if len(rates) == 2:
        numbers["reshard_pct_ceiling"] = min(given["reshard_ep_tp_pct"], given["reshard_tp_ep_pct"])
    if gpu is not None:
        numbers |= {f"reshard_{short}_pct_nominal": 100 * rate / gpu.link_gb_s for short, rate in rates.items()}
        if len(rates) == 2:
            numbers["reshard_pct_nominal"] = 100 * min(rates.values()) / gpu.link_gb_s
        notes.append(f"nominal: {gpu.link_gb_s:.0f} GB/s in one direction, as of an H200")
    rows = by_fill(results)
    plain = [row for row in rows if not row["prepared"]]
    numbers["switch_live_min_ms"], numbers["switch_live_max_ms"] = plain[0]["ms"], plain[-1]["ms"]
    numbers["switch_live_min_kv_tokens"] = float(plain[0]["kv_tokens"])
    numbers["switch_live_max_kv_tokens"] = float(plain[-1]["kv_tokens"])
    if prepared := [row for row in rows if row["prepared"]]:
        numbers["commit_pause_ms"] = prepared[0]["ms"]
        numbers["commit_pause_kv_tokens"] = float(prepared[0]["kv_tokens"])
    notes += [note for note in results.notes if "prepared" in note or "left out" in note]
    ranks = results.series["ranks"]
    for layout in ("EP", "TP"):
        worst = max(rank["overhead_bytes"][layout] for rank in ranks)
        numbers[f"account_over_static_{layout.lower()}_gb"] = worst / 1e9
        if ranks[0]["account"]["device"] == "cuda":
            numbers[f"account_over_static_{layout.lower()}_pct"] = 100 * worst / ranks[0]["account"]["device_bytes"]
    return numbers


def memory_figures(found: dict[str, Results]) -> dict[str, float]:
    """Driver's figures of the engines alone, and ours less the larger static one as a share of a GPU."""
    used, device = {}, 0.0
    for name in ("moebius", "stock_ep", "stock_tp"):
        if (results := found.get(f"memory_{name}")) is not None:
            used[name], device = results.results[f"{name}_driver_used_gib"], results.results["device_gib"]
    numbers = {f"memory_{name}_gib": gib for name, gib in used.items()}
    if len(used) == 3:
        larger = max(used["stock_ep"], used["stock_tp"])
        numbers["memory_overhead_pct"] = 100 * (used["moebius"] - larger) / device
    return numbers


def sweep_figures(found: dict[str, Results], plan: CostModel, beside: list[dict[str, Any]]) -> dict[str, float]:
    """Iterations by batch of every engine, ratios of layouts and engines, graphs against none."""
    curves: dict[str, dict[int, float]] = {}
    context = 0.0
    for step, label in (
        ("sweep_moebius", ""), ("sweep_stock_ep", ""), ("sweep_stock_tp", ""), ("sweep_deepep", "deepep"),
        ("sweep_eager", "eager"),
    ):  # fmt: skip
        if step not in found:
            continue
        options = found[step].options
        context = options["context"] + options["settle"] + options["iterations"] / 2
        for curve in found[step].curves:
            name = f"{label}_{curve.name.rsplit('_', 1)[-1]}" if label else curve.name
            curves[name] = {round(float(x)): y for x, y in zip(curve.x, curve.y, strict=True)}
    numbers = {f"{name}_{batch}_ms": ms for name, points in curves.items() for batch, ms in points.items()}
    ours = {layout: curves.get(f"moebius_{layout}", {}) for layout in ("ep", "tp")}
    for layout in ("ep", "tp"):
        for other, name in ((f"stock_{layout}", "over_stock"), (f"eager_{layout}", "eager_over_graphs")):
            for batch in sorted(ours[layout].keys() & curves.get(other, {}).keys()):
                ratio = ours[layout][batch] / curves[other][batch]
                numbers[f"{name}_{layout}_{batch}"] = 1 / ratio if name.startswith("eager") else ratio
        for batch, ms in ours[layout].items():
            _beside(beside, f"moebius_{layout}_{batch}_ms", float(plan.ms(Layout(layout.upper()), batch, context)), ms)
    both = sorted(ours["ep"].keys() & ours["tp"].keys())
    if len(both) >= 2:
        lead = {batch: ours["ep"][batch] / ours["tp"][batch] for batch in both}
        numbers |= {f"ep_over_tp_{both[0]}": lead[both[0]], f"tp_over_ep_{both[-1]}": 1 / lead[both[-1]]}
        crossing = crossover(both, [ours["ep"][b] for b in both], [ours["tp"][b] for b in both])
        if crossing is not None:
            numbers["crossover_batch"] = crossing
            _beside(beside, "crossover_batch", float(plan.threshold(context)), crossing)
    return numbers


def rollout_figures(runs: list[Results], plan: CostModel, beside: list[dict[str, Any]]) -> dict[str, float]:
    """Means over steps of different lengths; the ratio is each step's better static layout over ours."""
    ratios, planned, names = [], [], ("static_ep_s", "static_tp_s", "switched_s")
    whole = [run.results for run in runs if set(names) <= run.results.keys()]
    if not whole:
        return {}
    for run in runs:
        numbers = run.results
        if not set(names) <= numbers.keys():
            continue
        ratios.append(min(numbers["static_ep_s"], numbers["static_tp_s"]) / numbers["switched_s"])
        simulator = Simulator(Trace(tuple(run.series["lengths"]), int(run.options["prompt"])), plan)
        planned.append(simulator.best_static().seconds / simulator.oracle_single().seconds)
    mean, low, high = mean_interval(ratios)
    found = {f"rollout_{name}": statistics.fmean(numbers[name] for numbers in whole) for name in names}
    found |= {"rollout_ratio_vs_better_static": mean, "rollout_steps": float(len(ratios))}
    if len(ratios) > 1:
        found |= {"rollout_ratio_ci_low": low, "rollout_ratio_ci_high": high}
    _beside(beside, "rollout_ratio_vs_better_static", statistics.fmean(planned), mean)
    return found
