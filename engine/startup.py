"""Where the time of a start goes: one clock per rank, which times vLLM's worker methods while a runtime is built.

Plain data and a clock: importing this imports neither vLLM nor torch.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# vLLM's worker methods in the order EngineCore calls them, and the field that their seconds go to.
PHASES = {
    "init_device": "groups_s",
    "load_model": "load_s",
    "determine_available_memory": "profile_s",
    "initialize_from_config": "kv_s",
    "compile_or_warm_up_model": "warmup_s",
}


class StartupError(RuntimeError):
    """The clock does not fit the installed vLLM."""


@dataclass(slots=True)
class RuntimeStartup:
    """Seconds of building one runtime on one rank. The parts but `compile_s` add up to `total_s`."""

    layout: str  # "EP" | "TP"
    groups_s: float = 0.0  # device and process groups
    load_s: float = 0.0  # weights
    profile_s: float = 0.0  # the first forward pass, in which vLLM compiles the model
    kv_s: float = 0.0  # KV tensors and attention backends
    warmup_s: float = 0.0  # kernels, without graph capture
    capture_s: float = 0.0  # CUDA graphs
    other_s: float = 0.0  # the rest: scheduler, tokenizer, bookkeeping
    total_s: float = 0.0
    compile_s: float = 0.0  # what vLLM counts as compilation; lies within profile_s and warmup_s
    graph_bytes: int = 0  # device memory that graph capture took
    grown_bytes: int = 0  # device memory in use after less before; 0 on CPU


@dataclass(slots=True)
class Startup:
    """Seconds of starting one rank. `total_s` is all but `import_s`, which the process around the engine measures."""

    rank: int
    import_s: float = 0.0  # of vLLM
    config_s: float = 0.0  # vLLM's configuration of both layouts
    buffer_s: float = 0.0  # allocating the unified buffer
    other_s: float = 0.0  # checks, mover, everything between
    total_s: float = 0.0
    runtimes: list[RuntimeStartup] = field(default_factory=list)  # in the order they were built
    calibration_s: float = 0.0  # within other_s: measuring iterations and switches for the policy
    costs: str = ""  # where the policy's costs come from, in words
    # Microseconds per small kernel of a CUDA graph before and after `moebius.engine.settle`; empty without CUDA graphs.
    kernel_us: list[float] = field(default_factory=list)


class StartupClock:
    """Measures one rank's start; begins to count when it is made."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._parts: dict[str, float] = {"config": 0.0, "buffer": 0.0}
        self._runtimes: list[RuntimeStartup] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the block as `name`: "config" or "buffer"."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._parts[name] += time.perf_counter() - started

    @contextmanager
    def runtime(self, layout: str) -> Iterator[RuntimeStartup]:
        """Time the building of one runtime inside the block, phase by phase.

        Raises StartupError when vLLM has no method of a name in PHASES.
        """
        seen = RuntimeStartup(layout=str(layout))
        before, started = device_used_bytes(), time.perf_counter()
        undo = _watch(seen)
        try:
            yield seen
        finally:
            for restore in undo:
                restore()
        seen.total_s = time.perf_counter() - started
        seen.warmup_s = max(0.0, seen.warmup_s - seen.capture_s)  # capture is called by the warm-up
        parts = seen.groups_s + seen.load_s + seen.profile_s + seen.kv_s + seen.warmup_s + seen.capture_s
        seen.other_s = max(0.0, seen.total_s - parts)
        seen.grown_bytes = max(0, device_used_bytes() - before)
        self._runtimes.append(seen)

    def report(self, rank: int) -> Startup:
        """What was measured, from the making of this clock until now."""
        total = time.perf_counter() - self._started
        known = sum(self._parts.values()) + sum(runtime.total_s for runtime in self._runtimes)
        return Startup(
            rank=rank,
            config_s=self._parts["config"],
            buffer_s=self._parts["buffer"],
            other_s=max(0.0, total - known),
            total_s=total,
            runtimes=list(self._runtimes),
        )


def device_used_bytes() -> int:
    """Bytes in use on this rank's GPU, by whatever process; 0 without one."""
    import torch

    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info(int(os.environ.get("LOCAL_RANK", "0")))
    return int(total - free)


def moe_config_folder() -> Path:
    """The folder of tuned kernel configurations that comes with the engine; for VLLM_TUNED_CONFIG_FOLDER."""
    return Path(__file__).resolve().parent / "moe_configs"


def _watch(seen: RuntimeStartup) -> list[Callable[[], None]]:
    """Time the worker methods of PHASES and graph capture; returns what undoes it."""
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    workers = [Worker]
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        workers.append(CPUWorker)  # overrides some of the methods and inherits the others
    undo = []
    for name, field_name in PHASES.items():
        owners = [owner for owner in workers if name in vars(owner)]
        if not owners:
            raise StartupError(f"vLLM's workers have no {name}: is another vLLM version installed?")
        clock = _PhaseClock(seen, field_name)
        undo += [_replace(owner, name, clock) for owner in owners]
    undo.append(_replace(GPUModelRunner, "capture_model", _PhaseClock(seen, "capture_s")))
    return undo


class _PhaseClock:
    """Adds the seconds of outermost calls to one field: an override that calls its base counts once."""

    def __init__(self, seen: RuntimeStartup, field_name: str) -> None:
        self._seen, self._field, self._depth = seen, field_name, 0

    def wrap(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            self._depth += 1
            try:
                result = method(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    spent = getattr(self._seen, self._field) + time.perf_counter() - started
                    setattr(self._seen, self._field, spent)
            self._note(result)
            return result

        return timed

    def _note(self, result: Any) -> None:
        if self._field == "capture_s":
            self._seen.graph_bytes = max(0, int(result or 0))
        elif self._field == "warmup_s":
            self._seen.compile_s = float(getattr(result, "language_model", 0.0))


def _replace(owner: type, name: str, clock: _PhaseClock) -> Callable[[], None]:
    original = vars(owner)[name]
    setattr(owner, name, clock.wrap(original))
    return lambda: setattr(owner, name, original)
