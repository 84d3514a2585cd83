"""The chart of a comparison as inline SVG: per step one bar per run, burst plain, switch dark, tail striped."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from moebius.rollout.compare import Bar, Comparison
from moebius.rollout.svg import short, ticks

COLOURS = 6
_KINDS = {"EP": 0, "TP": 1, "switching": 3}
_LEFT, _TOP, _BOTTOM, _HEIGHT = 48.0, 26.0, 36.0, 330.0

_LIGHT = ("#2f74d0", "#d9822b", "#3d8f7d", "#a63d8f", "#7a6ad8", "#667085")
_DARK = ("#5c9df0", "#eba052", "#5bb5a1", "#d272bd", "#a195f0", "#98a3b5")
CHART_CSS = (
    ":root{" + "".join(f"--r{i}:{c};" for i, c in enumerate(_LIGHT)) + "}"
    "@media (prefers-color-scheme: dark){:root{"
    + "".join(f"--r{i}:{c};" for i, c in enumerate(_DARK))
    + "}}"
    + "".join(
        f"rect.run{i}{{fill:var(--r{i})}} i.run{i}{{background:var(--r{i})}} rect.edge{i}{{stroke:var(--r{i})}}"
        f"svg .stripe{i}{{stroke:var(--r{i});stroke-width:2.4}}"
        for i in range(COLOURS)
    )
    + "rect.pause{fill:var(--ink)} i.dark{background:var(--ink)} i.plain{background:var(--soft)}"
    "i.striped{background:repeating-linear-gradient(45deg,var(--soft) 0 2px,transparent 2px 4px)}"
    "svg text.gain{font-size:10px} .warn{border-left:4px solid var(--tp);padding:6px 12px;background:var(--card)}"
)


def colour_of(found: Comparison, run: int) -> int:
    """Number of a run's colour: that of its kind for the first of a kind, else one that is free."""
    taken: list[int] = []
    for kind in found.kinds[: run + 1]:
        own = _KINDS[kind]
        if own in taken:
            own = next((i for i in range(COLOURS) if i not in taken and i not in _KINDS.values()), len(taken) % COLOURS)
        taken.append(own)
    return taken[-1]


def bar_chart(found: Comparison) -> str:
    """Grouped bars over one axis of seconds from 0."""
    count = len(found.runs)
    bar_width = max(13.0, min(40.0, 900 / (len(found.steps) * (count + 1))))
    group = bar_width * (count + 1)
    width = max(560.0, _LEFT + group * len(found.steps) + 20)
    top = max((bar.total_s for bars in found.bars for bar in bars), default=0.0)
    marks = ticks(top)
    floor = _HEIGHT - _BOTTOM

    def scale(seconds: float) -> float:
        return floor - seconds / marks[-1] * (floor - _TOP)

    body = [f"<defs>{''.join(_pattern(i) for i in range(COLOURS))}</defs>"]
    for value in marks:
        y = scale(value)
        body.append(f'<path class="{"axis" if value == 0 else "grid"}" d="M{_LEFT} {y:.1f}H{width - 8:.1f}"/>')
        body.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(value)}</text>')
    for i, step in enumerate(found.steps):
        start = _LEFT + 10 + i * group
        body.append(
            f'<text x="{start + group / 2 - bar_width / 2:.1f}" y="{floor + 15:.1f}" text-anchor="middle">{step}</text>'
        )
        for r, bars in enumerate(found.bars):
            body += _draw(bars[i], colour_of(found, r), start + r * bar_width, bar_width * 0.9, scale)
    body.append(f'<text x="{width - 8:.1f}" y="{floor + 31:.1f}" text-anchor="end">step</text>')
    body.append(f'<text x="4" y="{_TOP - 12}">seconds</text>')
    return (
        f'<svg viewBox="0 0 {width:g} {_HEIGHT:g}" role="img" aria-label="Time of each step and run">'
        f"{''.join(body)}</svg>"
    )


def _pattern(i: int) -> str:
    return (
        f'<pattern id="tail{i}" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<path class="stripe{i}" d="M1.2 0V5"/></pattern>'
    )


def _draw(bar: Bar, colour: int, x: float, width: float, scale: Callable[[float], float]) -> list[str]:
    out, below = [], 0.0
    title = (
        f"{bar.run}, step {bar.step}: {bar.total_s:.2f} s (burst {bar.burst_s:.2f}, switch {bar.switch_s:.3f}, "
        f"tail {bar.tail_s:.2f})"
    )
    for size, look in (
        (bar.burst_s, f'class="run{colour}"'),
        (bar.switch_s, 'class="pause"'),
        (bar.tail_s, f'class="edge{colour}" fill="url(#tail{colour})"'),
    ):
        if size > 0:
            y, end = scale(below + size), scale(below)
            out.append(
                f'<rect {look} x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{max(end - y, 0.8):.1f}">'
                f"<title>{escape(title)}</title></rect>"
            )
        below += size
    if bar.speedup is not None:
        out.append(
            f'<text class="strong gain" x="{x + width / 2:.1f}" y="{scale(below) - 4:.1f}" text-anchor="middle">'
            f"{bar.speedup:.2f}x</text>"
        )
    return out
