"""`moebius simulate`, `moebius plan`, `moebius calibrate`: options here, the work in the modules beside."""

from __future__ import annotations

import shlex
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from moebius.rollout.errors import BadInput

if TYPE_CHECKING:
    from moebius.engine.costs import CostModel
    from moebius.rollout.cost_files import HostShare
    from moebius.rollout.simulate import Trace

ModelName = Annotated[str | None, typer.Option("--model", help="Model: a shipped shape's name, or its config.json.")]
GpuName = Annotated[str, typer.Option("--gpu", help="h200, h100, a100 or b200.")]
Lengths = Annotated[str, typer.Option(help="deepmath, or a file of `moebius rollout --capture-lengths`.")]
Requests = Annotated[int, typer.Option(min=1, help="deepmath: samples per step.")]
Steps = Annotated[int, typer.Option(min=1, help="deepmath: steps, each of its own seed.")]
Group = Annotated[int, typer.Option(min=1, help="Samples per prompt.")]
Prompt = Annotated[int, typer.Option(min=0, help="Prompt tokens per sample.")]
HostMs = Annotated[float, typer.Option(min=0, help="Expected switch: its part that moves no bytes, ms.")]
Out = Annotated[Path | None, typer.Option(help="Folder for the JSON and the PNG.")]


def register(app: typer.Typer) -> None:
    """Add the commands to `moebius`."""
    for command in (simulate, plan, calibrate):
        app.command()(command)


def simulate(
    costs: Annotated[Path, typer.Option(help="File of `moebius calibrate`, or sweep.json of `moebius bench sweep`.")],
    model: ModelName = None,
    gpu: GpuName = "h200",
    lengths: Lengths = "deepmath",
    requests: Requests = 2048,
    steps: Steps = 9,
    group: Group = 1,
    prompt: Prompt = 120,
    threshold: Annotated[
        int | None, typer.Option(min=0, help="Of the fixed policy; default: where the measured curves cross.")
    ] = None,
    siblings: Annotated[bool, typer.Option(help="Tell the predictive policy whose samples end.")] = False,
    reports: Annotated[
        Path | None,
        typer.Option(help="Folder of step reports that were not used to calibrate: how far off are the costs?"),
    ] = None,
    switch_host_ms: HostMs = 15.0,
    out: Out = None,
) -> None:
    """Replay output lengths through measured costs: static layouts, policies, and the oracle that knows them all."""
    from moebius.rollout.cost_files import HostShare
    from moebius.rollout.simulate import compare

    cost = _costs(costs, model, gpu, HostShare(switch_host_ms))
    traces = _traces(lengths, requests, steps, group, prompt)
    context = prompt + statistics.median(traces[0].lengths)
    chosen = cost.threshold(context) if threshold is None else threshold
    rows = compare(traces, cost, chosen, siblings=siblings)
    numbers = summary(rows) | {"threshold": float(chosen), "requests": float(len(traces[0].lengths))}
    notes = [f"expected, not measured: {', '.join(cost.expected)}"] if cost.expected else []
    if reports is not None:
        numbers |= _check(reports, cost)
    options = {"lengths": Path(lengths).name, "steps": len(rows), "prompt": prompt, "group": group,
               "siblings": siblings, "costs": cost.source or costs.name}  # fmt: skip
    _finish("policy_sim", numbers, options, out, notes, series={"steps": rows})


def _check(folder: Path, costs: CostModel) -> dict[str, float]:
    """`sim_error_pct`, the largest over the steps, and each step's own."""
    from moebius.rollout.hindsight import check
    from moebius.rollout.report_types import StepReport

    paths = sorted(folder.glob("step_*.json"))
    if not paths:
        raise BadInput(f"--reports {folder}: there is no step_NNNN.json in it")
    errors = {path.stem: check(StepReport.load(path), costs).error_pct for path in paths}
    worst = max(abs(error) for error in errors.values())
    return {"sim_error_pct": worst} | {f"error_{name}_pct": error for name, error in errors.items()}


def summary(rows: list[dict[str, float]]) -> dict[str, float]:
    """Per cent by which policies differ over the steps; positive `predictive_vs_fixed` means predictive is faster."""
    fixed = [100 * (row["fixed"] / row["predictive"] - 1) for row in rows]
    behind = [100 * (row["predictive"] / row["oracle_single"] - 1) for row in rows]
    better = [100 * (min(row["static_ep"], row["static_tp"]) / row["predictive"] - 1) for row in rows]
    numbers = {
        "predictive_vs_fixed_mean_pct": statistics.fmean(fixed),
        "predictive_vs_fixed_worst_pct": min(fixed),
        "predictive_vs_oracle_pct": statistics.fmean(behind),
        "predictive_vs_oracle_worst_pct": max(behind),
        "predictive_vs_better_static_mean_pct": statistics.fmean(better),
        "predictive_vs_better_static_worst_pct": min(better),
    }
    names = ("static_ep", "static_tp", "fixed", "predictive", "oracle_single", "oracle")
    numbers |= {f"{name}_s": statistics.fmean(row[name] for row in rows) for name in names}
    numbers |= {f"{name}_mean": statistics.fmean(row[name] for row in rows) for name in ("flat_low", "flat_high")}
    return numbers


def plan(
    model: Annotated[str, typer.Option("--model", help="A shipped shape's name, or the model's config.json.")],
    gpus: Annotated[int, typer.Option(min=2, help="GPUs of the switch group.")],
    gpu: GpuName = "h200",
    lengths: Lengths = "deepmath",
    requests: Requests = 2048,
    steps: Steps = 9,
    prompt: Prompt = 120,
    costs: Annotated[
        Path | None, typer.Option(help="Costs measured with this model on so many GPUs, instead of expected ones.")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="Costs or sweep of another model or size, to fit the efficiencies to.")
    ] = None,
    calibration_model: Annotated[str | None, typer.Option(help="Model of --calibration.")] = None,
    switch_host_ms: HostMs = 15.0,
    out: Out = None,
) -> None:
    """Predict memory, crossover, switch cost and gain for a model on so many GPUs."""
    from moebius.rollout import plan_model
    from moebius.rollout.cost_files import HostShare
    from moebius.rollout.planner import beside_paper, chart, make_plan

    host, card, sizes = HostShare(switch_host_ms), plan_model.load_gpu(gpu), plan_model.load_model(model, gpus)
    factors = plan_model.H200
    if calibration is not None:
        if calibration_model is None:
            raise BadInput("--calibration needs --calibration-model: whose sizes the measured times belong to")
        found = _costs(calibration, calibration_model, gpu, host)
        factors = plan_model.fit(found, plan_model.load_model(calibration_model, found.ranks), card)
    measured = None if costs is None else _costs(costs, model, gpu, host)
    made = make_plan(
        sizes, card, gpus, _traces(lengths, requests, steps, 1, prompt), factors, costs=measured, host=host
    )
    numbers, notes = made.numbers(), list(made.notes)
    is_papers = model.lower().endswith("qwen3-235b-a22b") and gpus == 8 and card.name == "h200"
    if is_papers and lengths == "deepmath" and costs is None:
        more, words = beside_paper(made)
        numbers, notes = numbers | more, notes + words
    notes.append(f"recommended, under engine: {made.settings()}")
    options = {"model": Path(model).name, "gpus": gpus, "gpu": card.name, "lengths": Path(lengths).name, "steps": steps,
               "requests": requests, "factors": vars_of(factors)}  # fmt: skip
    _finish("plan", numbers, options, out, notes, curves=chart(made), title=f"{Path(model).name} on {gpus} {card.name}")


def calibrate(
    config: Annotated[Path, typer.Option(help="YAML file with the settings of the group; see configs/.")],
    out: Annotated[Path, typer.Option(help="Folder for costs.json, costs.png and the logs of engines.")],
    overrides: Annotated[list[str] | None, typer.Option("--set", help="Override a setting; repeatable.")] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks; default: as configured.")] = None,
    weights: Annotated[str, typer.Option(help="dummy: random weights; or checkpoint.")] = "dummy",
    batches: Annotated[str, typer.Option(help="Comma-separated global batches.")] = "1,2,8,32,64,128,256,512",
    contexts: Annotated[str, typer.Option(help="Comma-separated prompt lengths.")] = "128,2048",
    iterations: Annotated[int, typer.Option(min=4, help="Iterations measured per layout and point.")] = 40,
) -> None:
    """Measure iterations of both layouts and switches on this machine. Times mean something on CUDA only.

    Later starts with engine.policy.costs: auto find the costs, where the settings that matter for speed are equal. With
    engine.ep.all2all: auto, EP is measured with every all-to-all that this machine can use, and they take the fastest.
    """
    from moebius.engine.calibrate import Grid
    from moebius.rollout.bench.cli import _integers, _setup
    from moebius.rollout.calibration import calibrate_all, draw_costs

    grid = Grid(
        batches=tuple(_integers(batches, "--batches")),
        contexts=tuple(_integers(contexts, "--contexts")),
        iterations=iterations,
    )
    # CUDA graphs of both layouts as far as the policy that uses costs needs them, whatever the config's own would do.
    fixed = ["engine.policy.kind=predictive", "engine.policy.costs=null", "engine.policy.threshold_source=given"]
    setup = _setup(config, [*(overrides or []), *fixed], ranks, max(grid.batches), weights, out)
    costs, notes = calibrate_all(setup, grid, out / "logs", typer.echo)
    path = out / "costs.json"
    costs.save(path)
    draw_costs(costs, path.with_suffix(".png"))
    for note in notes:
        typer.echo(f"note: {note}")
    for context in grid.contexts:
        typer.echo(f"crossover at a context of {context}: {costs.threshold(context)} live samples")
    typer.echo(f"costs: {path}")


def vars_of(slotted: Any) -> dict[str, Any]:
    """Fields of a dataclass with slots."""
    from dataclasses import asdict

    return asdict(slotted)


def _costs(path: Path, model: str | None, gpu: str, host: HostShare) -> CostModel:
    from moebius.rollout import plan_model
    from moebius.rollout.cost_files import load_costs, ranks_in

    sizes = None if model is None else plan_model.load_model(model, ranks_in(path))
    return load_costs(path, model=sizes, gpu=plan_model.load_gpu(gpu), host=host)


def _traces(lengths: str, requests: int, steps: int, group: int, prompt: int) -> list[Trace]:
    from moebius.rollout.bench.traces import DEEPMATH_CAP, captured, deepmath_like
    from moebius.rollout.simulate import Trace

    if lengths != "deepmath":
        return [Trace(tuple(captured(Path(lengths))), prompt, None, group)]
    drawn = (deepmath_like(requests, seed=seed) for seed in range(steps))
    return [Trace(tuple(step), prompt, DEEPMATH_CAP, group) for step in drawn]


def _finish(
    name: str,
    numbers: dict[str, float],
    options: dict[str, Any],
    out: Path | None,
    notes: list[str],
    *,
    series: dict[str, Any] | None = None,
    curves: list[tuple[str, list[float], list[float]]] | None = None,
    title: str = "",
) -> None:
    from moebius.rollout.bench.results import Curve, Picture, make_results

    drawn = [Curve(name=label, x=list(x), y=y) for label, x, y in curves or []]
    picture = Picture(title=title, x_label="global batch", y_label="ms per iteration") if drawn and out else None
    command = shlex.join(["moebius", *sys.argv[1:]])
    results = make_results(
        name, command=command, options=options, results=numbers, curves=drawn, picture=picture, series=series or {},
        notes=notes,
    )  # fmt: skip
    console = Console()
    results.show(console)
    if out is not None:
        console.print(f"results: {results.write(out)}", soft_wrap=True, highlight=False)
