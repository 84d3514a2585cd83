"""Where the groups of several replicas run: room for each on one node, spread over the nodes of a Ray cluster.

One placement group has a bundle per replica, as large as all its ranks: a bundle never spans nodes, and Ray spreads
bundles as far as there are nodes. An actor in each bundle holds what Ray gave it and tells which node and GPUs that is;
the group's ranks then start there with these devices (`place`), without asking Ray again.
"""

from __future__ import annotations

import logging
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from moebius.rollout.config import Place, RolloutConfig
from moebius.rollout.errors import MoebiusError
from moebius.rollout.placement import PLACEMENT_TIMEOUT_S

_log = logging.getLogger(__name__)


class _Holder:
    """Keeps one replica's resources."""

    def where(self) -> tuple[str, list[str]]:
        """Ray's id of the node, and the ids of the GPUs that Ray gave it."""
        context = ray.get_runtime_context()
        return context.get_node_id(), [str(device) for device in context.get_accelerator_ids().get("GPU", [])]


class Homes:
    """Room for `config.replicas` groups. `close` gives it back; the groups must have ended before."""

    def __init__(self, config: RolloutConfig, device: str) -> None:
        """Reserve all of it. Raises MoebiusError in words if the cluster has no room, or none that is free."""
        self._config, self._device = config, device
        self._bundle = {"CPU": config.cpus_per_rank * config.ranks}
        self._bundle |= {"GPU": float(config.ranks)} if device == "cuda" else {}
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        room = sum(groups_on(node, self._bundle) for node in nodes)
        if room < config.replicas:
            raise MoebiusError(self._words(f"the {len(nodes)} nodes of the cluster have room for {room}"))
        self._group: PlacementGroup | None = placement_group([self._bundle] * config.replicas, strategy="SPREAD")
        self._holders: list[Any] = [None] * config.replicas
        timeout = min(PLACEMENT_TIMEOUT_S, config.startup_timeout_s)
        try:
            ready = self._group.wait(timeout)
        except GetTimeoutError:
            ready = False
        except BaseException:  # Ctrl-C: nobody else knows of it
            self.close()
            raise
        if not ready:
            self.close()
            raise MoebiusError(self._words(f"after {timeout:.0f} s not enough is free; end other jobs or groups"))

    def place(self, replica: int) -> Place:
        """Node and GPUs of a replica; other ones than before if its node was lost and Ray has found room elsewhere.

        Raises MoebiusError if there is none.
        """
        if self._group is None:
            raise MoebiusError("the replicas were shut down")
        for _ in range(2):
            if self._holders[replica] is None:
                options: dict[str, Any] = {"num_cpus": self._bundle["CPU"], "num_gpus": self._bundle.get("GPU", 0)}
                where = PlacementGroupSchedulingStrategy(self._group, replica)
                self._holders[replica] = ray.remote(_Holder).options(**options, scheduling_strategy=where).remote()
            try:
                node, devices = ray.get(self._holders[replica].where.remote(), timeout=PLACEMENT_TIMEOUT_S)
            except RayActorError:  # its node is gone
                self._holders[replica] = None
            except GetTimeoutError:
                break
            else:
                return Place(node=node, devices=devices)
        self._drop(replica)
        raise MoebiusError(f"replica {replica} finds no room: its node was lost, and no other has enough free")

    def close(self) -> None:
        """Give everything back; may be called again."""
        group, self._group = self._group, None
        if group is None or not ray.is_initialized():
            return
        for replica in range(len(self._holders)):
            self._drop(replica)
        remove_placement_group(group)

    def _drop(self, replica: int) -> None:
        holder, self._holders[replica] = self._holders[replica], None
        if holder is not None:
            ray.kill(holder, no_restart=True)

    def _words(self, what: str) -> str:
        asked = ", ".join(f"{amount:g} {name}" for name, amount in self._bundle.items())
        return (
            f"{self._config.replicas} replicas of {self._config.ranks} ranks cannot be placed: each needs {asked} on "
            f"one node, and {what}. Lower `replicas`, `ranks` or `cpus_per_rank`, or add nodes"
        )


def groups_on(node: dict[str, float], bundle: dict[str, float]) -> int:
    """How many groups fit on a node."""
    return int(min(node.get(name, 0.0) // amount for name, amount in bundle.items()))
