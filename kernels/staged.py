"""The direct mover's staging: experts sent into the peers' staging rooms beside the running model, then copied locally.

A room holds, per peer in the order of `staging_index`, that peer's block of w13 and then of w2, as they lie in the TP
tensors. Sending is pitched copies by the copy engines in a stream of its own; committing takes SMs, idle by then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moebius.kernels.collective import staging_index
from moebius.kernels.experts import Copy2d, TensorMove, TritonCopy, copy_2d
from moebius.kernels.signals import Barrier


@dataclass(frozen=True, slots=True)
class CommitPlan:
    """Of one layer: moves within this rank, and (target, source) of what peers have staged."""

    w13: TensorMove
    w2: TensorMove
    copies: tuple[tuple[torch.Tensor, torch.Tensor], ...]


class StagedExperts:
    """Stages and commits moves between places of one buffer; `bases` are the addresses of all ranks' buffers."""

    def __init__(self, bases: Sequence[int], rank: int, device: torch.device, signals: Barrier) -> None:
        self._bases, self._rank, self._device, self._signals = tuple(bases), rank, device, signals
        self._local = TritonCopy([bases[rank]], 0, device)
        self._stream: torch.cuda.Stream | None = None
        self._staged: torch.cuda.Event | None = None

    @property
    def ranks(self) -> int:
        """Ranks of the group."""
        return len(self._bases)

    def compile(self, moves: Sequence[TensorMove]) -> None:
        """Compile and load what `commit` launches, for moves of this geometry."""
        self._local.compile(*(self._own(move) for move in moves))

    def begin(self) -> None:
        """See `Mover.begin_staging`."""
        if self._stream is None:
            # Above the model's own streams: a wait for a flag must not stand behind its kernels.
            self._stream = torch.cuda.Stream(self._device, priority=-1)
            self._staged = torch.cuda.Event()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._signals.barrier()

    def stage(self, moves: Sequence[TensorMove], room: int) -> int:
        """Send this rank's part; `room` is the offset of the staging room in the buffer. Returns the bytes sent."""
        assert self._stream is not None
        for copy in self.copies(moves, room):
            copy_2d(copy, self._stream)
        return sum(move.rows * move.width for move in moves) * (self.ranks - 1)

    def copies(self, moves: Sequence[TensorMove], room: int) -> list[Copy2d]:
        """What `stage` sends."""
        sizes = [_block(move) for move in moves]
        found = []
        for part, move in enumerate(moves):
            for copy in move.copies(self._bases, self._rank):
                if copy.peer == self._rank:
                    continue
                index = staging_index(self._rank, copy.peer, self.ranks)
                target = self._bases[copy.peer] + room + index * sum(sizes) + sum(sizes[:part])
                found.append(dataclasses.replace(copy, dst=target, dst_pitch=copy.width))
        return found

    def end(self) -> None:
        """See `Mover.end_staging`."""
        assert self._stream is not None and self._staged is not None
        with torch.cuda.stream(self._stream):
            self._signals.barrier()
            self._staged.record()

    def begin_commit(self) -> None:
        """See `Mover.begin_commit`."""
        if self._staged is not None:
            torch.cuda.current_stream(self._device).wait_event(self._staged)

    def plan_commit(
        self,
        of_ranks: Sequence[Sequence[TensorMove]],
        targets: Sequence[torch.Tensor],
        starts: Sequence[int],
        room: torch.Tensor,
    ) -> CommitPlan:
        """What `commit` does for a layer: `targets` (w13, w2) lie at offsets `starts` of the buffer.

        `of_ranks[r]` are the moves of rank r, whose target offsets say where its blocks belong.
        """
        w13, w2 = (self._own(move) for move in of_ranks[self._rank])
        copies = []
        sizes = [_block(move) for move in of_ranks[self._rank]]
        for peer in range(self.ranks):
            if peer == self._rank:
                continue
            first = staging_index(peer, self._rank, self.ranks) * sum(sizes)
            for part, (target, start, move) in enumerate(zip(targets, starts, of_ranks[peer], strict=True)):
                source = room[first + sum(sizes[:part]) :][: sizes[part]]
                begin = move.dst_offset - start
                copies.append((target.view(-1).view(torch.uint8)[begin : begin + sizes[part]], source))
        return CommitPlan(w13, w2, tuple(copies))

    def commit(self, plan: CommitPlan) -> None:
        """Copy what this rank keeps, and the room's blocks, to where TP has them."""
        self._local.move(plan.w13, plan.w2)
        for target, source in plan.copies:
            target.copy_(source)

    def _own(self, move: TensorMove) -> TensorMove:
        """What stays here, as a move of one rank to itself."""
        return dataclasses.replace(move, src_offset=move.src_offset + self._rank * move.src_step)


def _block(move: TensorMove) -> int:
    if move.dst_pitch != move.width:
        raise ValueError(f"a peer's block of a TP tensor must be one run of memory, found {move}")
    return move.rows * move.width
