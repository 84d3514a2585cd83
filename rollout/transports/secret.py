"""What keeps a weight session to those who know its secret, and its bytes from being run.

A store of torch's (TCPStore) listens on all interfaces and lists its keys to whoever connects. So ours listen on the
address they are meant for; what is said in them is JSON with a code that only the secret can make (HMAC-SHA256, RFC
2104); and every member proves that it knows the secret before anything is sent. The bytes of weights are not encrypted.
"""

from __future__ import annotations

import hmac
import io
import json
import pickle
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

NCCL_ID_BYTES = 128  # of ncclUniqueId, nccl.h


def listening_store(host: str, timeout: timedelta, port: int = 0) -> dist.TCPStore:
    """A store that listens on `host` alone (port 0: any free one). Raises OSError when it cannot."""
    import torch.distributed as dist

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family)
    return dist.TCPStore(
        host, listener.getsockname()[1], is_master=True, timeout=timeout, wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip


def seal(secret: str, key: str, told: Any) -> str:
    """`told` as JSON, with a code for `key` and it."""
    text = json.dumps(told)
    return f"{_code(secret, key, text)} {text}"


def unseal(secret: str, key: str, sealed: bytes) -> Any:
    """What `seal` was given. Raises ValueError if somebody without the secret wrote it, or for another key."""
    code, _, text = sealed.decode("utf-8", "replace").partition(" ")
    if not hmac.compare_digest(code.encode(), _code(secret, key, text).encode()):
        raise ValueError(
            "a message of the weight session was not written with its secret: somebody else uses its store"
        )
    return json.loads(text)


def _code(secret: str, key: str, text: str) -> str:
    return hmac.digest(secret.encode(), f"{key}\n{text}".encode(), "sha256").hex()


class _OnlyAnId(pickle.Unpickler):
    """Reads a pickled ncclUniqueId as its bytes, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """See pickle.Unpickler."""
        if (module, name) == ("_ctypes", "_unpickle"):
            return _bytes_of
        if name == "ncclUniqueId" and module.startswith("vllm."):
            return _Id
        raise pickle.UnpicklingError(f"{module}.{name} is no NCCL id")


class _Id:
    """Stands for the class of NCCL ids."""


def _bytes_of(kind: Any, state: Any) -> bytes:
    if kind is not _Id or not isinstance(state, tuple) or len(state) != 2 or not isinstance(state[1], bytes):
        raise pickle.UnpicklingError("this is no NCCL id")
    return state[1]


def nccl_id(sent: bytes) -> bytes:
    """The NCCL id that vLLM's clients send pickled. Nothing is run; raises ValueError for any other content."""
    try:
        found = _OnlyAnId(io.BytesIO(sent)).load()
    except Exception as error:  # a broken pickle raises what it likes
        raise ValueError(f"the trainer sent something else than an NCCL id: {error}") from error
    if not isinstance(found, bytes) or len(found) != NCCL_ID_BYTES:
        raise ValueError("the trainer sent something else than an NCCL id")
    return found


def join_nccl(host: str, port: int, member: int, size: int, device: torch.device) -> Any:
    """Member `member` (not 0) of a group that vLLM's `stateless_init_process_group` makes on the trainer's side."""
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId
    from vllm.distributed.utils import StatelessProcessGroup

    class _Group(StatelessProcessGroup):
        """vLLM's own would unpickle whatever the trainer's store says."""

        def broadcast_obj(self, obj: Any, src: int) -> Any:
            number = self.broadcast_recv_src_counter[src]
            self.broadcast_recv_src_counter[src] += 1
            content = nccl_id(self.store.get(f"broadcast_from/{src}/{number}"))
            found = ncclUniqueId()
            for i, byte in enumerate(content):
                found.internal[i] = byte
            return found

    joined = StatelessProcessGroup.create(host=host, port=port, rank=member, world_size=size)
    group = _Group(rank=joined.rank, world_size=joined.world_size, store=joined.store)
    return PyNcclCommunicator(group, device=device)
