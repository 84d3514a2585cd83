"""Which mover a group uses, and how it is made ready."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from moebius.engine.config import EngineConfig
from moebius.engine.runtime import RuntimePair
from moebius.kernels.collective import CollectiveMover, Mover
from moebius.kernels.direct import DirectMover
from moebius.kernels.peers import PeerError
from moebius.kernels.plan import kv_head_ranges
from moebius.kernels.virtual import VirtualMemory

_log = logging.getLogger(__name__)


def make_mover(
    config: EngineConfig, pair: RuntimePair, device_group: dist.ProcessGroup, cpu_group: dist.ProcessGroup
) -> Mover:
    """The mover `config.mover` asks for, made ready: connections, staging memory, compiled kernels. A collective.

    EP must be active and its weights loaded: the spare slot is written to. Raises PeerError if direct writes are asked
    for and the ranks cannot map each other's memory.
    """
    mover: Mover
    if config.mover != "collective" and pair.buffer.storage.device.type == "cuda":
        try:
            return _direct(pair, cpu_group)
        except PeerError as error:
            if config.mover == "direct":
                raise
            _log.warning("no direct writes between GPUs, moving over NCCL instead: %s", error)
    mover = CollectiveMover(device_group)
    mover.warm_up(_largest(pair), pair.buffer.storage.device)
    return mover


def _direct(pair: RuntimePair, cpu_group: dist.ProcessGroup) -> Mover:
    backing = pair.buffer.backing
    mover = DirectMover.connect(backing if isinstance(backing, VirtualMemory) else pair.buffer.storage, cpu_group)
    mover.warm_up(_largest(pair), pair.buffer.storage.device)
    ep, tp = (runtime.expert_modules[0] for runtime in (pair.ep, pair.tp))
    mover.prepare_experts((ep.w13_weight.data, ep.w2_weight.data), (tp.w13_weight.data, tp.w2_weight.data))
    heads = kv_head_ranges(pair.shape.num_kv_heads, dist.get_world_size(cpu_group))
    mover.prepare_kv(pair.ep.kv[0], pair.tp.kv[0], heads)
    return mover


def _largest(pair: RuntimePair) -> int:
    """Bytes of the largest expert tensor of one layer."""
    parameters: list[torch.Tensor] = [
        p for module in pair.ep.expert_modules for p in (module.w13_weight, module.w2_weight)
    ]
    return max(p.numel() * p.element_size() for p in parameters)
