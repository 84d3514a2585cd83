"""The shape of a GRPO loop around a rollout group. Runs on CPU with the tiny model of `moebius demo`:

    python examples/grpo_loop.py runs/example

Replace `train` by your trainer; it gets what GRPO needs: token ids, log-probabilities and advantages of every sample.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import torch

from moebius.rollout.datasets import load_questions
from moebius.rollout.demo import demo_config, load_weights, perturb
from moebius.rollout.demo_assets import make_questions, make_tiny_model, math_reward
from moebius.rollout.group import RolloutGroup
from moebius.rollout.report_html import write_html
from moebius.rollout.types import Rollout

STEPS, PROMPTS, N = 2, 4, 8


def train(
    weights: dict[str, torch.Tensor], rollouts: list[Rollout], advantages: list[list[float]], step: int
) -> Iterable[tuple[str, torch.Tensor]]:
    """Stands in for a trainer: changes some weights at random. Returns all weights, by their Hugging Face names."""
    perturb(weights, advantages, seed=step)
    return weights.items()


def main(folder: Path) -> None:
    model = make_tiny_model(folder / "model")
    questions = load_questions(make_questions(folder / "questions.jsonl", PROMPTS))
    prompts = [[{"role": "user", "content": str(question.prompt)}] for question in questions]
    weights = load_weights(model)

    with RolloutGroup(demo_config(model, threshold=8)) as group:
        for step in range(STEPS):
            rollouts = group.generate(prompts, N, step=step)
            if group.last_report is not None:
                group.last_report.write(folder)

            advantages = []
            for rollout, question in zip(rollouts, questions, strict=True):
                rewards = [math_reward(sample.text or "", question.answer) for sample in rollout.samples]
                mean = sum(rewards) / N
                advantages.append([reward - mean for reward in rewards])

            group.update_weights(train(weights, rollouts, advantages, step), version=step + 1)
            lengths = [len(sample.token_ids) for rollout in rollouts for sample in rollout.samples]
            print(f"step {step}: {sum(lengths)} tokens, longest sample {max(lengths)}, now at version {step + 1}")
    print(write_html(folder))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/example"))
