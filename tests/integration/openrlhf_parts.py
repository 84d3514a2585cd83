"""What OpenRLHF needs and a machine without GPUs does not have, for tests only: flash-attn, and CUDA calls.

flash-attn is built for GPUs. OpenRLHF imports it in every process of its trainers, but calls it only for packed
samples; so an empty package of that name serves here.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray

FLASH_ATTN = {
    "flash_attn/__init__.py": "",
    "flash_attn/bert_padding.py": "index_first_axis = pad_input = rearrange = unpad_input = None\n",
    "flash_attn/utils/__init__.py": "",
    "flash_attn/utils/distributed.py": "all_gather = None\n",
    "flash_attn-2.8.3.dist-info/METADATA": "Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n",
    "flash_attn-2.8.3.dist-info/top_level.txt": "flash_attn\n",
    "flash_attn-2.8.3.dist-info/RECORD": "",
}


def empty_flash_attn(folder: Path) -> Path:
    """A folder for PYTHONPATH with an empty flash_attn in it."""
    for name, text in FLASH_ATTN.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


@ray.remote(num_cpus=1)
class Trainer:
    """OpenRLHF's own sender of weights, ActorPPOTrainer, around a model on the CPU. Without an optimiser."""

    def __init__(self, model: str, engines: list[Any], ranks: int) -> None:
        import openrlhf.trainer.ray.ppo_actor as module
        import torch
        import torch.distributed as dist
        from transformers import AutoModelForCausalLM

        from moebius.rollout.transports import trainer as transport

        class Group:
            """In place of NCCL's: gloo's, with the same way to broadcast."""

            def __init__(self, host: str, port: int, rank: int, size: int, device: Any) -> None:
                assert rank == 0
                self._group = transport.open_trainer(port, size, host)

            def broadcast(self, tensor: torch.Tensor, src: int, stream: Any) -> None:
                self._group.broadcast(tensor.contiguous().view(-1).view(torch.uint8), src)

        module.stateless_init_process_group = Group
        module.torch_dist_barrier_and_cuda_sync = lambda: None
        torch.cuda.current_device = lambda: 0  # type: ignore[assignment]
        torch.cuda.current_stream = lambda device=None: None  # type: ignore[assignment,return-value]
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.sender = object.__new__(module.ActorPPOTrainer)
        vllm = SimpleNamespace(
            num_engines=len(engines), tensor_parallel_size=ranks, sync_with_ray=False, enable_prefix_caching=True
        )
        self.sender.strategy = SimpleNamespace(
            args=SimpleNamespace(vllm=vllm, ds=SimpleNamespace(zero_stage=2, tensor_parallel_size=1))
        )
        self.sender.vllm_engines, self.sender.use_cuda_ipc = engines, False
        self.sender.actor = SimpleNamespace(model=SimpleNamespace(module=self.model))
        self.sender._init_vllm_sync_group("gloo")

    def names(self) -> list[str]:
        return [name for name, _ in self.model.named_parameters()]

    def change(self, factor: float) -> None:
        """Other weights, which the engines do not have yet."""
        import torch

        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(factor)

    def broadcast(self) -> None:
        self.sender.broadcast_to_vllm()

    def logprobs(self, tokens: list[int], start: int) -> list[float]:
        """Of tokens[start:], by the trainer's weights, natural logarithm."""
        import torch

        with torch.no_grad():
            logits = self.model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
        return [float(logits[i - 1, tokens[i]]) for i in range(start, len(tokens))]


@ray.remote(num_cpus=0)
class Member:
    """A process in a group of Ray's collectives, as a rank is, or as the trainer is."""

    def join(self, world_size: int, member: int, name: str) -> None:
        from moebius.rollout.integrations.openrlhf import transfer

        transfer.join("gloo", world_size, member, name)

    def send(self, values: list[float], name: str) -> None:
        import torch
        from ray.util import collective

        collective.broadcast(torch.tensor(values), 0, group_name=name)

    def receive(self, count: int, name: str) -> list[tuple[str, list[float]]]:
        from moebius.rollout.integrations.openrlhf import transfer

        batches = transfer.receive(name, "weight", "float32", [count])
        return [(key, tensor.tolist()) for batch in batches for key, tensor in batch]
