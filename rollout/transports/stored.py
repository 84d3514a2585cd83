"""Weights that lie in Ray's object store: one copy per node, which its ranks map."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SOURCE = f"{__name__}:read"


def read(refs: list[Any]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The tensors of buckets (moebius.rollout.weights.Bucket) that were put into the store."""
    import ray

    for ref in refs:
        bucket = ray.get(ref)
        with warnings.catch_warnings():
            # Mapped read-only; the engine only copies out of it.
            warnings.filterwarnings("ignore", message="The given (NumPy array|buffer) is not writable")
            tensors = bucket.tensors()
        yield tensors
