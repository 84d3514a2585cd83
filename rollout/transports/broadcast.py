"""Weights from one trainer process to all ranks by NCCL or gloo broadcasts, in a process group of their own.

The trainer is member 0, rank r member r+1; neither side's own torch process groups take part. What a bucket holds is
told as JSON through the group's store, its bytes follow as one broadcast. Who does not know the session's secret,
which only the `args` of an offer tell, is refused (see moebius.rollout.transports.secret). NCCL needs the trainer on a
GPU that no rank has; on a shared GPU use `update_weights(transport="ipc")`.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from moebius.rollout.transports.secret import listening_store, seal, unseal
from moebius.rollout.transports.sender import Offer, Sender, Sending
from moebius.rollout.weights import DEFAULT_BUCKET_BYTES, Entry, Pair, fill, views

SOURCE = f"{__name__}:receive"
Backend = Literal["nccl", "gloo"]
POLL_S = 0.005  # between two looks whether all ranks read


@dataclass
class _Member:
    """This process as part of the group."""

    store: dist.Store
    device: torch.device
    group: Any = None  # a torch process group's backend
    generation: int = 0  # of it; 0: there is none yet
    flat: torch.Tensor = field(init=False)  # the largest bucket so far

    def __post_init__(self) -> None:
        self.flat = torch.empty(0, dtype=torch.uint8, device=self.device)

    def connect(self, generation: int, member: int, size: int, backend: Backend, timeout: timedelta) -> None:
        """Become a member of another group, at the same time as all others."""
        self.group = None
        inner = dist.PrefixStore(f"group/{generation}", self.store)
        if backend == "gloo":
            self.group = dist.ProcessGroupGloo(inner, member, size, timeout)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self.group = dist.ProcessGroupNCCL(inner, member, size, options)
        self.generation = generation

    def buffer(self, nbytes: int) -> torch.Tensor:
        """The first `nbytes` of a buffer that is used again and again."""
        if self.flat.numel() < nbytes:
            self.flat = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return self.flat[:nbytes]

    def broadcast(self, flat: torch.Tensor) -> None:
        """Send or receive. On GPUs, what is launched next waits for it."""
        if flat.numel():
            self.group.broadcast(flat, 0).wait()


class _Link:
    """The trainer's end. In each session every rank says first that it reads, and which group it is in; message 0 then
    names the group that is used, and each bucket and the end have one more.
    """

    def __init__(self, host: str, size: int, backend: Backend, device: torch.device, timeout_s: float) -> None:
        self._host, self._size, self._backend = host, size, backend
        self._timeout_s, self._timeout = timeout_s, timedelta(seconds=timeout_s)
        self.secret = secrets.token_hex(16)
        self.server = listening_store(host, self._timeout)
        self._own = _Member(self.server, device)
        self._generation = 0
        self._messages = 0  # of the present session
        self._keys: list[str] = []  # in the store, of the last session

    def offer(self, session: int) -> Offer:
        """See Link."""
        common = (self._host, self.server.port, self.secret, self._size, self._backend, self._timeout_s)
        return SOURCE, [(*common, member, session) for member in range(1, self._size)]

    def begin(self, session: int, sending: Sending) -> None:
        """See Link. Nothing is sent before all ranks have proved that they know the secret."""
        if self._own.device.type == "cuda":
            torch.cuda.set_device(self._own.device)
        self._messages = 0
        ready = [_ready(session, member) for member in range(1, self._size)]
        until = time.monotonic() + self._timeout_s
        while not self.server.check(ready):
            sending.go_on()
            if time.monotonic() > until:
                raise TimeoutError(f"not all ranks have begun to read within {self._timeout_s:g} s")
            time.sleep(POLL_S)
        theirs = {unseal(self.secret, key, self.server.get(key)) for key in ready}
        for key in self._keys:  # they have read them
            self.server.delete_key(key)
        self._keys = ready
        renew = theirs != {self._own.generation} or self._own.generation == 0
        if renew:  # at first, and where a rank was started again or has left after an error
            self._generation += 1
        self._tell(session, {"generation": self._generation})
        if renew:
            self._own.connect(self._generation, 0, self._size, self._backend, self._timeout)

    def put(self, session: int, number: int, pairs: list[Pair], entries: list[Entry], nbytes: int) -> None:
        """See Link."""
        del number
        flat = self._own.buffer(nbytes)
        fill(flat, entries, pairs)
        self._tell(session, {"nbytes": nbytes, "entries": [entry.to_json() for entry in entries]})
        self._own.broadcast(flat)

    def end(self, session: int, number: int, error: str | None) -> None:
        """See Link."""
        del number
        self._tell(session, {"end": True} if error is None else {"error": error})
        if error is not None:
            self._own.generation = 0  # whatever state the group is in, it is not used again

    def drain(self) -> None:
        """See Link. What has been sent has been received."""

    def stop(self) -> None:
        """See Link. A gloo group cannot be stopped; it fails when its other members have gone."""
        if self._backend == "nccl" and self._own.group is not None:
            with contextlib.suppress(RuntimeError):  # nothing was sent through it yet
                self._own.group.abort()

    def close(self) -> None:
        """See Link."""
        self._own.group = None

    def _tell(self, session: int, told: dict[str, Any]) -> None:
        key = _key(session, self._messages)
        self.server.set(key, seal(self.secret, key, told))
        self._keys.append(key)
        self._messages += 1


class Broadcaster(Sender):
    """The trainer's side; keep it from update to update, and `close` it.

        with Broadcaster(ranks=group.config.ranks, backend="nccl") as weights:
            group.pull_update(version, *weights.offer(model.named_parameters()))

    Where another process calls `pull_update`, send it what `offer` returns. If that fails, call `cancel` before the
    next offer; an error that leaves the `with` block does so. Ranks that were started again find their way back.

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
        where = torch.device(device)
        super().__init__(lambda: _Link(host, ranks + 1, backend, where, timeout_s), bucket_bytes)


_members: dict[tuple[str, int], _Member] = {}  # in a rank's process, by the trainer's secret and its own number


def receive(
    host: str, port: int, secret: str, size: int, backend: Backend, timeout_s: float, member: int, session: int
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """A rank's side: the buckets of one `offer`, as views of a buffer that is overwritten by the next one.

    Raises ValueError with what went wrong on the trainer's side, or if somebody else wrote to the store, and torch's
    DistStoreError if it says nothing.
    """
    key = (secret, member)
    for other in [other for other in _members if other[0] != secret]:
        _members.pop(other, None)  # of a trainer, or a connection, that was there before
    timeout = timedelta(seconds=timeout_s)
    own = _members.get(key)
    if own is None:
        device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        own = _Member(dist.TCPStore(host, port, is_master=False, timeout=timeout), device)
    try:
        ready = _ready(session, member)
        own.store.set(ready, seal(secret, ready, own.generation))
        generation = _hear(own, secret, session, 0)["generation"]
        if generation != own.generation:
            own.connect(generation, member, size, backend, timeout)
        number = 1
        while "end" not in (told := _hear(own, secret, session, number)):
            entries = [Entry.from_json(entry) for entry in told["entries"]]
            flat = own.buffer(told["nbytes"])
            own.broadcast(flat)
            yield views(flat, entries)
            number += 1
    except BaseException:
        _members.pop(key, None)  # the trainer must not wait for this member; it joins again
        raise
    _members[key] = own


def _hear(own: _Member, secret: str, session: int, number: int) -> dict[str, Any]:
    """A message of the trainer's. Raises ValueError if it has failed."""
    key = _key(session, number)
    told: dict[str, Any] = unseal(secret, key, own.store.get(key))
    if "error" in told:
        raise ValueError(f"the trainer could not send: {told['error']}")
    return told


def _key(session: int, number: int) -> str:
    return f"{session}/{number}"


def _ready(session: int, member: int) -> str:
    return f"{session}/ready/{member}"
