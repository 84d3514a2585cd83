"""Weights from vLLM's own trainer side, as TRL's client uses it, to a rank's side of ours over NCCL: every byte.

With one GPU the processes share it, and NCCL goes over sockets (tests/engine/fleet.py).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moebius.rollout.transports import trainer
from tests.engine.fleet import Fleet

pytestmark = pytest.mark.gpu

BUFFER = 1 << 20
SHAPES = [
    ((512, 300), "bfloat16"),
    ((3, 7), "float32"),
    ((1024, 1024), "bfloat16"),
    ((1, 1), "float32"),
    ((5,), "float32"),
]


class Member:
    """A process with a GPU of its own."""

    def __init__(self) -> None:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        self.group: Any = None


def weights(round_: int) -> dict[str, torch.Tensor]:
    """The same in every process."""
    made = {}
    for i, (shape, dtype) in enumerate(SHAPES):
        flat = torch.arange(torch.Size(shape).numel(), device="cuda") % 251 + round_ + i
        made[f"w{i}"] = flat.view(shape).to(getattr(torch, dtype))
    return made


def connect(own: Member, port: int, member: int) -> None:
    if member:
        trainer.join("nccl", "127.0.0.1", port, member, 2)
        return
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    info = {"master_address": "127.0.0.1", "master_port": port, "world_size": 2}
    own.group = NCCLWeightTransferEngine.trainer_init(info)


def send(own: Member, round_: int, packed: bool) -> None:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerSendWeightsArgs, NCCLWeightTransferEngine

    args = NCCLTrainerSendWeightsArgs(group=own.group, packed=packed, packed_buffer_size_bytes=BUFFER)
    made = weights(round_)
    torch.cuda.synchronize()  # vLLM packs on streams of its own, which do not wait for this one
    NCCLWeightTransferEngine.trainer_send_weights(iter(made.items()), args)
    torch.cuda.synchronize()


def receive(own: Member, round_: int, packed: bool) -> int:
    want = weights(round_)
    shapes = [list(shape) for shape, _ in SHAPES]
    batches = trainer.receive("nccl", list(want), [dtype for _, dtype in SHAPES], shapes, packed, BUFFER)
    got = {name: tensor.clone() for batch in batches for name, tensor in batch}
    torch.cuda.synchronize()
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
    return len(got)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    fleet = Fleet(2, Member)
    yield fleet
    fleet.close()


def together(fleet: Fleet, first: tuple[Any, ...], second: tuple[Any, ...]) -> list[Any]:
    for pipe, (function, *args) in zip(fleet.pipes, (first, second), strict=True):
        pipe.send((function, tuple(args)))
    answers = []
    for pipe in fleet.pipes:
        assert pipe.poll(180), "no answer"
        answers.append(pipe.recv())
    return answers


def test_vllms_trainer_is_understood(fleet: Fleet) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    assert together(fleet, (connect, port, 0), (connect, port, 1)) == [(True, None)] * 2
    for round_, packed in enumerate((True, False, True)):
        answers = together(fleet, (send, round_, packed), (receive, round_, packed))
        assert answers == [(True, None), (True, len(SHAPES))]
