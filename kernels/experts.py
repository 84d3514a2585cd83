"""Expert movers that write into the peers' slots: by copy engine (no SMs), or by a Triton kernel.

Both take the same description. What one rank sends all ranks of one tensor is affine in the target rank (see
`moebius.kernels.plan`): the same rows, width and pitches, the source shifted by a constant per target.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from moebius.kernels.cuda_calls import checked, runtime
from moebius.kernels.plan import CopyRect, plan_experts_ep_to_tp


@dataclass(frozen=True, slots=True)
class Copy2d:
    """`rows` runs of `width` bytes from address `src` here to address `dst` of rank `peer`, as cudaMemcpy2D has it."""

    peer: int
    dst: int
    dst_pitch: int
    src: int
    src_pitch: int
    width: int
    rows: int


@dataclass(frozen=True, slots=True)
class TensorMove:
    """What one rank sends to all of them of one tensor, in bytes.

    The source for rank p starts at `src_offset + p * src_step` of this rank's buffer, the target at `dst_offset` of
    rank p's buffer.
    """

    rows: int
    width: int
    src_pitch: int
    dst_pitch: int
    src_step: int
    src_offset: int
    dst_offset: int

    def placed(self, src_offset: int, dst_offset: int) -> TensorMove:
        """The same move between tensors that start at these offsets of the buffers."""
        return dataclasses.replace(
            self, src_offset=self.src_offset + src_offset, dst_offset=self.dst_offset + dst_offset
        )

    def copies(self, bases: Sequence[int], rank: int) -> Iterator[Copy2d]:
        """One pitched copy per rank; rank r begins with its neighbour r + 1, so that no two begin with the same."""
        for turn in range(1, len(bases) + 1):
            peer = (rank + turn) % len(bases)
            yield Copy2d(
                peer,
                bases[peer] + self.dst_offset,
                self.dst_pitch,
                bases[rank] + self.src_offset + peer * self.src_step,
                self.src_pitch,
                self.width,
                self.rows,
            )


@functools.lru_cache(maxsize=16)
def expert_moves(
    experts: int, hidden: int, intermediate: int, ranks: int, rank: int, itemsize: int, to_tp: bool
) -> tuple[TensorMove, TensorMove]:
    """What `rank` sends of w13 and of w2 in one layer, by the plan, for tensors at offset 0."""
    plan = plan_experts_ep_to_tp(experts, hidden, intermediate, ranks)
    if not to_tp:
        plan = plan.reversed()
    return _tensor_move(plan.w13, rank, itemsize), _tensor_move(plan.w2, rank, itemsize)


def _tensor_move(rects: Sequence[CopyRect], rank: int, itemsize: int) -> TensorMove:
    mine = sorted((r for r in rects if r.src_rank == rank), key=lambda r: r.dst_rank)
    first = mine[0]
    step = mine[1].src_offset - first.src_offset if len(mine) > 1 else 0
    for index, rect in enumerate(mine):
        wanted = dataclasses.replace(first, dst_rank=index, src_offset=first.src_offset + index * step)
        if rect != wanted:
            raise ValueError(f"the plan is not affine in the target rank: {rect} instead of {wanted}")
    return TensorMove(
        rows=first.rows,
        width=first.width * itemsize,
        src_pitch=first.src_pitch * itemsize,
        dst_pitch=first.dst_pitch * itemsize,
        src_step=step * itemsize,
        src_offset=first.src_offset * itemsize,
        dst_offset=first.dst_offset * itemsize,
    )


class ExpertMover(Protocol):
    """Moves w13 and w2 of one layer from this rank to all ranks, in order with the current stream."""

    def move(self, w13: TensorMove, w2: TensorMove) -> None:
        """Enqueue the copies. When they are done is for the caller's barrier to say."""
        ...


class CopyEngine:
    """Pitched 2-D copies on three streams: w13 to peers, w2 to peers, and what stays on this rank."""

    def __init__(self, bases: Sequence[int], rank: int, device: torch.device) -> None:
        self._bases, self._rank, self._device = tuple(bases), rank, device
        self._side = [torch.cuda.Stream(device) for _ in range(2)]
        self._begun = torch.cuda.Event()
        self._ended = [torch.cuda.Event() for _ in self._side]

    def move(self, w13: TensorMove, w2: TensorMove) -> None:
        """See `ExpertMover.move`."""
        main = torch.cuda.current_stream(self._device)
        self._begun.record(main)
        for stream in self._side:
            stream.wait_event(self._begun)
        for tensor, to_peers in ((w13, main), (w2, self._side[0])):
            for copy in tensor.copies(self._bases, self._rank):
                copy_2d(copy, self._side[1] if copy.peer == self._rank else to_peers)
        for stream, ended in zip(self._side, self._ended, strict=True):
            ended.record(stream)
            main.wait_event(ended)


def copy_2d(copy: Copy2d, stream: torch.cuda.Stream) -> None:
    """Enqueue one pitched copy between device addresses. Raises CudaError if CUDA refuses it."""
    cuda = runtime()
    result = cuda.cudaMemcpy2DAsync(
        copy.dst,
        copy.dst_pitch,
        copy.src,
        copy.src_pitch,
        copy.width,
        copy.rows,
        cuda.cudaMemcpyKind.cudaMemcpyDefault,
        stream.cuda_stream,
    )
    checked(result, f"copying {copy.rows} x {copy.width} bytes to rank {copy.peer}")


class TritonCopy:
    """One kernel per layer for both tensors and all ranks."""

    def __init__(self, bases: Sequence[int], rank: int, device: torch.device) -> None:
        self._bases, self._rank, self._device = tuple(bases), rank, device
        self._table = torch.tensor(self._bases, dtype=torch.int64, device=device)
        # By layer: what is passed to the kernel. Places do not change, and working it out takes longer than a launch.
        self._arguments: dict[tuple[TensorMove, TensorMove], tuple[int, dict[str, Any]]] = {}

    def move(self, w13: TensorMove, w2: TensorMove) -> None:
        """See `ExpertMover.move`."""
        self._launch(w13, w2, do_nothing=False)

    def compile(self, w13: TensorMove, w2: TensorMove) -> None:
        """Compile and load the kernel for moves of this geometry, without moving anything."""
        self._launch(w13, w2, do_nothing=True)

    def _launch(self, w13: TensorMove, w2: TensorMove, do_nothing: bool) -> None:
        from moebius.kernels.peer_triton import expert_kernel

        key = (w13, w2)
        if key not in self._arguments:
            self._arguments[key] = self._work_out(w13, w2)
        programs, parts = self._arguments[key]
        own, ranks = self._bases[self._rank], len(self._bases)
        limit = 0 if do_nothing else programs
        with torch.cuda.device_of(self._table):
            expert_kernel[(max(1, limit),)](
                self._table,
                limit,
                own + w13.src_offset,
                w13.dst_offset,
                own + w2.src_offset,
                w2.dst_offset,
                first=(self._rank + 1) % ranks,
                ranks=ranks,
                **parts,
            )

    def _work_out(self, w13: TensorMove, w2: TensorMove) -> tuple[int, dict[str, Any]]:
        """Programs of a launch, and those of its arguments that are no addresses."""
        from moebius.kernels.peer_triton import Grain

        grain = Grain.of(*(_gcd_parts(w13) + _gcd_parts(w2)), *self._bases)
        parts: dict[str, Any] = {}
        tiles, warps = 0, 1
        for name, tensor in (("a", w13), ("b", w2)):
            arguments, count, tensor_warps = _geometry(tensor, grain.unit)
            parts |= {f"{key}_{name}": value for key, value in arguments.items()}
            tiles, warps = tiles + count, max(warps, tensor_warps)
        parts |= {"unit": grain.unit, "aligned": grain.aligned, "num_warps": warps}
        return tiles * len(self._bases), parts


def _gcd_parts(tensor: TensorMove) -> tuple[int, ...]:
    return tuple(value for name in TensorMove.__slots__ if name != "rows" for value in (getattr(tensor, name),))


@functools.lru_cache(maxsize=16)
def _tiles(rows: int, width: int, unit: int) -> tuple[int, int, int, int]:
    from moebius.kernels.peer_triton import tile_of

    tile = tile_of(rows, width, unit)
    return tile.rows, tile.cols, -(-rows // tile.rows) * -(-width // tile.cols), tile.warps


def _geometry(tensor: TensorMove, unit: int) -> tuple[dict[str, int], int, int]:
    """Arguments of the kernel for one tensor, its number of tiles, and the warps a tile wants."""
    tile_rows, tile_cols, tiles, warps = _tiles(tensor.rows, tensor.width // unit, unit)
    arguments = {
        "step": tensor.src_step,
        "rows": tensor.rows,
        "width": tensor.width // unit,
        "src_pitch": tensor.src_pitch // unit,
        "dst_pitch": tensor.dst_pitch // unit,
        "tile_rows": tile_rows,
        "tile_cols": tile_cols,
        "tiles": tiles,
    }
    return arguments, tiles, warps
