"""Several replicas of groups that sample without an engine, and what tests of them share."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from moebius.rollout.replicas import RolloutReplicas
from moebius.rollout.types import LengthTrace, Rollout

PROMPTS = [[i + 1, i + 2] for i in range(12)]
Make = Callable[..., RolloutReplicas]


def fake(replicas: RolloutReplicas, index: int) -> Any:
    return replicas._members[index].group


def tokens(rollouts: list[Rollout]) -> list[Any]:
    return [(r.step, r.prompt_index, [s.token_ids for s in r.samples]) for r in rollouts]


def spread(lengths: list[int]) -> LengthTrace:
    return LengthTrace({(p, s): length for p, length in enumerate(lengths) for s in range(2)})


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def tensors() -> dict[str, Any]:
    import torch

    return {name: torch.ones(2) for name in "abc"}
