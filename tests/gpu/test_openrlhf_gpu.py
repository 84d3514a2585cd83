"""Weights as OpenRLHF hands them over where trainer and rollouts share GPUs: handles of CUDA memory, read by a rank."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch

from moebius.rollout.integrations.openrlhf import transfer

pytestmark = pytest.mark.gpu


def pattern(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel(), device="cuda") % 251).view(shape).to(dtype)


def read(pipe: Any) -> None:
    """A rank's side: whether every tensor came as it was, until None is asked for."""
    torch.cuda.set_device(0)
    while (asked := pipe.recv()) is not None:
        handles, name, shape, dtype = asked
        for batch in transfer.read(handles, name):
            [(told, tensor)] = batch
            same = told == name and torch.equal(tensor, pattern(shape, dtype))
            del batch, tensor
        pipe.send(same)


def test_tensors_of_the_trainer_are_read_in_place() -> None:
    from torch.multiprocessing.reductions import reduce_tensor

    torch.cuda.set_device(0)
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    reader = context.Process(target=read, args=(theirs,))
    reader.start()
    for name, shape, dtype in (
        ("experts.gate_up_proj", (8, 64, 32), torch.bfloat16), ("norm", (33,), torch.float32),
    ):  # fmt: skip
        weight = pattern(shape, dtype).clone()  # as OpenRLHF clones each parameter
        torch.cuda.synchronize()
        pipe.send(({uuid: reduce_tensor(weight)}, name, shape, dtype))
        assert pipe.poll(120) and pipe.recv() is True, name
    pipe.send(None)
    reader.join(60)
    assert reader.exitcode == 0
