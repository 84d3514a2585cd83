"""A trainer's broadcasts, over gloo between two threads: packing as vLLM's, and every byte."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from moebius.rollout.transports import trainer
from tests.integration.ray_head import free_ports

SHAPES = [
    ((40, 3), "bfloat16"),
    ((3, 7), "float32"),
    ((64, 64), "bfloat16"),
    ((1,), "uint8"),
    ((5,), "float32"),
    ((0, 4), "float32"),
]


def tensors() -> dict[str, torch.Tensor]:
    return {
        f"w{i}": (torch.arange(torch.Size(shape).numel()) % 97 + i).view(shape).to(getattr(torch, dtype))
        for i, (shape, dtype) in enumerate(SHAPES)
    }


@pytest.mark.filterwarnings("ignore:Tensor")  # larger than the buffer, on purpose
@pytest.mark.parametrize("buffer_bytes", [1, 100, 300, 8192, 1 << 20])
def test_batches_are_those_of_vllm(buffer_bytes: int) -> None:
    from vllm.distributed.weight_transfer.packed_tensor import pack_tensors

    named = iter(tensors().items())
    theirs = []
    while (chunk := pack_tensors(named, lambda item: item[1], buffer_bytes)) is not None:
        theirs.append(chunk.names)
    announced = [(name, tensor.dtype, list(tensor.shape)) for name, tensor in tensors().items()]
    assert [[name for name, _, _ in batch] for batch in trainer._batches(announced, buffer_bytes)] == theirs


@pytest.mark.parametrize(("packed", "buffer_bytes"), [(True, 300), (True, 1 << 20), (False, 300)])
def test_every_byte_comes(packed: bool, buffer_bytes: int) -> None:
    [port] = free_ports(1)
    want = tensors()
    failures: list[BaseException] = []

    def sender() -> None:
        try:
            group = trainer.open_trainer(port, 2)
            trainer.send(group, want.items(), packed=packed, buffer_bytes=buffer_bytes)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=sender)
    thread.start()
    trainer.join("gloo", "127.0.0.1", port, 1, 2)
    info: tuple[Any, ...] = (list(want), [dtype for _, dtype in SHAPES], [list(shape) for shape, _ in SHAPES])
    got = {}
    for batch in trainer.receive("gloo", *info, packed, buffer_bytes):
        got.update({name: tensor.clone() for name, tensor in batch})
    thread.join(60)
    assert not failures and not thread.is_alive()
    assert list(got) == list(want) and all(torch.equal(got[name], want[name]) for name in want)


def test_what_cannot_be_received(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="unknown dtype 'float31'"):
        list(trainer.receive("gloo", ["a"], ["float31"], [[1]], False, 1))
    monkeypatch.setattr(trainer, "_joined", None)
    with pytest.raises(ValueError, match="init_weight_transfer_engine first"):
        list(trainer.receive("gloo", [], [], [], False, 1))
