"""Rewards for the OpenRLHF examples: `--reward.remote_url examples/openrlhf/reward.py`."""

from __future__ import annotations

from typing import Any

import torch

from moebius.rollout.scoring import math_score


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, Any]:
    """1 for the right final answer, else 0. A query is a prompt with its output."""
    scores = [
        math_score(query.removeprefix(prompt), label)
        for query, prompt, label in zip(queries, prompts, labels, strict=True)
    ]
    rewards = torch.tensor(scores, dtype=torch.float32)
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}
