"""Weights as OpenRLHF sends them, one tensor at a time: by Ray's collectives, or as handles of CUDA memory.

Its third way, NCCL in a group of its own, is that of moebius.rollout.transports.trainer. Everything here runs in a
rank's process, for `RolloutGroup.on_ranks` and `pull_tensors`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

JOIN = f"{__name__}:join"
RECEIVE = f"{__name__}:receive"
READ = f"{__name__}:read"
_DEVICE = 6  # place of the device's index among the arguments that rebuild a CUDA tensor

Tensors = Iterator[list[tuple[str, "torch.Tensor"]]]


def join(backend: str, world_size: int, member: int, name: str) -> None:
    """Become `member` of a group of ray.util.collective. Raises ValueError when that fails."""
    try:
        from ray.util import collective

        if collective.is_group_initialized(name):  # of a trainer that was there before
            collective.destroy_collective_group(name)
        collective.init_collective_group(world_size=world_size, rank=member, backend=backend, group_name=name)
    except (ImportError, RuntimeError, ValueError, OSError) as error:
        raise ValueError(
            f"Ray's collective group {name!r} over {backend} could not be joined ({error}); it needs cupy for nccl. "
            "Without --vllm.sync_with_ray NCCL is used directly"
        ) from error


def receive(group: str, name: str, dtype: str, shape: list[int]) -> Tensors:
    """One tensor, broadcast by member 0 of a group of ray.util.collective."""
    import torch
    from ray.util import collective

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
    collective.broadcast(tensor, 0, group_name=group)
    yield [(name, tensor)]
    _synchronize(tensor)


def read(handles: Mapping[str, Any], name: str) -> Tensors:
    """One tensor in the memory of the trainer's process on this rank's GPU.

    `handles` are, by the UUID of a GPU, what torch.multiprocessing.reductions.reduce_tensor has made of it there. The
    sender may give the memory back when this has ended. Raises ValueError when no trainer process is on this GPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise ValueError(f"{name!r} came as a handle of CUDA memory, and the ranks have no GPUs: use another transport")
    device = torch.cuda.current_device()
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    if uuid not in handles:
        raise ValueError(
            f"no process of the trainer holds {name!r} on this rank's GPU ({uuid}): with --train.colocate_all, the "
            "actor's GPUs must be those of the engines"
        )
    rebuild, arguments = handles[uuid]
    own = list(arguments)
    own[_DEVICE] = device  # processes number GPUs otherwise
    tensor = rebuild(*own)
    yield [(name, tensor)]
    _synchronize(tensor)


def _synchronize(tensor: torch.Tensor) -> None:
    """Copies out of it must be over when the sender hears that they are."""
    import torch

    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
