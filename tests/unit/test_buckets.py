"""Packing of a weight stream into buckets."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moebius.rollout.errors import BadInput
from moebius.rollout.weights import buckets

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8]


@given(
    shapes=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9), st.sampled_from(DTYPES)), max_size=12),
    bucket_bytes=st.integers(1, 2000),
)
def test_tensors_come_out_as_they_went_in(shapes, bucket_bytes):
    sent = {f"w{i}": torch.randn(a, b).mul(9).to(dtype) for i, (a, b, dtype) in enumerate(shapes)}
    packed = [pickle.loads(pickle.dumps(bucket)) for bucket in buckets(sent, bucket_bytes)]
    got = [pair for bucket in packed for pair in bucket.tensors()]
    assert [name for name, _ in got] == list(sent)
    assert all(tensor.dtype == sent[name].dtype and torch.equal(tensor, sent[name]) for name, tensor in got)
    assert all(bucket.data.nbytes <= bucket_bytes or len(bucket.entries) == 1 for bucket in packed)


def test_views_and_parameters_are_copied():
    base = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4))
    [bucket] = buckets([("t", base.t()), ("row", base[1])])
    expected = {"t": base.detach().t().clone(), "row": base.detach()[1].clone()}
    with torch.no_grad():
        base.zero_()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in bucket.tensors())


def test_the_stream_is_read_as_it_is_sent():
    taken = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(10):
            taken.append(i)
            yield f"w{i}", torch.zeros(16)

    first = next(buckets(stream(), bucket_bytes=128))
    assert [entry.name for entry in first.entries] == ["w0", "w1"]
    assert taken == [0, 1, 2]


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (("w", [1.0]), "expected a name and a tensor, got str and list"),
        ((1, torch.zeros(1)), "got int and Tensor"),
        ("w", "expected pairs of a name and a tensor, got str"),
        (("w", torch.zeros(1, device="meta")), "'w' is on the meta device"),
    ],
)
def test_anything_but_named_tensors_is_refused(item, words):
    with pytest.raises(BadInput, match=words):
        list(buckets([item]))
