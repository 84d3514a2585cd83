"""One GPU in the place of several: for benchmarks that can show what is right where too few are there to measure time.

    python -m benchmarks.shared_gpu --ranks 2 --out runs/soak moebius bench switch --config ... --out runs/soak

runs a command so, and adds a note about it to the results in `--out`. The two trainers' benchmarks do it by themselves.

Ray is told of as many GPUs as there are ranks. Every Python process of the run then takes whichever of them it is given
for the one that exists, and seems to NCCL to be on a host of its own: NCCL refuses two ranks on one GPU of a host. It
talks over sockets then, and the processes' kernels run by turns, so that no time that is measured means anything.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from moebius.rollout.bench.engines import visible_devices
from moebius.rollout.bench.results import read_results
from moebius.rollout.errors import BadInput

OVER_LOOPBACK = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}  # for members that seem to be on other hosts
_GPU = "MOEBIUS_BENCH_SHARED_GPU"
_NO_TIMES = "NCCL over sockets of the loopback interface: times, and what follows from them, say nothing"

# Python runs this in every process that finds it on its path, before anything else. Ray, verl and ranks name the GPUs
# of a process when it runs already, so that it is assignments that have to be caught. "" means no GPU and stays, and so
# does a list that a process is started with: it counts ranks by it, and uses no GPU itself.
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
    if "," not in os.environ[_key]:
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
        return f"one GPU shared by {self.ranks} ranks and the trainer, {_NO_TIMES}"

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


def results_name(trainer: str, shared: SharedGpu | None) -> str:
    """trl_x2, or trl_shared_x1 where ranks share."""
    return f"{trainer}_x2" if shared is None else f"{trainer}_shared_x1"


def note_in(folder: Path, ranks: int, before: Mapping[Path, int]) -> None:
    """Add to results in `folder` that ranks shared a GPU, but not to files that are as old as `before` says."""
    for path, written in written_in(folder).items():
        if before.get(path) == written:
            continue  # of another run
        try:
            results = read_results(path)
        except BadInput:
            continue  # costs, lengths and the like
        results.notes.append(f"one GPU shared by {ranks} ranks, {_NO_TIMES}; memory of the device is all ranks'")
        path.write_text(results.model_dump_json(indent=1) + "\n", encoding="utf-8")


def written_in(folder: Path) -> dict[Path, int]:
    """The files that may be results, and when each was written."""
    return {path: path.stat().st_mtime_ns for path in sorted(folder.glob("*.json"))}


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a command whose ranks share one GPU, with its exit status.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, help="folder of its results, which get a note")
    parser.add_argument("--ray", action="store_true", help="it starts a group with Ray, and may use the GPU itself")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    chosen = parser.parse_args()
    if not chosen.command:
        parser.error("there is no command: give one, as `moebius bench memory --config ...`")
    shared = SharedGpu.where_needed("cuda", chosen.ranks)
    if shared is None:
        parser.error(f"{chosen.ranks} GPUs are there: run the command itself")
    devices = {} if chosen.ray else {"CUDA_VISIBLE_DEVICES": ",".join([shared.gpu] * chosen.ranks)}
    before = {} if chosen.out is None else written_in(chosen.out)
    try:
        status = subprocess.call(chosen.command, env=shared.environment(os.environ) | devices)
    finally:
        shared.close()
    if chosen.out is not None:
        note_in(chosen.out, chosen.ranks, before)
    return status


if __name__ == "__main__":
    sys.exit(main())
