"""Whether a machine can run `benchmarks/paper.sh`."""

from __future__ import annotations

import shutil
from pathlib import Path

from moebius.rollout.bench.engines import visible_devices
from moebius.rollout.bench.results import gpu_memory_used
from moebius.rollout.doctor import VLLM_VERSION, installed_versions

_IDLE_GB = 2.0  # in use on a GPU before anything was started
_DISK_GB = 10.0  # compiled code of both layouts


def problems(gpus: int, needs_gb: float, *, engines_up: bool) -> list[str]:
    """What is missing, in words; empty when all is there. `engines_up`: memory in use is our own."""
    import torch

    found = []
    version = installed_versions().get("vllm", "not installed")
    if version.split("+")[0] != VLLM_VERSION:
        found.append(f"vLLM {VLLM_VERSION} is needed, here it is {version}")
    devices = visible_devices()
    if len(devices) < gpus:
        return [*found, f"{gpus} GPUs are needed, {len(devices)} are visible: choose --gpus 2, 4 or 8 accordingly"]
    for i in range(gpus):
        memory = torch.cuda.get_device_properties(i).total_memory / 1e9
        if memory < needs_gb:
            found.append(f"GPU {i} has {memory:.0f} GB, a rank takes about {needs_gb:.0f} GB: use more GPUs")
    used = gpu_memory_used()
    busy = [i for i, device in enumerate(devices[:gpus]) if device.isdigit() and _over(used, int(device))]
    if busy and not engines_up:
        found.append(f"GPUs {busy} are in use by others: memory and times would be theirs too")
    apart = [(0, i) for i in range(1, gpus) if not torch.cuda.can_device_access_peer(0, i)]
    if apart:
        found.append(f"GPUs {apart[0]} cannot map each other's memory: switches would go by NCCL")
    free = shutil.disk_usage(Path.home()).free / 1e9
    if free < _DISK_GB:
        found.append(f"{free:.0f} GB of disk are free for compiled code, {_DISK_GB:.0f} GB are needed")
    return found


def _over(used_gib: list[float], index: int) -> bool:
    return index < len(used_gib) and used_gib[index] > _IDLE_GB
