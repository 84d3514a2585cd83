"""Staging rooms: where experts that were sent ahead wait, in whatever runs of memory are free.

PREPARE brings what a rank will need of a layer from its peers into a room of the rank's buffer, COMMIT copies it from
there. A room is a list of pieces: whole rows of a peer's block of w13 or of w2, as they lie in the TP tensors. Rooms
are packed into runs of free memory (spans) that are the same on all ranks, so that senders know where bytes go.

Of N layers the lowest S are staged. TP layer i is slot i and EP layer i slot i + 1, so COMMIT has two chains that touch
no common slot:

    layers 0 .. S-1    from rooms and within the rank    write slots 0 .. S-1, read slots 1 .. S-1
    layers S .. N-1    between the ranks                 write slots S .. N-1, read slots S+1 .. N

Slot S, where EP layer S-1 stands, would be read by the first and written by the second. So layer S-1 is staged whole:
its room takes also what the rank keeps, and nobody reads slot S any more. Any other choice of S layers would have more
such places, each with a whole room, or make one chain wait for the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

Parts = tuple[tuple[int, int], tuple[int, int]]  # (rows, bytes per row) of one rank's block of w13 and of w2
Span = tuple[int, int]  # first byte and end, counted from the buffer's start


class Piece(NamedTuple):
    """Rows [first, first + rows) of w13 (part 0) or w2 (part 1) of a block, from byte `start` of the buffer on."""

    block: int  # see `staging_index`; ranks - 1 is the rank's own
    part: int
    first: int
    rows: int
    start: int


@dataclass(frozen=True, slots=True, eq=False)
class Room:
    """One layer's room in `memory`, this rank's buffer (uint8, flat); the pieces are the same on every rank."""

    memory: torch.Tensor
    parts: Parts
    whole: bool  # has a block for what the rank keeps
    pieces: tuple[Piece, ...]

    def blocks(self, ranks: int) -> int:
        """Blocks it holds."""
        return ranks if self.whole else ranks - 1

    def of(self, block: int, part: int) -> list[Piece]:
        """The pieces of one block's tensor, in order."""
        return [piece for piece in self.pieces if (piece.block, piece.part) == (block, part)]

    def place(self, piece: Piece) -> torch.Tensor:
        """The bytes of a piece, here."""
        return self.memory[piece.start : piece.start + piece.rows * self.parts[piece.part][1]]

    def rows(self, piece: Piece) -> tuple[int, int]:
        """First byte and end of a piece within its block's tensor."""
        width = self.parts[piece.part][1]
        return piece.first * width, (piece.first + piece.rows) * width

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.rows * self.parts[piece.part][1] for piece in self.pieces)

    def check(self, parts: Parts, ranks: int) -> None:
        """Raise ValueError unless it takes blocks of this shape from all peers."""
        held = self.nbytes
        wanted = self.blocks(ranks) * sum(rows * width for rows, width in parts)
        if self.parts != parts or held != wanted:
            raise ValueError(
                f"a room for staging holds {held} bytes in rows of {self.parts}, needed are {wanted} in rows of {parts}"
            )


class _Packer:
    """Fills spans in order, a row at least at a time."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans, self._span = spans, 0
        self._at = spans[0][0] if spans else 0

    def copy(self) -> _Packer:
        other = _Packer(self._spans)
        other._span, other._at = self._span, self._at
        return other

    def room(self, parts: Parts, blocks: int) -> tuple[Piece, ...] | None:
        """Pieces of so many blocks, or None where the spans end before; then it is of no further use."""
        pieces = []
        for block in range(blocks):
            for part, (rows, width) in enumerate(parts):
                first = 0
                while first < rows:
                    if self._span >= len(self._spans):
                        return None
                    fit = min(rows - first, (self._spans[self._span][1] - self._at) // width)
                    if fit:
                        pieces.append(Piece(block, part, first, fit, self._at))
                        first, self._at = first + fit, self._at + fit * width
                    if first < rows:
                        self._span += 1
                        self._at = self._spans[self._span][0] if self._span < len(self._spans) else 0
        return tuple(pieces)


def pack_rooms(spans: Sequence[Span], parts: Parts, ranks: int, layers: int, most: int) -> list[tuple[Piece, ...]]:
    """Rooms of layers 0, 1, ..., as many as fit into `spans`, at most `most` of all `layers`.

    The last one is whole, unless it is the model's last. The same input gives the same rooms, so ranks need not agree.
    """
    packer = _Packer(spans)
    rooms: list[tuple[Piece, ...]] = []
    best: list[tuple[Piece, ...]] = []
    for layer in range(min(most, layers)):
        whole = packer.copy().room(parts, ranks if layer + 1 < layers else ranks - 1)
        if whole is not None:
            best = [*rooms, whole]
        room = packer.room(parts, ranks - 1)
        if room is None:
            break
        rooms.append(room)
    return best


def commit_order(staged: int, layers: int) -> list[int]:
    """All layers in an order in which to start them, so that both chains begin at once and end together.

    Within each chain upwards: a layer's slot is its predecessor's source.
    """

    def progress(layer: int) -> tuple[float, bool]:
        moved = layer >= staged
        place = (layer - staged, layers - staged) if moved else (layer, staged)
        return place[0] / place[1], not moved  # what goes over the link first: it takes longer

    return sorted(range(layers), key=progress)
