"""Small charts as inline SVG, coloured by CSS classes of the page around them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 560.0
LEFT, RIGHT, TOP = 52.0, 12.0, 16.0


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a stacked bar: its size in the unit of the axis, its CSS class, and what a pointer over it shows."""

    size: float
    css: str
    title: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line at `x`, with a shade up to `x_end` when that is wider than the line."""

    x: float
    x_end: float
    label: str
    css: str = "switch"
    row: int = 0  # the label's line of text, or one below it


@dataclass(frozen=True, slots=True)
class Band:
    """A coloured background from `x` to `x_end`."""

    x: float
    x_end: float
    css: str


def short(value: float) -> str:
    """A number in few characters: 12.3k, 1.5M, 0.04."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (limit if unit != 'k' else 1e3):.3g}{unit}"
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def ticks(top: float, count: int = 4) -> list[float]:
    """Round values from 0 to at least `top`, about `count` steps."""
    if top <= 0:
        return [0.0, 1.0]
    raw = top / count
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(scale * m for m in (1, 2, 2.5, 5, 10) if scale * m >= raw * (1 - 1e-9))
    return [i * step for i in range(math.ceil(top / step - 1e-9) + 1)]


def lines(
    series: Sequence[tuple[str, Sequence[tuple[float, float]]]],
    *,
    marks: Sequence[Mark] = (),
    x_label: str,
    label: str,
    x_top: float,
    y_top: float,
    height: float = 190.0,
    fill: bool = False,
    bands: Sequence[Band] = (),
    x_ticks: Sequence[tuple[float, str]] | None = None,
) -> str:
    """A line chart of (css class, [(x, y), ...]) series over x from 0 to `x_top` and y from 0 to `y_top`.

    A series whose class holds the word `dots` is drawn as dots. `x_ticks` replaces the round values of x by others.
    """
    bottom, scale_x, scale_y, body = frame(x_top, y_top, height, x_label, x_ticks)
    body[:0] = background(bands, scale_x, bottom)
    for css, data in series:
        if not data:
            continue
        placed = [(scale_x(x), scale_y(y)) for x, y in data]
        if "dots" in css.split():
            dots = dict.fromkeys(f"M{x:.1f} {y:.1f}h0" for x, y in placed)
            body.append(f'<path class="{css}" d="{"".join(dots)}"/>')
            continue
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in _visible(placed))
        if fill:
            first, last = placed[0][0], placed[-1][0]
            body.append(f'<path class="area {css}" d="M{first:.1f} {bottom:.1f}L{path}L{last:.1f} {bottom:.1f}Z"/>')
        body.append(f'<path class="line {css}" d="M{path}"/>')
    body += _marked(marks, scale_x, bottom)
    return drawing(height, label, body)


def background(bands: Sequence[Band], scale_x: Callable[[float], float], bottom: float) -> list[str]:
    """The elements of coloured backgrounds."""
    return [
        f'<rect class="band {band.css}" x="{scale_x(band.x):.1f}" y="{TOP}" '
        f'width="{max(0.5, scale_x(band.x_end) - scale_x(band.x)):.1f}" height="{bottom - TOP:.1f}"/>'
        for band in bands
    ]


def _marked(marks: Sequence[Mark], scale_x: Callable[[float], float], bottom: float) -> list[str]:
    body, taken = [], [-1e9, -1e9, -1e9]  # where the last label of each line of text ends
    for mark in marks:
        x, end = scale_x(mark.x), scale_x(mark.x_end)
        body.append(
            f'<rect class="shade {mark.css}" x="{x:.1f}" y="{TOP}" width="{max(1.0, end - x):.1f}" '
            f'height="{bottom - TOP}"><title>{escape(mark.label)}</title></rect>'
        )
        body.append(f'<path class="mark {mark.css}" d="M{x:.1f} {TOP}V{bottom}"/>')
        # Near the right edge the text would be cut: put it on the other side of the line.
        size = 8.0 * len(mark.label)
        near_edge = x + size > WIDTH
        anchor, dx = ("end", -5) if near_edge else ("start", max(5.0, end - x + 5))
        begin = x + dx - (size if near_edge else 0)
        # A label goes to the first line of text with room; where none has any, pointing at the line shows it.
        row = next((i for i, until in enumerate(taken) if i >= mark.row and begin > until), None)
        if row is None:
            continue
        taken[row] = begin + size
        body.append(
            f'<text class="strong" x="{x + dx:.1f}" y="{TOP + 10 + 14 * row}" text-anchor="{anchor}">'
            f"{escape(mark.label)}</text>"
        )
    return body


def histogram(
    values: Sequence[int],
    *,
    x_label: str,
    label: str,
    marks: Sequence[Mark] = (),
    height: float = 190.0,
    bins: int = 28,
) -> str:
    """How many of `values` (not negative) fall into each of about `bins` equal bins from 0."""
    width = max(1, math.ceil((max(values, default=0) + 1) / bins))
    count = max(1, math.ceil((max(values, default=0) + 1) / width))
    counts = [0] * count
    for value in values:
        counts[value // width] += 1
    bottom, scale_x, scale_y, body = frame(width * count, max(counts), height, x_label)
    for i, number in enumerate(counts):
        if number:
            x, end, y = scale_x(i * width), scale_x((i + 1) * width), scale_y(number)
            body.append(
                f'<rect class="bar" x="{x + 0.5:.1f}" y="{y:.1f}" width="{max(0.8, end - x - 1):.1f}" '
                f'height="{bottom - y:.1f}">'
                f"<title>{i * width:,} to {(i + 1) * width - 1:,} tokens: {number:,} samples</title></rect>"
            )
    body += _marked(marks, scale_x, bottom)
    return drawing(height, label, body)


def stacked_bars(
    rows: Sequence[tuple[str, Sequence[Part], str]],
    *,
    label: str,
    x_label: str,
    left: float = 64.0,
    row_height: float = 22.0,
    width: float = WIDTH,
) -> str:
    """Horizontal bars of (name, parts, text at the end), one per row, over one axis from 0."""
    top = max((sum(part.size for part in parts) for _, parts, _ in rows), default=0.0)
    marks = ticks(top)
    end_text = 7.7 * max((len(text) for _, _, text in rows), default=0) + 12
    span = width - left - max(RIGHT, end_text)
    bottom = TOP / 2 + row_height * len(rows)
    axis_top = marks[-1] if marks[-1] <= top * 1.2 else top or 1.0
    gap = 3.0 if row_height >= 16 else 1.5
    body = []
    for value in marks:
        if value <= axis_top * (1 + 1e-9):
            x = left + value / axis_top * span
            body.append(f'<path class="grid" d="M{x:.1f} {TOP / 2}V{bottom:.1f}"/>')
            body.append(f'<text x="{x:.1f}" y="{bottom + 14:.1f}" text-anchor="middle">{short(value)}</text>')
    for i, (name, parts, text) in enumerate(rows):
        y, x = TOP / 2 + i * row_height, left
        body.append(f'<text x="{left - 8}" y="{y + row_height * 0.66:.1f}" text-anchor="end">{escape(name)}</text>')
        for part in parts:
            size = part.size / axis_top * span
            if size > 0:
                # Hundreds of rows would triple the page with their titles.
                title = f"<title>{escape(part.title)}</title>" if len(rows) <= 40 else ""
                body.append(
                    f'<rect class="{part.css}" x="{x:.1f}" y="{y + gap:.1f}" width="{max(size, 0.8):.1f}" '
                    f'height="{row_height - 2 * gap:.1f}">{title}</rect>'
                )
            x += size
        body.append(f'<text class="strong" x="{x + 6:.1f}" y="{y + row_height * 0.66:.1f}">{escape(text)}</text>')
    body.append(f'<text x="{left + span:.1f}" y="{bottom + 29:.1f}" text-anchor="end">{escape(x_label)}</text>')
    return drawing(bottom + 34, label, body, width)


def frame(
    x_top: float,
    y_top: float,
    height: float,
    x_label: str,
    x_ticks: Sequence[tuple[float, str]] | None = None,
) -> tuple[float, Callable[[float], float], Callable[[float], float], list[str]]:
    """Axes with ticks: the y of the zero line, the scales from data to picture, and the drawn elements."""
    y_marks, bottom = ticks(y_top), height - 36
    x_top = x_top or 1.0

    def scale_x(x: float) -> float:
        return LEFT + min(max(x / x_top, 0.0), 1.0) * (WIDTH - LEFT - RIGHT)

    def scale_y(y: float) -> float:
        return bottom - min(y / y_marks[-1], 1.0) * (bottom - TOP)

    body = []
    for value in y_marks:
        y = scale_y(value)
        body.append(f'<path class="{"axis" if value == 0 else "grid"}" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        body.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(value)}</text>')
    body += [
        f'<text x="{min(scale_x(value), WIDTH - 4 * len(text)):.1f}" y="{bottom + 15:.1f}" '
        f'text-anchor="middle">{text}</text>'
        for value, text in x_ticks or [(value, short(value)) for value in ticks(x_top, 6)]
        if value <= x_top * (1 + 1e-9)
    ]
    body.append(f'<text x="{WIDTH - RIGHT}" y="{bottom + 31:.1f}" text-anchor="end">{escape(x_label)}</text>')
    return bottom, scale_x, scale_y, body


def _visible(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points without those that the eye could not tell from the one before; the first and last stay."""
    out = list(points[:1])
    for x, y in points[1:-1]:
        if abs(x - out[-1][0]) + abs(y - out[-1][1]) >= 1.6:
            out.append((x, y))
    return out + list(points[1:][-1:])


def drawing(height: float, label: str, body: Sequence[str], width: float = WIDTH) -> str:
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label, quote=True)}">'
        + "".join(body)
        + "</svg>"
    )
