"""Agent loops that tell the servers of a step what a server cannot see: how many trajectories it has, and which ended.

Set by `MoebiusReplica` where verl lets it (V1 trainers), else by the user:
`+actor_rollout_ref.rollout.agent.agent_loop_manager_class=moebius.rollout.integrations.verl.agent_loop.AgentLoopManager`.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import ray
from verl.experimental.agent_loop import AgentLoopManager as VerlManager
from verl.experimental.agent_loop import AgentLoopWorker as VerlWorker
from verl.utils.ray_utils import auto_await

from moebius.rollout.integrations.verl.metrics import Metrics, merge
from moebius.rollout.integrations.verl.names import servers

_log = logging.getLogger(__name__)


class AgentLoopManager:
    """Makes the manager for the trainer in use."""

    @classmethod
    def create(cls, *args: Any, **kwargs: Any) -> Any:
        """A manager as verl makes them, for its V0 or V1 trainers."""
        config = kwargs["config"] if "config" in kwargs else args[0]
        kind = _tq_manager() if config.trainer.get("use_v1", True) else _Manager
        return kind.create(*args, **kwargs)


class _Announces:
    """Of a manager: tells the servers of steps, and takes their numbers."""

    config: Any
    rollout_config: Any

    def announce(self, trajectories: int, validate: bool) -> None:
        """Split among the replicas; verl's load balancer sends each about as many."""
        if self.config.trainer.get("use_v1", True) and self.config.trainer.v1.trainer_mode == "separate_async":
            return  # batches come while others run: there are no steps
        found = servers()
        several_turns = self.rollout_config.agent.default_agent_loop != "single_turn_agent"
        multi_turn = bool(self.rollout_config.multi_turn.enable) or several_turns
        share, rest = divmod(trajectories, len(found)) if found else (0, 0)
        calls = [server.begin_step.remote(share + (i < rest), multi_turn, validate) for i, server in enumerate(found)]
        ray.get(calls)

    def take_metrics(self) -> Metrics:
        """Numbers of the step that has ended, by verl's names."""
        return merge(ray.get([server.take_metrics.remote() for server in servers()]))


def _ended(original: Callable[..., Any]) -> Callable[..., Any]:
    """`_run_agent_loop` of a worker, after which the servers hear that a trajectory is over."""

    @functools.wraps(original)
    async def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return await original(self, *args, **kwargs)
        finally:
            # Which replica it ran on is not known here; told in turns, it evens out.
            server = next(_in_turns(self), None)
            if server is not None:
                server.trajectories_ended.remote()

    return run


def _in_turns(worker: Any) -> Iterator[Any]:
    """Servers, one after the other without end; looked up once per worker."""
    if not hasattr(worker, "moebius_servers"):
        worker.moebius_servers = itertools.cycle(servers())
    turns: Iterator[Any] = worker.moebius_servers
    return turns


class _Worker(VerlWorker):
    _run_agent_loop = _ended(VerlWorker._run_agent_loop)


class _Manager(_Announces, VerlManager):
    """For the V0 trainer, which waits for a batch and gets its trajectories back."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.agent_loop_workers_class = ray.remote(_Worker)
        super().__init__(*args, **kwargs)

    @auto_await
    async def generate_sequences(self, prompts: Any) -> Any:
        """As verl's, with `timing_s/gen/burst` and so on among the timings it returns."""
        validate = bool(prompts.meta_info.get("validate", False))
        self.announce(len(prompts), validate)
        output = await super().generate_sequences(prompts)
        if not validate:
            # verl puts timing_s/ before the names of timings, and takes nothing else from here.
            numbers = {name.partition("timing_s/")[2]: value for name, value in self.take_metrics().items()}
            output.meta_info["timing"] |= {name: value for name, value in numbers.items() if name}
        return output


@functools.cache
def _tq_manager() -> type[Any]:
    """For the V1 trainers, which send batches out and find trajectories in TransferQueue. Made when asked for: V0 does
    without that package.
    """
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    base = AgentLoopWorkerTQ.__ray_metadata__.modified_class.__ray_actor_class__

    class WorkerTQ(base):  # type: ignore[misc,valid-type]
        _run_agent_loop = _ended(base._run_agent_loop)

    class ManagerTQ(_Announces, AgentLoopManagerTQ):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.agent_loop_workers_class = ray.remote(WorkerTQ)

        def generate_sequences(self, prompts: Any) -> None:
            self.announce(*_trajectories(prompts, self.rollout_config))
            super().generate_sequences(prompts)

    _show_metrics(PPOTrainer, ManagerTQ)
    return ManagerTQ


def _trajectories(prompts: Any, rollout: Any) -> tuple[int, bool]:
    """How many a batch of the V1 trainers becomes (n of each prompt, or what the prompt says itself), and whether it is
    for validation.
    """
    validate = bool(prompts["validate"]) if "validate" in prompts else False
    own = prompts.get("__rollout_n__", None)
    if own is not None:
        return sum(int(n) for n in (own.tolist() if hasattr(own, "tolist") else own)), validate
    return len(prompts) * int(rollout.val_kwargs.n if validate else rollout.n), validate


def _show_metrics(trainer: type[Any], manager: type[Any]) -> None:
    """Have the V1 trainers log our numbers with those of the weight sync, at the end of each step.

    verl asks only its trainer's own methods for a step's metrics, so one of them is wrapped.
    """
    original = getattr(trainer, "_consume_sync_metrics", None)
    if original is None:
        _log.warning("this verl has no PPOTrainer._consume_sync_metrics: burst, switch and tail are not in its metrics")
        return

    @functools.wraps(original)
    def consume(self: Any) -> dict[str, Any]:
        metrics = dict(original(self))
        if isinstance(self.agent_loop_manager, manager):
            metrics |= self.agent_loop_manager.take_metrics()
        return metrics

    trainer._consume_sync_metrics = consume
