"""Packs a stream of named tensors into buckets, which cross processes as one block of bytes each.

One flat byte array per bucket is shared with all ranks of a node through Ray's object store without a copy per rank;
tensors sent one by one would be pickled and copied for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from moebius.rollout.errors import BadInput

if TYPE_CHECKING:
    from moebius.rollout.transports.ipc import IpcBucket

DEFAULT_BUCKET_BYTES = 64 << 20
_ALIGN = 64  # bytes; more than any dtype needs

Pair = tuple[str, torch.Tensor]
NamedTensors = Mapping[str, torch.Tensor] | Iterable[Pair]
Transport = Literal["host", "ipc"]


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies in its bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes
    nbytes: int

    def to_json(self) -> list[Any]:
        """For `from_json`."""
        return [self.name, str(self.dtype).removeprefix("torch."), list(self.shape), self.offset, self.nbytes]

    @classmethod
    def from_json(cls, values: list[Any]) -> Entry:
        """What `to_json` made. Raises ValueError for a dtype that torch does not have."""
        name, dtype, shape, offset, nbytes = values
        found = getattr(torch, dtype, None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"weight {name!r}: unknown dtype {dtype!r}")
        return cls(name, found, tuple(shape), offset, nbytes)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some tensors of an update: `data` is a flat uint8 array."""

    data: np.ndarray
    entries: list[Entry]

    def tensors(self) -> list[Pair]:
        """The tensors on CPU, as views of `data`."""
        return views(torch.from_numpy(self.data), self.entries)


def packed(named_tensors: NamedTensors, bucket_bytes: int, transport: Transport) -> Iterator[Bucket | IpcBucket]:
    """Buckets for one of the transports. Raises BadInput as `batches`, and for an unknown transport."""
    if transport == "host":
        return buckets(named_tensors, bucket_bytes)
    if transport == "ipc":
        from moebius.rollout.transports.ipc import ipc_buckets

        return ipc_buckets(named_tensors, bucket_bytes)
    raise BadInput(f"update_weights: transport must be 'host' or 'ipc', got {transport!r}")


def buckets(named_tensors: NamedTensors, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Iterator[Bucket]:
    """Buckets in host memory; sizes and errors as `batches`."""
    for pairs in batches(named_tensors, bucket_bytes):
        entries, nbytes = plan(pairs)
        data = np.empty(nbytes, dtype=np.uint8)
        fill(torch.from_numpy(data), entries, pairs)
        yield Bucket(data, entries)


def batches(named_tensors: NamedTensors, bucket_bytes: int) -> Iterator[list[Pair]]:
    """Tensors of at most `bucket_bytes` together, except that a larger one comes alone.

    Takes tensors from the stream as it goes, so no more than a bucket is held at a time. Raises BadInput for anything
    but pairs of a name and a tensor with data.
    """
    pairs = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
    waiting: list[Pair] = []
    size = 0
    for pair in pairs:
        name, tensor = _checked(pair)
        nbytes = _aligned(tensor.numel() * tensor.element_size())
        if waiting and size + nbytes > bucket_bytes:
            yield waiting
            waiting, size = [], 0
        waiting.append((name, tensor))
        size += nbytes
    if waiting:
        yield waiting


def plan(pairs: Iterable[Pair]) -> tuple[list[Entry], int]:
    """Where tensors lie in a bucket of their own, and its bytes."""
    entries: list[Entry] = []
    offset = 0
    for name, tensor in pairs:
        nbytes = tensor.numel() * tensor.element_size()
        entries.append(Entry(name, tensor.dtype, tuple(tensor.shape), offset, nbytes))
        offset += _aligned(nbytes)
    return entries, offset


def fill(flat: torch.Tensor, entries: list[Entry], pairs: Iterable[Pair]) -> None:
    """Copy tensors to where `entries` say in the bytes of `flat`."""
    for (_, view), (_, tensor) in zip(views(flat, entries), pairs, strict=True):
        view.copy_(tensor)


def views(flat: torch.Tensor, entries: Iterable[Entry]) -> list[Pair]:
    """The tensors of a bucket, as views of its bytes."""
    return [(e.name, _view(flat, e)) for e in entries]


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


def _view(flat: torch.Tensor, entry: Entry) -> torch.Tensor:
    if entry.nbytes == 0:  # torch cannot reinterpret no bytes
        return torch.empty(entry.shape, dtype=entry.dtype)
    return flat[entry.offset : entry.offset + entry.nbytes].view(entry.dtype).view(entry.shape)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
