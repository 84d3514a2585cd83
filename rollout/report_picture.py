"""A step as one SVG file, for a README or a slide: live samples over time beside the samples' lifelines."""

from __future__ import annotations

from html import escape

from moebius.rollout.report_parts import PART_CSS, PART_NAMES, seconds
from moebius.rollout.report_step import lifeline_drawing, live_drawing
from moebius.rollout.report_style import CSS
from moebius.rollout.report_types import StepReport
from moebius.rollout.svg import WIDTH, short

POINTS = 300
_TOP, _GAP = 64.0, 24.0


def picture(report: StepReport) -> str:
    """The text of a self-contained SVG, light or dark by the reader's preference, with what is known in words above."""
    lifeline, note = lifeline_drawing(report)
    panels = [("Live samples over all ranks", live_drawing(report, POINTS, 226.0), 226.0)]
    if lifeline:
        panels.append((f"Lifelines: {note}", lifeline, 226.0))
    width = WIDTH * len(panels) + _GAP * (len(panels) + 1)
    height = _TOP + max(height for _, _, height in panels) + 34
    switch = "; ".join(f"switch to {s.to} with {s.live:,} live in {s.pause_ms:,.0f} ms" for s in report.switches[:2])
    title = (
        f"{report.counts.samples:,} samples, {short(report.counts.output_tokens)} tokens in "
        f"{seconds(report.durations_s.total)} on {report.ranks} ranks ({report.device}); {switch or 'no switch'}"
    )
    body = [f'<text class="title strong" x="{_GAP}" y="26">{escape(title)}</text>']
    x = _GAP
    for name, drawn, _ in panels:
        inner = drawn[drawn.index(">") + 1 : drawn.rindex("</svg>")]
        body.append(f'<text x="{x:g}" y="{_TOP - 14:g}">{escape(name)}</text>')
        body.append(f'<g transform="translate({x:g} {_TOP - 8:g})">{inner}</g>')
        x += WIDTH + _GAP
    x = _GAP
    for part in ("burst", "switch", "tail"):
        body.append(f'<rect class="{PART_CSS[part]}" x="{x:g}" y="{height - 22:g}" width="11" height="11" rx="3"/>')
        body.append(f'<text x="{x + 17:g}" y="{height - 12:g}">{PART_NAMES[part]}</text>')
        x += 110
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{escape(title, quote=True)}"><style>{_style()}</style>'
        f'<rect class="paper" width="{width:g}" height="{height:g}" rx="10"/>{"".join(body)}</svg>\n'
    )


def _style() -> str:
    """The page's own rules; those about other elements than drawings find none here."""
    extra = (
        "svg { font-family: system-ui, -apple-system, 'Segoe UI', sans-serif; }"
        "rect.paper { fill: var(--card); stroke: var(--rule); } svg .title { font-size: 16px; font-weight: 600; }"
    )
    return CSS + extra
