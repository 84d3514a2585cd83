"""`moebius bench graphs`: what CUDA graphs save per decode iteration, in each layout."""

from __future__ import annotations

from moebius.rollout.bench.engines import Engines, need_cuda
from moebius.rollout.bench.results import Results
from moebius.rollout.bench.stats import Spread
from moebius.rollout.bench.sweep import SweepOptions, run_sweep
from moebius.rollout.errors import BadInput

ENGINES = ("moebius", "moebius+eager")


def run_graphs(engines: Engines, options: SweepOptions, command: str = "bench graphs") -> Results:
    """A sweep of our engine with and without graphs, and the ratio of the two by layout."""
    need_cuda(engines.setup, "graphs", "there are no CUDA graphs on CPU")
    missing = set(ENGINES) - {spec.name for spec in engines.specs}
    if missing:
        raise BadInput(f"bench graphs needs the engines {' and '.join(ENGINES)}; missing: {', '.join(sorted(missing))}")
    results = run_sweep(engines, options, command)
    add_ratios(results)
    results.benchmark = "graphs"
    assert results.picture is not None
    results.picture.title = f"With and without CUDA graphs, context {options.context}, {engines.setup.ranks} ranks"
    return results


def add_ratios(results: Results) -> None:
    """Add `eager_over_graphs_<layout>_<batch>` and the largest of each layout to the results."""
    windows = results.series["windows_ms"]
    for layout in ("ep", "tp"):
        graphs, eager = windows[f"moebius_{layout}"], windows[f"moebius+eager_{layout}"]
        ratios = {}
        for batch in sorted(set(graphs) & set(eager)):
            if any(graphs[batch]) and any(eager[batch]):
                medians = [Spread.pooled(rounds).median for rounds in (eager[batch], graphs[batch])]
                ratios[batch] = medians[0] / medians[1]
                results.results[f"eager_over_graphs_{layout}_{batch}"] = ratios[batch]
        if ratios:
            results.results[f"eager_over_graphs_{layout}_max"] = max(ratios.values())
