"""Weights from another process's GPU memory, and over NCCL: every byte.

With one GPU the processes share it, and NCCL goes over sockets (tests/engine/fleet.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moebius.rollout.transports.broadcast import Broadcaster
from moebius.rollout.transports.ipc import IpcBucket, ipc_buckets
from moebius.rollout.worker import _calling
from tests.engine.fleet import Fleet

pytestmark = pytest.mark.gpu

ROUNDS = 3


class Trainer:
    """A process with weights on its GPU, and one that gets them."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(self.device)
        self.buckets: Iterator[IpcBucket] | None = None
        self.sender: Broadcaster | None = None


def weights(round_: int, device: torch.device) -> dict[str, torch.Tensor]:
    """The same in every process."""
    return {
        f"w{i}": (torch.arange(shape[0] * shape[1], device=device) % 251 + round_ + i).view(shape).to(dtype)
        for i, (shape, dtype) in enumerate(
            [
                ((512, 300), torch.bfloat16),
                ((3, 7), torch.float32),
                ((1024, 1024), torch.bfloat16),
                ((1, 1), torch.float32),
            ]
        )
    }


def next_bucket(own: Trainer) -> IpcBucket | None:
    """The next bucket of three updates, one after the other."""
    if own.buckets is None:
        everything = ((f"{r}/{n}", t) for r in range(ROUNDS) for n, t in weights(r, own.device).items())
        own.buckets = ipc_buckets(everything, 1 << 20)
    return next(own.buckets, None)


def read(own: Trainer, bucket: IpcBucket) -> list[str]:
    """Names of what is right in a bucket."""
    found = []
    for name, tensor in bucket.tensors():
        round_, key = name.split("/")
        assert torch.equal(tensor.to(own.device), weights(int(round_), own.device)[key]), name
        found.append(name)
    torch.cuda.synchronize()
    return found


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    fleet = Fleet(2, Trainer)
    yield fleet
    fleet.close()


def test_another_process_reads_the_buckets_in_place(fleet: Fleet) -> None:
    """Buffers are filled anew while the process that reads keeps its mapping."""
    names: list[str] = []
    while True:
        fleet.pipes[0].send((next_bucket, ()))
        ok, bucket = fleet.pipes[0].recv()
        assert ok, bucket
        if bucket is None:
            break
        fleet.pipes[1].send((read, (bucket,)))
        ok, found = fleet.pipes[1].recv()
        assert ok, found
        names += found
    assert len(names) == len(set(names)) == ROUNDS * 4


def offer(own: Trainer, round_: int) -> tuple[str, list[Any]]:
    own.sender = own.sender or Broadcaster(1, "nccl", bucket_bytes=1 << 20, timeout_s=120)
    return own.sender.offer(weights(round_, own.device))


def receive(own: Trainer, source: str, args: tuple[Any, ...], round_: int) -> int:
    got = {name: tensor.clone() for bucket in _calling(source)(*args) for name, tensor in bucket}
    want = weights(round_, own.device)
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
    return len(got)


def test_nccl_brings_every_byte(fleet: Fleet) -> None:
    for round_ in range(ROUNDS):
        fleet.pipes[0].send((offer, (round_,)))
        ok, offered = fleet.pipes[0].recv()
        assert ok, offered
        source, args = offered
        fleet.pipes[1].send((receive, (source, args[0], round_)))
        assert fleet.pipes[1].poll(180)
        assert fleet.pipes[1].recv() == (True, 4)
