"""One GPU in the place of several: for benchmarks that can show what is right where too few are there to measure time.

Ray is told of as many GPUs as there are ranks. Every Python process of the run then takes whichever of them it is given
for the one that exists, and seems to NCCL to be on a host of its own: NCCL refuses two ranks on one GPU of a host. It
talks over sockets then, and the processes' kernels run by turns, so that no time that is measured means anything.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from moebius.rollout.bench.engines import visible_devices

OVER_LOOPBACK = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}  # for members that seem to be on other hosts
_GPU = "MOEBIUS_BENCH_SHARED_GPU"

# Python runs this in every process that finds it on its path, before anything else. Ray, verl and ranks name the GPUs
# of a process when it runs already, so that it is assignments that have to be caught. "" means no GPU and stays.
_SITE = f"""
import os

_set = os._Environ.__setitem__

def _shared(self, key, value):
    if key == "CUDA_VISIBLE_DEVICES" and value:
        value = os.environ["{_GPU}"]
    _set(self, key, "0" if key == "LOCAL_RANK" else value)

def _own_host():
    os.environ["NCCL_HOSTID"] = f"pid{{os.getpid()}}"

os._Environ.__setitem__ = _shared
for _key in {{"CUDA_VISIBLE_DEVICES", "LOCAL_RANK"}} & set(os.environ):
    os.environ[_key] = os.environ[_key]
_own_host()
os.register_at_fork(after_in_child=_own_host)
"""


class SharedGpu:
    """A folder that makes processes share the first visible GPU; remove it with `close` when they have ended."""

    def __init__(self, gpu: str, ranks: int) -> None:
        self.gpu, self.ranks = gpu, ranks
        self.folder = Path(tempfile.mkdtemp(prefix="mshared", dir="/tmp"))
        (self.folder / "sitecustomize.py").write_text(_SITE, encoding="utf-8")

    @classmethod
    def where_needed(cls, device: str, ranks: int) -> SharedGpu | None:
        """None on CPU, and where each rank has a GPU of its own. Raises SystemExit where there is no GPU at all."""
        if device != "cuda" or len(there := visible_devices()) >= ranks:
            return None
        if not there:
            raise SystemExit("no GPU is visible: see `nvidia-smi` and CUDA_VISIBLE_DEVICES, or use --device cpu")
        return cls(there[0], ranks)

    def environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The same for a process that shares the GPU, and for all that it starts.

        CUDA_VISIBLE_DEVICES is not in it: Ray takes its length for the number of GPUs.
        """
        path = os.pathsep.join(filter(None, [str(self.folder), environment.get("PYTHONPATH")]))
        kept = {name: value for name, value in environment.items() if name != "CUDA_VISIBLE_DEVICES"}
        return kept | {
            _GPU: self.gpu,
            "PYTHONPATH": path,
            **OVER_LOOPBACK,
            "RAY_OVERRIDE_RESOURCES": json.dumps({"GPU": self.ranks}),
        }

    @property
    def note(self) -> str:
        """For the results."""
        return (
            f"one GPU shared by {self.ranks} ranks and the trainer, NCCL over sockets of the loopback interface: "
            "times, and what follows from them, say nothing"
        )

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


def results_name(trainer: str, shared: SharedGpu | None) -> str:
    """trl_x2, or trl_shared_x1 where ranks share."""
    return f"{trainer}_x2" if shared is None else f"{trainer}_shared_x1"
