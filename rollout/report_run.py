"""Cards of the HTML report about all steps of a run: lengths, iteration times, switches, updates, hindsight."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from moebius.engine.costs import CostModel
from moebius.engine.layout import Layout as EngineLayout
from moebius.rollout.hindsight import SHARES, Counterfactual, end_to_end
from moebius.rollout.report_lanes import views
from moebius.rollout.report_lifelines import prefill_points
from moebius.rollout.report_parts import (
    LAYOUTS,
    NONE,
    PART_CSS,
    PHASES_NOTE,
    card,
    counted,
    figure,
    fitted,
    fold,
    legend,
    phase_bars,
    seconds,
    size,
    table,
)
from moebius.rollout.report_types import Layout, Phases, StepReport, SwitchEntry
from moebius.rollout.svg import Mark, Part, lines, short, stacked_bars

_BY_LAYOUT = (("ep", "EP"), ("tp", "TP"))
DOTS = 260  # iterations drawn per layout
ROWS = 40  # bars in a chart with one bar per step or switch
TABLE_ROWS = 100
CDF_STEPS = 24  # steps with a CDF of their own


def lengths_card(reports: Sequence[StepReport]) -> str:
    """Share of samples with at most so many output tokens: each step, and all together."""
    own = [np.sort([s.output_tokens for s in r.samples]) for r in reports if r.samples]
    if not own:
        return ""
    pooled = np.sort(np.concatenate(own))
    top = float(pooled[-1])
    series = [("faint", _cdf(lengths)) for lengths in own[-CDF_STEPS:]] if len(own) > 1 else []
    p50, p99 = (float(v) for v in np.percentile(pooled, [50, 99]))
    chart = lines(
        [*series, ("all", _cdf(pooled))],
        marks=[Mark(p50, p50, f"median {p50:,.0f}", "note"), Mark(p99, p99, f"p99 {p99:,.0f}", "note", 1)],
        x_label="output tokens",
        label="Distribution of output lengths",
        x_top=top,
        y_top=1.0,
    )
    note = f"share of {len(pooled):,} samples with at most so many tokens" + ("; thin: each step" if series else "")
    return figure("Output-length CDF", chart, note)


def _cdf(lengths: npt.NDArray[np.int64]) -> list[tuple[float, float]]:
    at = np.unique(np.linspace(0, len(lengths) - 1, min(len(lengths), 160)).round().astype(int))
    return [(0.0, 0.0), *((float(lengths[i]), (i + 1) / len(lengths)) for i in at)]


def decoding(reports: Sequence[StepReport], layout: Layout) -> list[tuple[float, float, int]]:
    """(live samples that decoded, ms, iterations) of the timelines' points in a layout, prefill left out."""
    return [
        (p.tokens / p.iterations, p.iteration_ms, p.iterations)
        for r in reports
        for view in views(r)
        for p in view.timeline[prefill_points(view) :]
        if p.layout == layout and p.tokens
    ]


def medians(points: Sequence[tuple[float, float, int]]) -> list[tuple[float, float]]:
    """(live, ms): medians of the points in each half octave of the live count, ascending."""
    bins: dict[int, list[tuple[float, float, int]]] = {}
    for point in points:
        bins.setdefault(round(2 * float(np.log2(max(1.0, point[0])))), []).append(point)
    return [(2 ** (key / 2), statistics.median(ms for _, ms, _ in found)) for key, found in sorted(bins.items())]


def crossover(ep: Sequence[tuple[float, float]], tp: Sequence[tuple[float, float]]) -> float | None:
    """Live count at which the medians of both layouts cross for the last time; None: nowhere both were measured."""
    times = dict(tp)
    common = [(live, ms - times[live]) for live, ms in ep if live in times]
    found = None
    for (a, before), (b, after) in pairwise(common):
        if before > 0 >= after:
            found = float(a * (b / a) ** (before / (before - after)))
    return found


def iteration_card(reports: Sequence[StepReport], costs: CostModel | None) -> str:
    """Iteration ms against live samples in both layouts, and where they cross."""
    points = {layout: decoding(reports, layout) for layout in LAYOUTS}
    every = [p for found in points.values() for p in found]
    if not every:
        return ""
    curves = {layout: medians(found) for layout, found in points.items()}
    top = max(live for live, _, _ in every)
    # A rare long iteration would press all others flat.
    y_top = 1.15 * max(float(np.percentile([ms for _, ms, _ in found], 99)) for found in points.values() if found)
    series = []
    for layout in LAYOUTS:
        css, found = PART_CSS["burst" if layout == "EP" else "tail"], points[layout]
        picked = found[:: max(1, -(-len(found) // DOTS))]
        series.append((f"dots {css}", [(_log(live), ms) for live, ms, _ in picked]))
        series.append((css, [(_log(live), ms) for live, ms in curves[layout]]))
    note, at = "dots: iterations; lines: medians by half octave", crossover(curves["EP"], curves["TP"])
    if costs is not None:
        context = _context(reports)
        lives = np.geomspace(1, max(2.0, top), 40)
        for layout in LAYOUTS:
            css = PART_CSS["burst" if layout == "EP" else "tail"]
            modelled = costs.ms(EngineLayout(layout), lives, context)
            series.append((f"{css} dashed", [(_log(x), float(y)) for x, y in zip(lives, modelled, strict=True)]))
        note += f"; dashed: costs at a context of {context:,.0f}, which cross at {costs.threshold(context):,} live"
    elif at is None:
        note += "; where the layouts cross is not seen here, moebius report --costs shows it from measured costs"
    marks = [] if at is None else [Mark(_log(at), _log(at), f"cross at {at:,.0f}", "note")]
    octaves = range(int(np.log2(max(2.0, top))) + 1)
    step = 2 if len(octaves) > 9 else 1
    chart = lines(
        series,
        marks=marks,
        x_label="samples that decoded (logarithmic)",
        label="Iteration time against live samples",
        x_top=_log(max(2.0, top)),
        y_top=y_top,
        x_ticks=[(float(i), short(2**i)) for i in octaves[::step]],
    )
    return figure("Iteration ms against samples that decoded", legend(_BY_LAYOUT) + chart, note)


def _log(live: float) -> float:
    return float(np.log2(max(1.0, live)))


def _context(reports: Sequence[StepReport]) -> float:
    """Mean context of a decode step: prompt and half of the output of every token's sample."""
    samples = [s for r in reports for s in r.samples if s.output_tokens]
    tokens = sum(s.output_tokens for s in samples)
    return sum(s.output_tokens * (s.prompt_tokens + s.output_tokens / 2) for s in samples) / max(1, tokens)


def switch_card(reports: Sequence[StepReport]) -> str:
    """Phases by direction, KV use before and after, and a table of all switches."""
    found = [(r.step, s) for r in reports for s in r.switches]
    if not found:
        return ""
    figures = []
    for to in sorted({s.to for _, s in found}, reverse=True):
        own = [s for _, s in found if s.to == to]
        phases = [s.phases_ms.model_dump() for s in own]
        medians_ms = {name: statistics.median(found[name] for found in phases) for name in Phases().model_dump()}
        pause = statistics.median(s.pause_ms for s in own)
        note = (f"median of {len(own)}" if len(own) > 1 else "one switch") + f"; pause {pause:,.1f} ms; {PHASES_NOTE}"
        chart = phase_bars(medians_ms, f"Phases of switches to {to}", "ms")
        figures.append(figure(f"Phases of a switch to {to}", chart, note))
    kv = []
    for step, s in found[-ROWS // 2 :]:
        for css, use in (("before", s.kv_use_before), ("after", s.kv_use_after)):
            name = f"step {step}, to {s.to}" if css == "before" else ""
            kv.append((name, [Part(100 * use, css, f"{css}: {100 * use:.1f} %")], f"{100 * use:.0f} %"))
    chart = stacked_bars(
        kv, label="KV pages in use", x_label="% of KV pages in use, fullest rank", row_height=13, left=84
    )
    body = legend((("before", "before the switch"), ("after", "after it"))) + chart
    shown = f", the last {ROWS // 2} shown" if len(found) > ROWS // 2 else ""
    figures.append(figure("KV use at switches", body, f"{counted(len(found), 'switch', 'es')} by step{shown}"))
    return card("Switches", f'<div class="charts">{"".join(figures)}</div>{fold("All switches", _switch_table(found))}')


def _switch_table(found: Sequence[tuple[int, SwitchEntry]]) -> str:
    names = list(Phases().model_dump())
    heads = ["step", "to", "t s", "live", "pause ms", *(f"{n} ms" for n in names)]
    heads += ["KV before %", "KV after %", "experts", "of them ahead", "KV"]
    rows = []
    for step, s in found[-TABLE_ROWS:]:
        phases = s.phases_ms.model_dump()
        cells = [str(step), s.to, f"{s.t:.2f}", f"{s.live:,}", f"{s.pause_ms:,.2f}"]
        cells += [f"{phases[name]:,.2f}" for name in names]
        cells += [f"{100 * s.kv_use_before:.1f}", f"{100 * s.kv_use_after:.1f}"]
        rows.append([*cells, size(s.expert_bytes), size(s.staged_bytes), size(s.kv_bytes)])
    return table(heads, rows)


def update_card(reports: Sequence[StepReport]) -> str:
    """Seconds of the weight update before each step, and the return to EP where there was none."""
    found = [r for r in reports if r.update_weights_s is not None or r.return_reshard_ms]
    if not found:
        return ""
    rows = []
    for r in found[-ROWS:]:
        update, back = r.update_weights_s or 0.0, r.return_reshard_ms / 1e3
        parts = [
            Part(update, "bar", f"weight update: {update:.3f} s"),
            Part(back, "other", f"return to EP: {back:.3f} s"),
        ]
        rows.append((f"step {r.step}", parts, f"{update + back:.2f} s"))
    chart = stacked_bars(rows, label="Weight updates", x_label="seconds", row_height=22 if len(rows) <= 16 else 13)
    names = (("bar", "weight update"), ("other", "experts back to EP"))
    shown = f"; the last {ROWS} shown" if len(found) > ROWS else ""
    return figure("Weight updates", legend(names) + chart, f"before each step; {len(found)} steps{shown}")


def hindsight_card(
    reports: Sequence[StepReport], found: Mapping[int, Counterfactual], source: str, share: float | None = None
) -> str:
    """What static layouts would have taken, by costs: a bar for each, a table, and what it makes of training steps."""
    if not found:
        return card("Static layouts in hindsight", "", f"Not known: {source}.")
    bars, rows = [], []
    for r in reports:
        if (c := found.get(r.step)) is None:
            continue
        bars += [
            (f"step {r.step}", [Part(c.measured_s, "bar", f"measured: {c.measured_s:.2f} s")], f"{c.gain:.3f}x"),
            ("", [Part(c.static_ep_s, "ep", f"static EP: {c.static_ep_s:.2f} s")], ""),
            ("", [Part(c.static_tp_s, "tp", f"static TP: {c.static_tp_s:.2f} s")], ""),
        ]
        times = (c.measured_s, c.static_ep_s, c.static_tp_s, c.best_single_s)
        rows.append([str(r.step), *(NONE if t is None else f"{t:.2f}" for t in times), f"{c.gain:.3f}x"])
    measured, ep, tp = sums(found)
    best = min(ep, tp)
    cells = [f"{value:.2f}" for value in (measured, ep, tp)]
    single = [c.best_single_s for c in found.values() if c.best_single_s is not None]
    cells.append(f"{sum(single):.2f}" if len(single) == len(found) else NONE)
    rows.append(["all", *cells, f"{best / measured:.3f}x" if measured else NONE])
    names = (("bar", "measured"), ("ep", "static EP, by costs"), ("tp", "static TP, by costs"))
    drawn = fitted(
        lambda width: stacked_bars(
            bars[-3 * ROWS :], label="Measured and static", x_label="seconds of decoding", row_height=13, width=width
        )
    )
    heads = ["step", "measured s", "static EP s", "static TP s", "best single switch s", "better static / measured"]
    note = (
        f"Static times and the best single switch are predictions ({source}) of decoding alone: prefill is part of "
        "what was measured and not of them. moebius bench measures static layouts themselves. In all: "
        f"{seconds(measured)} measured, {seconds(best)} in the better static layout."
    )
    body = f"{legend(names)}{drawn}{table(heads, rows)}"
    if measured:
        body += projection_table(best / measured, share)
    return card("Static layouts in hindsight", body, note)


def sums(found: Mapping[int, Counterfactual]) -> tuple[float, float, float]:
    """Seconds over all steps: measured, static EP, static TP."""
    values = list(found.values())
    return sum(c.measured_s for c in values), sum(c.static_ep_s for c in values), sum(c.static_tp_s for c in values)


def projection_table(gain: float, share: float | None) -> str:
    """What rollouts `gain` times as fast make of whole training steps, by the rollout's share of their time."""
    shares = tuple(sorted({*SHARES, *(() if share is None else (share,))}))
    rows = [
        [f"{100 * e.rollout_share:g} %" + (" (given)" if e.rollout_share == share else ""), f"{e.speedup:.3f}x"]
        for e in end_to_end(gain, shares)
    ]
    heads = ["rollout's share of a training step", f"whole step, rollout {gain:.3f}x as fast"]
    return f"<h3>End to end</h3>{table(heads, rows)}"
