"""GRPO by TRL in server mode. Nothing here is about this package: `moebius serve` takes the place of `vllm serve`.

moebius serve --config configs/trl_30b_x2.yaml                       # on the first two GPUs
CUDA_VISIBLE_DEVICES=2 python examples/trl/grpo_server.py MODEL      # the trainer, on others
"""

from __future__ import annotations

import sys
from typing import Any

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward


def with_prompt(row: dict[str, Any]) -> dict[str, Any]:
    """TRL's columns."""
    return {"prompt": [{"role": "user", "content": row["question"]}], "solution": f"${row['final_answer']}$"}


if __name__ == "__main__":
    GRPOTrainer(
        model=sys.argv[1],
        reward_funcs=accuracy_reward,
        args=GRPOConfig(
            output_dir="runs/trl",
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url="http://127.0.0.1:8000",
            num_generations=8,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=16,
            max_completion_length=8192,
            report_to=[],
        ),
        train_dataset=load_dataset("zwhe99/DeepMath-103K", split="train").map(with_prompt),
    ).train()
