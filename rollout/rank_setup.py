"""What a rank is started with, and what it answers then."""

from __future__ import annotations

from dataclasses import dataclass

from moebius.engine.account import MemoryAccount
from moebius.engine.config import EngineConfig
from moebius.engine.costs import CostModel
from moebius.engine.startup import Startup, moe_config_folder


@dataclass(frozen=True, slots=True)
class RankHost:
    """Where a rank's process lives. `devices` are the GPU ids that Ray gave it, empty on CPU."""

    rank: int
    pid: int
    node: str
    devices: list[str]
    log_file: str | None


@dataclass(frozen=True, slots=True)
class RankSetup:
    """What a rank needs to build its engine. `devices[r]` is the GPU of rank r; empty on CPU."""

    engine: EngineConfig
    rank: int
    world_size: int
    device: str  # "cpu" | "cuda"
    devices: list[str]
    master_port: int
    ident: str  # of the group, see moebius.rollout.shm


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the driver must know of the engine to check its input."""

    max_model_len: int
    vocab_size: int
    policy_version: int
    has_tokenizer: bool
    startup: Startup  # of this rank
    memory: MemoryAccount  # of this rank
    costs: CostModel | None = None  # that the policy decides by


def rank_environment(setup: RankSetup) -> dict[str, str]:
    """Variables a rank must run with, whatever the cluster's environment says."""
    env = {
        "RANK": str(setup.rank),
        "LOCAL_RANK": str(setup.rank),  # index into the group's own device list
        "WORLD_SIZE": str(setup.world_size),
        "MASTER_ADDR": "127.0.0.1",  # all ranks of a group are on one node
        "MASTER_PORT": str(setup.master_port),
        "MOEBIUS_GROUP_ID": setup.ident,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_KV_CACHE_LAYOUT": "HND",
    }
    if setup.device == "cpu":
        # Dynamo off: the model runs eagerly on CPU anyway, and compiling the sampler's helpers slows every start.
        return env | {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
    return env | {
        # Peers map each other's memory, so each rank sees all GPUs of its group, and Ray must not narrow that again.
        "CUDA_VISIBLE_DEVICES": ",".join(setup.devices),
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        # NVLink multicast stays off.
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }


DEFAULT_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # vLLM looks here before it looks among its own; see docs/moe-tuning.md.
    "VLLM_TUNED_CONFIG_FOLDER": str(moe_config_folder()),
}
