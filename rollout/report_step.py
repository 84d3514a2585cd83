"""The card of one step in the HTML report: its charts, its switches, and what the policy decided."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from moebius.rollout.report_drafts import drafts_words
from moebius.rollout.report_lifelines import lifelines, spans
from moebius.rollout.report_parts import (
    PART_CSS,
    figure,
    fitted,
    fold,
    legend,
    parts_of,
    phase_bars,
    seconds,
    size,
    table,
)
from moebius.rollout.report_replicas import lane_charts, lanes_section
from moebius.rollout.report_types import DecisionEntry, StepReport, SwitchEntry, TimelinePoint
from moebius.rollout.svg import (
    Band,
    Mark,
    background,
    drawing,
    frame,
    histogram,
    lines,
    short,
    stacked_bars,
)
from moebius.rollout.timeline import thin

PHASE_CHARTS = 2  # switches of a step drawn by phase; all of them are in the table of switches
LIFELINES = 190  # lines drawn: one per unit of the drawing's height, more could not be told apart
DECISIONS = 24
ARRIVAL_BINS = 80
RATE_WINDOWS = 120  # of a step's time: so long a window each rate of tokens is taken over


def step_card(report: StepReport, limit: int, *, is_open: bool) -> str:
    """A step with at most `limit` points of its timeline drawn."""
    series = thin(report.timeline, limit)
    drawn, note = lifeline_drawing(report)
    charts = [
        figure("Live samples", live_drawing(report, limit), "over all ranks, after each iteration"),
        *lane_charts(report),
        figure("Output tokens per second", _rate_chart(series, _marks(report), _end(report)), "over all ranks"),
        figure("Sample lifelines", drawn, note),
        *_arrivals(report),
        figure("Output lengths", _length_chart(report), "samples by output tokens"),
    ]
    charts += [
        figure(f"Switch to {s.to} at {s.t:.2f} s", _phase_chart(s), _switch_note(s))
        for s in report.switches[:PHASE_CHARTS]
    ]
    row = [("", parts_of(report), "")]
    bar = fitted(lambda width: stacked_bars(row, label="Time by part", x_label="seconds", left=8, width=width))
    reasons = ", ".join(f"{count:,} by {reason}" for reason, count in report.counts.finish_reasons.items() if count)
    refused = "".join(f"<li>at {c.t:.2f} s with {c.live} live: {escape(c.reason)}</li>" for c in report.cancelled)
    lost = "".join(
        f"<li>{escape(loss.why)}; after {loss.seconds:.1f} s {loss.replayed:,} samples were drawn anew</li>"
        for loss in report.losses
    )
    return (
        f'<details class="card"{" open" if is_open else ""}><summary><h2>Step {report.step}</h2>'
        f"<span>{seconds(report.durations_s.total)} · {short(report.tokens_per_s)} tok/s · "
        f"{report.counts.samples:,} samples (ended {escape(reasons)})</span></summary>{legend()}{bar}"
        f'{lanes_section(report)}<div class="charts">{"".join(charts)}</div>'
        + (f"<h3>Ranks lost, and started again</h3><ul>{lost}</ul>" if lost else "")
        + (f"<h3>Switches refused</h3><ul>{refused}</ul>" if refused else "")
        + (f'<p class="note">{escape(drafts_words(report.drafts))}</p>' if report.drafts else "")
        + _decisions(report.decisions)
        + f"<footer>{escape(report.created)} · policy version {report.policy_version}</footer></details>"
    )


def _css(layout: str) -> str:
    return PART_CSS["burst" if layout == "EP" else "tail"]


def _by_layout(series: Sequence[TimelinePoint], values: Sequence[float]) -> list[tuple[str, list[tuple[float, float]]]]:
    """Runs of points of one layout as line series (css class, points)."""
    runs: list[tuple[str, list[tuple[float, float]]]] = []
    for i, (point, value) in enumerate(zip(series, values, strict=True)):
        if i == 0 or point.layout != series[i - 1].layout:
            runs.append((_css(point.layout), []))
        runs[-1][1].append((point.t, value))
    return runs


def live_drawing(report: StepReport, limit: int, height: float = 190.0) -> str:
    """Live samples over time with the layouts as background and each switch marked, of at most `limit` points."""
    series = thin(report.timeline, limit)
    return lines(
        _by_layout(series, [float(p.live) for p in series]),
        marks=_marks(report),
        bands=_bands(report),
        x_label="seconds since the step began",
        label="Live samples over time",
        x_top=_end(report),
        y_top=max((p.live for p in series), default=0),
        height=height,
    )


def _marks(report: StepReport) -> list[Mark]:
    return [Mark(s.t, s.t + s.pause_ms / 1e3, f"to {s.to}, {s.live:,} live") for s in report.switches]


def _bands(report: StepReport) -> list[Band]:
    return [Band(s.start, s.end, _css(s.layout)) for s in spans(report.timeline)]


def _end(report: StepReport) -> float:
    return max([report.durations_s.total, *(p.t for p in report.timeline)])


def _arrivals(report: StepReport) -> list[str]:
    """Samples that joined the running step, by second; nothing where all were there when it began."""
    times = report.sample_times
    if times is None or not any(times.arrived_s):
        return []
    end = _end(report)
    counts, edges = np.histogram(times.arrived_s, bins=ARRIVAL_BINS, range=(0.0, end or 1.0))
    rates = counts / (edges[1] - edges[0])
    points = [(float(x), float(rate)) for a, b, rate in zip(edges[:-1], edges[1:], rates, strict=True) for x in (a, b)]
    drawn = lines(
        [("all", points)],
        marks=_marks(report),
        bands=_bands(report),
        x_label="seconds since the step began",
        label="Arrivals over time",
        x_top=end,
        y_top=float(rates.max()),
        fill=True,
    )
    later = sum(t > 0 for t in times.arrived_s)
    return [
        figure("Arrivals per second", drawn, f"{later:,} of {len(times.arrived_s):,} samples joined the running step")
    ]


def _rate_chart(series: Sequence[TimelinePoint], marks: Sequence[Mark], end: float) -> str:
    rates = trailing_rates(series, end / RATE_WINDOWS)
    return lines(
        _by_layout(series, rates),
        marks=marks,
        x_label="seconds since the step began",
        label="Tokens per second over time",
        x_top=end,
        y_top=max(rates, default=0.0),
    )


def trailing_rates(series: Sequence[TimelinePoint], window_s: float) -> list[float]:
    """Tokens per second of each point and those before it, back to `window_s` of iterations in the same layout.

    One iteration says little: with asynchronous scheduling the last of a step only fetches tokens, and is very short.
    """
    rates: list[float] = []
    for i, point in enumerate(series):
        tokens, spent = 0, 0.0
        for before in reversed(series[: i + 1]):
            if before.layout != point.layout or (spent >= window_s and spent > 0):
                break
            tokens += before.tokens
            spent += before.iteration_ms * before.iterations / 1e3
        rates.append(tokens / spent if spent > 0 else 0.0)
    return rates


def lifeline_drawing(report: StepReport) -> tuple[str, str]:
    """A line per sample from begin to end in the colours of the layouts, and a note about it; empty where unknown."""
    if report.lanes and report.sample_times is None:
        return "", "not drawn: a replica was lost, and with it the times of its samples"
    found, total = lifelines(report), len(report.samples)
    if found is None:
        why = "not drawn: samples joined while the step ran, and the report has no times by sample"
        return "", why if total else "not drawn: there are no samples"
    bands, end = _bands(report), _end(report)
    # Rank by rank, the longest first, so that a rank with long samples stands out.
    order = np.lexsort((-found.end, np.array([sample.rank for sample in report.samples])))
    count = max(16, min(LIFELINES, total, 1200 // max(1, len(bands)))) if total > 16 else total
    drawn = order[np.linspace(0, total - 1, count).round().astype(int)]
    bottom, scale_x, _, body = frame(end, 0, 190.0 + 36, "seconds since the step began")
    body = [element for element in body if 'text-anchor="end"' not in element or "seconds" in element]
    body[:0] = background(bands, scale_x, bottom)
    top = 16.0
    gap = (bottom - top) / count
    paths: dict[str, list[str]] = {}
    for row, i in enumerate(drawn):
        y = top + (row + 0.5) * gap
        for band in bands:
            begin, until = max(found.start[i], band.x), min(found.end[i], band.x_end)
            if until > begin:
                paths.setdefault(band.css, []).append(f"M{scale_x(begin):.1f} {y:.1f}H{scale_x(until):.1f}")
    width = f' style="stroke-width:{gap * 0.6:.1f}"' if gap > 1.6 else ""
    body += [f'<path class="life {css}"{width} d="{"".join(parts)}"/>' for css, parts in sorted(paths.items())]
    body.append(f'<text x="46" y="{top + 10}" text-anchor="end">rank 0</text>')
    if report.ranks > 1:
        body.append(f'<text x="46" y="{bottom - 2:.1f}" text-anchor="end">rank {report.ranks - 1}</text>')
    number = f"{total:,} samples" if count == total else f"{count} of {total:,} samples"
    colours = "; in the colour of EP as long as one replica was in it" if report.lanes else ""
    return drawing(226.0, "Lifelines of samples", body), f"{number}; {found.note}{colours}"


def _length_chart(report: StepReport) -> str:
    lengths = [s.output_tokens for s in report.samples]
    marks = []
    if lengths:
        p50, p99 = (float(v) for v in np.percentile(lengths, [50, 99]))
        marks = [Mark(p50, p50, f"median {p50:,.0f}", "note"), Mark(p99, p99, f"p99 {p99:,.0f}", "note")]
    return histogram(lengths, x_label="output tokens", label="Histogram of output lengths", marks=marks)


def _phase_chart(switch: SwitchEntry) -> str:
    return phase_bars(switch.phases_ms.model_dump(), "Switch phases", "ms, longest over the ranks")


def _switch_note(s: SwitchEntry) -> str:
    ahead = f" ({size(s.staged_bytes)} ahead, {s.staged_layers} of {s.expert_layers} layers)" if s.staged_layers else ""
    return (
        f"pause {s.pause_ms:,.1f} ms · {s.live} live ({', '.join(map(str, s.live_by_rank))} by rank) · "
        f"experts {size(s.expert_bytes)}{ahead}, KV {size(s.kv_bytes)} sent · "
        f"KV pages {100 * s.kv_use_before:.0f} % → {100 * s.kv_use_after:.0f} %"
    )


def _decisions(decisions: Sequence[DecisionEntry]) -> str:
    if not decisions:
        return ""
    rows = [
        [d.target or "stay", d.reason, d.outcome or "-", ", ".join(f"{k} {_value(v)}" for k, v in d.inputs.items())]
        for d in decisions[-DECISIONS:]
    ]
    more = f", the last {DECISIONS} shown" if len(decisions) > DECISIONS else ""
    return fold(
        f"Policy decisions: {len(decisions)}{more}", table(["target", "reason", "outcome", "inputs"], rows, (1, 3))
    )


def _value(value: float | int | str) -> str:
    return f"{value:,.5g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
