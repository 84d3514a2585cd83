"""The unified buffer: one range of memory per rank that holds expert slots and KV slots of both layouts.

N layers use N+1 slots of each kind: TP layer i lives in slot i, EP layer i in slot i+1. A layer's target is therefore
never its own source, and walking the layers upwards (EP->TP) or downwards (TP->EP) overwrites only slots whose old
content has already been moved (paper, section 4.2).

Its two regions, experts and KV, can be given back to the system and returned at the same addresses, if what is behind
the buffer can do that (docs/memory.md).
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from moebius.engine.layout import Layout
from moebius.kernels.virtual import GRANULE, chunk_sizes

RegionName = Literal["experts", "kv"]
REGIONS: tuple[RegionName, ...] = ("experts", "kv")
ALIGNMENT = 4096  # bytes; page-aligned slots map cleanly into peers and keep vector loads aligned
LARGE_SLOT = 64 << 20  # bytes; such slots begin at a GRANULE, so that chunks of memory can end between two of them


class BackingError(RuntimeError):
    """The buffer's memory cannot be had, or not be given back."""


class Backing(Protocol):
    """The memory behind a buffer, at an address that never changes."""

    def as_tensor(self) -> torch.Tensor:
        """All of it, uint8, zeros at first. It and its views must not be used where memory is released."""
        ...

    def release(self, start: int, nbytes: int) -> int:
        """Give a region's memory back; its content is lost. Returns bytes given back, 0 if it was away already."""
        ...

    def restore(self, start: int, nbytes: int) -> int:
        """Have a region's memory again, zeroed. Returns bytes taken, 0 if it was there already."""
        ...


class HostBacking:
    """Memory of this process, which the kernel takes back where it is told to and gives again, zeroed, when touched.

    See madvise(2), MADV_DONTNEED: for private anonymous mappings only.
    """

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._tensor = torch.frombuffer(self._map, dtype=torch.uint8)[:nbytes]
        self._away: set[tuple[int, int]] = set()

    def as_tensor(self) -> torch.Tensor:
        """See `Backing.as_tensor`."""
        return self._tensor

    def release(self, start: int, nbytes: int) -> int:
        """See `Backing.release`. Raises ValueError unless the region begins and ends at pages."""
        if start % mmap.PAGESIZE or nbytes % mmap.PAGESIZE:
            raise ValueError(f"region of {nbytes} bytes from {start}: pages have {mmap.PAGESIZE} bytes")
        if (start, nbytes) in self._away:
            return 0
        self._map.madvise(mmap.MADV_DONTNEED, start, nbytes)
        self._away.add((start, nbytes))
        return nbytes

    def restore(self, start: int, nbytes: int) -> int:
        """See `Backing.restore`: whatever was written there meanwhile is dropped."""
        if (start, nbytes) not in self._away:
            return 0
        self._map.madvise(mmap.MADV_DONTNEED, start, nbytes)
        self._away.remove((start, nbytes))
        return nbytes


class PlainBacking:
    """A tensor of torch's allocator."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        # Zeros, not empty: the pages of a KV slot must never hold NaN (0 * NaN is NaN in masked attention).
        self._tensor = torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def as_tensor(self) -> torch.Tensor:
        """See `Backing.as_tensor`."""
        return self._tensor

    def release(self, start: int, nbytes: int) -> int:
        """Raises BackingError: torch frees a tensor as a whole, and its address with it."""
        raise BackingError(
            f"the buffer's memory on {self._tensor.device} cannot be given back while its addresses stay: "
            "set engine.memory: auto, or virtual to be told why not"
        )

    def restore(self, start: int, nbytes: int) -> int:
        """Nothing was released."""
        return 0


def default_backing(nbytes: int, device: torch.device) -> Backing:
    """On CPU memory that can be given back, elsewhere a plain tensor."""
    return HostBacking(nbytes) if device.type == "cpu" else PlainBacking(nbytes, device)


def _align(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment


def _stride(nbytes: int) -> int:
    """Bytes from one slot of `nbytes` to the next."""
    return _align(nbytes, GRANULE if nbytes >= LARGE_SLOT else ALIGNMENT)


@dataclass(frozen=True)
class SlotSizes:
    """Bytes of one slot per kind, and how many layers of each kind the model has."""

    expert_layers: int
    expert_bytes: int
    kv_layers: int
    kv_bytes: int

    @property
    def expert_stride(self) -> int:
        """Bytes from one expert slot to the next."""
        return _stride(self.expert_bytes)

    @property
    def kv_stride(self) -> int:
        """Bytes from one KV slot to the next."""
        return _stride(self.kv_bytes)

    @property
    def expert_region(self) -> int:
        """Bytes of all expert slots, to where the KV slots begin."""
        return _align((self.expert_layers + 1) * self.expert_stride, GRANULE)

    @property
    def kv_region(self) -> int:
        """Bytes of all KV slots, to the end of the buffer."""
        return _align((self.kv_layers + 1) * self.kv_stride, GRANULE)

    @property
    def total_bytes(self) -> int:
        """Bytes of the buffer."""
        return self.expert_region + self.kv_region

    def chunks(self) -> list[int]:
        """Bytes of the pieces in which the buffer's memory comes and goes, none part of both regions."""
        experts = chunk_sizes(self.expert_layers + 1, self.expert_stride)
        return experts + chunk_sizes(self.kv_layers + 1, self.kv_stride)


class UnifiedBuffer:
    """Fixed-address slots; every expert parameter and KV tensor of both runtimes is a view of it."""

    def __init__(self, sizes: SlotSizes, device: torch.device, backing: Backing | None = None) -> None:
        self.sizes = sizes
        self.backing = backing or default_backing(sizes.total_bytes, device)
        self.storage = self.backing.as_tensor()
        self._kv_base = sizes.expert_region
        self.regions: dict[RegionName, tuple[int, int]] = {  # first byte, bytes
            "experts": (0, sizes.expert_region),
            "kv": (sizes.expert_region, sizes.kv_region),
        }
        if self.storage.numel() != sizes.total_bytes:
            raise ValueError(f"the buffer needs {sizes.total_bytes} bytes, its memory has {self.storage.numel()}")

    def release(self, names: Iterable[RegionName] = REGIONS) -> int:
        """Give regions' memory back, which nobody may touch then; peers must have unmapped it. Returns bytes."""
        return sum(self.backing.release(*self.regions[name]) for name in names)

    def restore(self, names: Iterable[RegionName] = REGIONS) -> int:
        """Have regions again, zeroed, where they were. Returns bytes."""
        return sum(self.backing.restore(*self.regions[name]) for name in names)

    def expert_slot(self, layout: Layout, ordinal: int) -> torch.Tensor:
        """uint8 view of the expert slot of the `ordinal`-th MoE layer (0-based) in `layout`."""
        sizes = self.sizes
        return self._slot(0, sizes.expert_stride, sizes.expert_bytes, sizes.expert_layers, layout, ordinal)

    def kv_slot(self, layout: Layout, ordinal: int) -> torch.Tensor:
        """uint8 view of the KV slot of the `ordinal`-th attention layer (0-based) in `layout`."""
        sizes = self.sizes
        return self._slot(self._kv_base, sizes.kv_stride, sizes.kv_bytes, sizes.kv_layers, layout, ordinal)

    def _slot(self, base: int, stride: int, nbytes: int, layers: int, layout: Layout, ordinal: int) -> torch.Tensor:
        if not 0 <= ordinal < layers:
            raise IndexError(f"layer {ordinal} of {layers}")
        start = base + (ordinal + (layout is Layout.EP)) * stride
        return self.storage[start : start + nbytes]

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether every byte of a contiguous `tensor` lies inside this buffer."""
        start = self.storage.data_ptr()
        first = tensor.data_ptr()
        return start <= first and first + tensor.numel() * tensor.element_size() <= start + self.storage.numel()
