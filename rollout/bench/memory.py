"""`moebius bench memory`: memory per rank of ours against static EP and static TP, each alone on the GPUs, at rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from moebius.rollout.bench import probes, rank
from moebius.rollout.bench.engines import BenchSetup, Engines, need_cuda, visible_devices
from moebius.rollout.bench.results import Curve, Picture, Results, gpu_memory_used, make_results
from moebius.rollout.bench.sweep import STATIC
from moebius.rollout.bench.traces import Workload
from moebius.rollout.errors import BadInput

ENGINES = ("moebius", "stock_ep", "stock_tp")
PARTS = ("weights_and_kv", "allocated", "reserved", "driver_used")


def run_memory(
    setup: BenchSetup,
    logs: Path,
    names: Sequence[str] = ENGINES,
    *,
    say: Callable[[str], None] = print,
    command: str = "bench memory",
) -> Results:
    """Start each engine alone, let it decode a little in its layouts, and look at its memory."""
    need_cuda(setup, "memory", "it compares GPU memory")
    if "stock_mp" in names:
        raise BadInput("bench memory looks into rank processes, which stock_mp keeps to itself: take stock_tp")
    before = _used_on_our_gpus(setup.ranks)
    figures: dict[str, dict[str, float]] = {}
    device_gib = 0.0
    for name in names:
        with Engines(setup, [name], logs, say) as engines:
            (spec,) = engines.specs
            load = Workload.uniform(4 * setup.ranks, 64, 16, seed=0, vocab=engines.capacity(name).vocab)
            for layout in spec.layouts:
                engines.fleet(name).call(rank.run, load, STATIC[layout])
            of_ranks = engines.fleet(name).call(probes.memory)
        figures[name] = {part: max(of_rank[part] for of_rank in of_ranks) for part in PARTS}
        device_gib = of_ranks[0]["device"]
        say(f"{name}: " + ", ".join(f"{part} {gib:.2f} GiB" for part, gib in figures[name].items()))
    results = summarise(setup, figures, device_gib, command)
    if max(before, default=0.0) > 1.0:
        results.notes.append(
            f"other processes held up to {max(before):.1f} GiB of a GPU before: driver_used holds them"
        )
    return results


def _used_on_our_gpus(ranks: int) -> list[float]:
    used = gpu_memory_used()
    indices = [int(device) for device in visible_devices()[:ranks] if device.isdigit()]
    return [used[index] for index in indices if index < len(used)]


def summarise(setup: BenchSetup, figures: dict[str, dict[str, float]], device_gib: float, command: str) -> Results:
    """Figures in GiB per rank (the fullest rank), and the differences of ours to both stock layouts.

    `memory_overhead_pct` is ours less the larger stock layout, as a share of the `device_gib` that a GPU has; with
    other settings of ours, as `moebius:attention_weights=shared`, their names stand before it.
    """
    numbers = {f"{name}_{part}_gib": gib for name, parts in figures.items() for part, gib in parts.items()}
    numbers["device_gib"] = device_gib
    ours = figures.get("moebius")
    for layout in ("ep", "tp"):
        stock = figures.get(f"stock_{layout}")
        if ours and stock:
            for part in ("driver_used", "weights_and_kv"):
                numbers[f"moebius_over_{layout}_{part}_gib"] = ours[part] - stock[part]
            numbers[f"moebius_over_{layout}_pct"] = 100 * (ours["driver_used"] / stock["driver_used"] - 1)
    if {"moebius", "stock_ep", "stock_tp"} <= figures.keys():
        larger = max(figures[name]["driver_used"] for name in ("stock_ep", "stock_tp"))
        for name in (name for name in figures if name.startswith("moebius")):
            share = 100 * (figures[name]["driver_used"] - larger) / device_gib
            numbers["memory_overhead_pct" if name == "moebius" else f"{name}_memory_overhead_pct"] = share
    return make_results(
        "memory",
        command=command,
        options={"setup": setup.model_dump(mode="json")},
        results=numbers,
        curves=[
            Curve(name=part, x=list(figures), y=[parts[part] for parts in figures.values()])
            for part in next(iter(figures.values()))
        ],
        picture=Picture(kind="bars", title=f"Memory per rank at rest, {setup.ranks} ranks", y_label="GiB"),
        series={"gib": figures},
        notes=[f"every engine has {setup.engine.kv_cache_bytes / 2**30:.1f} GiB of KV pages; ours a spare slot more"],
    )
