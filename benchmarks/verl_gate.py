"""For benchmarks/verl_gpu.py: the agent-loop manager that waits at the start line, and what it measures besides.

Set as `actor_rollout_ref.rollout.agent.agent_loop_manager_class`. verl makes it once its engines are up, in the process
of its trainer and as the last thing before training, so that here is where several jobs can wait for their turn.
"""

from __future__ import annotations

import functools
import inspect
import os
import time
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any

READY = "MOEBIUS_BENCH_READY"  # file that says that this job has started
GO = "MOEBIUS_BENCH_GO"  # file that it waits for
LONGEST_S = 1200.0


class Gate:
    """Makes the manager that belongs to the rollout in use, and hands it over when this job's turn has come."""

    @classmethod
    def create(cls, *args: Any, **kwargs: Any) -> Any:
        """As verl's managers are made. Raises TimeoutError when the turn does not come."""
        config = kwargs["config"] if "config" in kwargs else args[0]
        _add_logprob_differences()
        if config.actor_rollout_ref.rollout.name == "moebius":
            from moebius.rollout.integrations.verl.agent_loop import AgentLoopManager as Manager
        else:
            from verl.trainer.ppo.v1 import AgentLoopManagerTQ as Manager
        made = Manager.create(*args, **kwargs)
        return _awaited(made) if inspect.isawaitable(made) else _wait(made)


async def _awaited(made: Awaitable[Any]) -> Any:
    return _wait(await made)


def _wait(manager: Any) -> Any:
    """At the start line, once the manager's workers are up: they take as long as some steps of training."""
    import ray

    ray.get([worker.__ray_ready__.remote() for worker in manager.agent_loop_workers], timeout=LONGEST_S)
    Path(os.environ[READY]).touch()
    deadline = time.monotonic() + LONGEST_S
    while not Path(os.environ[GO]).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{os.environ[GO]} did not come within {LONGEST_S:.0f} s")
        time.sleep(0.1)
    return manager


def _add_logprob_differences() -> None:
    """verl's metrics tell how far probabilities of rollout and actor are apart; add the same for their logarithms.

    Of all tokens, and of those drawn in each layout. verl's metrics do not see a sample's extra fields, so they are
    fetched before them.
    """
    from verl.trainer.ppo.v1 import trainer_base

    original, compute = trainer_base.calculate_debug_metrics, trainer_base.PPOTrainer._compute_old_log_prob
    layouts: list[str] = []

    @functools.wraps(compute)
    def fetch(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        wanted = {"keys": batch.keys, "partition_id": batch.partition_id, "select_fields": ["extra_fields"]}
        fields = trainer_base.tq.kv_batch_get(**wanted).pop("extra_fields").tolist()
        layouts[:] = [field.get("layouts", "") for field in fields]
        return compute(self, batch, metrics)

    @functools.wraps(original)
    def measure(data: Any) -> dict[str, Any]:
        return dict(original(data)) | logprob_differences(data.batch, layouts)

    trainer_base.PPOTrainer._compute_old_log_prob = fetch
    trainer_base.calculate_debug_metrics = measure


def logprob_differences(batch: Mapping[str, Any], layouts: Sequence[str]) -> dict[str, float]:
    """Mean, 99th percentile and maximum of |rollout - actor| log-probability, of all tokens and by layout.

    `batch` has float tensors [samples, positions] rollout_log_probs and old_log_probs, and response_mask;
    `layouts` says of each sample in which layout its tokens were drawn, as "EP:120 TP:31". A sample whose record does
    not fit its tokens (that of several turns does not) counts among all tokens only.
    """
    import torch

    mask = batch["response_mask"].bool()
    differences = (batch["rollout_log_probs"] - batch["old_log_probs"]).abs().float()
    parts = {"": mask} | {f"_{name}": torch.zeros_like(mask) for name in ("ep", "tp")}
    for row, text in enumerate(layouts):
        runs = [(name.lower(), int(count)) for name, _, count in (run.partition(":") for run in text.split())]
        if sum(count for _, count in runs) != int(mask[row].sum()):
            continue
        at = 0
        for name, count in runs:
            parts[f"_{name}"][row, at : at + count] = True
            at += count
    found: dict[str, float] = {}
    for name, part in parts.items():
        values = differences[part & mask]
        if name:
            found[f"bench/tokens{name}"] = float(values.numel())
        if values.numel():
            numbers = {"mean": values.mean(), "p99": values.quantile(0.99), "max": values.max()}
            found |= {f"bench/logprob_difference{name}_{what}": value.item() for what, value in numbers.items()}
    return found
