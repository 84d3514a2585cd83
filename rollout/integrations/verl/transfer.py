"""Weights from verl's bucketed sender, in a rank's process: straight into the update session, no copy on the way.

A sender (one per trainer process) binds a ZMQ socket and speaks first: the handle of its buffer, then one message per
bucket that says where in the buffer which tensor lies; each is acknowledged when it has been read. The sender waits
for that without end, so whoever stops reading must still acknowledge to the last bucket (`drain`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SOURCE = f"{__name__}:receive"
SILENT_S = 1800.0  # longest time without a word of the sender; gathering a large model's next bucket takes long


def socket_address(job: str, replica: int, rank: int) -> str:
    """ZMQ address between a trainer process and the engine rank on its device."""
    return f"ipc://{tempfile.gettempdir()}/moebius-verl-{job}-{replica}-{rank}.sock"


@cache
def verl_buckets() -> ModuleType:
    """verl's module of sender and receiver. By its file: importing its package would import verl's own vLLM rollout,
    which refuses vLLM builds for CPU.
    """
    package = importlib.util.find_spec("verl.workers.rollout")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("verl is not installed")
    file = Path(package.submodule_search_locations[0]) / "vllm_rollout" / "bucketed_weight_transfer.py"
    spec = importlib.util.spec_from_file_location("moebius_verl_buckets", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def receive(address: str, shared_memory: bool, calls: str | None = None) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Buckets of one update, as lists of (name, tensor).

    The tensors are views of the sender's buffer on this rank's device, good until the next bucket; with `shared_memory`
    they are copies, as their reader would keep it from being closed. If the reader stops early, the rest is thrown
    away, so that the sender gets to its end. `calls`: file for a line about what was received.

    Raises TimeoutError when the sender says nothing for SILENT_S.
    """
    import torch
    import zmq

    device = torch.device("cpu") if shared_memory else torch.device("cuda", torch.cuda.current_device())
    receiver = verl_buckets().BucketedWeightReceiver(address, device, use_shm=shared_memory)
    seen = _Seen(calls)
    reading, last = True, False
    try:
        receiver._init_socket()
        receiver.socket.setsockopt(zmq.RCVTIMEO, int(1e3 * SILENT_S))
        receiver._init_buffer()
        while not last:
            message = receiver.socket.recv_pyobj()
            last = message["is_last"]
            weights = _tensors(receiver, message["bucket_meta"])
            seen.add(weights)
            try:
                yield weights
            except GeneratorExit:
                reading = False
                raise
            finally:
                del weights
                _synchronize(device)
                if not last:
                    receiver.socket.send(b"")
        seen.tell()
    except zmq.Again as error:
        raise TimeoutError(f"no weights came from the trainer process at {address} for {SILENT_S:.0f} s") from error
    finally:
        if not reading and not last:
            _acknowledge_all(receiver.socket, SILENT_S)
        receiver._ack_pending = last or not reading  # verl's clean-up acknowledges the last bucket
        receiver._cleanup()


def _tensors(receiver: Any, meta: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """As verl's receiver makes them."""
    weights = []
    for name, entry in meta.items():
        if entry["handle"] is not None:  # larger than the buffer: a handle of its own
            weights.append((name, verl_buckets().rebuild_ipc(entry["handle"], receiver.device.index)))
            continue
        size = entry["dtype"].itemsize * entry["shape"].numel()
        flat = receiver.buffer[entry["offset"] : entry["offset"] + size]
        tensor = flat.view(entry["dtype"]).view(entry["shape"])
        weights.append((name, tensor.clone() if receiver.use_shm else tensor))
    return weights


def _synchronize(device: torch.device) -> None:
    """The buffer is written again once it is acknowledged: copies out of it must be over."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def sender(address: str, bucket_megabytes: int, shared_memory: bool) -> Any:
    """verl's sender, which raises TimeoutError where verl's own would wait without end for a reader that is gone."""
    import zmq

    class Sender(verl_buckets().BucketedWeightSender):  # type: ignore[misc]
        def _init_socket(self) -> None:
            super()._init_socket()
            for option in (zmq.RCVTIMEO, zmq.SNDTIMEO):  # sending waits for a reader to connect
                self.socket.setsockopt(option, int(1e3 * SILENT_S))
            self.socket.setsockopt(zmq.LINGER, 0)

        async def async_send_weights(self, weights: Any) -> None:
            try:
                await super().async_send_weights(weights)
            except zmq.Again as error:
                raise TimeoutError(
                    f"the rollout has not read weights for {SILENT_S:.0f} s; see the logs of the server and its ranks"
                ) from error

    return Sender(zmq_handle=address, bucket_size_mb=bucket_megabytes, use_shm=shared_memory)


def drain(address: str, wait_s: float) -> bool:
    """Acknowledge everything of a sender nobody reads from. False when there was none within `wait_s` seconds."""
    import zmq

    socket: Any = zmq.Context.instance().socket(zmq.REP)
    with socket:
        socket.setsockopt(zmq.LINGER, 1000)
        socket.connect(address)
        if not socket.poll(int(1e3 * wait_s)):
            return False
        socket.recv()  # the handle of its buffer
        socket.send(b"")
        _acknowledge_all(socket, SILENT_S)
        socket.send(b"")
        return True


def _acknowledge_all(socket: Any, silent_s: float) -> None:
    """Up to the last message, which is left to the caller."""
    while True:
        if not socket.poll(int(1e3 * silent_s)):
            raise TimeoutError(f"the sender of weights said nothing for {silent_s:.0f} s")
        if socket.recv_pyobj()["is_last"]:
            return
        socket.send(b"")


class _Seen:
    """For debugging: how much was received, and a sum over it that tells one set of weights from another."""

    def __init__(self, calls: str | None) -> None:
        self._calls = calls
        self._tensors = self._bytes = 0
        self._sum = 0.0
        self._started = time.perf_counter()

    def add(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        if self._calls is None:
            return
        for _, tensor in weights:
            self._tensors += 1
            self._bytes += tensor.nbytes
            self._sum += float(tensor.double().abs().sum())

    def tell(self) -> None:
        if self._calls is not None:
            seconds = time.perf_counter() - self._started
            rank = int(os.environ.get("RANK", "-1"))
            note(self._calls, "received", rank=rank, tensors=self._tensors, bytes=self._bytes, sum=self._sum, s=seconds)


def note(file: str | None, call: str, **facts: Any) -> None:
    """Append a line to the file of calls; lines of several processes do not mix, as each is one short write."""
    if file is not None:
        line = json.dumps({"t": time.time(), "call": call, **facts}) + "\n"
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
