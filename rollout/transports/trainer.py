"""Weights from one trainer process by the protocol of vLLM's HTTP routes: the trainer is member 0, the ranks follow.

Names, dtypes and shapes come in the request, the bytes by broadcasts in that order: one per tensor, or packed, which
means one after another without gaps until a buffer is full (vllm/distributed/weight_transfer/packed_tensor.py). The
group is NCCL's where ranks have GPUs, so that vLLM's and TRL's own clients can be the trainer, and gloo's on CPUs, with
`open_trainer` and `send` as the trainer's side.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Protocol

from moebius.rollout.transports.secret import join_nccl, listening_store

if TYPE_CHECKING:
    import torch

JOIN = f"{__name__}:join"
RECEIVE = f"{__name__}:receive"
BUFFER_BYTES = 1 << 30  # vLLM's default
_WAIT = timedelta(seconds=120)  # of one member for the others

Backend = Literal["nccl", "gloo"]


class Group(Protocol):
    """What both kinds of groups can do."""

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Send, as member `src`, or receive."""


class _Gloo:
    """A process group of its own, beside torch's default one."""

    def __init__(self, host: str, port: int, member: int, size: int) -> None:
        import torch.distributed as dist

        if member == 0:
            store = listening_store(host, _WAIT, port)
        else:
            store = dist.TCPStore(host, port, is_master=False, timeout=_WAIT)
        self._group: Any = dist.ProcessGroupGloo(dist.PrefixStore("moebius", store), member, size, _WAIT)
        self._store = store

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """See Group."""
        if tensor.numel():
            self._group.broadcast(tensor, src).wait()


_joined: Group | None = None  # of this rank's process


def join(backend: Backend, host: str, port: int, member: int, size: int) -> None:
    """Become `member` of the trainer's group; waits for all others. Raises ValueError when that fails."""
    global _joined
    _joined = None  # that of an earlier trainer
    try:
        if backend == "gloo":
            _joined = _Gloo(host, port, member, size)
            return
        import torch

        _joined = join_nccl(host, port, member, size, torch.device("cuda", torch.cuda.current_device()))
    except (RuntimeError, OSError) as error:  # torch's DistError is a RuntimeError
        raise ValueError(f"the trainer at {host}:{port} was not reached: {error}") from error


def receive(
    backend: Backend, names: list[str], dtypes: list[str], shapes: list[list[int]], packed: bool, buffer_bytes: int
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The announced tensors as they come. Those of one list are overwritten by the next.

    Raises ValueError when this process is in no trainer's group, or a dtype is unknown.
    """
    import torch

    if _joined is None:
        raise ValueError("no trainer is connected: call /init_weight_transfer_engine first")
    device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", torch.cuda.current_device())
    announced = [(name, _dtype(dtype), shape) for name, dtype, shape in zip(names, dtypes, shapes, strict=True)]
    flat = torch.empty(0, dtype=torch.uint8, device=device)
    for batch in _batches(announced, buffer_bytes if packed else 0):
        sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in batch]
        if flat.numel() < sum(sizes):
            flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        taken = flat[: sum(sizes)]
        _joined.broadcast(taken, src=0)
        parts = taken.split(sizes)
        yield [(name, _as(part, dtype, shape)) for part, (name, dtype, shape) in zip(parts, batch, strict=True)]


def _batches(
    announced: Iterable[tuple[str, torch.dtype, list[int]]], buffer_bytes: int
) -> Iterator[list[tuple[str, torch.dtype, list[int]]]]:
    """As vLLM packs: a batch ends with the tensor that makes it larger than the buffer."""
    batch: list[tuple[str, torch.dtype, list[int]]] = []
    nbytes = 0
    for entry in announced:
        batch.append(entry)
        nbytes += math.prod(entry[2]) * entry[1].itemsize
        if nbytes > buffer_bytes or not buffer_bytes:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _as(part: torch.Tensor, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    if part.storage_offset() % dtype.itemsize:  # behind a tensor of a smaller dtype
        part = part.clone()
    return part.view(dtype).view(shape)


def _dtype(name: str) -> torch.dtype:
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}: write it as torch does, without the 'torch.'")
    return dtype


# ---- the trainer's side, on CPU -------------------------------------------------------------------------------------


def open_trainer(port: int, world_size: int, host: str = "127.0.0.1") -> Group:
    """The trainer's membership in a gloo group; waits for the ranks, which /init_weight_transfer_engine makes join."""
    return _Gloo(host, port, 0, world_size)


def send(
    group: Group, named_tensors: Iterable[tuple[str, torch.Tensor]], *, packed: bool, buffer_bytes: int = BUFFER_BYTES
) -> None:
    """Broadcast tensors in the order in which /update_weights has announced them; call it while that runs."""
    import torch

    waiting: list[torch.Tensor] = []
    for _, tensor in named_tensors:
        waiting.append(tensor.detach().contiguous().view(-1).view(torch.uint8))
        if not packed or sum(part.numel() for part in waiting) > buffer_bytes:
            group.broadcast(torch.cat(waiting), src=0)
            waiting = []
    if waiting:
        group.broadcast(torch.cat(waiting), src=0)
