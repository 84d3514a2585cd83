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
class PageWay:
    """How the kernel is launched; which bytes move where is the same in all ways (benchmarks/kv_variants.py)."""

    runs: bool = False  # neighbouring heads of a page as one run, where both pools keep them side by side
    programs_per_sm: int = 0  # programs that take pages in turn; 0: one program for each page and route
    streaming: bool = False  # tell the caches that nothing is used again
    warps: int = 0  # of a program; 0: by its tile


WAY = PageWay()  # of all moves that are given no other


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
        together = torch.empty(len(parts) * self.pages, dtype=torch.int64) if staging is None else staging
        together = together[: len(parts) * self.pages]
        np.concatenate([_host_array(ids) for ids in parts], out=together.numpy())
        moved = together.to(device, non_blocking=True).view(len(parts), self.pages)
        return dataclasses.replace(
            self, src_pages=moved[0], dst_pages=moved[1], owners=moved[2] if len(parts) > 2 else None
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
    mine = [tuple(_host_array(ids[turn::copies]) for ids in pair) for pair in pages]
    counts = [source.size for source, _ in mine]
    # Pages of all owners mixed, so that all of them are written to all the time.
    order = _interleaved(counts, rank)
    # numpy throughout: torch takes several times as long, and wakes all cores for it; the device waits for this.
    source, target, owners = (
        torch.from_numpy(ids.take(order))
        for ids in (*map(np.concatenate, zip(*mine, strict=True)), np.repeat(np.arange(len(mine)), counts))
    )
    routes = tuple((0, head - start, head) for head in range(start, stop))
    leaving = sum(counts) - counts[rank]
    return PageList(source, target, owners, routes, leaving * (stop - start))


class PageMover:
    """Launches the kernel; `bases` are the addresses of all ranks' buffers as mapped here."""

    def __init__(self, bases: Sequence[int], rank: int, device: torch.device, way: PageWay | None = None) -> None:
        self._bases, self._rank, self._way = tuple(bases), rank, way or WAY
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
        way = self._way
        geometry, warps, run = page_geometry(
            tuple(src.stride()), tuple(dst.stride()), tuple(src.shape[2:]), src.element_size(),
            (src.data_ptr(), dst_offset, *self._bases), run_of(pages.routes) if way.runs else 1,
        )  # fmt: skip
        taken = pages.routes[::run]
        routes = self._routes.get(taken)
        if routes is None:
            routes = self._routes[taken] = torch.tensor(taken, dtype=torch.int64, device=self._table.device)
        programs = max(1, count * len(taken))
        if way.programs_per_sm:
            programs = min(programs, way.programs_per_sm * _processors(self._table.device))
        with torch.cuda.device_of(self._table):
            page_kernel[(programs,)](
                self._table,
                src.data_ptr(),
                dst_offset,
                pages.src_pages,
                pages.dst_pages,
                pages.src_pages if pages.owners is None else pages.owners,
                routes,
                count,
                by_owner=pages.owners is not None,
                route_count=len(taken),
                **geometry,
                persistent=way.programs_per_sm > 0,
                streaming=way.streaming,
                num_warps=way.warps or warps,
            )


@functools.lru_cache(maxsize=16)
def run_of(routes: tuple[Route, ...]) -> int:
    """Into how many neighbouring heads all routes can be grouped, each group to one rank."""
    for run in range(len(routes), 1, -1):
        if len(routes) % run == 0 and all(
            routes[first + i] == (peer, source + i, target + i)
            for first, (peer, source, target) in zip(range(0, len(routes), run), routes[::run], strict=True)
            for i in range(run)
        ):
            return run
    return 1


@functools.lru_cache(maxsize=256)
def page_geometry(
    src_stride: tuple[int, ...],
    dst_stride: tuple[int, ...],
    page: tuple[int, int],
    itemsize: int,
    addresses: tuple[int, ...],
    run: int = 1,
) -> tuple[dict[str, Any], int, int]:
    """The kernel's compile-time arguments for `run` heads of a page (tokens, 2 * head dim), and the warps to run it.

    Also returns how many heads that are: 1 where a pool does not keep those of a page side by side. `addresses` only
    count for how coarse the units may be. Raises ValueError if a pool's last axis is not dense.
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
    run = run if rows == 1 and src_head == dst_head == width else 1
    if run > 1:
        width = src_pitch = dst_pitch = width * run
    grain = Grain.of(src_page, src_head, src_pitch, dst_page, dst_head, dst_pitch, width, *addresses)
    unit = grain.unit
    tile = tile_of(rows, width // unit, unit)
    return (
        {
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
        },
        tile.warps,
        run,
    )


def span_of(ids: torch.Tensor) -> tuple[int, int]:
    """The least and the greatest of page ids on the host, of which there is at least one."""
    found = _host_array(ids)
    return int(found.min()), int(found.max())


def _host_array(ids: torch.Tensor) -> np.ndarray:
    return ids.cpu().numpy()


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _rotated(routes: tuple[Route, ...], rank: int) -> tuple[Route, ...]:
    """Neighbours first, so that the ranks do not all begin with rank 0."""
    ranks = 1 + max(peer for peer, _, _ in routes)
    return tuple(sorted(routes, key=lambda route: (route[0] - rank - 1) % ranks))


def _interleaved(counts: Sequence[int], rank: int) -> np.ndarray:
    """Order of the concatenated lists in which their entries alternate evenly, the next rank's first."""
    ranks = len(counts)
    keys = [
        (np.arange(count, dtype=np.float64) + ((owner - rank - 1) % ranks + 1) / (ranks + 1)) / max(1, count)
        for owner, count in enumerate(counts)
    ]
    # Timsort merges the sorted runs; torch's argsort takes 40 times as long.
    return np.argsort(np.concatenate(keys), kind="stable")
