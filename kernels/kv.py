"""Moves live KV pages into the peers' pools with a Triton kernel: page ids here to page ids there, heads by rank.

Pools are (pages, KV heads, page size, 2 * head dim), in any order of memory whose last axis is dense; pages of the
order HND move as one run per head.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from moebius.kernels.collective import HeadRanges, PagePairs

Route = tuple[int, int, int]  # target rank, head in the source pool, head in the target pool


@dataclass(frozen=True, slots=True)
class PageList:
    """What this rank sends in every layer: pages (int64, one length) and the routes each of them takes.

    With `owners`, page i goes to rank owners[i] by every route; without, to the rank that a route names.
    """

    src_pages: torch.Tensor
    dst_pages: torch.Tensor
    owners: torch.Tensor | None
    routes: tuple[Route, ...]
    peer_heads: int  # page heads that leave this rank; times the bytes of one is what it sends

    @property
    def pages(self) -> int:
        """Pages sent."""
        return self.src_pages.numel()

    def on(self, device: torch.device, staging: torch.Tensor | None = None) -> PageList:
        """The same with its page ids on `device`, copied in stream order.

        Through pinned `staging` (int64, three times the pages) the host does not wait: from pageable memory a copy
        would first wait for all earlier work of the stream. Its earlier contents must have been copied.
        """
        parts = [self.src_pages, self.dst_pages, *(() if self.owners is None else (self.owners,))]
        moved = []
        for index, ids in enumerate(parts):
            if staging is not None and ids.numel():
                source = staging[index * ids.numel() :][: ids.numel()].copy_(ids)
            else:
                source = ids
            moved.append(source.to(device, non_blocking=True))
        return dataclasses.replace(
            self, src_pages=moved[0], dst_pages=moved[1], owners=moved[2] if len(moved) > 2 else None
        )


def pages_to_tp(pages: PagePairs, head_ranges: HeadRanges, rank: int) -> PageList:
    """EP -> TP: this rank's pages, to every TP rank its heads; on the host."""
    source, target = (ids.cpu() for ids in pages[rank])
    routes = tuple(
        (peer, head, head - start) for peer, (start, stop) in enumerate(head_ranges) for head in range(start, stop)
    )
    leaving = sum(peer != rank for peer, _, _ in routes)
    return PageList(source, target, None, _rotated(routes, rank), source.numel() * leaving)


def pages_to_ep(pages: PagePairs, head_ranges: HeadRanges, rank: int) -> PageList:
    """TP -> EP: this rank's heads of every page, to the page's owner; ranks that hold the same heads take turns.

    On the host.
    """
    start, stop = head_ranges[rank]
    alike = [peer for peer, heads in enumerate(head_ranges) if heads == head_ranges[rank]]
    turn, copies = alike.index(rank), len(alike)
    mine = [(source[turn::copies].cpu(), target[turn::copies].cpu()) for source, target in pages]
    owners = torch.repeat_interleave(torch.arange(len(mine)), torch.tensor([_count(pair) for pair in mine]))
    # Pages of all owners mixed, so that all of them are written to all the time.
    order = _interleaved([_count(pair) for pair in mine], rank)
    source, target = (torch.cat([pair[side] for pair in mine])[order] for side in (0, 1))
    routes = tuple((0, head - start, head) for head in range(start, stop))
    leaving = sum(_count(pair) for owner, pair in enumerate(mine) if owner != rank)
    return PageList(source, target, owners[order], routes, leaving * (stop - start))


class PageMover:
    """Launches the kernel; `bases` are the addresses of all ranks' buffers as mapped here."""

    def __init__(self, bases: Sequence[int], rank: int, device: torch.device) -> None:
        self._bases, self._rank = tuple(bases), rank
        self._table = torch.tensor(self._bases, dtype=torch.int64, device=device)
        self._routes: dict[tuple[Route, ...], torch.Tensor] = {}

    def move(
        self, src: torch.Tensor, dst: torch.Tensor, dst_offset: int, pages: PageList, limit: int | None = None
    ) -> None:
        """Enqueue one layer: from pool `src` here into the pools at `dst_offset` of the ranks' buffers.

        `dst` is this rank's target pool, which stands for the shape and strides of all. `limit` bounds the pages; 0
        compiles and loads the kernel without moving anything.
        """
        from moebius.kernels.peer_triton import page_kernel

        count = pages.pages if limit is None else min(limit, pages.pages)
        if not count and limit is None:
            return
        routes = self._routes.get(pages.routes)
        if routes is None:
            routes = torch.tensor(pages.routes, dtype=torch.int64, device=self._table.device)
            self._routes[pages.routes] = routes
        geometry, warps = page_geometry(
            tuple(src.stride()), tuple(dst.stride()), tuple(src.shape[2:]), src.element_size(),
            (src.data_ptr(), dst_offset, *self._bases),
        )  # fmt: skip
        with torch.cuda.device_of(self._table):
            page_kernel[(max(1, count * len(pages.routes)),)](
                self._table,
                src.data_ptr(),
                dst_offset,
                pages.src_pages,
                pages.dst_pages,
                pages.src_pages if pages.owners is None else pages.owners,
                routes,
                count,
                by_owner=pages.owners is not None,
                route_count=len(pages.routes),
                **geometry,
                num_warps=warps,
            )


@functools.lru_cache(maxsize=256)
def page_geometry(
    src_stride: tuple[int, ...],
    dst_stride: tuple[int, ...],
    page: tuple[int, int],
    itemsize: int,
    addresses: tuple[int, ...],
) -> tuple[dict[str, Any], int]:
    """The kernel's compile-time arguments for one head of a page (tokens, 2 * head dim), and the warps to run it.

    `addresses` only count for how coarse the units may be. Raises ValueError if a pool's last axis is not dense.
    """
    from moebius.kernels.peer_triton import Grain, tile_of

    if src_stride[3] != 1 or dst_stride[3] != 1:
        raise ValueError(f"KV pools must be dense in their last axis, strides are {src_stride} and {dst_stride}")
    src_page, src_head, src_pitch = (stride * itemsize for stride in src_stride[:3])
    dst_page, dst_head, dst_pitch = (stride * itemsize for stride in dst_stride[:3])
    rows, width = page[0], page[1] * itemsize
    if src_pitch == dst_pitch == width:
        rows, width = 1, rows * width
        src_pitch = dst_pitch = width
    grain = Grain.of(src_page, src_head, src_pitch, dst_page, dst_head, dst_pitch, width, *addresses)
    unit = grain.unit
    tile = tile_of(rows, width // unit, unit)
    return {
        "unit": unit,
        "aligned": grain.aligned,
        "src_page": src_page,
        "dst_page": dst_page,
        "src_head": src_head,
        "dst_head": dst_head,
        "rows": rows,
        "width": width // unit,
        "src_pitch": src_pitch // unit,
        "dst_pitch": dst_pitch // unit,
        "tile_rows": tile.rows,
        "tile_cols": tile.cols,
        "tiles": -(-rows // tile.rows) * -(-(width // unit) // tile.cols),
    }, tile.warps


def _count(pair: tuple[torch.Tensor, torch.Tensor]) -> int:
    return pair[0].numel()


def _rotated(routes: tuple[Route, ...], rank: int) -> tuple[Route, ...]:
    """Neighbours first, so that the ranks do not all begin with rank 0."""
    ranks = 1 + max(peer for peer, _, _ in routes)
    return tuple(sorted(routes, key=lambda route: (route[0] - rank - 1) % ranks))


def _interleaved(counts: Sequence[int], rank: int) -> torch.Tensor:
    """Order of the concatenated lists in which their entries alternate evenly, the next rank's first."""
    ranks = len(counts)
    keys = [
        (torch.arange(count, dtype=torch.float64) + ((owner - rank - 1) % ranks + 1) / (ranks + 1)) / max(1, count)
        for owner, count in enumerate(counts)
    ]
    # Timsort merges the sorted runs; torch's argsort takes 40 times as long.
    return torch.from_numpy(np.argsort(torch.cat(keys).numpy(), kind="stable"))
