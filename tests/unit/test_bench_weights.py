"""What benchmarks.weights sends between ranks: all of them get the same bytes, in the same buckets."""

from __future__ import annotations

import threading
from typing import Any

import torch

from benchmarks import weights

SHAPES: weights.Shapes = {"a": (3, 4), "b": (5, 7), "c": (2, 2)}


def test_rank_0_sends_what_it_loads_itself() -> None:
    source, args = weights.begin(SHAPES, "bfloat16", 2, 64)  # type: ignore[misc]
    assert weights.begin(None, "bfloat16", 2, 64) is None, "the others send nothing"
    found: list[Any] = [None] * 3

    def rank(index: int, offered: Any) -> None:
        found[index] = [{name: tensor.clone() for name, tensor in bucket} for bucket in weights.take(64, offered)]

    offers = [None, *((source, each) for each in args)]
    threads = [threading.Thread(target=rank, args=given) for given in enumerate(offers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    weights.end()
    assert [list(bucket) for bucket in found[0]] == [["a"], ["b"], ["c"]]
    for got in found[1:]:
        for mine, theirs in zip(found[0], got, strict=True):
            assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
