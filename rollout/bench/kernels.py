"""`moebius bench kernels`: device time of a decode iteration by kernel, ours beside stock. Tells where a difference is.

Every engine decodes the same requests twice, to a length and to twice that length, under torch's profiler. The
difference of both is so many decode iterations and nothing else: no prefill, no admission.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from moebius.engine.config import PolicyConfig
from moebius.rollout.bench.engines import Engines
from moebius.rollout.bench.rank import Ours, Stock
from moebius.rollout.bench.results import Curve, Picture, Results, make_results
from moebius.rollout.bench.sweep import STATIC, lanes_of, pairs, refusal
from moebius.rollout.bench.traces import Workload
from moebius.rollout.errors import BadInput, MoebiusError

Kernels = dict[str, tuple[float, int]]  # by name: microseconds, calls
_NAME = 110  # characters of a kernel's name that are kept: templates make them endless
_TRACED = 16  # tokens per request in a trace: enough to see an iteration, few enough for a viewer


class KernelsOptions(BaseModel):
    """What to measure."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    batches: list[int] = Field(default=[8, 512], min_length=1)
    context: int = Field(64, ge=1, description="Prompt tokens of every request.")
    iterations: int = Field(32, ge=1, description="Decode iterations that are counted.")
    top: int = Field(12, ge=1, description="Largest differences that are told for each pair of engines.")
    traces: str | None = Field(None, description="Folder for a Chrome trace per engine, layout, batch and rank.")
    seed: int = 0


def record(engine: Ours | Stock, workload: Workload, policy: PolicyConfig) -> Kernels:
    """Run `workload` once; kernels of this rank's device (on CPU: operators), called through `Fleet`. A collective."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    cuda = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as recorded:
        engine.run(workload, policy)
        if cuda:
            torch.cuda.synchronize()
    found: Kernels = {}
    for event in recorded.key_averages():
        spent = event.self_device_time_total if cuda else event.self_cpu_time_total
        if spent > 0:
            us, calls = found.get(event.key[:_NAME], (0.0, 0))
            found[event.key[:_NAME]] = (us + float(spent), calls + int(event.count))
    return found


def trace(engine: Ours | Stock, workload: Workload, policy: PolicyConfig, path: str) -> None:
    """Run `workload` once more and write what host and device did to `path` + `.<rank>.json.gz`. A collective."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    cuda = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as recorded:
        engine.run(workload, policy)
        if cuda:
            torch.cuda.synchronize()
    recorded.export_chrome_trace(f"{path}.{os.environ['RANK']}.json.gz")


def per_iteration(short: Kernels, long: Kernels, iterations: int) -> dict[str, tuple[float, float]]:
    """Microseconds and calls of one iteration by kernel, of a run that has `iterations` more than another."""
    rows = {}
    for name in short.keys() | long.keys():
        (us, calls), (less_us, less_calls) = long.get(name, (0.0, 0)), short.get(name, (0.0, 0))
        if calls != less_calls:  # what only begins or ends a run is the same in both
            rows[name] = ((us - less_us) / iterations, (calls - less_calls) / iterations)
    return rows


def differences(ours: dict[str, tuple[float, float]], other: dict[str, tuple[float, float]], top: int) -> list[str]:
    """The kernels whose time differs most, in words, largest first."""
    none = (0.0, 0.0)
    by_size = sorted(
        ours.keys() | other.keys(), key=lambda name: -abs(ours.get(name, none)[0] - other.get(name, none)[0])
    )
    told = []
    for name in by_size[:top]:
        (us, calls), (other_us, other_calls) = ours.get(name, none), other.get(name, none)
        told.append(f"{us - other_us:+.1f} us ({us:.1f} in {calls:.1f}, {other_us:.1f} in {other_calls:.1f}): {name}")
    return told


def run_kernels(engines: Engines, options: KernelsOptions, command: str = "bench kernels") -> Results:
    """Profile all lanes at all batches that fit. Raises BadInput where an engine keeps its workers to itself."""
    if any(spec.kind == "stock_mp" for spec in engines.specs):
        raise BadInput("bench kernels looks into rank processes, which stock_mp keeps to itself: take stock_tp")
    lanes, notes = lanes_of(engines), engines.notes()
    vocab = min(engines.capacity(lane.engine).vocab for lane in lanes)
    found: dict[str, dict[int, dict[str, tuple[float, float]]]] = {lane.name: {} for lane in lanes}
    for batch in sorted(set(options.batches)):
        for lane in lanes:
            tokens, capacity = 2 * options.iterations, engines.capacity(lane.engine)
            reason = refusal(batch, options.context + tokens, lane.layout, engines.setup.ranks, capacity)
            if reason is not None:
                notes.append(f"{lane.name}, batch {batch}: left out, it takes {reason}")
                continue
            fleet, runs = engines.fleet(lane.engine), []
            for length in (2, options.iterations, tokens):  # the first warms up
                load = Workload.uniform(batch, options.context, length, seed=options.seed, vocab=vocab)
                runs.append(fleet.call(record, load, STATIC[lane.layout])[0])
            if options.traces is not None:
                Path(options.traces).mkdir(parents=True, exist_ok=True)
                name = re.sub(r"[^A-Za-z0-9_.+-]", "_", lane.name)
                few = Workload.uniform(batch, options.context, _TRACED, seed=options.seed, vocab=vocab)
                fleet.call(trace, few, STATIC[lane.layout], f"{options.traces}/{name}_{batch}")
            rows = found[lane.name][batch] = per_iteration(runs[1], runs[2], options.iterations)
            engines.say(f"batch {batch} {lane.name}: {sum(us for us, _ in rows.values()):.0f} us of kernels")
    if not any(found.values()):
        raise MoebiusError("nothing was measured: " + "; ".join(notes))
    numbers: dict[str, float] = {}
    for name, by_batch in found.items():
        for batch, rows in by_batch.items():
            numbers[f"{name}_{batch}_device_ms"] = sum(us for us, _ in rows.values()) / 1e3
            numbers[f"{name}_{batch}_launches"] = sum(calls for _, calls in rows.values())
    for ours, other, _ in pairs(engines):
        for batch in sorted(set(found[ours]) & set(found[other])):
            told = differences(found[ours][batch], found[other][batch], options.top)
            notes += [f"batch {batch}, {ours} less {other}: {line}" for line in told]
    return make_results(
        "kernels",
        command=command,
        options=options.model_dump() | {"setup": engines.setup.model_dump(mode="json")},
        results=numbers,
        curves=[_curve(name, by_batch) for name, by_batch in found.items() if by_batch],
        picture=Picture(
            title=f"Kernels of a decode iteration, rank 0 of {engines.setup.ranks}",
            x_label="global batch",
            y_label="ms of device time",
        ),
        series={"kernels": {name: _rows(by_batch) for name, by_batch in found.items()}},
        notes=notes,
    )


def _rows(by_batch: dict[int, dict[str, tuple[float, float]]]) -> dict[int, list[dict[str, Any]]]:
    return {
        batch: [
            {"kernel": name, "us": round(us, 2), "calls": round(calls, 2)}
            for name, (us, calls) in sorted(rows.items(), key=lambda row: -row[1][0])
        ]
        for batch, rows in by_batch.items()
    }


def _curve(name: str, by_batch: dict[int, dict[str, tuple[float, float]]]) -> Curve:
    batches = sorted(by_batch)
    return Curve(
        name=name,
        x=[float(batch) for batch in batches],
        y=[sum(us for us, _ in by_batch[batch].values()) / 1e3 for batch in batches],
    )
