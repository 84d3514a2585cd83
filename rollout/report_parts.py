"""Pieces that the cards of the HTML report share: names and colours of parts, numbers in words, tables, figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

from moebius.rollout.report_types import Layout, StepReport
from moebius.rollout.svg import WIDTH, Part, stacked_bars

NONE = "-"
PARTS = ("burst", "switch", "tail", "other")
PART_NAMES = {"burst": "burst (EP)", "switch": "switch", "tail": "tail (TP)", "other": "other"}
PART_CSS = {"burst": "ep", "switch": "switch", "tail": "tp", "other": "other"}
LAYOUTS: tuple[Layout, Layout] = ("EP", "TP")


def parts_of(report: StepReport) -> list[Part]:
    """The parts of a step's time, for a stacked bar."""
    total = report.durations_s.total or 1.0
    sizes = {name: getattr(report.durations_s, name) for name in PARTS}
    return [
        Part(size, PART_CSS[name], f"{PART_NAMES[name]}: {seconds(size)}, {100 * size / total:.1f} %")
        for name, size in sizes.items()
    ]


def phase_bars(phases_ms: Mapping[str, float], label: str, x_label: str) -> str:
    """A bar per phase of a switch; grey is the pass in flight, in which samples still decode."""
    rows = []
    for name, ms in phases_ms.items():
        decoding = name == "drain"
        title = f"{name}: {ms:.2f} ms" + (", still decoding: no part of the pause" if decoding else "")
        rows.append((name, [Part(ms, "other" if decoding else "switch", title)], f"{ms:,.2f}"))
    return stacked_bars(rows, label=label, x_label=x_label, left=72, row_height=17.5)


PHASES_NOTE = "grey: samples still decode; docs/switching.md explains the phases"


def counted(number: int, noun: str, plural: str = "s") -> str:
    """A number with its noun: 1 step, 2 steps."""
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def legend(entries: Sequence[tuple[str, str]] | None = None) -> str:
    """Colours (css class, name); by default those of the parts of a step."""
    entries = [(PART_CSS[part], PART_NAMES[part]) for part in PARTS] if entries is None else entries
    return '<p class="legend">' + "".join(f'<span><i class="{css}"></i>{name}</span>' for css, name in entries) + "</p>"


def fitted(draw: Callable[[float], str]) -> str:
    """A drawing twice, for a wide and for a small screen, which shows its own: shrunk, texts could not be read."""
    return f'<div class="desk">{draw(1120.0)}</div><div class="phone">{draw(WIDTH)}</div>'


def figure(title: str, drawing: str, note: str) -> str:
    """A drawing with its title and a line about it."""
    return f"<figure><figcaption>{escape(title)}<small>{escape(note)}</small></figcaption>{drawing}</figure>"


def card(title: str, body: str, note: str = "") -> str:
    """A section of the page."""
    said = f'<p class="note">{escape(note)}</p>' if note else ""
    return f'<section class="card"><h2>{escape(title)}</h2>{body}{said}</section>'


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], text: Sequence[int] = ()) -> str:
    """A table of texts; columns numbered in `text` hold sentences, the others numbers."""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    wordy = [' class="text"' if i in text else "" for i in range(len(heads))]
    body = "".join(
        "<tr>" + "".join(f"<td{css}>{escape(cell)}</td>" for css, cell in zip(wordy, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def fold(title: str, body: str) -> str:
    """A part that opens when its title is clicked."""
    return f'<details class="fold"><summary>{escape(title)}</summary>{body}</details>'


def seconds(value: float) -> str:
    """Seconds in few characters: 0.42 s, 12.3 s, 7.1 min, 1.3 h."""
    if value >= 3600:
        return f"{value / 3600:.1f} h"
    return f"{value / 60:.1f} min" if value >= 300 else f"{value:.1f} s" if value >= 10 else f"{value:.2f} s"


def size(value: int) -> str:
    """Bytes in few characters."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.1f} {unit}"
    return f"{value} B"
