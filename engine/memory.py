"""The unified buffer: one allocation per rank that holds expert slots and KV slots of both layouts.

N layers use N+1 slots of each kind: TP layer i lives in slot i, EP layer i in slot i+1. A layer's target is therefore
never its own source, and walking the layers upwards (EP->TP) or downwards (TP->EP) overwrites only slots whose old
content has already been moved (paper, section 4.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moebius.engine.layout import Layout

ALIGNMENT = 4096  # bytes; page-aligned slots map cleanly into peers and keep vector loads aligned


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class SlotSizes:
    """Bytes of one slot per kind, and how many layers of each kind the model has."""

    expert_layers: int
    expert_bytes: int
    kv_layers: int
    kv_bytes: int

    @property
    def total_bytes(self) -> int:
        return (self.expert_layers + 1) * _align(self.expert_bytes) + (self.kv_layers + 1) * _align(self.kv_bytes)


class UnifiedBuffer:
    """Fixed-address slots; every expert parameter and KV tensor of both runtimes is a view of it."""

    def __init__(self, sizes: SlotSizes, device: torch.device) -> None:
        self.sizes = sizes
        # Zeros, not empty: the pages of a KV slot must never hold NaN (0 * NaN is NaN in masked attention).
        self.storage = torch.zeros(sizes.total_bytes, dtype=torch.uint8, device=device)
        self._kv_base = (sizes.expert_layers + 1) * _align(sizes.expert_bytes)

    def expert_slot(self, layout: Layout, ordinal: int) -> torch.Tensor:
        """uint8 view of the expert slot of the `ordinal`-th MoE layer (0-based) in `layout`."""
        return self._slot(0, self.sizes.expert_bytes, self.sizes.expert_layers, layout, ordinal)

    def kv_slot(self, layout: Layout, ordinal: int) -> torch.Tensor:
        """uint8 view of the KV slot of the `ordinal`-th attention layer (0-based) in `layout`."""
        return self._slot(self._kv_base, self.sizes.kv_bytes, self.sizes.kv_layers, layout, ordinal)

    def _slot(self, base: int, nbytes: int, layers: int, layout: Layout, ordinal: int) -> torch.Tensor:
        if not 0 <= ordinal < layers:
            raise IndexError(f"layer {ordinal} of {layers}")
        start = base + (ordinal + (layout is Layout.EP)) * _align(nbytes)
        return self.storage[start : start + nbytes]

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether every byte of a contiguous `tensor` lies inside this buffer."""
        start = self.storage.data_ptr()
        first = tensor.data_ptr()
        return start <= first and first + tensor.numel() * tensor.element_size() <= start + self.storage.numel()
