"""What bytes a switch moves, as data: pitched 2-D copies for experts, page-indexed copies for KV.

A plan is described once and serves both directions (`reversed`). Offsets, pitches and widths count elements, not bytes.
Shapes of one layer on one of G ranks, for E experts of hidden size H and intermediate size I:

    EP   w13 (E/G, 2I, H)    w2 (E/G, H, I)     whole experts
    TP   w13 (E, 2I/G, H)    w2 (E, H, I/G)     a slice of every expert; w13 rows are [gate slice ; up slice]
    KV   (pages, KV heads, page size, 2 * head dim), all heads in EP, the rank's heads in TP
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

PageIds = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CopyRect:
    """`rows` runs of `width` elements from one rank's tensor to another's; run i starts at offset + i * pitch."""

    src_rank: int
    dst_rank: int
    src_offset: int
    src_pitch: int
    dst_offset: int
    dst_pitch: int
    width: int
    rows: int

    @property
    def numel(self) -> int:
        """Elements moved."""
        return self.width * self.rows

    def reversed(self) -> CopyRect:
        """The copy that brings the same elements back."""
        return CopyRect(
            self.dst_rank,
            self.src_rank,
            self.dst_offset,
            self.dst_pitch,
            self.src_offset,
            self.src_pitch,
            self.width,
            self.rows,
        )


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """Copies of one layer between all pairs of ranks: one rectangle per pair and tensor, own rank included."""

    w13: tuple[CopyRect, ...]
    w2: tuple[CopyRect, ...]

    def reversed(self) -> ExpertPlan:
        """The plan of the other direction."""
        return ExpertPlan(tuple(rect.reversed() for rect in self.w13), tuple(rect.reversed() for rect in self.w2))

    def numel_sent(self, rank: int) -> int:
        """Elements that `rank` sends to its peers."""
        return sum(r.numel for r in self.w13 + self.w2 if r.src_rank == rank != r.dst_rank)


def plan_experts_ep_to_tp(experts: int, hidden: int, intermediate: int, ranks: int) -> ExpertPlan:
    """Plan one layer's EP -> TP reshard; use `.reversed()` for TP -> EP.

    w13 is seen as (2 * E/G, I, H) and cut on its middle axis, w2 as (E/G * H, I) and cut on its columns: in both, what
    one rank sends another is a pitched rectangle on the EP side and one contiguous block on the TP side.
    Raises ValueError if experts or intermediate is not a multiple of ranks.
    """
    if ranks < 1 or experts % ranks or intermediate % ranks:
        raise ValueError(f"{experts} experts with {intermediate} columns cannot be spread evenly over {ranks} ranks")
    local, part = experts // ranks, intermediate // ranks

    def rects(rows: int, pitch: int, width: int) -> tuple[CopyRect, ...]:
        return tuple(
            CopyRect(src, dst, dst * width, pitch, src * rows * width, width, width, rows)
            for src in range(ranks)
            for dst in range(ranks)
        )

    return ExpertPlan(
        w13=rects(2 * local, intermediate * hidden, part * hidden), w2=rects(local * hidden, intermediate, part)
    )


def apply_rects(rects: Iterable[CopyRect], src: Sequence[torch.Tensor], dst: Sequence[torch.Tensor]) -> None:
    """Carry out rectangles with plain torch; `src[r]` and `dst[r]` are rank r's contiguous tensors, all in reach.

    Raises ValueError if a tensor is not contiguous or a rectangle reaches outside it.
    """
    for rect in rects:
        source = _runs(src[rect.src_rank], rect.src_offset, rect.src_pitch, rect)
        _runs(dst[rect.dst_rank], rect.dst_offset, rect.dst_pitch, rect).copy_(source)


def _runs(tensor: torch.Tensor, offset: int, pitch: int, rect: CopyRect) -> torch.Tensor:
    end = offset + (rect.rows - 1) * pitch + rect.width
    if not tensor.is_contiguous() or offset < 0 or end > tensor.numel() or pitch < rect.width:
        raise ValueError(f"{rect} does not fit a tensor of shape {tuple(tensor.shape)}, strides {tensor.stride()}")
    return tensor.as_strided((rect.rows, rect.width), (pitch, 1), tensor.storage_offset() + offset)


class KvRequest(NamedTuple):
    """Pages of one live request: the first `pages` ids of both lists hold its computed tokens, in token order."""

    owner: int  # the rank that holds the request in EP
    ep_pages: Sequence[int]  # ids in the owner's EP pool
    tp_pages: Sequence[int]  # ids in the TP pool, the same on every rank
    pages: int


@dataclass(frozen=True, slots=True, eq=False)
class PageTable:
    """Live pages of all requests, grouped by owner: `ep_pages[r]` and `tp_pages[r]` (int64, same length) of rank r."""

    ep_pages: tuple[PageIds, ...]
    tp_pages: tuple[PageIds, ...]

    @classmethod
    def from_requests(cls, requests: Iterable[KvRequest], ranks: int) -> PageTable:
        """Gather the pages of `requests`, in their order, so that every rank gets the same table.

        Raises ValueError for an unknown owner, a list shorter than `pages`, or a negative page id.
        """
        ep: list[list[PageIds]] = [[] for _ in range(ranks)]
        tp: list[list[PageIds]] = [[] for _ in range(ranks)]
        for index, request in enumerate(requests):
            if not 0 <= request.owner < ranks:
                raise ValueError(f"request {index} names owner {request.owner}, but there are {ranks} ranks")
            if not 0 <= request.pages <= min(len(request.ep_pages), len(request.tp_pages)):
                raise ValueError(
                    f"request {index} has {request.pages} computed pages but lists {len(request.ep_pages)} EP and "
                    f"{len(request.tp_pages)} TP pages"
                )
            for out, ids in ((ep, request.ep_pages), (tp, request.tp_pages)):
                out[request.owner].append(np.asarray(ids[: request.pages], dtype=np.int64))
        table = cls(tuple(map(_join, ep)), tuple(map(_join, tp)))
        if any(ids.size and ids.min() < 0 for ids in table.ep_pages + table.tp_pages):
            raise ValueError("page ids must not be negative")
        return table

    @property
    def pages(self) -> int:
        """Live pages over all ranks."""
        return sum(ids.size for ids in self.tp_pages)


@dataclass(frozen=True, slots=True, eq=False)
class KvCopy:
    """Page `src_pages[i]`, heads [src_heads) of src_rank to page `dst_pages[i]`, heads [dst_heads) of dst_rank."""

    src_rank: int
    dst_rank: int
    src_pages: PageIds
    dst_pages: PageIds
    src_heads: tuple[int, int]
    dst_heads: tuple[int, int]


def kv_head_ranges(kv_heads: int, ranks: int) -> list[tuple[int, int]]:
    """KV heads [start, stop) of each TP rank; with more ranks than heads, rank r has head r * kv_heads // ranks.

    Raises ValueError if kv_heads is neither a multiple nor a divisor of ranks.
    """
    if min(kv_heads, ranks) < 1 or (kv_heads % ranks and ranks % kv_heads):
        raise ValueError(f"{kv_heads} KV heads can be neither split over nor replicated evenly on {ranks} ranks")
    count = max(1, kv_heads // ranks)
    return [(r * kv_heads // ranks, r * kv_heads // ranks + count) for r in range(ranks)]


def plan_kv_ep_to_tp(table: PageTable, kv_heads: int) -> list[KvCopy]:
    """One layer's KV from the owners to every TP rank: each rank gets all pages, but only its heads of them.

    A source page may appear twice (requests that share a prefix); raises ValueError if a target page does.
    """
    ranges = kv_head_ranges(kv_heads, len(table.ep_pages))
    _check_unique(_join(table.tp_pages), "TP")
    return [
        KvCopy(src, dst, ep, tp, ranges[dst], (0, ranges[dst][1] - ranges[dst][0]))
        for src, (ep, tp) in enumerate(zip(table.ep_pages, table.tp_pages, strict=True))
        for dst in range(len(ranges))
    ]


def plan_kv_tp_to_ep(table: PageTable, kv_heads: int) -> list[KvCopy]:
    """One layer's KV from every TP rank back to the owners. Ranks with copies of one head take turns at its pages.

    Raises ValueError if a target page appears twice in one owner's pool.
    """
    ranks = len(table.ep_pages)
    ranges = kv_head_ranges(kv_heads, ranks)
    copies = max(1, ranks // kv_heads)
    for owner, ids in enumerate(table.ep_pages):
        _check_unique(ids, f"EP rank {owner}")
    return [
        KvCopy(
            src,
            dst,
            tp[src % copies :: copies],
            ep[src % copies :: copies],
            (0, ranges[src][1] - ranges[src][0]),
            ranges[src],
        )
        for src in range(ranks)
        for dst, (ep, tp) in enumerate(zip(table.ep_pages, table.tp_pages, strict=True))
    ]


def apply_kv(copies: Iterable[KvCopy], src: Sequence[torch.Tensor], dst: Sequence[torch.Tensor]) -> None:
    """Carry out KV copies with plain torch; `src[r]`, `dst[r]` are rank r's (pages, heads, page size, 2 * head dim)."""
    for copy in copies:
        source = src[copy.src_rank][torch.from_numpy(copy.src_pages), slice(*copy.src_heads)]
        dst[copy.dst_rank][torch.from_numpy(copy.dst_pages), slice(*copy.dst_heads)] = source


def _join(parts: Sequence[PageIds]) -> PageIds:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def _check_unique(ids: PageIds, pool: str) -> None:
    unique, counts = np.unique(ids, return_counts=True)
    if unique.size != ids.size:
        raise ValueError(f"page {unique[counts > 1][0]} of the {pool} pool is the target of more than one page")
