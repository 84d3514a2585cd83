"""Calibration from outside the ranks: on the engines of a benchmark, and as a picture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from moebius.engine.all2all import ALLGATHER, DEEPEP_V2, GAIN, Backend, look, refusal, time_ratio
from moebius.engine.calibrate import Grid, calibrate
from moebius.engine.config import EpConfig
from moebius.engine.cost_cache import cost_key, keep
from moebius.engine.costs import CostModel
from moebius.engine.layout import Layout
from moebius.rollout.bench.engines import BenchSetup, Engines
from moebius.rollout.errors import MoebiusError


def calibrate_fleet(engines: Engines, grid: Grid) -> tuple[CostModel, list[str]]:
    """Costs of the engine `moebius` of a running fleet, which later starts find in the cache, and notes.

    Raises BadInput when it does not run there.
    """
    configured = engines.setup.engine.capture_sizes
    answers: list[tuple[CostModel, list[str]]] = engines.fleet("moebius").call(calibrate_rank, grid, configured)
    return answers[0]


def calibrate_all(setup: BenchSetup, grid: Grid, logs: Path, say: Callable[[str], None]) -> tuple[CostModel, list[str]]:
    """Start the engine, measure it and end it. With engine.ep.all2all: auto, once for every all-to-all that may be the
    fastest on this machine: the costs are those of the one that later starts take."""
    wanted: list[Backend] = backends(setup)
    found: dict[Backend, CostModel] = {}
    notes: list[str] = []
    for backend in wanted:
        engine = setup.engine.model_copy(update={"ep": EpConfig(all2all=backend)})
        try:
            with Engines(setup.model_copy(update={"engine": engine}), ["moebius"], logs, say) as engines:
                found[backend], more = calibrate_fleet(engines, grid)
        except MoebiusError as error:
            if not found:
                raise
            # `auto` does without: what it can use is measured. The model may be none for it, or CUDA graphs are off.
            more = [f"could not be measured, so auto does without it: {error}"]
        notes += [f"{backend}: {note}" for note in more] if len(wanted) > 1 else more
    if len(found) < 2:
        return found[wanted[0]], notes
    ratio = time_ratio(found[DEEPEP_V2], found[ALLGATHER], 1)
    notes.append(
        f"an EP iteration with {DEEPEP_V2} takes {100 * ratio:.1f} % of one with {ALLGATHER}, over all batches"
    )
    return found[DEEPEP_V2 if ratio < 1 - GAIN else ALLGATHER], notes


def backends(setup: BenchSetup) -> list[Backend]:
    """What EP is to be measured with: what the settings name, or for `auto` all that can be used here."""
    wanted = setup.engine.ep.all2all
    if wanted != "auto":
        return [wanted]
    usable = setup.device == "cuda" and setup.ranks > 1 and refusal(DEEPEP_V2, look()) is None
    return [ALLGATHER, DEEPEP_V2] if usable else [ALLGATHER]


def calibrate_rank(subject: Any, grid: Grid, capture_sizes: list[int] | None) -> tuple[CostModel, list[str]]:
    """Called in every rank: `subject.engine` is a MoebiusEngine; `capture_sizes` as configured for others like it."""
    engine = subject.engine
    key = cost_key(engine, engine.config.model_copy(update={"capture_sizes": capture_sizes}))
    costs, notes = calibrate(engine, grid, key=key)
    if engine.rank == 0:
        notes.append(f"costs: {keep(costs, engine.config.policy.costs_cache)}")
    return costs, notes


def draw_costs(costs: CostModel, path: Path) -> None:
    """A PNG with iterations by batch (a line per layout and context) and switches by KV tokens.

    Raises BadInput without matplotlib.
    """
    from moebius.rollout.errors import BadInput

    try:
        import matplotlib
    except ImportError:
        raise BadInput(f"{path.name} was not drawn: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), dpi=120)
    contexts = sorted({round(point.context, -2) for point in costs.points})
    for layout, style in ((Layout.EP, "-"), (Layout.TP, "--")):
        for i, context in enumerate(contexts):
            rows = sorted(
                (p.batch, p.ms) for p in costs.points if p.layout is layout and round(p.context, -2) == context
            )
            if rows:
                label = f"{layout.value}, context about {context:.0f}"
                left.plot(*zip(*rows, strict=True), style, marker="o", markersize=3, color=f"C{i}", label=label)
    left.set_xscale("log", base=2)
    batches = sorted({point.batch for point in costs.points})
    left.set_xticks(batches, [str(batch) for batch in batches], rotation=45 if len(batches) > 8 else 0)
    left.minorticks_off()  # their labels would be written over each other
    left.set(xlabel="global batch", ylabel="ms per iteration", title="Decode iteration")
    left.legend(fontsize=7)
    for to in (Layout.TP, Layout.EP):
        found = [(p.kv_tokens, p.ms) for p in costs.switches if p.to is to]
        if found:
            right.plot(*zip(*sorted(found), strict=True), "o", label=f"to {to.value}")
            right.legend(fontsize=7)
    right.set(xlabel="KV tokens of live samples", ylabel="ms", title="Switch")
    for axes in (left, right):
        axes.grid(True, alpha=0.3)
    names = ", ".join(f"{name} {value}" for name, value in costs.key.items())
    figure.text(0.01, 0.01, names or costs.source, fontsize=6)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
