"""Buffers of all ranks in shifted slots, what must be in them after a move, and direct movers that only record.

A slot of layer i is slot i in TP and slot i + 1 in EP, as in the unified buffer. Tensors are int16, which stand for
bf16: bytes are what counts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from moebius.kernels.direct import Buffers, DirectMover
from moebius.kernels.experts import Copy2d, TensorMove
from moebius.kernels.kv import PageMover
from moebius.kernels.plan import (
    KvRequest,
    PageTable,
    apply_kv,
    apply_rects,
    kv_head_ranges,
    plan_experts_ep_to_tp,
    plan_kv_ep_to_tp,
    plan_kv_tp_to_ep,
)
from moebius.kernels.rooms import Parts, Room, Span, pack_rooms

POISON = 0x5A
Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """A model's layers on `ranks` ranks; KV pages are (tokens, 2 * head dim)."""

    ranks: int
    layers: int = 3
    experts_per_rank: int = 2
    hidden: int = 8
    columns_per_rank: int = 8
    kv_heads: int = 4
    ep_pages: int = 12
    page: tuple[int, int] = (4, 8)

    @property
    def w13(self) -> int:
        return self.experts_per_rank * 2 * self.columns_per_rank * self.ranks * self.hidden

    @property
    def w2(self) -> int:
        return self.w13 // 2

    @property
    def heads(self) -> int:
        """KV heads of a TP rank."""
        return max(1, self.kv_heads // self.ranks)

    @property
    def tp_pages(self) -> int:
        return self.ep_pages * self.kv_heads // self.heads

    @property
    def expert_slot(self) -> int:
        """Elements, rounded up to 128 bytes."""
        return -(-(self.w13 + self.w2) // 64) * 64

    @property
    def kv_slot(self) -> int:
        return -(-self.ep_pages * self.kv_heads * self.page[0] * self.page[1] // 64) * 64

    @property
    def numel(self) -> int:
        return (self.layers + 1) * (self.expert_slot + self.kv_slot)


class Slots:
    """Views of one rank's buffer (int16, flat)."""

    def __init__(self, shape: Shape, storage: torch.Tensor, tokens_first: bool = False) -> None:
        self.shape, self.storage, self.tokens_first = shape, storage, tokens_first

    def experts(self, layout: str, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        s = self.shape
        start = (layer + (layout == "EP")) * s.expert_slot
        w13, w2 = self.storage[start : start + s.w13 + s.w2].split([s.w13, s.w2])
        inter, local = s.columns_per_rank * s.ranks, s.experts_per_rank
        if layout == "EP":
            return w13.view(local, 2 * inter, s.hidden), w2.view(local, s.hidden, inter)
        return (
            w13.view(local * s.ranks, 2 * s.columns_per_rank, s.hidden),
            w2.view(local * s.ranks, s.hidden, s.columns_per_rank),
        )

    def kv(self, layout: str, layer: int) -> torch.Tensor:
        s = self.shape
        start = (s.layers + 1) * s.expert_slot + (layer + (layout == "EP")) * s.kv_slot
        pages, heads = (s.ep_pages, s.kv_heads) if layout == "EP" else (s.tp_pages, s.heads)
        flat = self.storage[start : start + pages * heads * s.page[0] * s.page[1]]
        if self.tokens_first:
            return flat.view(pages, s.page[0], heads, s.page[1]).transpose(1, 2)
        return flat.view(pages, heads, *s.page)


def random_bits(like: torch.Tensor, *seed: int) -> torch.Tensor:
    """int16 of any value in the shape of `like`, the same for the same seeds on every device."""
    x = torch.arange(like.numel(), dtype=torch.int64, device=like.device)
    x += sum((n + 1) * 1_000_003**i for i, n in enumerate(seed)) % (1 << 40) << 22
    for factor in (0x5851F42D4C957F2D, 0x2545F4914F6CDD1D):  # multipliers of Knuth and of xorshift64*
        x = (x ^ (x >> 29)) * factor
    return (x >> 44).to(torch.int16).view(like.shape)


def poison(storage: torch.Tensor) -> torch.Tensor:
    storage.view(torch.uint8).fill_(POISON)
    return storage


def fill(slots: Slots, layout: str, rank: int, round_: int) -> None:
    """Poison a rank's buffer and write the experts and KV of `layout`; equal TP heads of ranks get equal bytes."""
    poison(slots.storage)
    s = slots.shape
    for layer in range(s.layers):
        for part, tensor in enumerate(slots.experts(layout, layer)):
            tensor.copy_(random_bits(tensor, round_, layer, rank, part))
        kv = slots.kv(layout, layer)
        content = rank if layout == "EP" else 50 + kv_head_ranges(s.kv_heads, s.ranks)[rank][0]
        kv.copy_(random_bits(kv, round_, layer, content, 9))


def page_table(shape: Shape, seed: int, fresh: bool = False) -> PageTable:
    """Random live pages of random owners; `fresh` gives every request pages of its own, as TP -> EP needs."""
    rng = random.Random(seed)
    tp = rng.sample(range(shape.tp_pages), shape.tp_pages)
    requests = []
    for owner in range(shape.ranks):
        ep = rng.sample(range(shape.ep_pages), shape.ep_pages)
        while ep and rng.random() < 0.7:
            count = rng.randint(1, 3)
            ids = [ep.pop() for _ in range(min(count, len(ep)))]
            if requests and not fresh and rng.random() < 0.3 and requests[-1].owner == owner:
                ids[0] = requests[-1].ep_pages[0]  # a shared prefix
            if len(ids) > len(tp):
                break
            requests.append(KvRequest(owner, ids, [tp.pop() for _ in ids], len(ids)))
    rng.shuffle(requests)
    return PageTable.from_requests(requests, shape.ranks)


def page_pairs(table: PageTable, to_tp: bool, device: str = "cpu") -> list[tuple[torch.Tensor, torch.Tensor]]:
    pairs = [(torch.from_numpy(a), torch.from_numpy(b)) for a, b in zip(table.ep_pages, table.tp_pages, strict=True)]
    return [(a.to(device), b.to(device)) if to_tp else (b.to(device), a.to(device)) for a, b in pairs]


def reference(
    shape: Shape,
    to_tp: bool,
    round_: int,
    table: PageTable | None,
    tokens_first: bool = False,
    device: str = "cpu",
) -> Tensors:
    """All ranks' buffers after a whole move, by the plans: source slots that no target took over are kept."""
    source, target = ("EP", "TP") if to_tp else ("TP", "EP")
    empty = torch.empty(shape.numel, dtype=torch.int16, device=device)
    before = [Slots(shape, empty.clone(), tokens_first) for _ in range(shape.ranks)]
    for rank, slots in enumerate(before):
        fill(slots, source, rank, round_)
    after = [Slots(shape, slots.storage.clone(), tokens_first) for slots in before]
    plan = plan_experts_ep_to_tp(
        shape.experts_per_rank * shape.ranks, shape.hidden, shape.columns_per_rank * shape.ranks, shape.ranks
    )
    plan = plan if to_tp else plan.reversed()
    for layer in range(shape.layers):
        for part, rects in enumerate((plan.w13, plan.w2)):
            apply_rects(
                rects, [s.experts(source, layer)[part] for s in before], [s.experts(target, layer)[part] for s in after]
            )
        if table is not None:
            copies = (plan_kv_ep_to_tp if to_tp else plan_kv_tp_to_ep)(table, shape.kv_heads)
            apply_kv(copies, [s.kv(source, layer) for s in before], [s.kv(target, layer) for s in after])
    return [slots.storage for slots in after]


def parts_of(shape: Shape) -> Parts:
    """Rows and bytes per row of one rank's blocks in TP, w13 and w2."""
    local, columns = shape.experts_per_rank, shape.columns_per_rank
    return (2 * local, columns * shape.hidden * 2), (local * shape.hidden, columns * 2)


def room_spans(shape: Shape, pages: int) -> list[Span]:
    """The last pages of each EP pool, as KV that is free late in a step."""
    page, kv_slots = shape.kv_heads * shape.page[0] * shape.page[1] * 2, (shape.layers + 1) * shape.expert_slot * 2
    ends = [kv_slots + (layer + 1) * shape.kv_slot * 2 + shape.ep_pages * page for layer in range(shape.layers)]
    return [(end - pages * page, end) for end in ends]


def rooms_of(shape: Shape, storage: torch.Tensor, spans: list[Span], most: int | None = None) -> list[Room]:
    """One rank's rooms for as many layers as fit."""
    parts = parts_of(shape)
    packed = pack_rooms(spans, parts, shape.ranks, shape.layers, shape.layers if most is None else most)
    whole = len(packed) if len(packed) < shape.layers else None
    memory = storage.view(torch.uint8)
    return [Room(memory, parts, layer + 1 == whole, pieces) for layer, pieces in enumerate(packed)]


def commit(mover: DirectMover, slots: Slots, rooms: list[Room], layer: int) -> None:
    """One layer of a COMMIT, staged or not."""
    experts = (*slots.experts("EP", layer), *slots.experts("TP", layer))
    if layer < len(rooms):
        mover.commit_experts(*experts, rooms[layer])
    else:
        mover.experts_ep_to_tp(*experts)


def layers_of(shape: Shape, to_tp: bool) -> Iterator[int]:
    """EP -> TP upwards, TP -> EP downwards: a target slot is then one whose content has been sent."""
    yield from range(shape.layers) if to_tp else reversed(range(shape.layers))


def move_experts(mover: DirectMover, slots: Slots, to_tp: bool, layer: int) -> int:
    if to_tp:
        return mover.experts_ep_to_tp(*slots.experts("EP", layer), *slots.experts("TP", layer))
    return mover.experts_tp_to_ep(*slots.experts("TP", layer), *slots.experts("EP", layer))


def buffers_of(storages: Tensors, rank: int) -> Buffers:
    bases = tuple(storage.data_ptr() for storage in storages)
    return Buffers(rank, bases, storages[rank].numel() * 2, storages[rank].device)


@dataclass
class Recorder:
    """Stands for the expert mover and the signals of one rank, and writes down what they are told, in order."""

    rank: int
    bases: tuple[int, ...]
    steps: list[list[Copy2d]] = field(default_factory=lambda: [[]])

    def move(self, w13: TensorMove, w2: TensorMove) -> None:
        for tensor in (w13, w2):
            self.steps[-1].extend(tensor.copies(self.bases, self.rank))

    def barrier(self) -> None:
        self.steps.append([])


def record_experts(shape: Shape, storages: Tensors, to_tp: bool) -> list[list[list[Copy2d]]]:
    """[rank][step] -> the copies that a direct mover enqueues before its barrier, over a whole move of experts."""
    programs = []
    for rank, storage in enumerate(storages):
        buffers = buffers_of(storages, rank)
        recorder = Recorder(rank, buffers.bases)
        mover = DirectMover(buffers, recorder, PageMover(buffers.bases, rank, storage.device), recorder)
        slots = Slots(shape, storage)
        for layer in layers_of(shape, to_tp):
            move_experts(mover, slots, to_tp, layer)
        assert recorder.steps.pop() == []  # the last step ended with a barrier
        programs.append(recorder.steps)
    return programs


class Memory:
    """Reads and writes by address in the ranks' buffers; anything outside them is an error."""

    def __init__(self, storages: Tensors) -> None:
        self._ranges = [(s.data_ptr(), s.view(torch.uint8).numpy()) for s in storages]

    def at(self, address: int, nbytes: int) -> np.ndarray:
        for base, data in self._ranges:
            if base <= address and address + nbytes <= base + data.size:
                return data[address - base : address - base + nbytes]
        raise AssertionError(f"{nbytes} bytes at {address:#x} lie outside all buffers")

    def read_row(self, copy: Copy2d, row: int) -> np.ndarray:
        return self.at(copy.src + row * copy.src_pitch, copy.width).copy()

    def write_row(self, copy: Copy2d, row: int, content: np.ndarray) -> None:
        self.at(copy.dst + row * copy.dst_pitch, copy.width)[:] = content

    def copying(self, copy: Copy2d) -> Iterator[None]:
        """The same row by row, each read and written at moments of the caller's choice."""
        for row in range(copy.rows):
            content = self.read_row(copy, row)
            yield
            self.write_row(copy, row, content)
            yield

    def copy_2d(self, copy: Copy2d) -> None:
        """What cudaMemcpy2D does, and its demand that rows do not overlap."""
        assert copy.width <= copy.src_pitch and copy.width <= copy.dst_pitch
        for row in range(copy.rows):
            self.write_row(copy, row, self.read_row(copy, row))
