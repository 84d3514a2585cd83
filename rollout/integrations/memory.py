"""How much KV memory a share of a GPU leaves, for trainers that say only what share the rollout may use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moebius.rollout.errors import BadInput

RESERVE_BYTES = 6 << 30  # of a GPU's share, neither weights nor KV: CUDA graphs, communication buffers, workspace
LEAST_BYTES = 1 << 28


def kv_bytes(
    hf_config: Mapping[str, Any],
    name: str,
    ranks: int,
    device_bytes: int,
    share: float,
    *,
    share_setting: str,
    kv_setting: str,
) -> int:
    """KV memory of a rank in bytes, if the rollout may use this `share` of a GPU with `device_bytes`.

    `share_setting` and `kv_setting` are the names under which the user can set the share, or the KV memory itself.
    Raises BadInput when nothing is left for KV.
    """
    from moebius.rollout.plan_model import Gpu, PlanModel
    from moebius.rollout.planner import memory_of

    gpu = Gpu("", device_bytes / 1e9, 0, 0, 0)
    model = PlanModel.from_config(name, hf_config, ranks)
    memory = memory_of(model, gpu, ranks, share=share, reserve_gb=RESERVE_BYTES / 1e9)
    if memory.kv_bytes < LEAST_BYTES:
        need = device_bytes * share - memory.kv_bytes
        raise BadInput(
            f"{share_setting}={share} of {device_bytes / 2**30:.0f} GiB leaves no room for KV beside "
            f"the weights of both layouts ({need / 2**30:.0f} GiB with graphs and buffers): raise it, use more GPUs a "
            f"replica, or set {kv_setting}"
        )
    return int(memory.kv_bytes)
