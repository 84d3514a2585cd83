"""The direct mover's staging: experts sent into the peers' staging rooms beside the running model, then copied locally.

Rooms are those of `moebius.kernels.rooms`. Sending is pitched copies by the copy engines in a stream of its own;
committing takes SMs, idle by then, in another one, beside which layers that were not staged go over the link.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from moebius.kernels.collective import staging_index
from moebius.kernels.experts import Copy2d, TensorMove, TritonCopy, copy_2d
from moebius.kernels.rooms import Parts, Room
from moebius.kernels.signals import Barrier


class Beside(Protocol):
    """Work in order with itself, beside that of the current stream."""

    def fork(self) -> None:
        """What is given to it from now on comes after all that the current stream has by now."""
        ...

    def on(self) -> AbstractContextManager[object]:
        """Inside the block, its stream is the current one."""
        ...

    def join(self) -> None:
        """What the current stream is given from now on comes after all that this one has by now."""
        ...


class SideStream:
    """`Beside` as a CUDA stream, made when it is first used."""

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self._device, self._priority = device, priority
        self._stream: torch.cuda.Stream | None = None

    def fork(self) -> None:
        """See `Beside.fork`."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device, priority=self._priority)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def on(self) -> AbstractContextManager[object]:
        """See `Beside.on`."""
        return torch.cuda.stream(self._stream)

    def join(self) -> None:
        """See `Beside.join`; nothing where it was never used."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


class InOrder:
    """`Beside` where there are no streams: each call is done when it returns."""

    def fork(self) -> None:
        """See `Beside.fork`."""

    def on(self) -> AbstractContextManager[object]:
        """See `Beside.on`."""
        return nullcontext()

    def join(self) -> None:
        """See `Beside.join`."""


def beside(device: torch.device, priority: int = 0) -> Beside:
    """What there is on `device`."""
    return SideStream(device, priority) if device.type == "cuda" else InOrder()


@dataclass(frozen=True, slots=True)
class CommitPlan:
    """Of one layer: moves within this rank (None: all is in the room), and (target, source) of what is in the room."""

    room: Room
    own: tuple[TensorMove, TensorMove] | None
    copies: tuple[tuple[torch.Tensor, torch.Tensor], ...]


class StagedExperts:
    """Stages and commits moves between places of one buffer; `bases` are the addresses of all ranks' buffers."""

    def __init__(self, bases: Sequence[int], rank: int, device: torch.device, signals: Barrier) -> None:
        self._bases, self._rank, self._device, self._signals = tuple(bases), rank, device, signals
        self._local = TritonCopy([bases[rank]], 0, device)
        # Above the model's own streams: a wait for a flag must not stand behind its kernels.
        self.sending = beside(device, priority=-1)
        self.copying = beside(device)

    @property
    def ranks(self) -> int:
        """Ranks of the group."""
        return len(self._bases)

    def compile(self, moves: Sequence[TensorMove]) -> None:
        """Compile and load what `commit` launches, for moves of this geometry."""
        self._local.compile(*(self._own(move) for move in moves))

    def begin(self) -> None:
        """See `Mover.begin_staging`."""
        self.sending.fork()
        with self.sending.on():
            self._signals.barrier()

    def stage(self, moves: Sequence[TensorMove], room: Room) -> int:
        """Send this rank's part. Returns the bytes sent to peers."""
        with self.sending.on():
            for copy in self.copies(moves, room):
                self.send(copy)
        return sum(move.rows * move.width for move in moves) * (self.ranks - 1)

    def send(self, copy: Copy2d) -> None:
        """Enqueue one copy on the current stream."""
        copy_2d(copy, torch.cuda.current_stream(self._device))

    def copies(self, moves: Sequence[TensorMove], room: Room) -> list[Copy2d]:
        """What `stage` sends; of a whole room, what this rank keeps too."""
        room.check(staged_parts(moves), self.ranks)
        found = []
        for part, move in enumerate(moves):
            for copy in move.copies(self._bases, self._rank):
                for piece in room.of(staging_index(self._rank, copy.peer, self.ranks), part):
                    found.append(
                        dataclasses.replace(
                            copy,
                            dst=self._bases[copy.peer] + piece.start,
                            dst_pitch=copy.width,
                            src=copy.src + piece.first * copy.src_pitch,
                            rows=piece.rows,
                        )
                    )
        return found

    def end(self) -> None:
        """See `Mover.end_staging`."""
        with self.sending.on():
            self._signals.barrier()

    def begin_commit(self, moves_follow: bool) -> None:
        """See `Mover.begin_commit`."""
        self.sending.join()
        self.copying.fork()
        if moves_follow:
            # A peer's target is the slot of the last staged layer, which this rank's model may have read until now.
            self._signals.barrier()

    def plan_commit(
        self,
        of_ranks: Sequence[Sequence[TensorMove]],
        targets: Sequence[torch.Tensor],
        starts: Sequence[int],
        room: Room,
    ) -> CommitPlan:
        """What `commit` does for a layer: `targets` (w13, w2) lie at offsets `starts` of the buffer.

        `of_ranks[r]` are the moves of rank r, whose target offsets say where its blocks belong.
        """
        flat = [target.view(-1).view(torch.uint8) for target in targets]
        copies = []
        for piece in room.pieces:
            peer = (self._rank + 1 + piece.block) % self.ranks
            begin = of_ranks[peer][piece.part].dst_offset - starts[piece.part]
            first, end = room.rows(piece)
            copies.append((flat[piece.part][begin + first : begin + end], room.place(piece)))
        w13, w2 = (self._own(move) for move in of_ranks[self._rank])
        return CommitPlan(room, None if room.whole else (w13, w2), tuple(copies))

    def commit(self, plan: CommitPlan) -> None:
        """Copy what this rank keeps, and what is in the room, to where TP has them."""
        with self.copying.on():
            if plan.own is not None:
                self._local.move(*plan.own)
            for target, source in plan.copies:
                target.copy_(source)

    def end_commit(self) -> None:
        """See `Mover.end_commit`."""
        self.copying.join()
        self._signals.barrier()

    def _own(self, move: TensorMove) -> TensorMove:
        """What stays here, as a move of one rank to itself."""
        return dataclasses.replace(move, src_offset=move.src_offset + self._rank * move.src_step)


def staged_parts(moves: Sequence[TensorMove]) -> Parts:
    """Rows and bytes per row of the blocks these moves write."""
    for move in moves:
        if move.dst_pitch != move.width:
            raise ValueError(f"a peer's block of a TP tensor must be one run of memory, found {move}")
    w13, w2 = moves
    return (w13.rows, w13.width), (w2.rows, w2.width)
