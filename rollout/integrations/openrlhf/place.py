"""Which GPUs OpenRLHF means an engine to have: those of some bundles of the placement group its actor is in."""

from __future__ import annotations

from collections.abc import Sequence

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from moebius.rollout.config import Place
from moebius.rollout.errors import BadInput

LOOK_S = 300.0  # for a process in each bundle


def _whereabouts() -> tuple[str, list[str], int | None]:
    """In a bundle: its node, its GPUs, and one's memory in bytes; None where there are no devices."""
    import torch

    context = ray.get_runtime_context()
    memory = None
    if torch.cuda.is_available():
        memory = int(torch.cuda.get_device_properties(0).total_memory)
    return context.get_node_id(), context.get_accelerator_ids().get("GPU", []), memory


def find_place(group: PlacementGroup, bundles: Sequence[int], share: float) -> tuple[Place, int | None]:
    """Where the bundles are, and a GPU's memory in bytes (None: CPU). A process in each of them looks, and ends.

    `share` of the bundle's GPU must be free, as for the engine that OpenRLHF would start there. Raises BadInput.
    """
    look = ray.remote(num_cpus=0, num_gpus=share, max_calls=1)(_whereabouts)
    places = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle) for bundle in bundles]
    found = ray.get([look.options(scheduling_strategy=place).remote() for place in places], timeout=LOOK_S)
    nodes = {node for node, _, _ in found}
    if len(nodes) != 1:
        raise BadInput(
            f"an engine would span {len(nodes)} nodes, and a group lives on one: let --vllm.tensor_parallel_size "
            "divide the GPUs of a node"
        )
    memory = found[0][2]
    devices = [] if memory is None else [device for _, devices, _ in found for device in devices[:1]]
    return Place(node=found[0][0], devices=devices), memory
