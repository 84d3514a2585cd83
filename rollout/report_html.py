"""One self-contained HTML page from the step reports of a run. It loads nothing from a network."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np

from moebius.rollout.errors import BadInput
from moebius.rollout.report_startup import RankStart
from moebius.rollout.report_style import CSS
from moebius.rollout.report_types import Layout, StepReport, SwitchEntry, TimelinePoint
from moebius.rollout.svg import Mark, Part, histogram, lines, short, stacked_bars
from moebius.rollout.timeline import thin

NONE = "-"
PARTS = ("burst", "switch", "tail", "other")
PART_NAMES = {"burst": "burst (EP)", "switch": "switch", "tail": "tail (TP)", "other": "other"}
PART_CSS = {"burst": "ep", "switch": "switch", "tail": "tp", "other": "other"}
DETAILED_STEPS = 12  # charts for the last so many steps (half in a long run); tables and overview show all
LONG_RUN = 40
BUDGET_POINTS = 1000  # points drawn on the whole page, so that it stays small


def write_html(directory: str | Path) -> Path:
    """Write report.html into `directory` from every step_*.json in it, and return its path.

    Raises BadInput when there is no step report or one is broken.
    """
    directory = Path(directory)
    reports = [StepReport.load(path) for path in directory.glob("step_*.json")]
    if not reports:
        raise BadInput(f"{directory}: no step_*.json in it; give the folder that a run wrote its reports to")
    path, temporary = directory / "report.html", directory / f".report.html.{os.getpid()}.tmp"
    try:
        temporary.write_text(page(reports), encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def page(reports: Sequence[StepReport]) -> str:
    """The HTML text for step reports in any order."""
    reports = sorted(reports, key=lambda r: r.step)
    last, shown = reports[-1], reports[-(DETAILED_STEPS if len(reports) <= LONG_RUN else DETAILED_STEPS // 2) :]
    limit = max(64, min(512, BUDGET_POINTS // len(shown)))
    versions = " · ".join(f"{name} {version}" for name, version in last.versions.items())
    body = [
        "<header><h1>Rollout report</h1>",
        f"<p>{escape(last.model)} · {last.ranks} ranks on {escape(last.device)} · {escape(versions)}</p></header>",
        _tiles(reports),
        f'<section class="card"><h2>Where the time went</h2>{_legend()}{_overview(reports)}</section>',
        f'<section class="card"><h2>Steps</h2><div class="scroll">{_table(reports)}</div></section>',
    ]
    starts = next((r.startup for r in reversed(reports) if r.startup), None)
    if starts:
        body.append(_start(starts))
    if len(shown) < len(reports):
        body.append(f'<p class="note">Charts of the last {len(shown)} of {len(reports)} steps follow.</p>')
    body += [_step(report, limit, is_open=len(shown) <= 3 or report is last) for report in shown]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>Rollout report: {escape(last.model)}</title><style>{CSS}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _tiles(reports: Sequence[StepReport]) -> str:
    seconds = sum(r.durations_s.total for r in reports)
    tokens = sum(r.counts.output_tokens for r in reports)
    pauses = [s.pause_ms for r in reports for s in r.switches]
    first, last = reports[0].step, reports[-1].step
    tiles = [
        ("steps", f"{len(reports):,}", f"number {first}" if first == last else f"numbers {first} to {last}"),
        ("samples", f"{sum(r.counts.samples for r in reports):,}", f"{short(tokens)} output tokens"),
        ("throughput", f"{short(tokens / seconds) if seconds else '0'}", "output tokens per second"),
        ("time", f"{_seconds(seconds)}", "in rollout steps"),
        ("median pause", f"{np.median(pauses):,.1f} ms" if pauses else NONE, f"switches: {len(pauses)}"),
    ]
    cells = "".join(f"<div><dt>{name}</dt><dd>{value}</dd><small>{note}</small></div>" for name, value, note in tiles)
    return f'<dl class="tiles">{cells}</dl>'


def _legend() -> str:
    return (
        '<p class="legend">'
        + "".join(f'<span><i class="{PART_CSS[p]}"></i>{PART_NAMES[p]}</span>' for p in PARTS)
        + "</p>"
    )


def _start(starts: Sequence[RankStart]) -> str:
    """The latest start: seconds by rank and runtime, and memory by rank."""
    slowest = max(start.import_s + start.total_s for start in starts)
    return (
        f'<details class="card"><summary><h2>Start</h2><span>{_seconds(slowest)}, slowest rank</span></summary>'
        f'<div class="scroll">{_start_table(starts)}{_memory_table(starts)}</div></details>'
    )


def _start_table(starts: Sequence[RankStart]) -> str:
    names = ["groups", "load", "profile", "kv", "warmup", "capture", "other", "total"]
    heads = ["rank", "import s", "config s", "buffer s", "runtime", *(f"{name} s" for name in names), "graphs GB"]
    rows = []
    for start in starts:
        for built in start.runtimes:
            cells = [str(start.rank), *(f"{v:.1f}" for v in (start.import_s, start.config_s, start.buffer_s))]
            cells += [built.layout, *(f"{getattr(built, f'{name}_s'):.1f}" for name in names)]
            rows.append([*cells, f"{built.graph_bytes / 1e9:.2f}"])
    return _plain_table(heads, rows)


def _memory_table(starts: Sequence[RankStart]) -> str:
    accounts = [start.memory.account() for start in starts]
    by_rank = [dict(account.rows()) for account in accounts]
    names = list(dict.fromkeys(name for rows in by_rank for name in rows))
    heads = ["memory in GB (% of the device)", *(f"rank {account.rank}" for account in accounts)]
    cells = [
        [f"{r.get(name, 0) / 1e9:.3f} ({100 * r.get(name, 0) / (a.device_bytes or 1):.1f} %)" for r, a in zip(
            by_rank, accounts, strict=True)]
        for name in names
    ]  # fmt: skip
    return _plain_table(heads, [[name, *row] for name, row in zip(names, cells, strict=True)])


def _plain_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _parts(report: StepReport) -> list[Part]:
    total = report.durations_s.total or 1.0
    sizes = {name: getattr(report.durations_s, name) for name in PARTS}
    return [
        Part(size, PART_CSS[name], f"{PART_NAMES[name]}: {_seconds(size)}, {100 * size / total:.1f} %")
        for name, size in sizes.items()
    ]


def _overview(reports: Sequence[StepReport]) -> str:
    rows = [(f"step {r.step}", _parts(r), f"{short(r.tokens_per_s)} tok/s") for r in reports]
    # One thin row per step keeps long runs on one screen.
    height = 22.0 if len(rows) <= 16 else 13.0
    return _wide(
        stacked_bars(rows, label="Time of each step by part", x_label="seconds", row_height=height, width=1120)
    )


def _wide(svg: str) -> str:
    """A wide drawing that scrolls sideways on a small screen, where shrinking would make its text unreadable."""
    return f'<div class="scroll wide">{svg}</div>'


def _table(reports: Sequence[StepReport]) -> str:
    heads = [
        "step",
        "policy",
        "samples",
        "output tokens",
        "tok/s",
        "total s",
        "burst s",
        "switch s",
        "tail s",
        "other s",
    ]
    heads += ["switch at live", "pause ms", "EP p50 ms", "TP p50 ms", "update s", "aborted"]
    rows = []
    for r in reports:
        d, used = r.durations_s, r.iteration_ms
        cells = [
            r.step,
            r.policy_version,
            f"{r.counts.samples:,}",
            f"{r.counts.output_tokens:,}",
            short(r.tokens_per_s),
        ]
        cells += [f"{value:.2f}" for value in (d.total, d.burst, d.switch, d.tail, d.other)]
        cells += [", ".join(str(s.live) for s in r.switches) or NONE]
        cells += [", ".join(f"{s.pause_ms:,.1f}" for s in r.switches) or NONE]
        cells += [f"{used[layout].p50:.2f}" if layout in used else NONE for layout in _LAYOUTS]
        cells += [NONE if r.update_weights_s is None else f"{r.update_weights_s:.2f}"]
        cells += [str(r.counts.finish_reasons.get("abort", 0))]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{name}</th>" for name in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


_LAYOUTS: tuple[Layout, Layout] = ("EP", "TP")


def _step(report: StepReport, limit: int, *, is_open: bool) -> str:
    series = thin(report.timeline, limit)
    marks = [Mark(s.t, s.t + s.pause_ms / 1e3, f"to {s.to}, {s.live} live") for s in report.switches]
    end = max([report.durations_s.total, *(p.t for p in series)])
    charts = [
        ("Live samples", _live_chart(series, marks, end), "over all ranks, after each iteration"),
        ("Output tokens per second", _rate_chart(series, marks, end), "over all ranks, by iteration"),
    ]
    charts += [(f"Switch to {s.to} at {s.t:.2f} s", _phase_chart(s), _switch_note(s)) for s in report.switches]
    charts.append(("Output lengths", _length_chart(report), "samples by output tokens"))
    bar = _wide(stacked_bars([("", _parts(report), "")], label="Time by part", x_label="seconds", left=8, width=1120))
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in report.counts.finish_reasons.items() if count)
    cards = "".join(f"<figure><figcaption>{a}<small>{escape(c)}</small></figcaption>{b}</figure>" for a, b, c in charts)
    refused = "".join(f"<li>at {c.t:.2f} s with {c.live} live: {escape(c.reason)}</li>" for c in report.cancelled)
    return (
        f'<details class="card"{" open" if is_open else ""}><summary><h2>Step {report.step}</h2>'
        f"<span>{_seconds(report.durations_s.total)} · {short(report.tokens_per_s)} tok/s · "
        f"{report.counts.samples:,} samples ({escape(reasons)})</span></summary>{_legend()}{bar}"
        f'<div class="charts">{cards}</div>'
        + (f"<h3>Switches refused</h3><ul>{refused}</ul>" if refused else "")
        + f"<footer>{escape(report.created)} · policy version {report.policy_version}</footer></details>"
    )


def _by_layout(series: Sequence[TimelinePoint], values: Sequence[float]) -> list[tuple[str, list[tuple[float, float]]]]:
    """Runs of points of one layout as line series (css class, points)."""
    runs: list[tuple[str, list[tuple[float, float]]]] = []
    for i, (point, value) in enumerate(zip(series, values, strict=True)):
        if i == 0 or point.layout != series[i - 1].layout:
            runs.append((PART_CSS["burst" if point.layout == "EP" else "tail"], []))
        runs[-1][1].append((point.t, value))
    return runs


def _live_chart(series: Sequence[TimelinePoint], marks: Sequence[Mark], end: float) -> str:
    runs = _by_layout(series, [float(p.live) for p in series])
    top = max((p.live for p in series), default=0)
    return lines(
        runs,
        marks=marks,
        x_label="seconds since the step began",
        label="Live samples over time",
        x_top=end,
        y_top=top,
        fill=True,
    )


def _rate_chart(series: Sequence[TimelinePoint], marks: Sequence[Mark], end: float) -> str:
    rates = [p.tokens / (p.iteration_ms * p.iterations / 1e3) if p.iteration_ms > 0 else 0.0 for p in series]
    runs = _by_layout(series, rates)
    return lines(
        runs,
        marks=marks,
        x_label="seconds since the step began",
        label="Tokens per second over time",
        x_top=end,
        y_top=max(rates, default=0.0),
    )


def _phase_chart(switch: SwitchEntry) -> str:
    phases = switch.phases_ms.model_dump()
    rows = [(name, [Part(ms, "switch", f"{name}: {ms:.2f} ms")], f"{ms:,.2f}") for name, ms in phases.items()]
    return stacked_bars(rows, label="Switch phases", x_label="ms, longest over the ranks", left=72, row_height=17.5)


def _switch_note(s: SwitchEntry) -> str:
    return (
        f"pause {s.pause_ms:,.1f} ms · {s.live} live ({', '.join(map(str, s.live_by_rank))} by rank) · "
        f"experts {_bytes(s.expert_bytes)}, KV {_bytes(s.kv_bytes)} sent · "
        f"KV pages {100 * s.kv_use_before:.0f} % → {100 * s.kv_use_after:.0f} %"
    )


def _length_chart(report: StepReport) -> str:
    lengths = [s.output_tokens for s in report.samples]
    marks = []
    if lengths:
        p50, p99 = (float(v) for v in np.percentile(lengths, [50, 99]))
        marks = [Mark(p50, p50, f"median {p50:,.0f}", "note"), Mark(p99, p99, f"p99 {p99:,.0f}", "note")]
    return histogram(lengths, x_label="output tokens", label="Histogram of output lengths", marks=marks)


def _seconds(value: float) -> str:
    if value >= 3600:
        return f"{value / 3600:.1f} h"
    return f"{value / 60:.1f} min" if value >= 300 else f"{value:.1f} s" if value >= 10 else f"{value:.2f} s"


def _bytes(value: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value} B"
