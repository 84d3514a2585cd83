"""Writes a comparison of runs: a page, a table as CSV, a picture, and a summary on the terminal."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moebius.rollout.compare import FIELDS, Comparison, compare, load_runs, median_speedup
from moebius.rollout.compare_svg import CHART_CSS, bar_chart, colour_of
from moebius.rollout.report_files import projection_words, save_figure
from moebius.rollout.report_parts import counted
from moebius.rollout.report_run import projection_table
from moebius.rollout.report_style import CSS

NONE = "-"


def compare_runs(
    folders: Sequence[str | Path],
    out: str | Path,
    threshold: int | None = None,
    console: Console | None = None,
    share: float | None = None,
) -> Path:
    """Compare the runs in `folders`; write comparison.html, .csv and, with matplotlib, .png into `out`.

    `share` of a training step's time is its rollout, for the end-to-end projection.

    Prints a table and returns the path of the page. Raises BadInput as `load_runs` and `compare` do.
    """
    out, console = Path(out), console or Console()
    found = compare(load_runs(folders), threshold)
    out.mkdir(parents=True, exist_ok=True)
    _replace(out / "comparison.csv", csv_text(found).encode())
    _replace(out / "comparison.html", page(found, share).encode())
    console.print(_table(found))
    for i in range(len(found.runs)):
        gain = found.speedup(i)
        words = "" if gain is None else f"; {projection_words(gain, share)}"
        console.print(found.line(i) + words, highlight=False, soft_wrap=True)
    for warning in found.warnings:
        console.print(f"note: {warning}", highlight=False, soft_wrap=True)
    written = ["comparison.html", "comparison.csv"]
    if _write_png(found, out / "comparison.png"):
        written.append("comparison.png")
    else:
        note = "no picture: it needs matplotlib (pip install -e '.[bench]')"
        console.print(note, highlight=False, markup=False, soft_wrap=True)
    console.print(f"written to {out.resolve()}: {', '.join(written)}", highlight=False, soft_wrap=True)
    return out / "comparison.html"


def csv_text(found: Comparison) -> str:
    """One row per run and step; figures as in the step reports, unrounded."""
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS, lineterminator="\n")
    writer.writeheader()
    for bars in found.bars:
        writer.writerows({name: getattr(bar, name) for name in FIELDS} for bar in bars)
    return text.getvalue()


def page(found: Comparison, share: float | None = None) -> str:
    """The HTML text. It loads nothing from a network."""
    notes = "".join(f'<p class="warn">{escape(warning)}</p>' for warning in found.warnings)
    first = found.runs[0].reports[found.steps[0]]
    where = f"{first.model} · {first.ranks} ranks on {first.device}"
    chart = f'<div class="scroll wide">{bar_chart(found)}</div>'
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>Comparison of {len(found.runs)} runs</title><style>{CSS}{CHART_CSS}</style></head><body><main>"
        f"<header><h1>Comparison of {len(found.runs)} runs</h1><p>{escape(where)}</p></header>{notes}"
        f"{_tiles(found)}"
        f'<section class="card"><h2>Time of each step</h2>{_legend(found)}{chart}</section>'
        f'<section class="card"><h2>Steps</h2><div class="scroll">{_html_table(found)}</div>'
        f'<p class="note">{_ABOUT}</p></section>{_end_to_end(found, share)}</main></body></html>\n'
    )


def _end_to_end(found: Comparison, share: float | None) -> str:
    """What each switching run's measured gain makes of whole training steps."""
    parts = []
    for i, run in enumerate(found.runs):
        if (gain := found.speedup(i)) is not None:
            parts.append(f"<h3>{escape(run.name)}</h3>{projection_table(gain, share)}")
    if not parts:
        return ""
    about = "Measured gain over the better static run, with everything else of a training step unchanged."
    return f'<section class="card">{"".join(parts)}<p class="note">{about}</p></section>'


_ABOUT = (
    "Seconds. A step is split where the live samples fell to the number at which the switching run switched; in static "
    "runs the split is as exact as the report's timeline. Above a bar: the shortest static run's time over its own."
)


def _tiles(found: Comparison) -> str:
    cells = []
    for i, run in enumerate(found.runs):
        gain, median = found.speedup(i), median_speedup(found, i)
        note = f"{found.kinds[i]}, {counted(len(found.steps), 'step')}"
        if gain is not None and median is not None:
            note += f", {gain:.3f}x over the better static run (median of steps {median:.3f}x)"
        cells.append(
            f"<div><dt>{escape(run.name)}</dt><dd>{found.total_s(i):,.1f} s</dd><small>{escape(note)}</small></div>"
        )
    return f'<dl class="tiles">{"".join(cells)}</dl>'


def _legend(found: Comparison) -> str:
    runs = "".join(
        f'<span><i class="run{colour_of(found, i)}"></i>{escape(run.name)}</span>' for i, run in enumerate(found.runs)
    )
    return (
        f'<p class="legend">{runs}<span><i class="plain"></i>burst</span><span><i class="dark"></i>switch</span>'
        '<span><i class="striped"></i>tail</span></p>'
    )


def _html_table(found: Comparison) -> str:
    heads = ["step", "run", "total", "burst", "switch", "tail", "split at live", "tokens", "tokens/s", "speed-up"]
    rows = []
    for cells in _cells(found):
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{name}</th>" for name in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _cells(found: Comparison) -> list[list[str]]:
    rows = []
    for i, step in enumerate(found.steps):
        for bars in found.bars:
            bar = bars[i]
            seconds = [f"{value:.2f}" for value in (bar.total_s, bar.burst_s, bar.switch_s, bar.tail_s)]
            live = NONE if bar.split_live is None else f"{bar.split_live:,}"
            gain = NONE if bar.speedup is None else f"{bar.speedup:.3f}x"
            rows.append(
                [str(step), bar.run, *seconds, live, f"{bar.output_tokens:,}", f"{bar.tokens_per_s:,.0f}", gain]
            )
    return rows


def _table(found: Comparison) -> Table:
    """One row per step, one column per run: it must fit a terminal of 80 characters."""
    table = Table(title=f"{counted(len(found.steps), 'step')}; seconds: total = burst + switch + tail")
    table.add_column("step", justify="right")
    for i, run in enumerate(found.runs):
        table.add_column(run.name, justify="right", overflow="fold")
        if found.kinds[i] == "switching":
            table.add_column("gain", justify="right", no_wrap=True)
    for i, step in enumerate(found.steps):
        cells = [str(step)]
        for kind, bars in zip(found.kinds, found.bars, strict=True):
            bar = bars[i]
            parts = [bar.burst_s, *([bar.switch_s] if kind == "switching" else []), bar.tail_s]
            cells.append(f"{bar.total_s:.2f} = {'+'.join(f'{part:.2f}' for part in parts)}")
            if kind == "switching":
                cells.append(NONE if bar.speedup is None else f"{bar.speedup:.3f}x")
        table.add_row(*cells)
    return table


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


_PNG_COLOURS = ("#2f74d0", "#d9822b", "#3d8f7d", "#a63d8f", "#7a6ad8", "#667085")


def _write_png(found: Comparison, path: Path) -> bool:
    """The chart as a picture; False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    count, width = len(found.runs), 0.8 / len(found.runs)
    figure, axes = pyplot.subplots(figsize=(max(6.0, 1.0 + 0.42 * count * len(found.steps)), 4.2), dpi=130)
    draw: Callable[..., Any] = axes.bar
    for r, bars in enumerate(found.bars):
        colour = _PNG_COLOURS[colour_of(found, r) % len(_PNG_COLOURS)]
        xs = [i + (r - (count - 1) / 2) * width for i in range(len(bars))]
        bottoms = [0.0] * len(bars)
        for part, style in (
            ("burst_s", {"color": colour}),
            ("switch_s", {"color": "#1b2330"}),
            ("tail_s", {"facecolor": "white", "edgecolor": colour, "hatch": "////", "linewidth": 0.8}),
        ):
            sizes = [getattr(bar, part) for bar in bars]
            draw(xs, sizes, width * 0.92, bottom=bottoms, **style)
            bottoms = [a + b for a, b in zip(bottoms, sizes, strict=True)]
        for x, bar in zip(xs, bars, strict=True):
            if bar.speedup is not None:
                axes.text(x, bar.total_s, f"{bar.speedup:.2f}x", ha="center", va="bottom", fontsize=7)
    axes.set_xticks(range(len(found.steps)), [str(step) for step in found.steps])
    axes.set_xlabel("step")
    axes.set_ylabel("seconds")
    axes.spines[["top", "right"]].set_visible(False)
    keys = [
        Patch(color=_PNG_COLOURS[colour_of(found, i) % len(_PNG_COLOURS)], label=run.name)
        for i, run in enumerate(found.runs)
    ]
    keys += [
        Patch(color="#1b2330", label="switch"),
        Patch(facecolor="white", edgecolor="grey", hatch="////", label="tail"),
    ]
    axes.legend(handles=keys, frameon=False, fontsize=8, ncols=len(keys), loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.tight_layout()
    try:
        save_figure(figure, path)
    finally:
        pyplot.close(figure)
    return True
