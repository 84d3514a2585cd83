"""A step of several replicas on the page and on the terminal: a lane for each."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.table import Table

from moebius.rollout.report_lanes import views
from moebius.rollout.report_parts import NONE, PART_CSS, figure, fitted, seconds, table
from moebius.rollout.report_types import Lane, StepReport, SwitchEntry
from moebius.rollout.svg import Mark, Part, lines, short, stacked_bars
from moebius.rollout.timeline import thin

CHARTS = 8  # replicas with a chart of their own
CHART_POINTS = 120
_HEADS = [
    "replica", "node", "prompts", "from the queue later", "samples", "output tokens", "tok/s", "burst s", "switch s",
    "tail s", "idle s", "switches", "EP p50 ms", "TP p50 ms", "lost",
]  # fmt: skip


def lanes_section(report: StepReport) -> str:
    """A bar and a table row per replica, and live samples of each; empty where there is one group."""
    if not report.lanes:
        return ""
    bars = fitted(
        lambda width: stacked_bars(
            [(f"replica {lane.replica}", lane_parts(lane), _end_of(lane)) for lane in report.lanes],
            label="Time of each replica", x_label="seconds", width=width,
        )
    )  # fmt: skip
    rows = [_cells(report, lane) for lane in report.lanes]
    columns = len(_HEADS) if any(lane.lost for lane in report.lanes) else len(_HEADS) - 1
    shown = table(_HEADS[:columns], [row[:columns] for row in rows], (1, len(_HEADS) - 1))
    return f"<h3>Replicas</h3>{bars}{shown}"


def lane_charts(report: StepReport) -> list[str]:
    """Live samples of single replicas."""
    drawn = []
    lanes = [lane for lane in report.lanes if lane.durations_s is not None]
    for lane, view in zip(lanes[:CHARTS], views(report), strict=False):
        series = thin(view.timeline, CHART_POINTS)
        runs: list[tuple[str, list[tuple[float, float]]]] = []
        for i, point in enumerate(series):
            if i == 0 or point.layout != series[i - 1].layout:
                runs.append((PART_CSS["burst" if point.layout == "EP" else "tail"], []))
            runs[-1][1].append((lane.began_s + point.t, float(point.live)))
        marks = [
            Mark(lane.began_s + s.t, lane.began_s + s.t + s.pause_ms / 1e3, f"to {s.to}, {s.live:,} live")
            for s in view.switches
        ]
        chart = lines(
            runs,
            marks=marks,
            x_label="seconds since the step began",
            label=f"Live samples of replica {lane.replica}",
            x_top=report.durations_s.total,
            y_top=max((float(p.live) for p in series), default=0.0),
            height=150.0,
        )
        note = f"{lane.prompts:,} prompts, {lane.later:,} of them from the queue while it ran"
        drawn.append(figure(f"Replica {lane.replica}: live samples", chart, note))
    return drawn


def lane_parts(lane: Lane) -> list[Part]:
    """The parts of a replica's time, for a stacked bar that ends with its last sample."""
    d, idle = lane.durations_s, lane.idle_s or 0.0
    if d is None:
        return []
    sizes = {"burst": d.burst, "switch": d.switch, "tail": d.tail, "other": max(0.0, d.other - idle)}
    return [Part(value, PART_CSS[name], f"{name}: {seconds(value)}") for name, value in sizes.items()]


def _end_of(lane: Lane) -> str:
    return "lost" if lane.durations_s is None else f"{short(lane.tokens_per_s)} tok/s"


def _switches(report: StepReport, lane: Lane) -> list[SwitchEntry]:
    return [s for s in report.switches if s.replica == lane.replica]


def _cells(report: StepReport, lane: Lane) -> list[str]:
    d, used = lane.durations_s, lane.iteration_ms
    switches = ", ".join(f"{s.to} at {s.live:,}, {s.pause_ms:,.1f} ms" for s in _switches(report, lane))
    times = [NONE] * 3 if d is None else [f"{value:.2f}" for value in (d.burst, d.switch, d.tail)]
    return [
        str(lane.replica), lane.node[:12], f"{lane.prompts:,}", f"{lane.later:,}", f"{lane.samples:,}",
        f"{lane.output_tokens:,}", short(lane.tokens_per_s), *times,
        NONE if lane.idle_s is None else f"{lane.idle_s:.2f}", switches or NONE,
        f"{used['EP'].p50:.2f}" if "EP" in used else NONE, f"{used['TP'].p50:.2f}" if "TP" in used else NONE,
        lane.lost or NONE,
    ]  # fmt: skip


def lane_table(report: StepReport) -> Table:
    """The same for a terminal of 80 characters."""
    title = f"step {report.step} by replica; idle: waiting for the others at the end"
    found = Table(title=title, box=SIMPLE, padding=0, pad_edge=False)
    for name in ("replica", "prompts", "later", "samples", "tok/s", "burst", "switch", "tail", "idle", "switches"):
        found.add_column(name, justify="right", no_wrap=name != "switches", overflow="fold")
    for lane in report.lanes:
        d = lane.durations_s
        times = [NONE] * 3 if d is None else [f"{value:.2f}" for value in (d.burst, d.switch, d.tail)]
        switches = [f"{s.to} at {s.live:,}, {s.pause_ms:,.0f} ms" for s in _switches(report, lane)]
        found.add_row(
            str(lane.replica), f"{lane.prompts:,}", f"{lane.later:,}", f"{lane.samples:,}", short(lane.tokens_per_s),
            *times, NONE if lane.idle_s is None else f"{lane.idle_s:.2f}",
            "lost" if lane.lost is not None else "\n".join(switches) or NONE,
        )  # fmt: skip
    return found


def lanes_words(report: StepReport) -> str:
    """For the line about a step: until when each replica had samples."""
    ends = [
        "lost" if lane.durations_s is None else f"{lane.durations_s.total - (lane.idle_s or 0.0):.2f} s"
        for lane in report.lanes
    ]
    return f"replicas {' / '.join(ends)}" if ends else ""


def last_with_lanes(reports: Sequence[StepReport]) -> StepReport | None:
    """The last step that several replicas drew."""
    return next((report for report in reversed(reports) if report.lanes), None)
