"""Triton kernels that store into peers' memory: flags across ranks, expert rectangles, KV pages.

Addresses are int64 numbers, the peers' taken from a table in device memory. Copies count units of 1, 2 or 4 bytes;
with `aligned`, every address and pitch is a multiple of 16 bytes, and threads move 16 bytes at a time.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl

_TILE_BYTES = 16384  # a program's share: four 16-byte loads in flight for each thread of 8 warps


class Grain(NamedTuple):
    """Bytes of a copy's unit, and whether 16 bytes may move at a time."""

    unit: int
    aligned: bool

    @classmethod
    def of(cls, *quantities: int) -> Grain:
        """The coarsest grain that divides all addresses, pitches and widths in bytes."""
        common = math.gcd(16, *quantities)
        return cls(min(4, common), common == 16)


class Tile(NamedTuple):
    """Block shape in units, and the warps that move a block."""

    rows: int
    cols: int
    warps: int


def tile_of(rows: int, width: int, unit: int) -> Tile:
    """About 16 KiB of a copy of `rows` x `width` units: whole rows where possible, else pieces that need no mask."""
    limit = _TILE_BYTES // unit
    cols = min(limit, width & -width)  # the power of two that divides the width
    if cols * unit < 256:  # short of what one access of a warp's half covers: mask the end of the rows instead
        cols = min(limit, triton.next_power_of_2(width))
    height = min(limit // cols, triton.next_power_of_2(rows))
    return Tile(height, cols, min(8, max(1, height * cols * unit // 2048)))


@triton.jit(do_not_specialize=["rank", "value"])
def signal_kernel(
    peer_flags, own_flags, rank, value, ranks: tl.constexpr, stride: tl.constexpr, lanes: tl.constexpr
):  # fmt: skip
    """Raise my flag to `value` on every rank, then wait until every rank has raised its flag here as far.

    `peer_flags` is a table of the addresses of the ranks' flags; flag r of a rank is `r * stride` int32 further.
    Values may wrap: only their difference counts.
    """
    lane = tl.arange(0, lanes)
    used = lane < ranks
    there = tl.load(peer_flags + lane, mask=used, other=0).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(there + rank * stride, value, mask=used, sem="release", scope="sys")
    here = own_flags + lane * stride
    behind = 1
    while behind > 0:
        seen = tl.atomic_add(here, 0, mask=used, sem="acquire", scope="sys")
        behind = tl.max(tl.where(used, value - seen, 0), axis=0)


@triton.jit
def _pointer(address, unit: tl.constexpr, aligned: tl.constexpr):
    if unit == 4:
        pointer = address.to(tl.pointer_type(tl.int32))
    elif unit == 2:
        pointer = address.to(tl.pointer_type(tl.int16))
    else:
        pointer = address.to(tl.pointer_type(tl.int8))
    if aligned:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _copy_tile(
    src, dst, tile,
    rows: tl.constexpr, width: tl.constexpr, src_pitch: tl.constexpr, dst_pitch: tl.constexpr,
    tile_rows: tl.constexpr, tile_cols: tl.constexpr, streaming: tl.constexpr = False,
):  # fmt: skip
    """Tile number `tile` of a pitched copy, tiles of a row after each other; `streaming`: nothing is used again."""
    across: tl.constexpr = (width + tile_cols - 1) // tile_cols
    row = tile // across * tile_rows + tl.arange(0, tile_rows)
    col = tile % across * tile_cols + tl.arange(0, tile_cols)
    source = src + row.to(tl.int64)[:, None] * src_pitch + col[None, :]
    target = dst + row.to(tl.int64)[:, None] * dst_pitch + col[None, :]
    if streaming and rows % tile_rows == 0 and width % tile_cols == 0:
        tl.store(target, tl.load(source, eviction_policy="evict_first"), cache_modifier=".cs")
    elif rows % tile_rows == 0 and width % tile_cols == 0:
        tl.store(target, tl.load(source))
    else:
        mask = (row < rows)[:, None] & (col < width)[None, :]
        tl.store(target, tl.load(source, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["limit", "src_a", "dst_a", "src_b", "dst_b"])
def expert_kernel(
    bases, limit,
    src_a: tl.int64, dst_a: tl.int64, src_b: tl.int64, dst_b: tl.int64,
    first: tl.constexpr, ranks: tl.constexpr, unit: tl.constexpr, aligned: tl.constexpr,
    step_a: tl.constexpr, rows_a: tl.constexpr, width_a: tl.constexpr, src_pitch_a: tl.constexpr,
    dst_pitch_a: tl.constexpr, tile_rows_a: tl.constexpr, tile_cols_a: tl.constexpr, tiles_a: tl.constexpr,
    step_b: tl.constexpr, rows_b: tl.constexpr, width_b: tl.constexpr, src_pitch_b: tl.constexpr,
    dst_pitch_b: tl.constexpr, tile_rows_b: tl.constexpr, tile_cols_b: tl.constexpr, tiles_b: tl.constexpr,
):  # fmt: skip
    """Two tensors (a, b) to all ranks: program i moves tile i // ranks to rank (first + i) % ranks.

    `src_*` are addresses, to which `step_*` bytes are added per target rank; `dst_*` are offsets in each rank's buffer,
    whose address is in `bases`. Programs from `limit` on do nothing.
    """
    program = tl.program_id(0)
    if program < limit:
        peer = (program + first) % ranks
        tile = program // ranks
        base = tl.load(bases + peer)
        if tile < tiles_a:
            _copy_tile(
                _pointer(src_a + peer.to(tl.int64) * step_a, unit, aligned), _pointer(base + dst_a, unit, aligned),
                tile, rows_a, width_a, src_pitch_a, dst_pitch_a, tile_rows_a, tile_cols_a,
            )  # fmt: skip
        else:
            _copy_tile(
                _pointer(src_b + peer.to(tl.int64) * step_b, unit, aligned), _pointer(base + dst_b, unit, aligned),
                tile - tiles_a, rows_b, width_b, src_pitch_b, dst_pitch_b, tile_rows_b, tile_cols_b,
            )  # fmt: skip


@triton.jit
def _copy_page(
    program, bases, src, dst, src_pages, dst_pages, owners, routes,
    by_owner: tl.constexpr, route_count: tl.constexpr, unit: tl.constexpr, aligned: tl.constexpr,
    src_page: tl.constexpr, dst_page: tl.constexpr, src_head: tl.constexpr, dst_head: tl.constexpr,
    rows: tl.constexpr, width: tl.constexpr, src_pitch: tl.constexpr, dst_pitch: tl.constexpr,
    tile_rows: tl.constexpr, tile_cols: tl.constexpr, tiles: tl.constexpr, streaming: tl.constexpr,
):  # fmt: skip
    """Page program // route_count on route program % route_count, see `page_kernel`."""
    page = program // route_count
    route = routes + program % route_count * 3
    peer = tl.load(owners + page) if by_owner else tl.load(route)
    source = src + tl.load(src_pages + page) * src_page + tl.load(route + 1) * src_head
    target = tl.load(bases + peer) + dst + tl.load(dst_pages + page) * dst_page + tl.load(route + 2) * dst_head
    for tile in range(tiles):
        _copy_tile(
            _pointer(source, unit, aligned), _pointer(target, unit, aligned),
            tile, rows, width, src_pitch, dst_pitch, tile_rows, tile_cols, streaming,
        )  # fmt: skip


# A page list may begin anywhere in a tensor; another alignment must not mean another compilation in mid-switch.
@triton.jit(
    do_not_specialize=["src", "dst", "pages"],
    do_not_specialize_on_alignment=["src_pages", "dst_pages", "owners", "routes"],
)
def page_kernel(
    bases, src: tl.int64, dst: tl.int64, src_pages, dst_pages, owners, routes, pages,
    by_owner: tl.constexpr, route_count: tl.constexpr, unit: tl.constexpr, aligned: tl.constexpr,
    src_page: tl.constexpr, dst_page: tl.constexpr, src_head: tl.constexpr, dst_head: tl.constexpr,
    rows: tl.constexpr, width: tl.constexpr, src_pitch: tl.constexpr, dst_pitch: tl.constexpr,
    tile_rows: tl.constexpr, tile_cols: tl.constexpr, tiles: tl.constexpr,
    persistent: tl.constexpr = False, streaming: tl.constexpr = False,
):  # fmt: skip
    """One head of one page, or neighbouring heads: program i takes page i // route_count on route i % route_count.

    A route is (target rank, first source head, first target head); with `by_owner` the target rank is the page's owner
    instead. `src` is the address of my pool, `dst` the offset of the pool in the target rank's buffer; `src_page`,
    `src_head` and so on are strides in bytes, pitches and widths are in units. Pages from `pages` on do nothing. With
    `persistent`, the programs take the pages in turn.
    """
    program = tl.program_id(0)
    if persistent:
        for item in range(program, pages * route_count, tl.num_programs(0)):
            _copy_page(
                item, bases, src, dst, src_pages, dst_pages, owners, routes, by_owner, route_count, unit, aligned,
                src_page, dst_page, src_head, dst_head, rows, width, src_pitch, dst_pitch,
                tile_rows, tile_cols, tiles, streaming,
            )  # fmt: skip
    elif program < pages * route_count:
        _copy_page(
            program, bases, src, dst, src_pages, dst_pages, owners, routes, by_owner, route_count, unit, aligned,
            src_page, dst_page, src_head, dst_head, rows, width, src_pitch, dst_pitch,
            tile_rows, tile_cols, tiles, streaming,
        )  # fmt: skip
