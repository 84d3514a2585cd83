"""Weights that lie in another process's CUDA memory on the same host, read in place over a mapped handle.

The sender packs into two buffers by turns, so that one is read while the other is filled. A handle is of torch's own
kind (torch.multiprocessing.reductions); the device in it is named by its UUID, because processes number GPUs otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from moebius.rollout.errors import BadInput
from moebius.rollout.weights import Entry, NamedTensors, batches, fill, plan, views

_DEVICE = 6  # place of the device's index among the arguments that rebuild a CUDA tensor


@dataclass(frozen=True, slots=True)
class IpcBucket:
    """Some tensors of an update, in CUDA memory of the process that sent this."""

    entries: list[Entry]
    uuid: str  # of its GPU
    rebuild: Any  # torch's function and arguments
    arguments: tuple[Any, ...]

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors as views of the sender's memory, on its GPU. Raises ValueError if that is not visible here."""
        arguments = list(self.arguments)
        arguments[_DEVICE] = _index_of(self.uuid)
        return views(self.rebuild(*arguments), self.entries)


def ipc_buckets(named_tensors: NamedTensors, bucket_bytes: int) -> Iterator[IpcBucket]:
    """Buckets of at most `bucket_bytes`; each may be read until the next but one is asked for.

    Raises BadInput at once where this process has no CUDA.
    """
    if not torch.cuda.is_available():
        raise BadInput("update_weights: transport 'ipc' needs CUDA in the sending process; use 'host'")
    return _buckets(named_tensors, bucket_bytes)


def _buckets(named_tensors: NamedTensors, bucket_bytes: int) -> Iterator[IpcBucket]:
    from torch.multiprocessing.reductions import reduce_tensor

    device = torch.device("cuda", torch.cuda.current_device())
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    buffers = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2)]
    for turn, pairs in enumerate(batches(named_tensors, bucket_bytes)):
        entries, nbytes = plan(pairs)
        if buffers[turn % 2].numel() < nbytes:
            buffers[turn % 2] = torch.empty(max(nbytes, bucket_bytes), dtype=torch.uint8, device=device)
        flat = buffers[turn % 2]
        fill(flat, entries, pairs)
        torch.cuda.synchronize(device)  # readers do not know this process's streams
        rebuild, arguments = reduce_tensor(flat)
        yield IpcBucket(entries, uuid, rebuild, arguments)


def _index_of(uuid: str) -> int:
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return index
    raise ValueError(
        f"the weights lie on GPU {uuid}, which this rank cannot see: send them from a GPU of the group, or with "
        "transport='host'"
    )
