"""GPU memory of a process and of all that it has started, over time, as the driver counts it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.processes import descendants

EVERY_S = 0.25
# Who a process is, by what its title has in it. vLLM and Ray set titles.
ROLES = {"ranks": ("ray::RankWorker", "VLLM::"), "trainer": ("ray::WorkerDict",)}


class Sampler:
    """Samples in a thread while it is entered. Without CUDA there are none.

    `samples` has a row for each look: seconds, bytes in use on all devices, and bytes of each process by role and pid,
    such as "ranks/1234".
    """

    def __init__(self, pid: int, device: str) -> None:
        self.samples: list[dict[str, float]] = []
        self._pid, self._on = pid, device == "cuda"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Sampler:
        if self._on:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        if self._on:
            self._thread.join()

    def _run(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        started = time.monotonic()
        while not self._stop.wait(EVERY_S):
            ours = set(descendants(self._pid))
            row = {"s": time.monotonic() - started}
            for process in (p for handle in handles for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)):
                if process.pid in ours and process.usedGpuMemory is not None:
                    key = f"{_role(process)}/{process.pid}"
                    row[key] = row.get(key, 0.0) + process.usedGpuMemory
            row["devices"] = float(sum(pynvml.nvmlDeviceGetMemoryInfo(handle).used for handle in handles))
            self.samples.append(row)
        pynvml.nvmlShutdown()

    def summary(self) -> dict[str, float]:
        """See `summary`."""
        return summary(self.samples)


def summary(samples: list[dict[str, float]]) -> dict[str, float]:
    """GB over all processes of a role: the most that each held, and for ranks what they hold asleep.

    That is the value, to ten megabytes, at which a process was seen most often among those well below its most: it
    sleeps for longer than it takes to fall asleep or to end.
    """
    found: dict[str, float] = {}
    for key in dict.fromkeys(key for row in samples for key in row if "/" in key):
        role = key.partition("/")[0]
        held = [row[key] / 1e9 for row in samples if key in row]
        found[f"{role}_most_gb"] = found.get(f"{role}_most_gb", 0.0) + max(held)
        low = Counter(round(value, 2) for value in held if value < 0.8 * max(held))
        if role == "ranks" and low:
            found["ranks_asleep_gb"] = found.get("ranks_asleep_gb", 0.0) + low.most_common(1)[0][0]
    return found


def _role(process: Any) -> str:
    try:
        title = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return "others"
    return next((role for role, marks in ROLES.items() if any(mark in title for mark in marks)), "others")
