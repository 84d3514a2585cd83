"""What `moebius report` makes of one run: the page, tables as CSV, a picture, and a summary on the terminal."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from moebius.rollout.cost_files import load_costs
from moebius.rollout.hindsight import SHARES, end_to_end
from moebius.rollout.report_drafts import drafts_words
from moebius.rollout.report_html import hindsight, load_reports, write_html
from moebius.rollout.report_parts import LAYOUTS, NONE, seconds
from moebius.rollout.report_replicas import lane_table, last_with_lanes
from moebius.rollout.report_run import decoding, medians, sums
from moebius.rollout.report_types import Layout, Phases, StepReport
from moebius.rollout.svg import short

PHASES = tuple(Phases().model_dump())
STEP_FIELDS = (
    "step", "policy_version", "samples", "prompt_tokens", "output_tokens", "tokens_per_s", "total_s", "burst_s",
    "switch_s", "tail_s", "other_s", "switches", "cancelled", "ep_p50_ms", "tp_p50_ms", "update_weights_s",
    "return_reshard_ms", "static_ep_s", "static_tp_s", "best_single_s",
)  # fmt: skip
SWITCH_FIELDS = (
    "step", "to", "iteration", "t", "live", "kv_tokens", "pause_ms", *(f"{name}_ms" for name in PHASES),
    "expert_bytes", "staged_bytes", "staged_layers", "expert_layers", "kv_bytes", "kv_use_before", "kv_use_after",
    "replica",
)  # fmt: skip
_COLOURS = {"burst": "#2f74d0", "switch": "#a63d8f", "tail": "#d9822b", "other": "#a9b1be"}
_BY_LAYOUT: dict[Layout, str] = {"EP": _COLOURS["burst"], "TP": _COLOURS["tail"]}


def report_run(
    directory: str | Path,
    costs_file: str | Path | None = None,
    console: Console | None = None,
    share: float | None = None,
) -> Path:
    """Write report.html, report.csv, report_switches.csv and, with matplotlib, report.png into a run's folder.

    `costs_file` is one of `moebius calibrate`; None: static times are those of the reports, if they have any. `share`
    of a training step's time is its rollout. Prints a table and returns the path of the page. Raises BadInput for a
    folder without step reports, a broken one, and costs that do not fit.
    """
    directory, console = Path(directory), console or Console()
    costs = None if costs_file is None else load_costs(costs_file)
    reports = load_reports(directory)
    static = hindsight(reports, costs)
    path = write_html(directory, costs, share)
    steps = [_step_row(r) for r in reports]
    for row in steps:
        if (found := static.get(row["step"])) is not None:
            row |= {name: getattr(found, name) for name in STEP_FIELDS[-3:]}
    write_csv(directory / "report.csv", STEP_FIELDS, steps)
    write_csv(directory / "report_switches.csv", SWITCH_FIELDS, _switch_rows(reports))
    console.print(summary(reports))
    if (shared := last_with_lanes(reports)) is not None:
        console.print(lane_table(shared))
    for report in reports:
        if report.drafts is not None:
            line = f"step {report.step}, {drafts_words(report.drafts)}"
            console.print(line, highlight=False, soft_wrap=True, markup=False)
    if static:
        measured, ep, tp = sums(static)
        line = f"by the costs: static EP {seconds(ep)}, static TP {seconds(tp)}; measured {seconds(measured)}"
        if measured:
            gain = min(ep, tp) / measured
            line += f", {gain:.3f}x; {projection_words(gain, share)}"
        console.print(line, highlight=False, soft_wrap=True)
    else:
        console.print(
            f"static layouts: not known: {reports[-1].counterfactual.reason}", highlight=False, soft_wrap=True
        )
    written = ["report.csv", "report_switches.csv"]
    if write_png(reports, directory / "report.png"):
        written.append("report.png")
    else:
        console.print(
            "no picture: it needs matplotlib (pip install -e '.[bench]')",
            highlight=False, markup=False, soft_wrap=True,
        )  # fmt: skip
    console.print(f"{path}, beside it {', '.join(written)}", highlight=False, soft_wrap=True, markup=False)
    return path


def projection_words(gain: float, share: float | None) -> str:
    """A gain of rollouts as one of whole training steps."""
    shares = (SHARES[0], SHARES[-1]) if share is None else (share,)
    parts = [f"{e.speedup:.3f}x at {100 * e.rollout_share:g} %" for e in end_to_end(gain, shares)]
    return f"whole training steps {' and '.join(parts)} of their time in rollouts"


def summary(reports: Sequence[StepReport]) -> Table:
    """One row per step, for a terminal of 80 characters."""
    title = "seconds: total = burst + switch + tail + other"
    table = Table(title=title, box=SIMPLE, show_footer=len(reports) > 1, padding=0, pad_edge=False)
    spent = sum(r.durations_s.total for r in reports)
    tokens = sum(r.counts.output_tokens for r in reports)
    parts = {name: sum(getattr(r.durations_s, name) for r in reports) for name in ("burst", "switch", "tail")}
    columns = {
        "step": "all",
        "samples": f"{sum(r.counts.samples for r in reports):,}",
        "tok/s": short(tokens / spent) if spent else "0",
        "total": f"{spent:.2f}",
        **{name: f"{value:.2f}" for name, value in parts.items()},
        "update": f"{sum(r.update_weights_s or 0 for r in reports):.2f}",
        "switches": str(sum(len(r.switches) for r in reports)),
    }
    for name, total in columns.items():
        table.add_column(name, total, justify="right", no_wrap=name != "switches", overflow="fold")
    for r in reports:
        d = r.durations_s
        switches = [f"{s.to} at {s.live:,}, {s.pause_ms:,.0f} ms" for s in r.switches]
        if len(switches) > 3:
            switches = [*switches[:2], f"{len(switches) - 2} more"]
        if r.cancelled:
            switches.append(f"{len(r.cancelled)} refused")
        table.add_row(
            str(r.step),
            f"{r.counts.samples:,}",
            short(r.tokens_per_s),
            *(f"{value:.2f}" for value in (d.total, d.burst, d.switch, d.tail)),
            NONE if r.update_weights_s is None else f"{r.update_weights_s:.2f}",
            "\n".join(switches) or NONE,
        )
    return table


def _step_row(r: StepReport) -> dict[str, Any]:
    parts = {f"{name}_s": value for name, value in r.durations_s.model_dump().items()}
    p50 = {f"{layout.lower()}_p50_ms": r.iteration_ms[layout].p50 for layout in LAYOUTS if layout in r.iteration_ms}
    return {
        "step": r.step,
        "policy_version": r.policy_version,
        "samples": r.counts.samples,
        "prompt_tokens": r.counts.prompt_tokens,
        "output_tokens": r.counts.output_tokens,
        "tokens_per_s": r.tokens_per_s,
        "switches": len(r.switches),
        "cancelled": len(r.cancelled),
        "update_weights_s": r.update_weights_s,
        "return_reshard_ms": r.return_reshard_ms,
        **parts,
        **p50,
    }


def _switch_rows(reports: Sequence[StepReport]) -> Iterable[dict[str, Any]]:
    for r in reports:
        for s in r.switches:
            values = s.model_dump(exclude={"phases_ms", "live_by_rank", "device_ms"})
            phases = {f"{name}_ms": ms for name, ms in s.phases_ms.model_dump().items()}
            yield {"step": r.step, **values, **phases}


def write_csv(path: Path, fields: Sequence[str], rows: Iterable[dict[str, Any]]) -> None:
    """Figures as in the step reports, unrounded; what a step lacks is empty. Readers never see half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, fields, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_png(reports: Sequence[StepReport], path: Path) -> bool:
    """Steps by part, live samples of the last step, iteration times and lengths; False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(2, 2, figsize=(11, 7.2), dpi=120)
    try:
        _draw_steps(grid[0][0], reports)
        _draw_live(grid[0][1], reports[-1])
        _draw_iterations(grid[1][0], reports)
        lengths = sorted(s.output_tokens for r in reports for s in r.samples)
        grid[1][1].plot(lengths, [(i + 1) / len(lengths) for i in range(len(lengths))], color="#3d8f7d")
        grid[1][1].set(title="Output lengths", xlabel="tokens", ylabel="share of samples")
        for axes in grid.flat:
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(True, alpha=0.25)
        last = reports[-1]
        figure.suptitle(f"{last.model}, {last.ranks} ranks on {last.device}", fontsize=10)
        figure.tight_layout()
        save_figure(figure, path)
    finally:
        pyplot.close(figure)
    return True


def save_figure(figure: Any, path: Path) -> None:
    """Write a matplotlib figure as PNG under another name first, so that no reader sees half a picture."""
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.png")
    try:
        figure.savefig(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _draw_steps(axes: Any, reports: Sequence[StepReport]) -> None:
    at, below = range(len(reports)), [0.0] * len(reports)
    for part, colour in _COLOURS.items():
        sizes = [getattr(r.durations_s, part) for r in reports]
        axes.bar(at, sizes, bottom=below, color=colour, label=part)
        below = [a + b for a, b in zip(below, sizes, strict=True)]
    if len(reports) <= 24:
        axes.set_xticks(at, [str(r.step) for r in reports])
    axes.set(
        title="Time of each step", xlabel="step", ylabel="seconds", ylim=(0, 1.15 * max(below, default=1.0) or 1.0)
    )
    axes.legend(frameon=False, fontsize=8, ncols=len(_COLOURS), loc="upper center")


def _draw_live(axes: Any, report: StepReport) -> None:
    series = report.timeline
    for layout, colour in _BY_LAYOUT.items():
        live = [float(p.live) if p.layout == layout else float("nan") for p in series]
        axes.plot([p.t for p in series], live, color=colour, label=layout)
    for s in report.switches:
        axes.axvspan(s.t, s.t + s.pause_ms / 1e3, color=_COLOURS["switch"], alpha=0.6)
    axes.set(title=f"Live samples, step {report.step}", xlabel="seconds since the step began", ylim=(0, None))
    axes.legend(frameon=False, fontsize=8)


def _draw_iterations(axes: Any, reports: Sequence[StepReport]) -> None:
    for layout, colour in _BY_LAYOUT.items():
        points = decoding(reports, layout)
        axes.plot([p[0] for p in points], [p[1] for p in points], ".", color=colour, alpha=0.25, markersize=3)
        curve = medians(points)
        axes.plot([p[0] for p in curve], [p[1] for p in curve], color=colour, label=layout)
    axes.set(title="Decode iteration", xlabel="live samples", ylabel="ms", ylim=(0, None))
    if any(len(decoding(reports, layout)) for layout in LAYOUTS):
        axes.set_xscale("log")
    axes.legend(frameon=False, fontsize=8)
