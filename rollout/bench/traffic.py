"""Bytes that a switch reads, writes, sends and keeps on one rank, by formula from shapes (the paper's table 1).

Counted at the interface of copies and collectives: what NCCL does inside an exchange (its channel buffers) is not in
it. A rank's HBM writes are those into its memory, by whatever rank. Shapes: see `moebius.kernels.plan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Way = Literal["direct", "all_to_all", "prepare", "commit"]
EXPERT_WAYS: tuple[Way, ...] = ("direct", "all_to_all", "prepare", "commit")
KV_WAYS: tuple[Way, ...] = ("direct", "all_to_all")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes on one rank. `staging` is memory that is held beside source and target."""

    hbm_read: int
    hbm_written: int
    link_sent: int
    staging: int

    def layers(self, count: int) -> Traffic:
        """Of `count` layers one after another, which use the same staging memory."""
        return Traffic(self.hbm_read * count, self.hbm_written * count, self.link_sent * count, self.staging)


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The experts of a model."""

    layers: int
    experts: int
    hidden: int
    intermediate: int
    itemsize: int

    def tensors(self, ranks: int) -> tuple[int, int]:
        """Bytes of w13 and of w2 of one layer on a rank, in either layout."""
        w2 = self.experts // ranks * self.hidden * self.intermediate * self.itemsize
        return 2 * w2, w2


@dataclass(frozen=True, slots=True)
class KvShape:
    """The KV of a model in pages; `head_bytes` are those of one head of one page of one layer."""

    layers: int
    heads: Sequence[tuple[int, int]]  # by TP rank: KV heads [start, stop)
    kv_heads: int
    head_bytes: int


def expert_traffic(way: Way, shape: ExpertShape, ranks: int) -> Traffic:
    """All layers' experts, in either direction.

    direct: one pass, into the peers' slots. all_to_all: packed into staging memory and exchanged, or (to EP) exchanged
    into staging memory and unpacked. prepare: what peers get, into staging memory for all layers, while decoding goes
    on; commit: from there, and what stays on the rank, into the slots.
    """
    largest, w2 = shape.tensors(ranks)
    slot = largest + w2
    leaving = slot // ranks * (ranks - 1)
    match way:
        case "direct":
            return Traffic(slot, slot, leaving, 0).layers(shape.layers)
        case "all_to_all":
            return Traffic(2 * slot, 2 * slot, leaving, largest).layers(shape.layers)
        case "prepare":
            return Traffic(leaving, leaving, leaving, leaving * shape.layers).layers(shape.layers)
        case "commit":
            return Traffic(slot, slot, 0, leaving * shape.layers).layers(shape.layers)


def kv_traffic_to_tp(way: Way, shape: KvShape, pages: Sequence[int], rank: int) -> Traffic:
    """All layers' KV from EP to TP on `rank`, where rank r owns `pages[r]` pages. Raises ValueError for another way."""
    widths = [stop - start for start, stop in shape.heads]
    sent = pages[rank] * sum(widths) * shape.head_bytes
    came = sum(pages) * widths[rank] * shape.head_bytes
    leaving = pages[rank] * (sum(widths) - widths[rank]) * shape.head_bytes
    return _kv(way, sent, came, leaving).layers(shape.layers)


def kv_traffic_to_ep(way: Way, shape: KvShape, pages: Sequence[int], rank: int) -> Traffic:
    """All layers' KV from TP to EP on `rank`, where rank r will own `pages[r]` pages.

    Ranks that hold the same heads take turns at the pages. Raises ValueError for another way.
    """
    alike = [peer for peer, heads in enumerate(shape.heads) if heads == shape.heads[rank]]
    mine = [len(range(alike.index(rank), count, len(alike))) for count in pages]
    start, stop = shape.heads[rank]
    width = (stop - start) * shape.head_bytes
    return _kv(
        way, sum(mine) * width, pages[rank] * shape.kv_heads * shape.head_bytes, (sum(mine) - mine[rank]) * width
    ).layers(shape.layers)


def _kv(way: Way, sent: int, came: int, leaving: int) -> Traffic:
    """`sent` and `came` count what stays on the rank too."""
    if way == "direct":
        return Traffic(sent, came, leaving, 0)
    if way == "all_to_all":  # gathered into staging memory, exchanged into staging memory, scattered
        return Traffic(2 * sent + came, sent + 2 * came, leaving, sent + came)
    raise ValueError(f"KV is not moved by {way}")
