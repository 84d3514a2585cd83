"""PREPARE and COMMIT of any number of layers: rooms, and the flag protocol under random interleavings.

What each stream of each rank is told is recorded from a real `DirectMover`; the model plays the devices, as in
`test_signals.py`. Here a rank has three streams, and its model reads all experts until COMMIT begins.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moebius.kernels.direct import DirectMover
from moebius.kernels.experts import Copy2d, TensorMove
from moebius.kernels.kv import PageMover
from moebius.kernels.rooms import Parts, Room, commit_order, pack_rooms
from moebius.kernels.staged import CommitPlan
from tests.unit import direct_model as model
from tests.unit.direct_model import Memory, Shape, Slots

Op = tuple[str, Any]


# ---- rooms ----------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=80)
@given(
    st.sampled_from([2, 4, 8]),
    st.integers(1, 6),
    st.integers(0, 7),
    st.lists(st.integers(0, 90), max_size=9),
    st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 6), st.integers(1, 5)),
)
def test_rooms_hold_every_row_once_and_lie_apart(
    ranks: int, layers: int, most: int, lengths: list[int], sizes: tuple[int, int, int, int]
) -> None:
    parts: Parts = (sizes[:2], sizes[2:])
    spans = [(100 * i + i % 7, 100 * i + i % 7 + length) for i, length in enumerate(lengths)]
    packed = pack_rooms(spans, parts, ranks, layers, most)
    taken: list[tuple[int, int]] = []
    memory = torch.zeros(1000, dtype=torch.uint8)
    for layer, pieces in enumerate(packed):
        room = Room(memory, parts, layer + 1 == len(packed) < layers, pieces)
        room.check(parts, ranks)
        assert room.nbytes == sum(room.place(piece).numel() for piece in pieces)
        for block in range(room.blocks(ranks)):
            for part, (rows, _) in enumerate(parts):
                found = [row for p in room.of(block, part) for row in range(p.first, p.first + p.rows)]
                assert found == list(range(rows))
        for piece in pieces:
            end = piece.start + piece.rows * parts[piece.part][1]
            assert any(first <= piece.start and end <= last for first, last in spans)
            taken.append((piece.start, end))
    taken.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(taken))
    assert len(packed) <= min(most, layers)
    if len(packed) < min(most, layers):  # no room was refused that would have fitted in any order of rows
        blocks = ranks * (len(packed) + 1) if len(packed) + 1 < layers else (ranks - 1) * layers
        gaps = len(spans) * max(width for _, width in parts)
        assert sum(lengths) < blocks * sum(rows * width for rows, width in parts) + gaps


def test_a_room_of_another_shape_is_refused() -> None:
    parts: Parts = ((2, 8), (3, 4))
    (pieces,) = pack_rooms([(0, 100)], parts, 2, 1, 1)
    room = Room(torch.zeros(100, dtype=torch.uint8), parts, False, pieces)
    room.check(parts, 2)
    for other, ranks in ((((3, 8), (3, 4)), 2), (parts, 3)):
        with pytest.raises(ValueError, match="a room for staging holds 28 bytes"):
            room.check(other, ranks)  # type: ignore[arg-type]


@pytest.mark.parametrize(("staged", "layers"), [(0, 5), (5, 5), (1, 5), (4, 5), (34, 48), (1, 1)])
def test_both_chains_go_upwards_and_end_together(staged: int, layers: int) -> None:
    order = commit_order(staged, layers)
    local, moved = [i for i in order if i < staged], [i for i in order if i >= staged]
    assert local == list(range(staged)) and moved == list(range(staged, layers))
    if not local or not moved:
        return
    for done in range(1, layers + 1):
        shares = [sum(i in part for i in order[:done]) / len(part) for part in (local, moved)]
        assert abs(shares[0] - shares[1]) <= 1 / min(len(local), len(moved))


# ---- the protocol ---------------------------------------------------------------------------------------------------


class Rank:
    """Records what one rank's streams are told: copies, flags, and where a stream waits for another of the rank."""

    def __init__(self, shape: Shape, storages: list[torch.Tensor], rank: int) -> None:
        self.rank, self.buffers = rank, model.buffers_of(storages, rank)
        self.slots = Slots(shape, storages[rank])
        self.streams: dict[str, list[Op]] = {"main": [], "sending": [], "copying": []}
        self.current, self.steps, self.marks = "main", 0, 0
        bases, device = self.buffers.bases, self.buffers.device
        self.mover = DirectMover(self.buffers, self, PageMover(bases, rank, device), self)
        staged: Any = self.mover._staged
        staged.sending, staged.copying = Stream(self, "sending"), Stream(self, "copying")
        staged.send = lambda copy: self.tell("copy", copy)
        staged.commit = self.commit

    def tell(self, what: str, value: Any, stream: str | None = None) -> None:
        self.streams[stream or self.current].append((what, value))

    def barrier(self) -> None:
        """See `Barrier.barrier`."""
        self.steps += 1
        self.tell("barrier", self.steps)

    def move(self, w13: TensorMove, w2: TensorMove) -> None:
        """See `ExpertMover.move`."""
        for tensor in (w13, w2):
            for copy in tensor.copies(self.buffers.bases, self.rank):
                self.tell("copy", copy)

    def commit(self, plan: CommitPlan) -> None:
        with self.mover._staged.copying.on():
            for move in plan.own or ():
                for copy in move.copies([self.buffers.bases[self.rank]], 0):
                    self.tell("copy", copy)
            for target, source in plan.copies:
                size = target.numel()
                self.tell("copy", Copy2d(self.rank, target.data_ptr(), size, source.data_ptr(), size, size, 1))
            self.tell("order", None)  # the next layer's copies come after this one's

    def wait(self, stream: str, of: str) -> None:
        self.marks += 1
        self.tell("mark", self.marks, of)
        self.tell("await", self.marks, stream)


class Stream:
    """`Beside` that writes down."""

    def __init__(self, rank: Rank, name: str) -> None:
        self.rank, self.name = rank, name

    def fork(self) -> None:
        self.rank.wait(self.name, of="main")

    @contextmanager
    def on(self) -> Iterator[None]:
        before, self.rank.current = self.rank.current, self.name
        yield
        self.rank.current = before

    def join(self) -> None:
        self.rank.wait("main", of=self.name)


def record(shape: Shape, storages: list[torch.Tensor], pages: int, staged: int, mutation: str) -> list[Rank]:
    """All ranks' streams over PREPARE, decoding, COMMIT and KV written to where the rooms were."""
    spans = model.room_spans(shape, pages)
    ranks = [Rank(shape, storages, rank) for rank in range(shape.ranks)]
    for own in ranks:
        rooms = model.rooms_of(shape, storages[own.rank], spans, staged)
        if mutation == "the last layer is not whole" and rooms:
            parts, last = model.parts_of(shape), rooms[-1]
            pieces = tuple(piece for piece in last.pieces if piece.block < shape.ranks - 1)
            rooms[-1] = Room(last.memory, parts, False, pieces)
        mover, slots = own.mover, own.slots
        own.tell("model", spans)  # a pass that uses pages which are free only afterwards
        mover.begin_staging()
        for layer, room in enumerate(rooms):
            mover.stage_experts(*slots.experts("EP", layer), *slots.experts("TP", layer), room)
        mover.end_staging()
        own.tell("model", [])
        mover.begin_commit(moves_follow=staged < shape.layers and mutation != "no flag before the moves")
        for layer in commit_order(staged, shape.layers):
            model.commit(mover, slots, rooms, layer)
        if mutation == "peers are let in too early":
            mover._staged.copying.join = lambda: None  # type: ignore[method-assign]
        mover.end_commit()
        for peer in range(shape.ranks):
            own.tell("kv", [(peer, start, end) for start, end in spans])
    return ranks


class Devices:
    """Runs recorded streams, rows in any order within a step, flags arriving late, streams at different speeds."""

    def __init__(self, shape: Shape, storages: list[torch.Tensor], ranks: list[Rank], seed: int, skip: str) -> None:
        self.memory, self.rng, self.skip = Memory(storages), random.Random(seed), skip
        self.shape, self.storages, self.before = shape, storages, [s.view(torch.uint8).clone() for s in storages]
        self.flags = [[0] * shape.ranks for _ in ranks]  # [on][of]
        self.marks: set[tuple[int, int]] = set()
        self.tasks: list[tuple[Iterator[None], float]] = []
        self.unharmed = True  # all that the models have read
        for own in ranks:
            for name, ops in own.streams.items():
                speed = self.rng.choice((1.0, 1.0, 8.0, 40.0))
                self.tasks.append((self._stream(own.rank, self._without(name, ops)), speed))

    def run(self) -> None:
        while self.tasks:
            index = self.rng.choices(range(len(self.tasks)), [speed for _, speed in self.tasks])[0]
            if next(self.tasks[index][0], "done") == "done":
                del self.tasks[index]

    def _without(self, name: str, ops: list[Op]) -> list[Op]:
        """A mutation leaves out a flag of the sending stream: the first, or the last."""
        if name != "sending" or self.skip not in ("first", "last"):
            return ops
        barriers = [i for i, (what, _) in enumerate(ops) if what == "barrier"]
        if not barriers:
            return ops
        left_out = barriers[0 if self.skip == "first" else -1]
        return [("raise" if i == left_out else what, value) for i, (what, value) in enumerate(ops)]

    def _stream(self, rank: int, ops: list[Op]) -> Iterator[None]:
        pending: list[Iterator[None]] = []
        for what, value in [*ops, ("order", None)]:
            if what == "copy":
                pending.append(self.memory.copying(value))
                continue
            while pending:
                copy = self.rng.choice(pending)
                if next(copy, "done") == "done":
                    pending.remove(copy)
                yield
            match what:
                case "barrier" | "raise":
                    self._raise(rank, value)
                    others = [peer for peer in range(self.shape.ranks) if peer != rank]
                    while what == "barrier" and any(self.flags[rank][peer] < value for peer in others):
                        yield
                case "mark":
                    self.marks.add((rank, value))
                case "await":
                    while (rank, value) not in self.marks:
                        yield
                case "model":
                    yield from self._model(rank, value)
                case "kv":
                    for peer, start, end in value:
                        yield
                        self.storages[peer].view(torch.uint8)[start:end] = 0x33

    def _model(self, rank: int, also: list[tuple[int, int]]) -> Iterator[None]:
        """Reads EP's experts, and pages, bit by bit for a while."""
        shape = self.shape
        experts = (shape.expert_slot * 2, (shape.layers + 1) * shape.expert_slot * 2)
        for _ in range(self.rng.choice((2, 30))):
            for start, end in (experts, *also):
                found, wanted = (s[start:end] for s in (self.storages[rank].view(torch.uint8), self.before[rank]))
                self.unharmed &= torch.equal(found, wanted)
            yield

    def _raise(self, rank: int, step: int) -> None:
        for peer in range(self.shape.ranks):
            if peer != rank:
                self.tasks.append((self._deliver(rank, peer, step), 1.0))

    def _deliver(self, rank: int, peer: int, step: int) -> Iterator[None]:
        yield
        self.flags[peer][rank] = max(self.flags[peer][rank], step)


def is_right(ranks: int, staged: int, seed: int, mutation: str = "") -> bool:
    """Whether one interleaving leaves the plan's bytes in all slots, and nothing that was read had changed."""
    shape, pages = small(ranks), pages_for(ranks, staged)
    storages = [torch.empty(shape.numel, dtype=torch.int16) for _ in range(shape.ranks)]
    for rank, storage in enumerate(storages):
        model.fill(Slots(shape, storage), "EP", rank, 0)
    recorded = record(shape, storages, pages, staged, mutation)
    skip = {"rooms are written to too early": "first", "rooms are read too early": "last"}.get(mutation, "")
    devices = Devices(shape, storages, recorded, seed, skip)
    devices.run()
    wanted = model.reference(shape, True, 0, None)
    for found in (*storages, *wanted):
        for start, end in model.room_spans(shape, pages):
            found.view(torch.uint8)[start:end] = 0
    return devices.unharmed and all(torch.equal(f, w) for f, w in zip(storages, wanted, strict=True))


def small(ranks: int) -> Shape:
    return Shape(
        ranks, layers=4, experts_per_rank=1, hidden=2, columns_per_rank=2, kv_heads=ranks, ep_pages=24, page=(1, 1)
    )


@functools.cache
def pages_for(ranks: int, staged: int) -> int:
    """The fewest pages with rooms for so many layers."""
    shape = small(ranks)
    storage = torch.empty(shape.numel, dtype=torch.int16)
    return next(
        n for n in range(25) if len(model.rooms_of(shape, storage, model.room_spans(shape, n), staged)) == staged
    )


@settings(deadline=None, max_examples=40)
@given(st.sampled_from([2, 2, 2, 4, 4, 8]), st.integers(0, 4), st.integers(0, 1 << 32))
def test_any_share_under_any_interleaving(ranks: int, staged: int, seed: int) -> None:
    assert is_right(ranks, staged, seed)


@pytest.mark.parametrize(
    ("mutation", "staged"),
    [
        ("the last layer is not whole", 2),
        ("no flag before the moves", 2),
        ("peers are let in too early", 4),
        ("rooms are written to too early", 2),
        ("rooms are read too early", 2),
    ],
)
def test_a_weaker_protocol_loses_bytes(mutation: str, staged: int) -> None:
    """Of 30 interleavings at least a few go wrong, so the test above could fail."""
    wrong = sum(not is_right(2, staged, seed, mutation) for seed in range(30))
    assert wrong >= 3, f"only {wrong} of 30 interleavings went wrong"
