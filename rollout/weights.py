"""Packs a stream of named tensors into buckets, which cross processes as one block of bytes each.

One flat byte array per bucket is shared with all ranks of a node through Ray's object store without a copy per rank;
tensors sent one by one would be pickled and copied for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from moebius.rollout.errors import BadInput

DEFAULT_BUCKET_BYTES = 64 << 20
_ALIGN = 64  # bytes; more than any dtype needs

NamedTensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies in its bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes
    nbytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some tensors of an update: `data` is a flat uint8 array."""

    data: np.ndarray
    entries: list[Entry]

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors on CPU, as views of `data`."""
        flat = torch.from_numpy(self.data)
        return [(e.name, _view(flat, e)) for e in self.entries]


def buckets(named_tensors: NamedTensors, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Iterator[Bucket]:
    """Buckets of at most `bucket_bytes` each, except that a larger tensor gets one of its own.

    Takes tensors from the stream as it goes, so no more than a bucket is held at a time. Raises BadInput for anything
    but pairs of a name and a tensor with data.
    """
    pairs = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
    waiting: list[tuple[str, torch.Tensor]] = []
    size = 0
    for pair in pairs:
        name, tensor = _checked(pair)
        nbytes = _aligned(tensor.numel() * tensor.element_size())
        if waiting and size + nbytes > bucket_bytes:
            yield _pack(waiting)
            waiting, size = [], 0
        waiting.append((name, tensor))
        size += nbytes
    if waiting:
        yield _pack(waiting)


def _checked(pair: object) -> tuple[str, torch.Tensor]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise BadInput(f"update_weights: expected pairs of a name and a tensor, got {type(pair).__name__}")
    name, tensor = pair
    if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
        raise BadInput(
            f"update_weights: expected a name and a tensor, got {type(name).__name__} and {type(tensor).__name__}"
        )
    if tensor.is_meta:
        raise BadInput(f"update_weights: weight {name!r} is on the meta device and has no data")
    if hasattr(tensor, "full_tensor"):
        raise BadInput(
            f"update_weights: weight {name!r} is sharded (DTensor); send tensor.full_tensor(), called on all its ranks"
        )
    return name, tensor.detach()


def _pack(pairs: list[tuple[str, torch.Tensor]]) -> Bucket:
    entries: list[Entry] = []
    offset = 0
    for name, tensor in pairs:
        nbytes = tensor.numel() * tensor.element_size()
        entries.append(Entry(name, tensor.dtype, tuple(tensor.shape), offset, nbytes))
        offset += _aligned(nbytes)
    data = np.empty(offset, dtype=np.uint8)
    for (_, view), (_, tensor) in zip(Bucket(data, entries).tensors(), pairs, strict=True):
        view.copy_(tensor)
    return Bucket(data, entries)


def _view(flat: torch.Tensor, entry: Entry) -> torch.Tensor:
    if entry.nbytes == 0:  # torch cannot reinterpret no bytes
        return torch.empty(entry.shape, dtype=entry.dtype)
    return flat[entry.offset : entry.offset + entry.nbytes].view(entry.dtype).view(entry.shape)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
