"""One self-contained HTML page from the step reports of a run. It loads nothing from a network."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np

from moebius.engine.costs import CostModel
from moebius.rollout import report_run
from moebius.rollout.errors import BadInput
from moebius.rollout.hindsight import Counterfactual, told
from moebius.rollout.report_lanes import in_hindsight
from moebius.rollout.report_parts import LAYOUTS, NONE, card, fitted, legend, parts_of, seconds, table
from moebius.rollout.report_startup import RankStart
from moebius.rollout.report_step import step_card
from moebius.rollout.report_style import CSS
from moebius.rollout.report_types import StepReport
from moebius.rollout.svg import short, stacked_bars

DETAILED_STEPS = 12  # charts for the last so many steps (half in a long run); tables and overview show all
LONG_RUN = 40
BUDGET_POINTS = 1000  # points drawn on the whole page, so that it stays small


def load_reports(directory: str | Path) -> list[StepReport]:
    """The step reports in a folder, by step. Raises BadInput when there is none or one is broken."""
    directory = Path(directory)
    reports = [StepReport.load(path) for path in directory.glob("step_*.json")]
    if not reports:
        raise BadInput(f"{directory}: no step_*.json in it; give the folder that a run wrote its reports to")
    return sorted(reports, key=lambda r: r.step)


def write_html(directory: str | Path, costs: CostModel | None = None, share: float | None = None) -> Path:
    """Write report.html into `directory` from every step_*.json in it, and return its path.

    What static layouts would have taken is taken from the reports, or computed anew from `costs`. `share` of a training
    step's time is its rollout: a row of its own in the end-to-end projection. Raises BadInput when there is no step
    report, one is broken, or the costs are of another number of ranks or hold no switch.
    """
    directory = Path(directory)
    text = page(load_reports(directory), costs, share)
    path, temporary = directory / "report.html", directory / f".report.html.{os.getpid()}.tmp"
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def hindsight(reports: Sequence[StepReport], costs: CostModel | None) -> dict[int, Counterfactual]:
    """By step, where it is known: what static layouts would have taken. Raises BadInput as `write_html` says."""
    if costs is None:
        return {r.step: found for r in reports if (found := told(r)) is not None}
    if not costs.switches:
        raise BadInput(
            f"--costs: {costs.source or 'the costs'} hold no switch, which the best single switch needs: calibrate "
            "again with `moebius calibrate`"
        )
    # What a lost replica had drawn is in no timeline.
    whole = [r for r in reports if r.counts.output_tokens and not any(lane.lost for lane in r.lanes)]
    return {r.step: in_hindsight(r, costs) for r in whole}


def page(reports: Sequence[StepReport], costs: CostModel | None = None, share: float | None = None) -> str:
    """The HTML text for step reports in any order; arguments as of `write_html`."""
    reports = sorted(reports, key=lambda r: r.step)
    last, shown = reports[-1], reports[-(DETAILED_STEPS if len(reports) <= LONG_RUN else DETAILED_STEPS // 2) :]
    limit = max(64, min(512, BUDGET_POINTS // len(shown)))
    versions = " · ".join(f"{name} {version}" for name, version in last.versions.items())
    overall = (report_run.iteration_card(reports, costs), report_run.lengths_card(reports))
    figures = "".join((*overall, report_run.update_card(reports)))
    body = [
        "<header><h1>Rollout report</h1>",
        f"<p>{escape(last.model)} · {last.ranks} ranks on {escape(last.device)} · {escape(versions)}</p></header>",
        _tiles(reports),
        card("Where the time went", f"{legend()}{_overview(reports)}"),
        card("Steps", _table(reports)),
        card("All steps", f'<div class="charts">{figures}</div>') if figures else "",
        report_run.switch_card(reports),
    ]
    body.append(report_run.hindsight_card(reports, hindsight(reports, costs), _source(reports, costs), share))
    starts = next((r.startup for r in reversed(reports) if r.startup), None)
    if starts:
        body.append(_start(starts))
    if len(shown) < len(reports):
        body.append(f'<p class="note">Charts of the last {len(shown)} of {len(reports)} steps follow.</p>')
    body += [step_card(report, limit, is_open=len(shown) <= 3 or report is last) for report in shown]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>Rollout report: {escape(last.model)}</title><style>{CSS}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _source(reports: Sequence[StepReport], costs: CostModel | None) -> str:
    """Where costs come from, or why there are none."""
    if costs is not None:
        return costs.source or "the costs file"
    found = [r.counterfactual for r in reports]
    known = next((static.source for static in reversed(found) if static.reason is None), None)
    return known or found[-1].reason or ""


def _tiles(reports: Sequence[StepReport]) -> str:
    spent = sum(r.durations_s.total for r in reports)
    tokens = sum(r.counts.output_tokens for r in reports)
    pauses = [s.pause_ms for r in reports for s in r.switches]
    first, last = reports[0].step, reports[-1].step
    tiles = [
        ("steps", f"{len(reports):,}", f"number {first}" if first == last else f"numbers {first} to {last}"),
        ("samples", f"{sum(r.counts.samples for r in reports):,}", f"{short(tokens)} output tokens"),
        ("throughput", f"{short(tokens / spent) if spent else '0'}", "output tokens per second"),
        ("time", seconds(spent), "in rollout steps"),
        ("median pause", f"{np.median(pauses):,.1f} ms" if pauses else NONE, f"switches: {len(pauses)}"),
    ]
    cells = "".join(f"<div><dt>{name}</dt><dd>{value}</dd><small>{note}</small></div>" for name, value, note in tiles)
    return f'<dl class="tiles">{cells}</dl>'


def _start(starts: Sequence[RankStart]) -> str:
    """The latest start: seconds by rank and runtime, and memory by rank."""
    slowest = max(start.import_s + start.total_s for start in starts)
    return (
        f'<details class="card"><summary><h2>Start</h2><span>{seconds(slowest)}, slowest rank</span></summary>'
        f"{_start_table(starts)}{_memory_table(starts)}</details>"
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
    return table(heads, rows)


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
    return table(heads, [[name, *row] for name, row in zip(names, cells, strict=True)])


def _overview(reports: Sequence[StepReport]) -> str:
    rows = [(f"step {r.step}", parts_of(r), f"{short(r.tokens_per_s)} tok/s") for r in reports]
    # One thin row per step keeps long runs on one screen.
    height = 22.0 if len(rows) <= 16 else 13.0
    label = "Time of each step by part"
    if len(rows) > LONG_RUN:  # a second drawing for small screens would be as large as the rest of the page
        drawing = stacked_bars(rows, label=label, x_label="seconds", row_height=height, width=1120)
        return f'<div class="scroll wide">{drawing}</div>'
    return fitted(lambda width: stacked_bars(rows, label=label, x_label="seconds", row_height=height, width=width))


def _table(reports: Sequence[StepReport]) -> str:
    heads = ["step", "weights", "samples", "output tokens", "tok/s"]
    heads += ["total s", "burst s", "switch s", "tail s", "other s"]
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
        cells += [f"{used[layout].p50:.2f}" if layout in used else NONE for layout in LAYOUTS]
        cells += [NONE if r.update_weights_s is None else f"{r.update_weights_s:.2f}"]
        cells += [str(r.counts.finish_reasons.get("abort", 0))]
        rows.append([str(cell) for cell in cells])
    return table(heads, rows)
