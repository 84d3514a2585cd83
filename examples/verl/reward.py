"""Rewards for the verl examples: `reward.custom_reward_function.path=examples/verl/reward.py`.

verl's own scores do not know DeepMath's id, so the function must be named.
"""

from __future__ import annotations

from typing import Any

from moebius.rollout.demo_assets import math_reward
from moebius.rollout.scoring import math_score


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **kwargs: Any
) -> float:
    """1 for the right final answer, else 0. Sums of the smoke test give part of that for a number nearby."""
    if data_source == "sums":
        # A random model is never right: what its text looks like makes rewards differ, and with them advantages.
        return math_reward(solution_str, ground_truth) + len(set(solution_str)) % 7 / 14
    return math_score(solution_str, ground_truth)
