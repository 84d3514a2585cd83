"""A checkpoint engine for verl on CPU, where its own need CUDA: weights go through Ray's object store.

verl imports it in every process: `rollout.checkpoint_engine.custom_backend_module=tests.integration.verl_store`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from functools import cache
from typing import Any

import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.utils import ensure_async_iterator


class Store:
    """The weights of the last step that were sent."""

    def __init__(self) -> None:
        self.step: int | None = None
        self.tensors: dict[str, Any] = {}

    def put(self, step: int, tensors: dict[str, Any]) -> None:
        self.step, self.tensors = step, tensors

    def get(self, step: int) -> dict[str, Any] | None:
        return self.tensors if self.step == step else None


@cache  # an actor ends with the last handle to it
def store() -> Any:
    return ray.remote(Store).options(name="weights_store", get_if_exists=True, num_cpus=0).remote()


@CheckpointEngineRegistry.register("store")
class StoreEngine(CheckpointEngine):
    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.is_master = is_master

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(cls, actors: int, rollouts: int, metadata: list[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"rank": list(range(actors))}, {"rank": list(range(actors, actors + rollouts))}

    def init_process_group(self, rank: int) -> None:
        self.rank = rank

    def finalize(self) -> None:
        return None

    async def send_weights(
        self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        tensors = {}
        async for name, tensor in ensure_async_iterator(weights):
            if self.is_master:
                tensors[name] = tensor.detach().cpu().clone()
        if self.is_master:
            await store().put.remote(global_steps, tensors)
        return {}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        while (tensors := await store().get.remote(global_steps)) is None:
            await asyncio.sleep(0.05)
        for name, tensor in tensors.items():
            yield name, tensor
