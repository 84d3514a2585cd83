"""What `moebius bench switch` runs inside a rank process of our engine. Called through `Fleet`."""

from __future__ import annotations

import gc
import json
import os
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moebius.engine.config import PolicyConfig
from moebius.engine.layout import Layout
from moebius.engine.policy import Decision, LoggedDecision, Observation, StepStart, SwitchPolicy
from moebius.rollout.bench.rank import Ours
from moebius.rollout.bench.traces import Workload


class Alternating(SwitchPolicy):
    """Switches to the other layout before each of the given iterations of a step, the first time from EP.

    Those to TP are prepared `prepare` iterations before; with 0 they are not.
    """

    def __init__(self, iterations: list[int], prepare: int = 0) -> None:
        super().__init__(PolicyConfig(kind="scheduled", costs=None))
        self._iterations, self._prepare = sorted(iterations), prepare
        self._left: list[int] = []

    def begin_step(self, start: StepStart | None = None) -> None:
        """See `SwitchPolicy.begin_step`."""
        super().begin_step(start)
        self._left = list(self._iterations)

    def decide(self, seen: Observation) -> Decision:
        """See `SwitchPolicy.decide`."""
        if not seen.live or not self._left or seen.iteration < self._left[0]:
            return Decision(None, "between two switches")
        decision = Decision(Layout.TP if seen.layout is Layout.EP else Layout.EP, "alternating")
        self.log.append(LoggedDecision(decision))
        self._last = decision
        return decision

    def expects_tp(self, seen: Observation) -> bool:
        """See `SwitchPolicy.expects_tp`."""
        near = bool(self._left) and seen.iteration >= self._left[0] - self._prepare
        return self._prepare > 0 and seen.layout is Layout.EP and near

    def switched(self) -> None:
        """See `SwitchPolicy.switched`."""
        super().switched()
        self._left.pop(0)

    def cancelled(self, iteration: int) -> None:
        """See `SwitchPolicy.cancelled`: that switch is given up."""
        super().cancelled(iteration)
        self._left.pop(0)


@dataclass(slots=True)
class LiveRun:
    """One step of one rank; `switches` are SwitchRecords as plain data."""

    switches: list[dict[str, Any]]
    cancelled: list[str]
    ended: list[tuple[int, int, str]]  # of the requests that ended here: index, output tokens, finish reason
    prepared_at: list[int]  # iterations before which expert bytes began to be sent ahead
    iterations: list[tuple[str, int, float]]  # layout, tokens over all ranks, ms


@dataclass(slots=True)
class Held:
    """What this process holds: bytes in use on its device (on CPU its own resident set), resident set, descriptors."""

    device_bytes: int
    torch_bytes: int
    rss_bytes: int
    fds: int


@dataclass(slots=True)
class Shapes:
    """What the formulas of `moebius.rollout.bench.traffic` ask for."""

    ranks: int
    layers: int
    experts: int
    hidden: int
    intermediate: int
    itemsize: int
    kv_layers: int
    kv_heads: int
    page_tokens: int
    head_bytes: int  # of one head of one page
    device: str
    mover: str  # how the engine's own switches move bytes
    prepares: str | None  # why switches cannot be prepared; None: they can
    heads: list[tuple[int, int]] = field(default_factory=list)


def alternating_step(
    engine: Ours, workload: Workload, iterations: list[int], prepare: int, layers: int | None = None
) -> LiveRun:
    """One step that switches to and fro with whatever is live, see `Alternating`; a collective.

    Of prepared switches at most `layers` are staged; None: as many as the engine's settings say.
    """
    kept, engine.engine.policy = engine.engine.policy, Alternating(iterations, prepare)
    staging = engine.engine.switcher.staging
    most, staging.most = staging.most, min(staging.most, layers or staging.most)
    try:
        outcome = engine.step(workload)
    finally:
        engine.engine.policy, staging.most = kept, most
    return LiveRun(
        switches=[asdict(record) for record in outcome.stats.switches],
        cancelled=[cancelled.reason for cancelled in outcome.stats.cancelled],
        ended=[(r.key.prompt, len(r.token_ids), r.finish_reason) for r in outcome.results],
        prepared_at=list(outcome.stats.prepared_at),
        iterations=[(i.layout, i.tokens, i.ms) for i in outcome.stats.iterations],
    )


def drained_switches(engine: Ours, repeats: int) -> list[tuple[str, float]]:
    """(layout, ms) of switches without any request: experts and pointers. A collective; the experts must be in EP.

    The first one each way is left out.
    """
    import torch
    import torch.distributed as dist

    ours = engine.engine
    times: list[tuple[str, float]] = []
    with torch.inference_mode():
        for repeat in range(repeats + 1):
            for to in (Layout.TP, Layout.EP):
                _synchronize()
                dist.barrier(ours.switcher.cpu_group)
                started = time.perf_counter()
                ours.switcher.reshard(to)
                ours.pair.activate(to)
                _synchronize()
                if repeat:
                    times.append((to.value, 1e3 * (time.perf_counter() - started)))
    return times


def movers(engine: Ours, tokens: int, repeats: int) -> tuple[list[dict[str, Any]], int]:
    """Speeds of all movers on the engine's own slots, and how many tokens of KV were moved; a collective.

    The experts must be in EP, and are there again afterwards.
    """
    from vllm.distributed.parallel_state import get_world_group

    from moebius.rollout.bench.mover import measure_layers
    from moebius.rollout.bench.mover_layers import EngineLayers

    ours = engine.engine
    layers = EngineLayers(ours.pair, ours.world_size, tokens)
    device_group = get_world_group().device_group
    speeds = measure_layers(layers, ours.switcher.cpu_group, device_group=device_group, repeats=repeats)
    return [asdict(speed) for speed in speeds], layers.tokens


def shapes(engine: Ours) -> Shapes:
    """Shapes of the model as they lie in the slots."""
    pair, ranks = engine.engine.pair, engine.engine.world_size
    from moebius.kernels.plan import kv_head_ranges

    shape, kv = pair.shape, pair.ep.kv[0]
    mover = engine.engine.switcher.mover
    ways: dict[str, str] = getattr(mover, "ways", {})
    return Shapes(
        ranks=ranks,
        layers=len(pair.ep.expert_modules),
        experts=shape.num_experts,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        itemsize=pair.ep.expert_modules[0].w13_weight.element_size(),
        kv_layers=len(pair.ep.kv),
        kv_heads=shape.num_kv_heads,
        page_tokens=pair.ep.page_size,
        head_bytes=kv.shape[2] * kv.shape[3] * kv.element_size(),
        device=kv.device.type,
        mover=f"direct, {ways['experts'].replace('_', ' ')}" if "experts" in ways else "all to all",
        prepares=engine.engine.switcher.staging.why_not,
        heads=kv_head_ranges(shape.num_kv_heads, ranks),
    )


def held(engine: Ours) -> Held:
    """What the process holds now, garbage collected."""
    import torch

    gc.collect()
    page = os.sysconf("SC_PAGE_SIZE")
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * page
    device, by_torch = resident, 0
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        device, by_torch = total - free, torch.cuda.memory_allocated()
    return Held(device, by_torch, resident, len(os.listdir("/proc/self/fd")))


def profiled_copies(engine: Ours) -> dict[str, int]:
    """Bytes by name of the copies that the profiler saw while one layer's experts were written to all ranks and back.

    By copy engine, so that the device itself counts them; CUDA only, a collective. The experts must be in EP. Nothing
    where ranks cannot map each other's memory.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    from moebius.kernels.direct import DirectMover
    from moebius.kernels.peers import PeerError
    from moebius.rollout.bench.mover_layers import EngineLayers

    ours = engine.engine
    ep, tp = (runtime.expert_modules[0] for runtime in (ours.pair.ep, ours.pair.tp))
    layers = EngineLayers(ours.pair, ours.world_size, 1)
    try:
        mover = DirectMover.connect(layers.memory, ours.switcher.cpu_group)
    except PeerError:  # on every rank alike
        return {}
    mover.warm_up(0, "cuda")
    with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        mover.experts_ep_to_tp(ep.w13_weight, ep.w2_weight, tp.w13_weight, tp.w2_weight)
        mover.experts_tp_to_ep(tp.w13_weight, tp.w2_weight, ep.w13_weight, ep.w2_weight)
        mover.finish()
        torch.cuda.synchronize()
    mover.close()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return copied_bytes(json.loads(path.read_text(encoding="utf-8")))


def copied_bytes(trace: dict[str, Any]) -> dict[str, int]:
    """Bytes of a Chrome trace's device copies, by the copies' names."""
    counted: Counter[str] = Counter()
    for event in trace.get("traceEvents", []):
        if event.get("cat") == "gpu_memcpy":
            counted[event["name"]] += int(event["args"]["bytes"])
    return dict(counted)


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
