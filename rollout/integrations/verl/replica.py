"""One replica of verl's rollout: a server actor, which owns a group on the replica's devices."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from omegaconf import open_dict
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform import get_platform
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.device import get_device_name, get_resource_name
from verl.workers.config import HFModelConfig
from verl.workers.rollout.replica import RolloutReplica

from moebius.rollout.config import Place
from moebius.rollout.errors import BadInput
from moebius.rollout.integrations.verl.names import server_name
from moebius.rollout.integrations.verl.server import MoebiusServer
from moebius.rollout.integrations.verl.settings import check, group_config

MANAGER = "moebius.rollout.integrations.verl.agent_loop.AgentLoopManager"


class MoebiusReplica(RolloutReplica):
    """Takes the devices of the workers that verl gives it; Ray is not asked for more. Raises BadInput at once."""

    def __init__(
        self,
        replica_rank: int,
        config: Any,
        model_config: Any,
        gpus_per_node: int = 8,
        is_reward_model: bool = False,
        is_teacher_model: bool = False,
        name_suffix: str = "",
    ) -> None:
        super().__init__(
            replica_rank, config, model_config, gpus_per_node, is_reward_model, is_teacher_model, name_suffix
        )
        self.model = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)
        self.settings = check(self.config, self.model, gpus_per_node)
        if self.settings.announce and not (is_reward_model or is_teacher_model):
            _set_manager(config)

    async def launch_servers(self) -> None:
        """Start the server actor on the workers' node and its group on their devices; returns when it can serve."""
        found = await asyncio.gather(*[worker.__ray_call__.remote(_whereabouts) for worker in self.workers])
        nodes = {node for node, _, _ in found}
        if len(nodes) != 1:
            raise BadInput(
                f"replica {self.replica_rank} would span {len(nodes)} nodes, and a group lives on one: let its "
                "GPUs (tensor_model_parallel_size * data_parallel_size) divide the GPUs of a node"
            )
        node, _, device_bytes = found[0]
        on_cpu = get_device_name() == "cpu"
        place = Place(node=node, devices=[] if on_cpu else [device for _, device, _ in found])
        group = group_config(
            self.settings, self.config, self.model, place, device_bytes=None if on_cpu else device_bytes
        )
        suffix = "".join(
            part for part, wanted in (("_reward", self.is_reward_model), ("_teacher", self.is_teacher_model)) if wanted
        )
        name = server_name(self.replica_rank, f"{suffix}{self.name_suffix}")
        env_vars = dict.fromkeys(get_platform().ray_noset_envvars(), "1")
        server = ray.remote(MoebiusServer).options(
            name=name,
            num_cpus=0,
            max_concurrency=self.max_concurrency,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
            runtime_env={"env_vars": env_vars},
        ).remote(group, self.settings, self.config, self.rollout_mode.value)  # fmt: skip
        await server.launch.remote()
        self.servers = [server]
        self._server_handle = server
        self._server_address = name  # load balancers tell replicas apart by it; tokens go through the actor

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """End all running requests with the tokens they have; what comes until `resume_generation` waits."""
        return dict(await self._server_handle.abort_all_requests.remote(reject_request=reject_request))


def _whereabouts(worker: Any) -> tuple[str, str, int | None]:
    """In a trainer process: its node, the device Ray gave it, and that device's memory."""
    import torch

    context = ray.get_runtime_context()
    device = str(context.get_accelerator_ids()[get_resource_name()][0])
    memory = None
    if torch.cuda.is_available():
        memory = int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    return context.get_node_id(), device, memory


def _set_manager(config: Any) -> None:
    """Have steps announced, unless the user chose an agent-loop manager.

    The V1 trainers read this setting after their replicas are made; with the V0 trainer the user must set it.
    """
    if not hasattr(config, "_set_flag") or config.agent.get("agent_loop_manager_class"):
        return
    with open_dict(config):
        config.agent.agent_loop_manager_class = MANAGER
