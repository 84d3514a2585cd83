"""What benchmarks/kv_variants.py moves: KV slots whose every word is known, page tables, and ways of launching."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from moebius.engine.layout import Layout
from moebius.engine.memory import UnifiedBuffer
from moebius.kernels.kv import PageList, PageMover, PageWay, pages_to_ep, pages_to_tp
from moebius.kernels.plan import kv_head_ranges

_FACTOR = 0x9E3779B1 - (1 << 32)  # odd, so that all words of a slot differ
Pages = list[tuple[torch.Tensor, torch.Tensor]]
AS_NOW = PageWay()


@dataclass(frozen=True, slots=True)
class Shape:
    """Layers of KV, by default of Qwen3-30B-A3B with 40 GiB of KV and 512k live tokens on two ranks."""

    layers: int = 48
    heads: int = 4
    page_tokens: int = 16
    page_width: int = 256  # 2 * head dim, bf16
    pages: int = 26_749  # of a rank in EP
    live: int = 16_384  # of them

    @property
    def words(self) -> int:
        """int32 words of one head of a page."""
        return self.page_tokens * self.page_width // 2


@dataclass(frozen=True, slots=True)
class Variant:
    """A way of launching, in which order pages are listed, and whether what stays on a rank has a stream of its own."""

    way: PageWay = AS_NOW
    order: Literal["given", "target", "source"] = "given"
    apart: bool = False
    local: bool = True  # False: only what leaves the rank is moved, to see what the rest costs
    dense: bool = False  # live pages lie side by side, to see what random places cost


VARIANTS = {
    "one program a head": Variant(),
    "runs": Variant(PageWay(runs=True)),
    "runs, 4 warps": Variant(PageWay(runs=True, warps=4)),
    "runs, streaming": Variant(PageWay(runs=True, streaming=True)),
    "runs, 2 programs an SM": Variant(PageWay(runs=True, programs_per_sm=2)),
    "runs, 6 programs an SM": Variant(PageWay(runs=True, programs_per_sm=6)),
    "runs, by target": Variant(PageWay(runs=True), order="target"),
    "runs, by source": Variant(PageWay(runs=True), order="source"),
    "runs, local apart": Variant(PageWay(runs=True), apart=True),
    "(runs, nothing local)": Variant(PageWay(runs=True), local=False),
    "(runs, dense pages)": Variant(PageWay(runs=True), dense=True),
}


def words_of(shape: Shape, content: int, slot: int, device: torch.device) -> torch.Tensor:
    """What slot `slot` holds before a move, int32: no two words of it alike."""
    words = torch.arange(shape.pages * shape.heads * shape.words, dtype=torch.int32, device=device)
    shift = (content * 1009 + slot) * 0x01000193 % (1 << 31)
    return words.mul_(_FACTOR).add_(shift)


class Ranks:
    """Slots of one rank and the page tables of all; layer i is slot i in TP and slot i + 1 in EP."""

    def __init__(self, shape: Shape, buffer: UnifiedBuffer, bases: tuple[int, ...], rank: int) -> None:
        self.shape, self.buffer, self.rank, self.bases = shape, buffer, rank, bases
        self.device = buffer.storage.device
        self.head_ranges = kv_head_ranges(shape.heads, len(bases))
        self.tp_heads = self.head_ranges[0][1] - self.head_ranges[0][0]
        self.tp_pages = shape.pages * shape.heads // self.tp_heads
        self._tables: dict[tuple[bool, str, bool], Pages] = {}

    @property
    def ranks(self) -> int:
        """Ranks of the group."""
        return len(self.bases)

    def slot(self, number: int) -> torch.Tensor:
        """Slot `number`, flat int32."""
        last = self.shape.layers
        view = self.buffer.kv_slot(Layout.TP, number) if number < last else self.buffer.kv_slot(Layout.EP, last - 1)
        return view.view(torch.int32)

    def pools(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """bf16 pools of a layer in EP and in TP, (pages, heads, tokens, width)."""
        s, page = self.shape, (self.shape.page_tokens, self.shape.page_width)
        ep = self.slot(layer + 1).view(torch.bfloat16).view(s.pages, s.heads, *page)
        return ep, self.slot(layer).view(torch.bfloat16).view(self.tp_pages, self.tp_heads, *page)

    def tables(self, dense: bool, order: str, to_tp: bool) -> Pages:
        """By owner: (source pages, target pages) of a move, on the host and the same on all ranks."""
        if (dense, order, to_tp) not in self._tables:
            self._tables[dense, order, to_tp] = self._new_tables(dense, order, to_tp)
        return self._tables[dense, order, to_tp]

    def _new_tables(self, dense: bool, order: str, to_tp: bool) -> Pages:
        live = min(self.shape.live, self.tp_pages // self.ranks)
        generator = torch.Generator().manual_seed(1)
        tp = torch.randperm(self.tp_pages, generator=generator)
        pages: Pages = []
        for owner in range(self.ranks):
            ep, there = torch.randperm(self.shape.pages, generator=generator)[:live], tp[owner * live :][:live]
            if dense:
                ep, there = torch.arange(live), torch.arange(live) + owner * live
            source, target = (ep, there) if to_tp else (there, ep)
            if order != "given":
                by = (target if order == "target" else source).argsort()
                source, target = source[by], target[by]
            pages.append((source, target))
        return pages

    def listing(self, variant: Variant, to_tp: bool) -> list[PageList]:
        """What this rank sends, on the host: what leaves it, then what stays, or both together."""
        pages = self.tables(variant.dense, variant.order, to_tp)
        whole = (pages_to_tp if to_tp else pages_to_ep)(pages, self.head_ranges, self.rank)
        if variant.local and not variant.apart:
            return [whole]
        leaving, staying = (part_of(whole, self.rank, stays) for stays in (False, True))
        return [leaving, staying] if variant.local else [leaving]

    def fill(self, to_tp: bool) -> None:
        """All slots with what they hold before a move: the source layout's words."""
        for number in range(self.shape.layers + 1):
            self.slot(number).copy_(words_of(self.shape, self._content(self.rank, to_tp), number, self.device))

    def check(self, variant: Variant, to_tp: bool) -> None:
        """Compare every byte with what plain torch makes of the words. Raises AssertionError, naming the slot."""
        for number in range(self.shape.layers + 1):
            expected = words_of(self.shape, self._content(self.rank, to_tp), number, self.device)
            if 0 <= (layer := number if to_tp else number - 1) < self.shape.layers:
                self._move(expected, layer, variant, to_tp)
            assert torch.equal(self.slot(number), expected), f"rank {self.rank}, {to_tp=}, slot {number}: {variant}"

    def layers(self, to_tp: bool) -> Iterator[int]:
        """Upwards to TP, downwards to EP: a target slot is then one that has been sent."""
        yield from range(self.shape.layers) if to_tp else reversed(range(self.shape.layers))

    def sent(self, to_tp: bool) -> int:
        """Bytes that leave this rank in a move."""
        listing = self.listing(VARIANTS["one program a head"], to_tp)[0]
        return listing.peer_heads * self.shape.words * 4 * self.shape.layers

    def _content(self, rank: int, to_tp: bool) -> int:
        """Ranks that hold the same heads in TP hold the same words."""
        return rank if to_tp else 50 + self.head_ranges[rank][0]

    def _move(self, target: torch.Tensor, layer: int, variant: Variant, to_tp: bool) -> None:
        s, pages = self.shape, self.tables(variant.dense, variant.order, to_tp)
        for other in range(self.ranks):
            if other == self.rank and not variant.local:
                continue
            source = words_of(s, self._content(other, to_tp), layer + 1 if to_tp else layer, self.device)
            owner, holder = (other, self.rank) if to_tp else (self.rank, other)
            here, there = (ids.to(self.device) for ids in pages[owner])
            start, stop = self.head_ranges[holder]
            if to_tp:
                found = source.view(s.pages, s.heads, s.words)[here, start:stop]
                target.view(self.tp_pages, self.tp_heads, s.words)[there] = found
            else:
                found = source.view(self.tp_pages, self.tp_heads, s.words)[here]
                target.view(s.pages, s.heads, s.words)[there, start:stop] = found


def part_of(listing: PageList, rank: int, stays: bool) -> PageList:
    """What stays on `rank`, or what leaves it; where that is nothing, no pages."""
    if listing.owners is None:
        if not (routes := tuple(route for route in listing.routes if (route[0] == rank) == stays)):
            return replace(listing, src_pages=listing.src_pages[:0], dst_pages=listing.dst_pages[:0])
        return replace(listing, routes=routes)
    chosen = (listing.owners == rank) == stays
    return replace(
        listing,
        src_pages=listing.src_pages[chosen],
        dst_pages=listing.dst_pages[chosen],
        owners=listing.owners[chosen],
    )


def launch(own: Ranks, mover: PageMover, lists: list[PageList], layer: int, to_tp: bool, side: Any = None) -> None:
    """Enqueue one layer; with `side`, a stream, the second list goes there and the current stream waits for it."""
    ep, tp = own.pools(layer)
    source, target = (ep, tp) if to_tp else (tp, ep)
    offset = target.data_ptr() - own.bases[own.rank]
    main = None
    if side is not None:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            mover.move(source, target, offset, lists[1])
        lists = lists[:1]
    for listing in lists:
        mover.move(source, target, offset, listing)
    if main is not None:
        main.wait_stream(side)
