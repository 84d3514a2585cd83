"""Maps a tensor of every rank of one host into this process by CUDA IPC: stores to it go over NVLink.

A handle names a whole cudaMalloc allocation, of which a torch tensor may be a part, so it travels with the tensor's
offset. Each importer opens it with its own device current. The memory must outlive all mappings: close before freeing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moebius.kernels.cuda_calls import CudaError, checked, driver

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only value the call takes


class PeerError(RuntimeError):
    """The ranks cannot map each other's memory. Raised on every rank of the group alike."""


@dataclass(frozen=True, slots=True)
class Export:
    """What a rank tells the others about its tensor. `problem` says why there is no handle."""

    host: str
    device: str
    nbytes: int
    offset: int = 0
    handle: bytes = b""
    problem: str | None = None


Gather = Callable[[Any], list[Any]]  # all ranks' values by rank; a collective


def gather_of(group: dist.ProcessGroup) -> Gather:
    """All-gather of Python objects over a group that can send them from the CPU (gloo)."""

    def gather(value: Any) -> list[Any]:
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, value, group=group)
        return found

    return gather


class PeerMap:
    """Addresses of one tensor of each rank, valid in this process until `close`. Make it with `PeerMap.open`."""

    def __init__(self, tensor: torch.Tensor, addresses: Sequence[int], opened: Sequence[int] = ()) -> None:
        self.tensor = tensor  # kept alive: peers write to it
        self.addresses = tuple(addresses)
        self._opened = list(opened)

    @classmethod
    def open(cls, tensor: torch.Tensor, group: dist.ProcessGroup) -> PeerMap:
        """Exchange handles of a contiguous CUDA `tensor` (as large on every rank) and map all of them; a collective.

        `group` must be able to send Python objects from the CPU (gloo). What was written to the tensor before is
        visible to all ranks afterwards. Raises PeerError on every rank if any rank cannot map another.
        """
        rank = dist.get_rank(group)
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        exports: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(exports, export_memory(tensor), group=group)
        problem = obstacle(exports)
        if problem is not None:
            raise PeerError(problem)

        addresses, opened, failure = [], [], None
        with torch.cuda.device_of(tensor):
            for peer, export in enumerate(exports):
                if peer == rank:
                    addresses.append(tensor.data_ptr())
                    continue
                try:
                    base = _open_handle(export.handle)
                except CudaError as error:
                    failure = _cannot_map(rank, peer, exports, error)
                    break
                opened.append(base)
                addresses.append(base + export.offset)
        failures: list[Any] = [None] * len(exports)
        dist.all_gather_object(failures, failure, group=group)
        found = cls(tensor, addresses, opened)
        if any(failures):
            found._unmap()
            raise PeerError("; ".join(filter(None, failures)))
        return found

    def close(self, group: dist.ProcessGroup) -> None:
        """Unmap the peers' memory; a collective, after which every rank may free its tensor."""
        self._unmap()
        dist.barrier(group)

    def _unmap(self) -> None:
        if self._opened:
            with torch.cuda.device_of(self.tensor):
                torch.cuda.synchronize()
                while self._opened:
                    checked(driver().cuIpcCloseMemHandle(self._opened.pop()), "unmapping a peer's memory")
        self.addresses = ()


def export_memory(tensor: torch.Tensor) -> Export:
    """Make the handle of the allocation that holds `tensor`; what is in the way is reported, not raised."""
    nbytes = tensor.numel() * tensor.element_size()
    host, device = host_id(), str(tensor.device)
    try:
        if not tensor.is_cuda or not tensor.is_contiguous() or not nbytes:
            raise CudaError(f"a tensor on {device} of {nbytes} bytes, contiguous: {tensor.is_contiguous()}")
        with torch.cuda.device_of(tensor):
            offset, handle = _handle_of(tensor.data_ptr(), nbytes)
        properties = torch.cuda.get_device_properties(tensor.device)
        return Export(host, f"{device} ({properties.name}, {properties.uuid})", nbytes, offset, handle)
    except CudaError as error:
        return Export(host, device, nbytes, problem=str(error))


def obstacle(exports: Sequence[Export]) -> str | None:
    """Why these ranks cannot map each other, in words, by what they told; None if nothing speaks against it."""
    problems = [f"rank {rank} cannot share its memory: {e.problem}" for rank, e in enumerate(exports) if e.problem]
    if problems:
        return "; ".join(problems)
    for what, of_rank in (
        ("are on different hosts, and memory can be mapped within one", [e.host for e in exports]),
        ("have buffers of different sizes", [f"{e.nbytes} bytes" for e in exports]),
    ):
        for rank, value in enumerate(of_rank):
            if value != of_rank[0]:
                return f"rank 0 ({of_rank[0]}) and rank {rank} ({value}) {what}"
    return None


def _handle_of(pointer: int, nbytes: int) -> tuple[int, bytes]:
    """Offset of `pointer` in the allocation that holds all `nbytes`, and the allocation's IPC handle."""
    cuda = driver()
    capable = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
    base, size = checked(cuda.cuMemGetAddressRange(pointer), "looking up an allocation")
    whole = pointer + nbytes <= int(base) + int(size)
    if not whole or not checked(cuda.cuPointerGetAttribute(capable, pointer), "asking whether memory can be shared"):
        raise CudaError(
            "its memory does not come from cudaMalloc; take expandable_segments:True and backend:cudaMallocAsync out "
            "of PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF"
        )
    handle = checked(cuda.cuIpcGetMemHandle(base), "exporting an allocation")
    return pointer - int(base), ctypes.string_at(handle.getPtr(), _HANDLE_BYTES)


def _open_handle(handle: bytes) -> int:
    cuda = driver()
    own = cuda.CUipcMemHandle()
    ctypes.memmove(own.getPtr(), handle, _HANDLE_BYTES)
    return int(checked(cuda.cuIpcOpenMemHandle(own, _LAZY_PEER_ACCESS), "opening an IPC handle"))


def _cannot_map(rank: int, peer: int, exports: Sequence[Export], error: CudaError) -> str:
    return (
        f"rank {rank} on {exports[rank].device} cannot map the memory of rank {peer} on {exports[peer].device} "
        f"({error}): the GPUs need peer access to each other (nvidia-smi topo -p2p r), and containers a shared IPC "
        "namespace (--ipc=host)"
    )


def host_id() -> str:
    """Of this host: the same in all containers of a host, and different after a restart."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
