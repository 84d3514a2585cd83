"""Room for a group on a Ray cluster: connects, reserves, and says in words what is missing."""

from __future__ import annotations

import logging
import math
import os
import warnings
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from moebius.rollout.config import RolloutConfig
from moebius.rollout.errors import MoebiusError
from moebius.rollout.interrupts import waiting

PLACEMENT_TIMEOUT_S = 60.0  # resources exist but are in use: other jobs may be about to end


def connect(config: RolloutConfig) -> None:
    """Use the Ray connection of this process, else join `ray_address` or RAY_ADDRESS, else start Ray on this machine.

    A Ray started here ends with the process, not with the group. Raises MoebiusError if a cluster cannot be reached.
    """
    if ray.is_initialized():
        return
    address = config.ray_address or os.environ.get("RAY_ADDRESS")
    # The ranks' output stays in Ray's log files; errors name the file.
    options: dict[str, Any] = {"logging_level": logging.WARNING, "log_to_driver": False}
    if address:
        try:
            ray.init(address=address, **options)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise MoebiusError(
                f"no Ray cluster at {address}: {error}; check ray_address and RAY_ADDRESS; unset, Ray is started here"
            ) from error
        return
    # CPUs are only Ray's bookkeeping: a small machine may run more ranks than it has cores.
    cpus = max(os.cpu_count() or 1, math.ceil(config.total_ranks * config.cpus_per_rank))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"ray\.")  # about Ray's own next version
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, **options)


def resolve_device(config: RolloutConfig) -> str:
    """ "cpu" or "cuda": as configured, for "auto" cuda where the cluster has a GPU."""
    if config.device != "auto":
        return config.device
    if config.place is not None:
        return "cuda" if config.place.devices else "cpu"
    return "cuda" if ray.cluster_resources().get("GPU", 0) >= 1 else "cpu"


def reserve(config: RolloutConfig, device: str) -> PlacementGroup:
    """One bundle per rank, all on one node.

    Raises MoebiusError at once if no node is large enough, and after a wait if one is but is in use; either names the
    resource, how much is asked for and how much there is.
    """
    bundle = {"CPU": config.cpus_per_rank} | ({"GPU": 1.0} if device == "cuda" else {})
    needed = {name: amount * config.ranks for name, amount in bundle.items()}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(not _missing(needed, node) for node in nodes):
        best: dict[str, float] = min(nodes, key=lambda node: len(_missing(needed, node)), default={})
        raise MoebiusError(_words(config, needed, best, "the best node of the cluster has", _ADVICE))
    group = placement_group([bundle] * config.ranks, strategy="STRICT_PACK")
    timeout = min(PLACEMENT_TIMEOUT_S, config.startup_timeout_s)
    try:
        with waiting():
            ready = group.wait(timeout)
    except GetTimeoutError:
        ready = False
    except BaseException:  # Ctrl-C: nobody else knows of it
        remove_placement_group(group)
        raise
    if not ready:
        remove_placement_group(group)
        free = f"after {timeout:.0f} s the whole cluster has free only"
        raise MoebiusError(_words(config, needed, ray.available_resources(), free, "end other jobs or groups"))
    return group


def on_node(node: str | None) -> NodeAffinitySchedulingStrategy:
    """Ray's instruction to run an actor on one node (None: this one) and nowhere else.

    Raises MoebiusError if there is no such node.
    """
    wanted = ray.get_runtime_context().get_node_id() if node is None else node
    alive = [str(known["NodeID"]) for known in ray.nodes() if known["Alive"]]
    if wanted not in alive:
        raise MoebiusError(f"place.node: the Ray cluster has no node {wanted!r}; it has {', '.join(alive)}")
    return NodeAffinitySchedulingStrategy(node_id=wanted, soft=False)


_ADVICE = "lower `ranks` or `cpus_per_rank`, or start Ray with more"


def _missing(needed: dict[str, float], there: dict[str, float]) -> list[str]:
    return [name for name, amount in needed.items() if there.get(name, 0.0) < amount]


def _words(config: RolloutConfig, needed: dict[str, float], there: dict[str, float], where: str, advice: str) -> str:
    missing = _missing(needed, there)
    asked = ", ".join(f"{amount:g} {name}" for name, amount in needed.items())
    have = ", ".join(f"{there.get(name, 0.0):g} {name}" for name in needed)
    lacking = f"not enough {' and '.join(missing)}" if missing else "no single node has enough free"
    return f"{config.ranks} ranks cannot be placed: {lacking}. Asked for {asked} on one node; {where} {have}; {advice}"
