"""Pictures of benchmark results with matplotlib, without a display."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from moebius.rollout.errors import BadInput

if TYPE_CHECKING:
    from moebius.rollout.bench.results import Results


def draw(results: Results, path: Path) -> None:
    """Draw the curves into a PNG file. Raises BadInput without matplotlib; the numbers are written before."""
    try:
        import matplotlib
    except ImportError:
        raise BadInput(f"{path.name} was not drawn, the JSON beside it is whole: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    assert results.picture is not None
    figure, axes = pyplot.subplots(figsize=(8, 5), dpi=120)
    if results.picture.kind == "lines":
        _lines(axes, results)
    else:
        _bars(axes, results)
    if results.picture.log_y:
        axes.set_yscale("log")
    axes.set(title=results.picture.title, xlabel=results.picture.x_label, ylabel=results.picture.y_label)
    axes.grid(True, alpha=0.3)
    if results.curves:
        axes.legend()
    gpus = results.machine["gpus"]
    host = f"{len(gpus)} x {gpus[0]}" if gpus else str(results.machine["cpu"])
    figure.text(0.01, 0.01, f"{host}, vLLM {results.versions.get('vllm', '?')}, {results.date}", fontsize=7)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path)
    pyplot.close(figure)


def _lines(axes: Any, results: Results) -> None:
    for curve in results.curves:
        (line,) = axes.plot(curve.x, curve.y, marker="o", markersize=3, label=curve.name)
        if curve.low:
            axes.fill_between(curve.x, curve.low, curve.high, alpha=0.2, color=line.get_color())
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")


def _bars(axes: Any, results: Results) -> None:
    labels = list(dict.fromkeys(label for curve in results.curves for label in curve.x))
    width = 0.8 / max(1, len(results.curves))
    for i, curve in enumerate(results.curves):
        places = [labels.index(label) + (i - (len(results.curves) - 1) / 2) * width for label in curve.x]
        errors = None
        if curve.low:
            errors = [
                [max(0.0, y - low) for y, low in zip(curve.y, curve.low, strict=True)],
                [max(0.0, high - y) for y, high in zip(curve.y, curve.high, strict=True)],
            ]
        axes.bar(places, curve.y, width, yerr=errors, capsize=3, label=curve.name)
    axes.set_xticks(range(len(labels)), [str(label) for label in labels])
