"""Weights that are no experts (attention, embeddings, output head), in memory that sleep can give back.

Nothing moves them and no peer maps them, so they have no slots: each large one gets memory of its own, at an address
that stays. Those that would leave much of their last page or granule empty, and all small ones, are left to torch.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable, Sequence

import torch

from moebius.engine.memory import Backing, BackingError, HostBacking
from moebius.kernels.cuda_calls import CudaError
from moebius.kernels.virtual import GRANULE, VirtualMemory

_WASTE = 0.05  # of a tensor's bytes, at most, for what rounding up adds


class DenseWeights:
    """The dense weights of a rank.

    Args:
        make: gives memory of so many bytes; None: torch has all weights, and nothing is given back.
        granule: bytes that these are multiples of.
    """

    def __init__(self, make: Callable[[int], Backing] | None, granule: int = 1) -> None:
        self._make, self._granule = make, granule
        self._held: list[tuple[Backing, int, torch.Tensor]] = []  # with its bytes, and the weight as it was asked for

    @classmethod
    def beside(cls, backing: Backing, device: torch.device) -> DenseWeights:
        """In the same kind of memory as the unified buffer has: what cannot give that back gets none here either."""
        if isinstance(backing, HostBacking):
            return cls(HostBacking, mmap.PAGESIZE)
        if isinstance(backing, VirtualMemory):
            return cls(lambda nbytes: VirtualMemory([nbytes], device, backing.calls), GRANULE)
        return cls(None)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        """A weight of zeros, in memory that can be given back if that is worth while."""
        found = self._take(tuple(shape), dtype)
        return torch.zeros(tuple(shape), dtype=dtype, device=device) if found is None else found

    def adopt(self, parameter: torch.nn.Parameter) -> None:
        """Move a parameter that was just created, whose values do not count yet, if that is worth while."""
        if parameter.is_contiguous() and (found := self._take(tuple(parameter.shape), parameter.dtype)) is not None:
            parameter.data = found

    def keep(self, used: Iterable[torch.Tensor]) -> None:
        """Let go of weights that no tensor of `used` is a part of: a model replaced them, as tied output heads."""
        starts = [tensor.data_ptr() for tensor in used]
        self._held = [
            held for held in self._held if any(0 <= start - held[2].data_ptr() < held[2].nbytes for start in starts)
        ]

    def tensors(self) -> list[torch.Tensor]:
        """All weights here, in order of creation."""
        return [tensor for *_, tensor in self._held]

    def release(self) -> int:
        """Give all memory back; the weights are lost, and nobody may touch them. Returns bytes."""
        return sum(backing.release(0, nbytes) for backing, nbytes, _ in self._held)

    def restore(self) -> int:
        """Have it again, zeroed, where it was. Returns bytes. On an error, some may be back: release them."""
        return sum(backing.restore(0, nbytes) for backing, nbytes, _ in self._held)

    def _take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        wanted = math.prod(shape) * dtype.itemsize
        nbytes = -(-wanted // self._granule) * self._granule
        if self._make is None or not wanted or nbytes - wanted > _WASTE * wanted:
            return None
        try:
            backing = self._make(nbytes)
        except CudaError as error:
            raise BackingError(str(error)) from error
        tensor = backing.as_tensor()[:wanted].view(dtype).view(shape)
        self._held.append((backing, nbytes, tensor))
        return tensor
