"""For benchmarks/verl_gpu.py: the agent-loop manager that waits at the start line, and what it measures besides.

Set as `actor_rollout_ref.rollout.agent.agent_loop_manager_class`. verl makes it once its engines are up, in the process
of its trainer, so that here is where several jobs can wait for their turn.
"""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import Any

READY = "MOEBIUS_BENCH_READY"  # file that says that this job has started
GO = "MOEBIUS_BENCH_GO"  # file that it waits for
LONGEST_S = 1200.0


class Gate:
    """Makes the manager that belongs to the rollout in use, when this job's turn has come."""

    @classmethod
    def create(cls, *args: Any, **kwargs: Any) -> Any:
        """As verl's managers are made. Raises TimeoutError when the turn does not come."""
        config = kwargs["config"] if "config" in kwargs else args[0]
        _add_logprob_differences()
        Path(os.environ[READY]).touch()
        deadline = time.monotonic() + LONGEST_S
        while not Path(os.environ[GO]).exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{os.environ[GO]} did not come within {LONGEST_S:.0f} s")
            time.sleep(0.1)
        if config.actor_rollout_ref.rollout.name == "moebius":
            from moebius.rollout.integrations.verl.agent_loop import AgentLoopManager

            return AgentLoopManager.create(*args, **kwargs)
        from verl.trainer.ppo.v1 import AgentLoopManagerTQ

        return AgentLoopManagerTQ.create(*args, **kwargs)


def _add_logprob_differences() -> None:
    """verl's metrics tell how far probabilities of rollout and actor are apart; add the same for their logarithms."""
    from verl.trainer.ppo.v1 import trainer_base

    original = trainer_base.calculate_debug_metrics

    @functools.wraps(original)
    def measure(data: Any) -> dict[str, Any]:
        rollout, actor = data.batch["rollout_log_probs"], data.batch["old_log_probs"]
        differences = (rollout - actor).abs()[data.batch["response_mask"].bool()].float()
        found = {"mean": differences.mean(), "p99": differences.quantile(0.99), "max": differences.max()}
        return dict(original(data)) | {f"bench/logprob_difference_{name}": v.item() for name, v in found.items()}

    trainer_base.calculate_debug_metrics = measure
