"""Which memory stands behind the unified buffer. Decided before anything is allocated, by all ranks alike."""

from __future__ import annotations

import io
import itertools
import logging
import pickle
from dataclasses import is_dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from moebius.engine.memory import Backing, BackingError, PlainBacking, SlotSizes, default_backing
from moebius.kernels.cuda_calls import CudaError
from moebius.kernels.peers import Gather
from moebius.kernels.virtual import GRANULE, VirtualMemory
from moebius.kernels.virtual_peers import sharing_obstacle

MemoryKind = Literal["auto", "virtual", "plain"]
_TIMEOUT = timedelta(seconds=300)  # ranks may load their libraries at very different speeds
_log = logging.getLogger(__name__)
_stores: list[dist.Store] = []  # kept: rank 0's is the server that the process groups to come will use too


def make_backing(kind: MemoryKind, sizes: SlotSizes, device: torch.device, rank: int, ranks: int) -> Backing:
    """The memory that `kind` (engine.memory) asks for; a collective. Memory of CPUs can always be given back.

    `ranks` are those that are to map each other's memory, this one being `rank`: 1 if nobody maps anything. Called
    before process groups exist, so they talk over the store of the rendezvous (RANK, WORLD_SIZE, MASTER_ADDR,
    MASTER_PORT). Raises BackingError if virtual memory is asked for, or begun with, and not to be had.
    """
    if device.type != "cuda" or kind == "plain":
        return default_backing(sizes.total_bytes, device)
    gather = store_gather(rank, ranks) if ranks > 1 else _alone
    problem = sharing_obstacle(device, rank, gather, GRANULE)
    if problem is not None:
        if kind == "virtual":
            raise BackingError(f"engine.memory is virtual, which does not work here: {problem}")
        _log.warning("the buffer's memory is plain and cannot be given back by sleep: %s", problem)
        return PlainBacking(sizes.total_bytes, device)
    try:
        return VirtualMemory(sizes.chunks(), device)
    except CudaError as error:
        raise BackingError(str(error)) from error


def store_gather(rank: int, ranks: int) -> Gather:
    """All-gather of Python objects among the ranks of a rendezvous that has not led to process groups yet."""
    store, _, _ = next(dist.rendezvous("env://", rank, ranks, timeout=_TIMEOUT))
    _stores.append(store)
    store = dist.PrefixStore(f"moebius-memory-{len(_stores)}", store)
    turns = itertools.count()

    def gather(value: Any) -> list[Any]:
        turn = next(turns)
        store.set(f"{turn}/{rank}", pickle.dumps(value).hex())
        return [loads(bytes.fromhex(store.get(f"{turn}/{peer}").decode())) for peer in range(ranks)]

    return gather


class _OnlyOurs(pickle.Unpickler):
    """The rendezvous is open to whoever reaches its port: nothing but values of moebius.kernels is made from it."""

    def find_class(self, module: str, name: str) -> Any:
        """See pickle.Unpickler."""
        found = super().find_class(module, name) if module.startswith("moebius.kernels.") else None
        if not (isinstance(found, type) and is_dataclass(found)):
            raise pickle.UnpicklingError(f"{module}.{name} is nothing that ranks tell each other")
        return found


def loads(data: bytes) -> Any:
    """What a peer has pickled. Raises pickle.UnpicklingError for anything but plain values and our own dataclasses."""
    return _OnlyOurs(io.BytesIO(data)).load()


def _alone(value: Any) -> list[Any]:
    return [value]
