"""What a receiver of Ray's collectives tells the ranks, and who cannot be a trainer; the rest needs a cluster."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from moebius.rollout.errors import BadInput
from moebius.rollout.replica_homes import groups_on
from moebius.rollout.transports import ray_collective
from moebius.rollout.transports.ray_collective import Receiver, check


def test_buckets_come_in_order_to_every_reader_and_only_two_are_held() -> None:
    receiver = Receiver(2, 20)
    receiver.begin(1)
    found: list[list[Any]] = [[], []]

    def read(reader: int) -> None:
        number = 0
        while (bucket := receiver.bucket(1, number, reader)) is not None:
            found[reader].append(bucket[1])
            number += 1
            time.sleep(0.01 * reader)  # one is slower

    readers = [threading.Thread(target=read, args=(reader,), daemon=True) for reader in range(2)]
    for thread in readers:
        thread.start()
    for number in range(6):
        receiver.take(number, [], number, None)
        assert len(receiver._buckets) <= 2
    receiver.end(6, None)
    for thread in readers:
        thread.join(20)
    assert found == [list(range(6))] * 2
    receiver.drained()


def test_a_trainer_that_fails_and_one_that_says_nothing() -> None:
    receiver = Receiver(1, 0.05)
    receiver.begin(1)
    with pytest.raises(ValueError, match=r"the trainer sends nothing for 0\.05 s"):
        receiver.bucket(1, 0, 0)
    receiver.end(0, "ZeroDivisionError: half way")
    with pytest.raises(ValueError, match="could not send: ZeroDivisionError: half way"):
        receiver.bucket(1, 0, 0)
    with pytest.raises(ValueError, match="the update was not begun"):
        receiver.bucket(2, 0, 0)
    receiver.begin(2)
    receiver.take(0, [], 1, None)
    receiver.take(1, [], 1, None)
    with pytest.raises(ValueError, match="the ranks read no weights"):
        receiver.take(2, [], 1, None)


def test_who_cannot_be_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match="must be 'gloo' or 'nccl'"):
        check("mpi")
    with pytest.raises(BadInput, match="only within a Ray actor or task"):
        check("gloo")
    worker = SimpleNamespace(worker=SimpleNamespace(mode=1))
    fake = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: worker, WORKER_MODE=1)
    monkeypatch.setattr(ray_collective, "ray", fake)
    monkeypatch.setattr(ray_collective.collective, "nccl_available", lambda: False)
    with pytest.raises(BadInput, match="need cupy, here and in the ranks' environment"):
        check("nccl")
    check("gloo")
    monkeypatch.setattr(ray_collective.torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(BadInput, match="torch's default process group, which this process has already"):
        check("gloo")


def test_room_for_replicas() -> None:
    assert groups_on({"CPU": 8, "GPU": 7, "memory": 1e9}, {"CPU": 2, "GPU": 2}) == 3
    assert groups_on({"CPU": 8}, {"CPU": 2, "GPU": 2}) == 0
    assert groups_on({"CPU": 8}, {"CPU": 0.5}) == 16
