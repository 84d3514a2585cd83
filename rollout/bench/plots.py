"""Pictures of benchmark results with matplotlib, without a display."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from moebius.rollout.errors import BadInput

if TYPE_CHECKING:
    from moebius.rollout.bench.results import Curve, Picture, Results


def draw(results: Results, path: Path) -> None:
    """Draw the curves into a PNG file. Raises BadInput without matplotlib; the numbers are written before."""
    try:
        import matplotlib
    except ImportError:
        raise BadInput(f"{path.name} was not drawn, the JSON beside it is whole: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    assert results.picture is not None
    panels = [(results.picture, results.curves), *((panel.picture, panel.curves) for panel in results.panels)]
    figure, many = pyplot.subplots(1, len(panels), figsize=(8 * len(panels), 5), dpi=120, squeeze=False)
    for axes, (picture, curves) in zip(many[0], panels, strict=True):
        _panel(axes, picture, curves)
    gpus = results.machine["gpus"]
    host = f"{len(gpus)} x {gpus[0]}" if gpus else str(results.machine["cpu"])
    figure.text(0.01, 0.01, f"{host}, vLLM {results.versions.get('vllm', '?')}, {results.date}", fontsize=7)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path)
    pyplot.close(figure)


def _panel(axes: Any, picture: Picture, curves: list[Curve]) -> None:
    match picture.kind:
        case "lines":
            _lines(axes, curves)
        case "time":
            _time(axes, picture, curves)
        case "bars":
            _bars(axes, curves)
        case "stack":
            _stack(axes, curves)
    if picture.log_y:
        axes.set_yscale("log")
    axes.set(title=picture.title, xlabel=picture.x_label, ylabel=picture.y_label)
    axes.grid(True, alpha=0.3)
    if curves:
        # Beside the axes where bars fill them.
        beside: dict[str, Any] = (
            {} if picture.kind in ("lines", "time") else {"bbox_to_anchor": (1.01, 1.0), "loc": "upper left"}
        )
        axes.legend(**beside)


def _lines(axes: Any, curves: list[Curve]) -> None:
    for curve in curves:
        (line,) = axes.plot(curve.x, curve.y, marker="o", markersize=3, label=curve.name)
        if curve.low:
            axes.fill_between(curve.x, curve.low, curve.high, alpha=0.2, color=line.get_color())
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")


def _time(axes: Any, picture: Picture, curves: list[Curve]) -> None:
    for curve in curves:
        axes.plot(curve.x, curve.y, linewidth=1.2, label=curve.name)
    for name, spans in picture.spans.items():
        for number, (start, end) in enumerate(spans):
            axes.axvspan(start, end, color="0.85", zorder=0, label=name if number == 0 else None)
    for number, (name, marks) in enumerate(picture.marks.items()):
        for first, x in enumerate(marks):
            style: dict[str, Any] = {"color": f"C{number + 1}", "linestyle": "--", "linewidth": 1.2}
            axes.axvline(x, label=name if first == 0 else None, **style)


def _stack(axes: Any, curves: list[Curve]) -> None:
    """One bar per label, of one part per curve."""
    labels = list(dict.fromkeys(str(label) for curve in curves for label in curve.x))
    bottom = dict.fromkeys(labels, 0.0)
    for number, curve in enumerate(curves):
        x = [str(label) for label in curve.x]
        places, below = [labels.index(label) for label in x], [bottom[label] for label in x]
        axes.bar(places, curve.y, 0.7, below, label=curve.name, color=_colour(curve.name, number))
        for label, y in zip(x, curve.y, strict=True):
            bottom[label] += y
    axes.set_xticks(range(len(labels)), labels, rotation=30, ha="right", fontsize=8)


def _colour(name: str, number: int) -> str:
    """Light grey for what is drawn under the bars without being a part of what they stand for."""
    if "before the pause" in name:
        return "0.85"
    return f"C{number}" if number < 10 else "0.3"


def _bars(axes: Any, curves: list[Curve]) -> None:
    labels = list(dict.fromkeys(label for curve in curves for label in curve.x))
    width = 0.8 / max(1, len(curves))
    for i, curve in enumerate(curves):
        places = [labels.index(label) + (i - (len(curves) - 1) / 2) * width for label in curve.x]
        errors = None
        if curve.low:
            errors = [
                [max(0.0, y - low) for y, low in zip(curve.y, curve.low, strict=True)],
                [max(0.0, high - y) for y, high in zip(curve.y, curve.high, strict=True)],
            ]
        axes.bar(places, curve.y, width, yerr=errors, capsize=3, label=curve.name)
    axes.set_xticks(range(len(labels)), [str(label) for label in labels])
