"""Weights from one trainer process to all ranks by NCCL or gloo broadcasts, in a process group of their own.

The trainer is member 0, rank r member r+1; neither side's own torch process groups take part. What a bucket holds is
told as JSON through the group's store, its bytes follow as one broadcast. Who does not know the session's secret,
which only the `args` of an offer tell, is refused (see moebius.rollout.transports.secret). NCCL needs the trainer on a
GPU that no rank has; on a shared GPU use `update_weights(transport="ipc")`.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from moebius.rollout.errors import MoebiusError
from moebius.rollout.transports.secret import listening_store, seal, unseal
from moebius.rollout.weights import DEFAULT_BUCKET_BYTES, Entry, NamedTensors, batches, fill, plan, views

SOURCE = f"{__name__}:receive"
Backend = Literal["nccl", "gloo"]


@dataclass
class _Member:
    """This process as part of the group."""

    store: dist.Store
    group: Any  # a torch process group's backend
    device: torch.device
    flat: torch.Tensor = field(init=False)  # the largest bucket so far

    def __post_init__(self) -> None:
        self.flat = torch.empty(0, dtype=torch.uint8, device=self.device)

    def buffer(self, nbytes: int) -> torch.Tensor:
        """The first `nbytes` of a buffer that is used again and again."""
        if self.flat.numel() < nbytes:
            self.flat = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return self.flat[:nbytes]

    def broadcast(self, flat: torch.Tensor) -> None:
        """Send or receive. On GPUs, what is launched next waits for it."""
        if flat.numel():
            self.group.broadcast(flat, 0).wait()


def _join(
    host: str, port: int, secret: str, member: int, size: int, backend: Backend, device: str, timeout_s: float
) -> _Member:
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore(host, port, is_master=False, timeout=timeout)
    store.set(_proof(member), seal(secret, _proof(member), size))
    return _connect(store, member, size, backend, torch.device(device), timeout)


def _connect(
    store: dist.Store, member: int, size: int, backend: Backend, device: torch.device, timeout: timedelta
) -> _Member:
    inner = dist.PrefixStore("group", store)
    if backend == "gloo":
        return _Member(store, dist.ProcessGroupGloo(inner, member, size, timeout), device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return _Member(store, dist.ProcessGroupNCCL(inner, member, size, options), device)


class Broadcaster:
    """The trainer's side; keep it from update to update, and `close` it.

        with Broadcaster(ranks=group.config.ranks, backend="nccl") as weights:
            group.pull_update(version, *weights.offer(model.named_parameters()))

    Where another process calls `pull_update`, send it what `offer` returns.

    Args:
        ranks: of the group.
        backend: nccl for GPUs, gloo for CPUs.
        device: this process's device; None: the current GPU with nccl, else the CPU.
        host: address under which the ranks reach this process.
        bucket_bytes: sent at once; each member holds a buffer of that size.
        timeout_s: longest wait of one member for another.
    """

    def __init__(
        self,
        ranks: int,
        backend: Backend = "nccl",
        *,
        device: torch.device | str | None = None,
        host: str = "127.0.0.1",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout_s: float = 600.0,
    ) -> None:
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else "cpu"
        self._device, self._backend, self._size = torch.device(device), backend, ranks + 1
        self._host, self._bucket_bytes, self._timeout_s = host, bucket_bytes, timeout_s
        self._secret = secrets.token_hex(16)
        self._server = listening_store(host, timedelta(seconds=timeout_s))
        self._member: _Member | None = None
        self._sessions = 0
        self._sending: threading.Thread | None = None
        self._failure: BaseException | None = None

    def offer(self, named_tensors: NamedTensors) -> tuple[str, list[tuple[Any, ...]]]:
        """Begin to send; returns `source` and `args` of the `pull_update` that receives.

        A stream of tensors is read on another thread, as it is sent. The last offer must have been taken.
        """
        self.wait()
        self._sessions += 1
        self._sending = threading.Thread(target=self._send, args=(named_tensors, self._sessions), daemon=True)
        self._sending.start()
        common = (self._host, self._server.port, self._secret, self._size, self._backend, self._timeout_s)
        return SOURCE, [(*common, member, self._sessions) for member in range(1, self._size)]

    def wait(self) -> None:
        """Until the last offer has been sent. Raises MoebiusError if it could not be."""
        if self._sending is not None:
            self._sending.join()
            self._sending = None
            failure, self._failure = self._failure, None
            if failure is not None:
                raise MoebiusError(f"weights were not sent: {failure}") from failure

    def close(self) -> None:
        """Leave the group."""
        self.wait()
        self._member = None

    def __enter__(self) -> Broadcaster:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _send(self, named_tensors: NamedTensors, session: int) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        number = 0
        try:
            if self._member is None:
                timeout = timedelta(seconds=self._timeout_s)
                member = _connect(self._server, 0, self._size, self._backend, self._device, timeout)
                for other in range(1, self._size):  # all have joined: nothing is sent to one that was not told
                    unseal(self._secret, _proof(other), self._server.get(_proof(other)))
                self._member = member
            for pairs in batches(named_tensors, self._bucket_bytes):
                entries, nbytes = plan(pairs)
                flat = self._member.buffer(nbytes)
                fill(flat, entries, pairs)
                self._tell(session, number, {"nbytes": nbytes, "entries": [e.to_json() for e in entries]})
                self._member.broadcast(flat)
                number += 1
            self._tell(session, number, {"end": True})
        except BaseException as error:  # noqa: BLE001  (raised by `wait`, and told to the ranks)
            self._failure = error
            self._tell(session, number, {"error": f"{type(error).__name__}: {error}"})

    def _tell(self, session: int, number: int, told: dict[str, Any]) -> None:
        key = _key(session, number)
        self._server.set(key, seal(self._secret, key, told))


_members: dict[tuple[str, int], _Member] = {}  # in a rank's process, by the trainer's secret and its own number


def receive(
    host: str, port: int, secret: str, size: int, backend: Backend, timeout_s: float, member: int, session: int
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """A rank's side: the buckets of one `offer`, as views of a buffer that is overwritten by the next one.

    Raises ValueError with what went wrong on the trainer's side, or if somebody else wrote to the store, and torch's
    DistStoreError if it says nothing.
    """
    key = (secret, member)
    if key not in _members:
        device = f"cuda:{torch.cuda.current_device()}" if backend == "nccl" else "cpu"
        for other in [other for other in _members if other[0] != secret]:
            del _members[other]  # of a trainer that was there before
        _members[key] = _join(host, port, secret, member, size, backend, device, timeout_s)
    own = _members[key]
    number = 0
    while True:
        told = unseal(secret, _key(session, number), own.store.get(_key(session, number)))
        if "error" in told:
            raise ValueError(f"the trainer could not send: {told['error']}")
        if "end" in told:
            return
        entries = [Entry.from_json(entry) for entry in told["entries"]]
        flat = own.buffer(told["nbytes"])
        own.broadcast(flat)
        yield views(flat, entries)
        number += 1


def _key(session: int, number: int) -> str:
    return f"{session}/{number}"


def _proof(member: int) -> str:
    return f"proof/{member}"
