"""Weights from a trainer that is a Ray actor, by `ray.util.collective`: gloo on CPUs, NCCL on GPUs where cupy is there.

Ray's gloo groups are made of torch's default process group, which a rank has already (its engine's). So the members are
the trainer and one `Receiver` actor on each node with ranks, which puts buckets into the object store: a node gets the
bytes once, and its ranks map them. Ray's NCCL groups are cupy's own; there the ranks are members themselves. Ray's
collectives work within actors and tasks only, and the cluster they rendezvous on is as trusted as Ray itself.
`Broadcaster` (moebius.rollout.transports.broadcast) needs neither actors nor cupy.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import ray
import torch
from ray.util import collective

from moebius.rollout.errors import BadInput
from moebius.rollout.placement import on_node
from moebius.rollout.transports.sender import Offer, Sender, Sending
from moebius.rollout.weights import DEFAULT_BUCKET_BYTES, Bucket, Entry, Pair, fill, views

NODE = f"{__name__}:node"
STORED, DIRECT = f"{__name__}:receive_stored", f"{__name__}:receive_direct"
Backend = Literal["gloo", "nccl"]
_AHEAD = 2  # buckets that a receiver holds
_POLL_S = 0.2  # between looks whether an offer was given up


def node() -> str:
    """Ray's id of this process's node; `group.on_ranks(NODE, [()] * ranks)` tells `RayBroadcaster` where ranks are."""
    return str(ray.get_runtime_context().get_node_id())


class Receiver:
    """An actor that knows the buckets of an update: their places, and with gloo also their bytes."""

    def __init__(self, readers: int, timeout_s: float) -> None:
        self._timeout_s, self._changed = timeout_s, threading.Condition()
        self._session, self._at = 0, [0] * readers  # bucket that each reader asks for
        self._buckets: dict[int, Any] = {}
        self._end: tuple[int, str | None] | None = None  # number of buckets, and the error that ended it
        self._asked: set[int] = set()  # readers that have begun
        self._done: set[int] = set()  # readers that know of the end

    def join(self, size: int, member: int, group: str) -> None:
        """Become a member of the trainer's gloo group."""
        collective.init_collective_group(size, member, "gloo", group, round(1e3 * self._timeout_s))

    def begin(self, session: int) -> None:
        """A new update."""
        with self._changed:
            self._session, self._at = session, [0] * len(self._at)
            self._buckets, self._end, self._asked, self._done = {}, None, set(), set()

    def ready(self) -> None:
        """Until all readers have begun to read."""
        with self._changed:
            self._wait(lambda: len(self._asked) == len(self._at), "the ranks read no weights")

    def take(self, number: int, entries: list[Entry], nbytes: int, group: str | None) -> None:
        """The next bucket: received from the group here, or (None) by the ranks."""
        with self._changed:
            self._wait(lambda: len(self._buckets) < _AHEAD, "the ranks read no weights")
        bucket: Any = (entries, nbytes)
        if group is not None:
            data = np.empty(nbytes, dtype=np.uint8)
            if nbytes:
                collective.broadcast(data, 0, group)
            bucket = [ray.put(Bucket(data, entries))]
        with self._changed:
            self._buckets[number] = bucket
            self._changed.notify_all()

    def end(self, number: int, error: str | None) -> None:
        """That was all, or what went wrong on the trainer's side."""
        with self._changed:
            self._end = (number, error)
            self._changed.notify_all()

    def drained(self) -> None:
        """Until all readers have read all."""
        with self._changed:
            self._wait(lambda: len(self._done) == len(self._at), "the ranks read no weights")

    def bucket(self, session: int, number: int, reader: int) -> Any:
        """Bucket `number`, which a reader that has read all before waits for; None behind the last.

        Raises ValueError with what went wrong on the trainer's side.
        """
        with self._changed:
            self._wait(lambda: self._session == session, "the update was not begun")
            self._asked.add(reader)
            self._at[reader] = max(number, self._at[reader])
            for old in [old for old in self._buckets if old < min(self._at)]:
                del self._buckets[old]
            self._changed.notify_all()
            self._wait(lambda: number in self._buckets or self._end is not None, "the trainer sends nothing")
            if number in self._buckets:
                return self._buckets[number]
            self._done.add(reader)
            self._changed.notify_all()
            if self._end is not None and self._end[1] is not None:
                raise ValueError(f"the trainer could not send: {self._end[1]}")
            return None

    def _wait(self, true: Any, otherwise: str) -> None:
        if not self._changed.wait_for(true, self._timeout_s):
            raise ValueError(f"{otherwise} for {self._timeout_s:g} s")


class _Link:
    """The trainer's end: a collective group, and receivers: with gloo one on each node, with NCCL one for all ranks."""

    def __init__(self, nodes: Sequence[str], backend: Backend, timeout_s: float) -> None:
        self._nodes, self._backend, self._timeout_s = list(nodes), backend, timeout_s
        self._group = f"moebius-{secrets.token_hex(8)}"
        self._device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        self._joined = self._offered = self._made_default = False
        self._sending: Sending | None = None
        places = list(dict.fromkeys(self._nodes)) if backend == "gloo" else [self._nodes[0]]
        self._receiver_of = [places.index(place) if backend == "gloo" else 0 for place in self._nodes]
        self._receivers = []
        for index, place in enumerate(places):
            readers = self._receiver_of.count(index)
            options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": readers + 4}
            actor = ray.remote(Receiver).options(**options, scheduling_strategy=on_node(place))
            self._receivers.append(actor.remote(readers, timeout_s))

    def offer(self, session: int) -> Offer:
        """See Link."""
        ray.get([receiver.begin.remote(session) for receiver in self._receivers], timeout=self._timeout_s)
        self._offered = True
        readers = [0] * len(self._receivers)
        args: list[tuple[Any, ...]] = []
        for rank, index in enumerate(self._receiver_of):
            own = (self._receivers[index], session, readers[index])
            more = () if self._backend == "gloo" else (self._group, rank + 1, len(self._nodes) + 1)
            args.append((*own, *more))
            readers[index] += 1
        return STORED if self._backend == "gloo" else DIRECT, args

    def begin(self, session: int, sending: Sending) -> None:
        """See Link. Then the ranks, or their receivers, join at the same time."""
        del session
        self._sending = sending
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._await([receiver.ready.remote() for receiver in self._receivers])
        if self._joined:
            return
        size = 1 + (len(self._receivers) if self._backend == "gloo" else len(self._nodes))
        joining = []
        if self._backend == "gloo":
            joining = [r.join.remote(size, member, self._group) for member, r in enumerate(self._receivers, 1)]
        self._made_default = self._backend == "gloo" and not torch.distributed.is_initialized()
        collective.init_collective_group(size, 0, self._backend, self._group, round(1e3 * self._timeout_s))
        self._await(joining)
        self._joined = True

    def put(self, session: int, number: int, pairs: list[Pair], entries: list[Entry], nbytes: int) -> None:
        """See Link."""
        del session
        flat = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        fill(flat, entries, pairs)
        gloo = self._backend == "gloo"
        group = self._group if gloo else None
        taken = [receiver.take.remote(number, entries, nbytes, group) for receiver in self._receivers]
        if not gloo:
            self._await(taken)  # there is room for it
        if nbytes:
            collective.broadcast(flat, 0, self._group)
        self._await(taken)

    def _await(self, refs: list[Any]) -> None:
        """Answers of the receivers; an offer that was given up is not waited for. Raises their errors."""
        until = time.monotonic() + self._timeout_s
        waiting = refs
        while waiting:
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_POLL_S)
            if waiting and self._sending is not None:
                self._sending.go_on()
            if waiting and time.monotonic() > until:
                raise TimeoutError(f"the receivers did not answer within {self._timeout_s:g} s")
        ray.get(refs)

    def end(self, session: int, number: int, error: str | None) -> None:
        """See Link."""
        del session
        for receiver in self._receivers:
            receiver.end.remote(number, error)

    def drain(self) -> None:
        """See Link."""
        if self._offered:
            ray.get([receiver.drained.remote() for receiver in self._receivers], timeout=self._timeout_s)

    def stop(self) -> None:
        """See Link. Whoever waits for the receivers, also in a broadcast, sees that they are gone."""
        for receiver in self._receivers:
            ray.kill(receiver, no_restart=True)

    def close(self) -> None:
        """See Link."""
        if collective.is_group_initialized(self._group):
            collective.destroy_collective_group(self._group)
        if self._made_default and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()  # Ray leaves it, with these receivers as its members
        self.stop()


class RayBroadcaster(Sender):
    """The trainer's side, within a Ray actor or task; keep it from update to update, and `close` it.

        nodes = group.on_ranks(NODE, [()] * group.config.total_ranks)
        with RayBroadcaster(nodes) as weights:
            group.pull_update(version, *weights.offer(model.named_parameters()))

    If `pull_update` fails, call `cancel` before the next offer; an error that leaves the `with` block does so.

    Args:
        nodes: Ray's id of the node of each rank, of all replicas.
        backend: gloo, or nccl, which needs cupy here and in the ranks' environment, and a GPU that no rank has.
        bucket_bytes: sent at once.
        timeout_s: longest wait of one member for another.

    Raises:
        BadInput: this process, or its environment, cannot take part; the message says why and what to use instead.
    """

    def __init__(
        self,
        nodes: Sequence[str],
        backend: Backend = "gloo",
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout_s: float = 600.0,
    ) -> None:
        check(backend)
        super().__init__(lambda: _Link(nodes, backend, timeout_s), bucket_bytes)


def check(backend: str) -> None:
    """Whether this process can be the trainer. Raises BadInput with the reason."""
    if backend not in ("gloo", "nccl"):
        raise BadInput(f"RayBroadcaster: backend must be 'gloo' or 'nccl', got {backend!r}")
    if not ray.is_initialized() or ray.get_runtime_context().worker.mode != ray.WORKER_MODE:
        raise BadInput(
            "RayBroadcaster: ray.util.collective works only within a Ray actor or task; here use "
            "moebius.rollout.transports.broadcast.Broadcaster"
        )
    if backend == "nccl" and not collective.nccl_available():
        raise BadInput(
            "RayBroadcaster: the NCCL groups of ray.util.collective need cupy, here and in the ranks' environment: pip "
            "install cupy-cuda13x (or of your CUDA); Broadcaster(backend='nccl') needs none"
        )
    if backend == "gloo" and torch.distributed.is_available() and torch.distributed.is_initialized():
        raise BadInput(
            "RayBroadcaster: Ray makes gloo groups of torch's default process group, which this process has already "
            "(the trainer's own); use moebius.rollout.transports.broadcast.Broadcaster"
        )


# ---- the ranks' side ------------------------------------------------------------------------------------------------


def receive_stored(receiver: Any, session: int, reader: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Buckets that lie in the object store of this node, as they come."""
    from moebius.rollout.transports import stored

    number = 0
    while (refs := _ask(receiver, session, number, reader)) is not None:
        yield from stored.read(refs)
        number += 1


def receive_direct(
    receiver: Any, session: int, reader: int, group: str, member: int, size: int
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Buckets that come by NCCL, as views of memory that the next one overwrites."""
    if not collective.nccl_available():
        raise ValueError("ray.util.collective needs cupy in the ranks' environment for NCCL: pip install cupy-cuda13x")
    if not collective.is_group_initialized(group):
        collective.init_collective_group(size, member, "nccl", group)
    device = torch.device("cuda", torch.cuda.current_device())
    flat = torch.empty(0, dtype=torch.uint8, device=device)
    number = 0
    while (told := _ask(receiver, session, number, reader)) is not None:
        entries, nbytes = told
        if flat.numel() < nbytes:
            flat = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if nbytes:
            collective.broadcast(flat[:nbytes], 0, group)
            torch.cuda.synchronize(device)  # Ray's group works on streams of its own
        yield views(flat[:nbytes], entries)
        number += 1


def _ask(receiver: Any, session: int, number: int, reader: int) -> Any:
    began = time.monotonic()
    try:
        return ray.get(receiver.bucket.remote(session, number, reader))
    except ray.exceptions.RayTaskError as error:
        raise ValueError(str(error.cause) if error.cause is not None else str(error)) from None
    except ray.exceptions.RayActorError as error:
        raise ValueError(f"the trainer's receiver is gone, after {time.monotonic() - began:.0f} s: {error}") from None
