"""GRPO by TRL with rollouts of a switch group that this script holds. Runs on CPU with the tiny model of the demo:

    python examples/trl/grpo_rollout_func.py runs/trl

On GPUs the trainer needs one that no rank has; see docs/trl.md, also for several trainer processes.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset

from moebius.rollout.demo import demo_config
from moebius.rollout.demo_assets import make_tiny_model, math_reward
from moebius.rollout.group import RolloutGroup
from moebius.rollout.integrations.trl import GroupRollouts

STEPS, PROMPTS, N = 2, 4, 4


def reward(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """Part of a point for a number nearby; a random model's texts differ, and with them rewards."""
    texts = [completion[0]["content"] for completion in completions]
    return [math_reward(text, right) + len(set(text)) % 7 / 14 for text, right in zip(texts, answer, strict=True)]


def sums(count: int) -> Dataset:
    """Questions with answers."""
    rng = random.Random(0)
    pairs = [(rng.randrange(100), rng.randrange(100)) for _ in range(count)]
    rows = [{"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "answer": str(a + b)} for a, b in pairs]
    return Dataset.from_list(rows)


def main(folder: Path) -> None:
    """Train, and leave step reports in `folder`/reports."""
    from trl import GRPOConfig, GRPOTrainer

    model = make_tiny_model(folder / "model")
    config = GRPOConfig(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=PROMPTS * N,
        num_generations=N,
        max_completion_length=96,
        max_steps=STEPS,
        learning_rate=1e-4,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
    )
    with RolloutGroup(demo_config(model, threshold=6)) as group:
        GRPOTrainer(
            model=str(model),
            reward_funcs=reward,
            args=config,
            train_dataset=sums(PROMPTS * STEPS),
            rollout_func=GroupRollouts(group, reports=folder / "reports"),
        ).train()
        print(f"the group has the weights of version {group.policy_version}; reports in {folder / 'reports'}")


if __name__ == "__main__":
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # TRL calls rollout_func experimental
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/trl"))
