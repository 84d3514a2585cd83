"""Which dense weights get memory of their own, and that it comes and goes with their addresses."""

from __future__ import annotations

import mmap
import weakref

import pytest
import torch

from moebius.engine.dense import DenseWeights
from moebius.engine.memory import BackingError, HostBacking, PlainBacking
from moebius.kernels.cuda_calls import CudaError

PAGE = mmap.PAGESIZE
CPU = torch.device("cpu")


@pytest.fixture
def dense() -> DenseWeights:
    return DenseWeights.beside(HostBacking(PAGE), CPU)


def test_what_is_worth_while(dense: DenseWeights) -> None:
    rows = PAGE // 4 // 8
    taken = [
        dense.zeros((rows, 8), torch.float32, CPU),  # a page
        dense.zeros((20 * PAGE - PAGE // 2,), torch.uint8, CPU),  # 2.6 % for rounding up
        dense.zeros((PAGE * 3 // 2,), torch.uint8, CPU),  # 33 %: left to torch
        dense.zeros((7,), torch.bfloat16, CPU),
        dense.zeros((0, 8), torch.float32, CPU),
    ]
    assert [tuple(weight.shape) for weight in taken[:3]] == [(rows, 8), (20 * PAGE - PAGE // 2,), (PAGE * 3 // 2,)]
    assert not any(weight.any() for weight in taken)
    assert [weight.data_ptr() for weight in dense.tensors()] == [weight.data_ptr() for weight in taken[:2]]
    for weight in taken[:2]:
        weight.fill_(1)
    assert dense.release() == 21 * PAGE and dense.release() == 0
    assert dense.restore() == 21 * PAGE and dense.restore() == 0
    assert not any(weight.any() for weight in taken[:2]), "the same tensors, on new memory"


def test_a_parameter_stays_what_it_is(dense: DenseWeights) -> None:
    class Loaded(torch.nn.Parameter):
        """As vLLM's, whose loaders are attributes."""

    large = Loaded(torch.ones(PAGE, 2), requires_grad=False)
    large.weight_loader = "loader"  # type: ignore[attr-defined]
    small = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    turned = torch.nn.Parameter(torch.ones(2, PAGE).t(), requires_grad=False)
    was = [parameter.data_ptr() for parameter in (large, small, turned)]
    for parameter in (large, small, turned):
        dense.adopt(parameter)
    assert [parameter.data_ptr() == old for parameter, old in zip((large, small, turned), was, strict=True)] == [
        False, True, True
    ]  # fmt: skip
    assert type(large) is Loaded and large.weight_loader == "loader" and not large.requires_grad  # type: ignore[attr-defined]
    assert large.shape == (PAGE, 2) and [large.data_ptr()] == [weight.data_ptr() for weight in dense.tensors()]


def test_weights_that_a_model_replaced_are_let_go() -> None:
    made: list[weakref.ref[HostBacking]] = []

    def make(nbytes: int) -> HostBacking:
        backing = HostBacking(nbytes)
        made.append(weakref.ref(backing))
        return backing

    dense = DenseWeights(make, PAGE)
    embedding, head, split = (dense.zeros((2, PAGE), torch.uint8, CPU) for _ in range(3))
    del head  # tied to the embedding
    dense.keep([embedding, split[1:]])
    assert [weight.data_ptr() for weight in dense.tensors()] == [embedding.data_ptr(), split.data_ptr()]
    assert [backing() is None for backing in made] == [False, True, False] and dense.release() == 4 * PAGE


def test_memory_that_cannot_be_given_back_gets_none() -> None:
    none = DenseWeights.beside(PlainBacking(PAGE, CPU), CPU)
    assert none.zeros((PAGE,), torch.uint8, CPU).shape == (PAGE,)
    assert none.tensors() == [] and none.release() == none.restore() == 0


def test_a_full_device_is_told() -> None:
    def full(nbytes: int) -> HostBacking:
        raise CudaError(f"no {nbytes} bytes are free")

    with pytest.raises(BackingError, match="no 4096 bytes are free"):
        DenseWeights(full, 4096).zeros((4096,), torch.uint8, CPU)
