"""How EP's tokens travel: which of vLLM's all-to-all backends is used, and whether a machine can use it.

Plain data and look-ups: importing this imports neither vLLM nor torch. docs/deepep.md is the user's side of it.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import itertools
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from moebius.engine.layout import Layout

if TYPE_CHECKING:
    from moebius.engine.config import EngineConfig
    from moebius.engine.costs import CostModel
    from moebius.engine.layout import ModelShape

Backend = Literal["allgather_reducescatter", "deepep_v2", "deepep_low_latency"]
ALLGATHER: Backend = "allgather_reducescatter"
DEEPEP_V2: Backend = "deepep_v2"
DEEPEP_LL: Backend = "deepep_low_latency"

MIN_NCCL = 23004  # 2.30.4, as vLLM 0.26.0 asks for (utils/import_utils.py): the first with the device API DeepEP uses
ATOM_BYTES = 512  # DeepEP v2 sends rows in pieces of this size; vLLM would pad the experts of other models
LL_HIDDEN = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)  # vLLM's prepare_finalize/deepep_ll.py
GAIN = 0.01  # `auto` leaves the all-gather only for more than this share of an iteration

# Set unless the user did: a group is one NVLink domain, which needs no network; and DeepEP must not borrow torch's
# communicator, which is not made before the first collective (https://github.com/deepseek-ai/DeepEP/issues/726).
ENVIRONMENT = {"EP_DISABLE_GIN": "1", "EP_REUSE_NCCL_COMM": "0"}


class All2AllUnavailable(ValueError):
    """The wanted backend cannot be used on this machine or with this model; the message says what helps."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What deep_ep needs, as found here."""

    gpus: int = 0
    blocked: tuple[str, ...] = ()  # pairs of GPUs without peer access
    nccl: int | None = None  # the version that torch runs with: 23004 is 2.30.4
    deep_ep: str | None = None  # its version; None: not installed
    import_error: str = ""  # why it could not be imported
    elastic: bool = False  # it has ElasticBuffer, which came with version 2
    legacy: bool = False  # it has Buffer, of version 1
    nvcc: bool = False  # it compiles its kernels when they are first needed
    rdma: bool = False  # an InfiniBand device


def nccl_words(version: int | None) -> str:
    """2.30.4 for 23004."""
    return "none" if version is None else f"{version // 10000}.{version % 10000 // 100}.{version % 100}"


@cache
def look() -> Machine:
    """The machine this process runs on. Imports torch, and deep_ep where it is installed; makes no CUDA context."""
    if importlib.util.find_spec("torch") is None:
        return Machine()
    import torch

    if not torch.cuda.is_available():
        return Machine()
    count, blocked = _peers()
    found, error, elastic, legacy, nccl = None, "", False, False, _nccl_version()
    if importlib.util.find_spec("deep_ep") is not None:
        found = _version("deep_ep")
        # With an older NCCL its import fails in less plain words.
        if nccl is not None and nccl >= MIN_NCCL:
            try:
                module = importlib.import_module("deep_ep")
            except Exception as failure:  # noqa: BLE001  (it checks its surroundings with asserts, among others)
                error = f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"
            else:
                found = str(getattr(module, "__version__", found))
                elastic, legacy = hasattr(module, "ElasticBuffer"), hasattr(module, "Buffer")
    return Machine(
        gpus=count,
        blocked=blocked,
        nccl=nccl,
        deep_ep=found,
        import_error=error,
        elastic=elastic,
        legacy=legacy,
        nvcc=_cuda_compiler() is not None,
        rdma=any(Path("/sys/class/infiniband").glob("*")),
    )


def refusal(backend: Backend, machine: Machine) -> str | None:
    """Why `backend` cannot be used on `machine`, and what helps; None when it can."""
    if backend == ALLGATHER:
        return None
    if machine.gpus == 0:
        return "it needs CUDA GPUs, and there are none here"
    if machine.gpus < 2:
        return "it needs two GPUs or more, one is visible: see CUDA_VISIBLE_DEVICES"
    if machine.blocked:
        return f"no peer access between GPUs {', '.join(machine.blocked)}: it writes into the peers' memory over NVLink"
    if machine.deep_ep is None:
        return "the package deep_ep is not installed: build it as docs/deepep.md says"
    if machine.nccl is None or machine.nccl < MIN_NCCL:
        return (
            f"torch runs with NCCL {nccl_words(machine.nccl)}, deep_ep needs {nccl_words(MIN_NCCL)} or newer: put the "
            "newer libnccl.so.2 into LD_PRELOAD of every process, as docs/deepep.md says"
        )
    if machine.import_error:
        return f"deep_ep cannot be imported ({machine.import_error}): see docs/deepep.md"
    if backend == DEEPEP_V2 and not machine.elastic:
        return f"deep_ep {machine.deep_ep} has no ElasticBuffer: it needs version 2 or newer"
    if backend == DEEPEP_LL and not machine.legacy:
        return f"deep_ep {machine.deep_ep} has no Buffer, whose kernels this backend uses: take deepep_v2"
    if backend == DEEPEP_LL and not machine.rdma:
        return "its kernels need an InfiniBand device, and /sys/class/infiniband has none: take deepep_v2"
    if not machine.nvcc:
        return "deep_ep compiles its kernels at run time and finds no nvcc: set CUDA_HOME to a CUDA toolkit"
    return None


def model_refusal(backend: Backend, *, dtype: str, hidden: int, eager: bool) -> str | None:
    """Why `backend` cannot run a model of this dtype ("torch.bfloat16") and hidden size; None when it can."""
    if backend == ALLGATHER:
        return None
    if dtype != "torch.bfloat16":
        return f"it adds up experts' outputs in bfloat16 only, and the model runs in {dtype.removeprefix('torch.')}"
    if backend == DEEPEP_V2 and (2 * hidden) % ATOM_BYTES:
        return f"it sends rows in pieces of {ATOM_BYTES} bytes, and a hidden size of {hidden} makes no whole number"
    if backend == DEEPEP_LL and hidden not in LL_HIDDEN:
        return f"it has no kernels for a hidden size of {hidden}, only for {', '.join(map(str, LL_HIDDEN))}"
    if eager:
        return "without CUDA graphs it waits for the host in every layer: set engine.enforce_eager: false"
    return None


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend that EP runs with, and in words why."""

    backend: Backend
    words: str


def choose(
    config: EngineConfig, shape: ModelShape, ranks: int, *, machine: Callable[[], Machine] | None = None
) -> Choice:
    """What `engine.ep.all2all` asks for. Raises All2AllUnavailable when a named backend cannot be used here."""
    wanted = config.ep.all2all
    if wanted == ALLGATHER or (wanted == "auto" and ranks < 2):
        return Choice(ALLGATHER, "as configured" if wanted == ALLGATHER else "auto: one rank")
    found = (machine or look)()
    if wanted != "auto":
        if reason := refusal(wanted, found):
            raise All2AllUnavailable(f"engine.ep.all2all: {wanted} cannot be used: {reason}")
        return Choice(wanted, "as configured")
    if reason := refusal(DEEPEP_V2, found):
        return Choice(ALLGATHER, f"auto: not deepep_v2, since {reason}")
    from moebius.engine.cost_cache import kept_costs

    costs = {name: kept_costs(config, shape, ranks, name) for name in (ALLGATHER, DEEPEP_V2)}
    known = {name: model for name, model in costs.items() if model is not None}
    if len(known) < len(costs):
        missing = " and ".join(name for name in costs if name not in known)
        return Choice(ALLGATHER, f"auto: {missing} not measured here, `moebius calibrate` measures both")
    least = 1 if config.policy.kind == "predictive" else max(1, config.policy.threshold)
    ratio = time_ratio(known[DEEPEP_V2], known[ALLGATHER], least)
    words = f"auto: an EP iteration with deepep_v2 takes {100 * ratio:.1f} % of the all-gather's, as measured here"
    return Choice(DEEPEP_V2 if ratio < 1 - GAIN else ALLGATHER, words)


def time_ratio(one: CostModel, other: CostModel, least: int) -> float:
    """Geometric mean of `one`'s EP time over `other`'s, over the batches of at least `least` that both know.

    Smaller batches are TP's business; where all are smaller, all of them count.
    """
    batches = {p.batch for p in one.points if p.layout is Layout.EP} & {
        p.batch for p in other.points if p.layout is Layout.EP
    }
    contexts = [p.context for p in other.points if p.layout is Layout.EP]
    taken = np.asarray(sorted(b for b in batches if b >= least) or sorted(batches) or [least], dtype=np.float64)
    context = float(np.median(contexts))
    return float(np.exp(np.log(one.ms(Layout.EP, taken, context) / other.ms(Layout.EP, taken, context)).mean()))


def prepare_environment(backend: Backend) -> None:
    """Set what deep_ep reads when it makes its buffers."""
    if backend != ALLGATHER:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)


def problem_of_choices(choices: Mapping[int, str]) -> str | None:
    """What is wrong when ranks chose different backends, which would wait for each other for ever."""
    if len(set(choices.values())) < 2:
        return None
    told = ", ".join(f"rank {rank}: {backend}" for rank, backend in sorted(choices.items()))
    return f"ranks chose different all-to-all backends ({told}): name one in engine.ep.all2all"


def _peers() -> tuple[int, tuple[str, ...]]:
    """How many GPUs there are, and pairs of them without peer access. By the driver: torch would make contexts."""
    number = ctypes.c_int()
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0, ()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(number)):
        return 0, ()
    count, blocked = number.value, []
    for a, b in itertools.permutations(range(count), 2):
        if cuda.cuDeviceCanAccessPeer(ctypes.byref(number), a, b) or not number.value:
            blocked.append(f"{a}-{b}")
    return count, tuple(blocked)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "of unknown version"


def _nccl_version() -> int | None:
    """Of the NCCL in this process: the one that torch has loaded, or that was loaded before it."""
    version = ctypes.c_int()
    try:
        found = ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return version.value if found == 0 else None


def _cuda_compiler() -> Path | None:
    """The nvcc that deep_ep would take."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None:
        on_path = shutil.which("nvcc")
        return Path(on_path) if on_path else _existing(Path("/usr/local/cuda/bin/nvcc"))
    return _existing(Path(home) / "bin" / "nvcc")


def _existing(path: Path) -> Path | None:
    return path if path.is_file() else None
