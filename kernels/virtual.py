"""Device memory that can be given back and returned at the same addresses, as a tensor whose views stay valid.

A range of addresses is reserved once. Physical memory is put behind it in chunks; `release` takes chunks away, so that
other processes can have them, and `restore` puts new, zeroed ones there. Between the two, nothing may touch the range.
Chunks of some hundred MiB make this cheap (docs/memory.md): each costs calls, whatever its size.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moebius.kernels.cuda_calls import CudaError
from moebius.kernels.cuda_memory import MemoryCalls, out_of_memory

GRANULE = 2 << 20  # bytes; what chunks are multiples of on all GPUs so far (the constructor asks the driver)
TARGET = 512 << 20  # bytes of a chunk aimed at


@dataclass(frozen=True, slots=True)
class Chunk:
    """`nbytes` from byte `start` of a range."""

    start: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.start + self.nbytes


Piece = tuple[Chunk, Any]  # a chunk and the handle of the memory behind it


def chunk_sizes(slots: int, slot_bytes: int, target: int = TARGET) -> list[int]:
    """Sizes of the chunks for `slots` slots side by side: about `target` bytes each, and no slot in two chunks.

    So no copy of one slot runs over the end of an allocation. Slots that are no multiple of GRANULE get one chunk for
    all of them, rounded up.
    """
    if slots < 1 or slot_bytes < 1 or target < 1:
        raise ValueError(f"sizes must be at least 1: {slots} slots of {slot_bytes} bytes, chunks of {target}")
    if slot_bytes % GRANULE:
        return [-(-slots * slot_bytes // GRANULE) * GRANULE]
    together = max(1, target // slot_bytes)
    return [min(together, slots - first) * slot_bytes for first in range(0, slots, together)]


class VirtualMemory:
    """`sizes` bytes in chunks, one behind the other, at `address` on a CUDA device. Freed with its last tensor.

    Raises CudaError if the device does not support it or lacks the memory, ValueError for sizes that do not suit it.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device, calls: MemoryCalls | None = None) -> None:
        if device.type != "cuda" or device.index is None:
            raise ValueError(f"virtual memory is that of one CUDA device, got {device}")
        self.device = device
        self.calls = calls or MemoryCalls(device.index)
        if not sizes or any(size <= 0 or size % GRANULE for size in sizes):
            raise ValueError(f"chunks must be multiples of {GRANULE} bytes, got {list(sizes)}")
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self.chunks = tuple(Chunk(start, size) for start, size in zip(starts, sizes, strict=True))
        self.nbytes = self.chunks[-1].end
        self._handles: dict[Chunk, Any] = {}
        with self.calls.idle():  # makes the context, without which most calls fail
            if (problem := self.calls.unsupported()) is not None:
                raise CudaError(problem)
            if GRANULE % self.calls.granularity():
                raise CudaError(f"{device} allocates in steps of {self.calls.granularity()} bytes, not of {GRANULE}")
            self.address = self.calls.reserve(self.nbytes)
        self._free = weakref.finalize(self, _free, self.calls, self.address, self.nbytes, self._handles)
        self._free.atexit = False  # the process takes its memory along
        try:
            self.restore(0, self.nbytes)
        except BaseException:
            self._free()
            raise

    def as_tensor(self) -> torch.Tensor:
        """All of it as uint8. The tensor and its views keep the memory alive; they must not be used while released."""
        tensor = torch.as_tensor(_Interface(self), device=self.device)
        if tensor.data_ptr() != self.address:
            raise CudaError("torch copied the memory instead of taking its address")
        return tensor

    @property
    def resident(self) -> tuple[Chunk, ...]:
        """Chunks that have memory now, in order."""
        return tuple(chunk for chunk in self.chunks if chunk in self._handles)

    def handle(self, chunk: Chunk) -> Any:
        """The handle of a resident chunk."""
        return self._handles[chunk]

    def release(self, start: int, nbytes: int) -> int:
        """Give the memory of these chunks back; their content is lost. Waits for the device. Returns bytes freed.

        Peers must have unmapped it before, or it stays allocated until they do. Chunks without memory are passed over.
        Raises ValueError if the range does not begin and end with chunks.
        """
        held = [(chunk, self._handles[chunk]) for chunk in self._within(start, nbytes) if chunk in self._handles]
        with self.calls.idle():
            unmap(self.calls, self.address, held)
        for chunk, _ in held:
            del self._handles[chunk]
        return sum(chunk.nbytes for chunk, _ in held)

    def restore(self, start: int, nbytes: int) -> int:
        """Put zeroed memory behind these chunks again, at the addresses they had. Returns bytes allocated.

        Raises CudaError, with nothing changed, if the device has too little memory; ValueError as `release`.
        """
        missing = [chunk for chunk in self._within(start, nbytes) if chunk not in self._handles]
        pieces: list[Piece] = []
        with self.calls.idle():
            try:
                for chunk in missing:
                    pieces.append((chunk, self._create(chunk.nbytes)))
            except CudaError as error:
                for _, handle in pieces:
                    self.calls.drop(handle)
                wanted = sum(chunk.nbytes for chunk in missing) / 1e9
                raise CudaError(
                    f"no {wanted:.2f} GB of {self.device} are free for the buffer ({error}): end or shrink what else "
                    "uses this GPU (nvidia-smi), or put the trainer's memory away before waking up"
                ) from error
            map_pieces(self.calls, self.address, pieces)
            self._handles.update(pieces)
            for run in runs(missing):
                self.calls.zero(self.address + run.start, run.nbytes)
        return sum(chunk.nbytes for chunk in missing)

    def close(self) -> None:
        """Free memory and addresses now, whatever tensors there still are. Peers must have unmapped it."""
        self._free()

    def _create(self, nbytes: int) -> Any:
        try:
            return self.calls.create(nbytes)
        except CudaError as error:
            if not out_of_memory(error):
                raise
            self.calls.drop_caches()
            return self.calls.create(nbytes)

    def _within(self, start: int, nbytes: int) -> list[Chunk]:
        found = [chunk for chunk in self.chunks if start <= chunk.start and chunk.end <= start + nbytes]
        if nbytes < 0 or sum(chunk.nbytes for chunk in found) != nbytes or (found and found[0].start != start):
            raise ValueError(f"[{start}, {start + nbytes}) does not begin and end with chunks of {self.nbytes} bytes")
        return found


class _Interface:
    """What torch needs to see memory as a tensor. Kept by the tensor, so the memory lives as long."""

    def __init__(self, memory: VirtualMemory) -> None:
        self._memory = memory

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        memory = self._memory
        return {"shape": (memory.nbytes,), "typestr": "|u1", "data": (memory.address, False), "version": 2}


def runs(chunks: Iterable[Chunk]) -> list[Chunk]:
    """The same bytes with neighbours joined: many calls take several mappings at once."""
    joined: list[Chunk] = []
    for chunk in chunks:
        if joined and joined[-1].end == chunk.start:
            joined[-1] = Chunk(joined[-1].start, joined[-1].nbytes + chunk.nbytes)
        else:
            joined.append(chunk)
    return joined


def map_pieces(calls: MemoryCalls, base: int, pieces: Sequence[Piece]) -> None:
    """Map chunks of a range that begins at `base` and get access. On CudaError none is mapped, all handles dropped."""
    mapped: list[Chunk] = []
    try:
        for chunk, handle in pieces:
            calls.map(base + chunk.start, chunk.nbytes, handle)
            mapped.append(chunk)
        for run in runs(mapped):
            calls.allow(base + run.start, run.nbytes)
    except CudaError:
        for run in runs(mapped):
            calls.unmap(base + run.start, run.nbytes)
        for _, handle in pieces:
            calls.drop(handle)
        raise


def unmap(calls: MemoryCalls, base: int, pieces: Sequence[Piece]) -> None:
    """Unmap chunks of a range that begins at `base`, and drop their handles. The device must be idle."""
    for run in runs(chunk for chunk, _ in pieces):
        calls.unmap(base + run.start, run.nbytes)
    for _, handle in pieces:
        calls.drop(handle)


def _free(calls: MemoryCalls, address: int, nbytes: int, handles: dict[Chunk, Any]) -> None:
    with calls.idle():
        unmap(calls, address, sorted(handles.items(), key=lambda piece: piece[0].start))
        handles.clear()
        calls.unreserve(address, nbytes)
