"""What runs in each of verl's trainer processes: wakes the replica's server up and sends it weights."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import ray
import torch
from verl.utils.device import is_support_ipc
from verl.workers.rollout.base import BaseRollout

from moebius.rollout.errors import MoebiusError
from moebius.rollout.integrations.verl.names import server_name
from moebius.rollout.integrations.verl.transfer import sender, socket_address

_log = logging.getLogger(__name__)


class ServerAdapter(BaseRollout):
    """One per trainer process (or, where trainer and rollout are apart, per process of a checkpoint engine).

    The first process of a replica speaks for all of it; every process sends weights to the rank on its own device.
    """

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        rank = int(os.environ["RANK"])
        self.ranks = self.config.tensor_model_parallel_size * self.config.data_parallel_size
        self.replica_rank = rank // self.ranks if replica_rank == -1 else replica_rank
        self.rollout_rank = rank % self.ranks
        self.is_leader_rank = self.rollout_rank == 0
        self.sleep_level = 2  # verl sets it; all weights come anew after a sleep
        self._server: Any = None

    async def resume(self, tags: Sequence[str]) -> None:
        """Take memory again: "weights", "kv_cache"."""
        if self.config.free_cache_engine and self.is_leader_rank:
            await self._handle().wake_up.remote(tags=list(tags))

    async def release(self) -> None:
        """Give back all memory."""
        if self.config.free_cache_engine and self.is_leader_rank:
            await self._handle().sleep.remote()

    @torch.no_grad()
    async def update_weights(
        self,
        weights: Iterator[tuple[str, torch.Tensor]] | AsyncIterator[tuple[str, torch.Tensor]],
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        peft_config: Any = None,
        **kwargs: Any,
    ) -> None:
        """Send all weights to this process's rank; the update is whole when all ranks have all.

        Every process must call this: making a tensor whole is a collective. Raises MoebiusError for what is not
        supported, and the server's error when the update failed.
        """
        if wire_format != "named_tensors":
            raise MoebiusError(
                f"weights as {wire_format} are not understood; use a checkpoint engine with whole tensors"
            )
        if peft_config is not None:
            raise MoebiusError("LoRA adapters are not loaded by the rollout: set model.lora.merge=True")
        started = time.perf_counter()
        job = ray.get_runtime_context().get_job_id()
        addresses = [socket_address(job, self.replica_rank, rank) for rank in range(self.ranks)]
        shared_memory = not is_support_ipc()
        update = None
        if self.is_leader_rank:
            update = self._handle().update_weights.remote(addresses, shared_memory, global_steps)
        bucket = self.config.checkpoint_engine.update_weights_bucket_megabytes
        await sender(addresses[self.rollout_rank], bucket, shared_memory).async_send_weights(weights)
        if update is None:
            return
        await update
        await self._handle().clear_kv_cache.remote()
        if global_steps is not None:
            await self._handle().set_global_steps.remote(global_steps)
        _log.info("weights of step %s sent in %.2f s", global_steps, time.perf_counter() - started)

    def _handle(self) -> Any:
        if self._server is None:  # servers start after the trainer processes
            self._server = ray.get_actor(server_name(self.replica_rank))
        return self._server
