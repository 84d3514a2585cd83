"""`moebius bench strawmen`: other ways to change the layout, against our switch.

Restart: a stock engine is started in the other layout. Reload: its weights come from pinned host memory and its CUDA
graphs are captured again. Recapture: our transfer of the experts, and graphs captured again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from moebius.engine.config import PolicyConfig
from moebius.rollout.bench import probes, rank
from moebius.rollout.bench.engines import BenchSetup, Engines, need_cuda
from moebius.rollout.bench.rank import Series
from moebius.rollout.bench.results import Curve, Picture, Results, make_results
from moebius.rollout.bench.stats import Spread
from moebius.rollout.bench.sweep import STATIC
from moebius.rollout.bench.traces import Workload
from moebius.rollout.errors import MoebiusError

Say = Callable[[str], None]


def run_strawmen(
    setup: BenchSetup,
    logs: Path,
    *,
    live: int = 64,
    context: int = 512,
    repeats: int = 3,
    say: Say = print,
    command: str = "bench strawmen",
) -> Results:
    """Measure all ways, one engine at a time."""
    need_cuda(setup, "strawmen", "it captures CUDA graphs and copies to GPUs")
    numbers: dict[str, float] = {}
    for layout in ("ep", "tp"):
        numbers |= _stock(setup, logs, layout, repeats, say)
    with Engines(setup, ["moebius"], logs, say) as engines:
        numbers |= switch_times(engines, live=live, context=context, repeats=repeats)
    return summarise(setup, numbers, {"live": live, "context": context, "repeats": repeats}, command)


def _stock(setup: BenchSetup, logs: Path, layout: str, repeats: int, say: Say) -> dict[str, float]:
    name = f"stock_{layout}"
    with Engines(setup, [name], logs, say):
        pass  # fills the compile caches: a restart would find them full
    with Engines(setup, [name], logs, say) as engines:
        fleet = engines.fleet(name)
        reload_s = [max(fleet.call(probes.reload_from_host_s)) for _ in range(repeats)]
        capture_s = [max(fleet.call(probes.recapture_s)) for _ in range(repeats)]
        return {
            f"restart_{layout}_s": fleet.start_seconds,
            f"host_copy_{layout}_s": Spread.of(reload_s).median,
            f"capture_{layout}_s": Spread.of(capture_s).median,
        }


def switch_times(engines: Engines, *, live: int, context: int, repeats: int) -> dict[str, float]:
    """Medians of our switch EP->TP with `live` requests in mid-decode, and of the experts' way back without any."""
    vocab = engines.capacity("moebius").vocab
    fleet = engines.fleet("moebius")
    # As many requests end before the switch, so that `live` is the number left, all of them prefilled.
    room = max(1, engines.capacity("moebius").max_num_batched_tokens - 2 * live)
    short = 8 + math.ceil(2 * live * context / room)
    lengths = [short] * live + [short + 64] * live
    pauses, reshards, returns, moved = [], [], [], []
    for repeat in range(repeats + 1):  # the first one compiles kernels
        load = Workload((context,) * len(lengths), tuple(lengths), repeat, vocab)
        runs: list[Series] = fleet.call(rank.run, load, PolicyConfig(kind="rollout", threshold=live))
        back: list[Series] = fleet.call(rank.run, Workload((1,), (1,), repeat, vocab), STATIC["EP"])
        if not runs[0].switches:
            why = runs[0].cancelled[-1:] or ["the requests ended before it"]
            raise MoebiusError(f"no switch with {live} live requests: {why[0]}; lower --live or --context")
        if repeat:
            switches = [series.switches[0] for series in runs]
            pauses.append(max(switch["pause_ms"] for switch in switches))
            reshards.append(max(switch["device_ms"]["experts"] for switch in switches))
            returns.append(max(series.return_reshard_ms for series in back))
            moved.append(switches[0]["live"])
    return {
        "switch_ms": Spread.of(pauses).median,
        "switch_reshard_ms": Spread.of(reshards).median,
        "return_ms": Spread.of(returns).median,
        "live_at_switch": Spread.of(moved).median,
    }


def summarise(setup: BenchSetup, numbers: dict[str, float], options: dict[str, int], command: str) -> Results:
    """Put the parts together: seconds of each way into TP, and into EP."""
    for layout, ours in (("tp", "switch_ms"), ("ep", "return_ms")):
        reshard_s = numbers["switch_reshard_ms" if layout == "tp" else "return_ms"] / 1e3
        ways = {
            "host_reload": numbers[f"host_copy_{layout}_s"] + numbers[f"capture_{layout}_s"],
            "recapture": reshard_s + numbers[f"capture_{layout}_s"],
        }
        for way, seconds in ways.items():
            numbers[f"{way}_{layout}_s"] = seconds
        for way in ("restart", *ways):
            numbers[f"{way}_{layout}_over_ours"] = 1e3 * numbers[f"{way}_{layout}_s"] / numbers[ours]
    labels = ["restart", "host reload", "recapture", "ours"]
    curves = [
        Curve(
            name=f"into {layout.upper()}",
            x=list(labels),
            y=[
                *(numbers[f"{label.replace(' ', '_')}_{layout}_s"] for label in labels[:-1]),
                numbers[ours] / 1e3,
            ],
        )
        for layout, ours in (("tp", "switch_ms"), ("ep", "return_ms"))
    ]
    return make_results(
        "strawmen",
        command=command,
        options=options | {"setup": setup.model_dump(mode="json")},
        results=numbers,
        curves=curves,
        picture=Picture(kind="bars", title=f"Changing the layout, {setup.ranks} ranks", y_label="seconds", log_y=True),
        notes=[
            "restart is without reading a checkpoint where load_format is dummy, and with full compile caches",
            "only ours keeps the requests: the other ways would have to prefill them again",
        ],
    )
