"""`moebius bench rollout`: one trace of output lengths under every static layout and under ours with a switch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from moebius.engine.config import PolicyConfig
from moebius.rollout.bench import probes, rank, traces
from moebius.rollout.bench.engines import Engines
from moebius.rollout.bench.fleet import FleetError
from moebius.rollout.bench.rank import Series
from moebius.rollout.bench.results import Curve, Picture, Results, make_results
from moebius.rollout.bench.stats import LiveCurve, best_switch, ideal_ms, mean_interval, split_prefill
from moebius.rollout.bench.sweep import STATIC
from moebius.rollout.bench.traces import Workload
from moebius.rollout.errors import BadInput, MoebiusError

_LEAST_GAIN = 0.01  # below an ideal gain of 1 %, the share of it that was realised says nothing
MOVING = ("drain", "reshard", "kv", "wait")  # launch moves or wait for them; the others are Python and collectives


class RolloutOptions(BaseModel):
    """What to replay."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    trace: Literal["deepmath", "long-tail", "captured"] = "deepmath"
    lengths: list[int] = Field(default_factory=list, description="For `captured`: output tokens of every request.")
    requests: int = Field(1024, ge=2)
    prompt: int = Field(traces.DEEPMATH_PROMPT, ge=1, description="Prompt tokens of every request.")
    scale: float = Field(1.0, gt=0, description="Factor on the lengths of the deepmath trace.")
    cap: int = Field(traces.DEEPMATH_CAP, ge=1, description="Longest output of the deepmath trace.")
    body: int = Field(400, ge=1, description="long-tail: output tokens of most requests.")
    tail: int = Field(2400, ge=1, description="long-tail: output tokens of the stragglers.")
    stragglers: int | None = Field(None, ge=1, description="long-tail: how many; None: one in 16.")
    sweep: dict[str, list[tuple[int, float]]] | None = Field(
        None, description="long-tail: curves (batch, ms) of EP and TP to choose tail and stragglers by."
    )
    threshold: int | None = Field(
        None, ge=0, description="Switch at this many live requests; None: the best one by the first round's curves."
    )
    repeats: int = Field(3, ge=1)
    weights: bool = Field(True, description="Also time a full weight update of ours and of stock.")
    seed: int = 0


@dataclass(slots=True)
class Run:
    """One replay over all ranks."""

    seconds: float  # without what belongs to no step: the return of the experts, and the switch of static TP
    ranks: list[Series]


def make_lengths(options: RolloutOptions, fits: Callable[[Sequence[int]], bool]) -> list[int]:
    """Output tokens of every request; a trace chosen by curves is one that `fits` takes."""
    match options.trace:
        case "deepmath":
            return traces.deepmath_like(options.requests, seed=options.seed, scale=options.scale, cap=options.cap)
        case "captured":
            if not options.lengths:
                raise BadInput("a captured trace needs its lengths: give --lengths FILE")
            return options.lengths
    if options.sweep is not None:
        ep, tp = (LiveCurve(options.sweep[layout]) for layout in ("EP", "TP"))
        return traces.tuned_long_tail(options.requests, ep, tp, seed=options.seed, body=options.body, fits=fits)[0]
    stragglers = options.stragglers or max(1, options.requests // 16)
    return traces.long_tail(
        options.requests, seed=options.seed, body=options.body, tail=options.tail, stragglers=stragglers
    )


def curves_of_sweep(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Our engine's curves from a sweep's results. Raises BadInput when the file has none."""
    try:
        results = Results.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BadInput(f"{path}: not the results of a benchmark: {error}") from error
    by_name = {curve.name: curve for curve in results.curves}
    found = {}
    for layout in ("EP", "TP"):
        curve = by_name.get(f"moebius_{layout.lower()}")
        if curve is None:
            raise BadInput(f"{path}: no curve of ours in {layout}; run `moebius bench sweep` with the engine moebius")
        found[layout] = [(round(float(x)), y) for x, y in zip(curve.x, curve.y, strict=True)]
    return found


def run_rollout(engines: Engines, options: RolloutOptions, command: str = "bench rollout") -> Results:
    """Replay the trace under every engine in turn, several times."""
    if "moebius" not in {spec.name for spec in engines.specs}:
        raise BadInput("bench rollout needs the engine moebius; add it to --engines")
    longest, most = _room(engines)
    lengths = make_lengths(
        options, lambda some: options.prompt + max(some) <= longest and traces.peak_tokens(some, options.prompt) <= most
    )
    if options.prompt + max(lengths) > longest:
        raise BadInput(
            f"the trace needs {options.prompt + max(lengths)} tokens per request, the engines take {longest}; raise "
            "engine.max_model_len, or lower --cap, --tail or --scale"
        )
    peak = traces.peak_tokens(lengths, options.prompt)
    vocab = min(engines.capacity(spec.name).vocab for spec in engines.specs)
    # Kernels that are compiled or tuned on first use; also tells whether all engines work before the long runs.
    warm = Workload((options.prompt,) * len(lengths), (2,) * len(lengths), options.seed - 1, vocab)
    for spec in engines.specs:
        for layout in spec.layouts:
            _replay(engines, spec.name, warm, STATIC[layout])
    short = Workload(warm.prompt_tokens, tuple(4 if i % 2 else 16 for i in range(len(lengths))), warm.seed, vocab)
    _replay(engines, "moebius", short, PolicyConfig(kind="rollout", threshold=-(-len(lengths) // 2)))
    runs: dict[str, list[Run]] = {}
    threshold = options.threshold
    for repeat in range(options.repeats):
        load = Workload((options.prompt,) * len(lengths), tuple(lengths), options.seed + repeat, vocab)
        for spec in engines.specs:
            for layout in spec.layouts:
                name = f"static_{layout.lower()}" if spec.name == "moebius" else spec.name
                _record(runs, name, _replay(engines, spec.name, load, STATIC[layout]), engines)
        if threshold is None:
            threshold = _best_threshold(runs)
            engines.say(f"switching at {threshold} live requests, the best by the first round")
        if threshold:
            switched = _replay(engines, "moebius", load, PolicyConfig(kind="rollout", threshold=threshold))
            _record(runs, "switched", switched, engines)
    updates, notes = _weight_updates(engines) if options.weights else ({}, [])
    if peak > most:
        notes.append(f"the trace holds up to {peak} tokens of KV, engines have room for {most}: requests had to wait")
    return _summarise(engines, options, lengths, runs, threshold, updates, notes, command)


def _room(engines: Engines) -> tuple[int, int]:
    """Longest request, and about how many tokens of KV all engines hold in every layout (a tenth is lost in pages)."""
    ranks = engines.setup.ranks
    capacities = [engines.capacity(spec.name) for spec in engines.specs]
    tokens = [
        pages * capacity.page_tokens * (ranks if layout == "EP" else 1)
        for capacity in capacities
        for layout, pages in capacity.pages.items()
    ]
    return min(capacity.max_model_len for capacity in capacities), round(0.9 * min(tokens))


def _replay(engines: Engines, name: str, load: Workload, policy: PolicyConfig) -> Run:
    fleet = engines.fleet(name)
    if name.startswith("moebius"):  # experts left in TP by an earlier run go back now, as a weight update would do
        fleet.call(rank.run, Workload((1,), (1,), load.seed, load.vocab), STATIC["EP"])
    ranks: list[Series] = fleet.call(rank.run, load, policy)
    if policy.kind == "static_tp" and name.startswith("moebius") and not ranks[0].switches:
        raise MoebiusError(f"{name} did not get into TP: {ranks[0].cancelled[-1:] or 'the step was too short'}")
    static_tp_switch = max(_pause_s(series) for series in ranks) if policy.kind == "static_tp" else 0.0
    seconds = max(series.total_s - series.return_reshard_ms / 1e3 for series in ranks) - static_tp_switch
    return Run(seconds, ranks)


def _pause_s(series: Series) -> float:
    return sum(switch["pause_ms"] for switch in series.switches) / 1e3


def _record(runs: dict[str, list[Run]], name: str, run: Run, engines: Engines) -> None:
    runs.setdefault(name, []).append(run)
    engines.say(f"repeat {len(runs[name]) - 1} {name}: {run.seconds:.3f} s")


def _decode(run: Run) -> list[tuple[int, float]]:
    """(live requests, ms) of the iterations after the prefills; never the first, which holds the admission."""
    series = run.ranks[0]
    start = max(1, split_prefill(series.tokens, series.live))
    return [(live, ms) for live, ms in zip(series.live[start:], series.ms()[start:], strict=True) if live > 0]


def _curves(runs: dict[str, list[Run]]) -> tuple[LiveCurve, LiveCurve]:
    """Ours: EP and TP, over all repeats so far."""
    curves = []
    for name in ("static_ep", "static_tp"):
        curves.append(LiveCurve([pair for run in runs[name] for pair in _decode(run)]))
    return curves[0], curves[1]


def _best_threshold(runs: dict[str, list[Run]]) -> int:
    return best_switch([live for live, _ in _decode(runs["static_ep"][0])], *_curves(runs))[0]


def _weight_updates(engines: Engines) -> tuple[dict[str, float], list[str]]:
    """Seconds of a full weight update, the slowest rank's, of every engine whose model is in the rank's process.

    A failure becomes a note: the replays before it took long and are whole.
    """
    seconds, notes = {}, []
    for spec in engines.specs:
        if spec.kind == "stock_mp":
            continue
        try:
            seconds[spec.name] = max(engines.fleet(spec.name).call(probes.full_update_s))
        except FleetError as error:
            notes.append(f"weight update not measured: {error}")
    return seconds, notes


def _summarise(
    engines: Engines,
    options: RolloutOptions,
    lengths: list[int],
    runs: dict[str, list[Run]],
    threshold: int | None,
    updates: dict[str, float],
    notes: list[str],
    command: str,
) -> Results:
    numbers: dict[str, float] = {"requests": len(lengths), "output_tokens": sum(lengths), "threshold": threshold or 0}
    notes = engines.notes() + notes
    for name, of_name in runs.items():
        mean, low, high = mean_interval([run.seconds for run in of_name])
        numbers |= {f"{name}_s": mean, f"{name}_s_ci_low": low, f"{name}_s_ci_high": high}
    ideal = _ideal(runs)
    numbers |= ideal
    if "switched" in runs:
        numbers |= _gains(runs, ideal) | _switches(runs["switched"], notes)
        if "ideal_gain_realised_pct" not in numbers:
            notes.append("the ideal gain of a switch is below 1 % here, so no share of it is stated")
    else:
        notes.append("no run with a switch: by the first round's curves, TP is nowhere faster than EP")
    if "moebius" in updates:
        numbers["weight_update_s"] = updates["moebius"]
    stock_updates = [seconds for name, seconds in updates.items() if name.startswith("stock")]
    if stock_updates:
        numbers["stock_reload_s"] = min(stock_updates)
    ep, tp = _curves(runs)
    names = list(runs)
    intervals = [mean_interval([run.seconds for run in runs[name]]) for name in names]
    return make_results(
        "rollout",
        command=command,
        options=options.model_dump(exclude={"lengths"}) | {"setup": engines.setup.model_dump(mode="json")},
        results=numbers,
        curves=[
            Curve(
                name="seconds",
                x=list(names),
                y=[mean for mean, _, _ in intervals],
                low=[low for _, low, _ in intervals],
                high=[high for _, _, high in intervals],
            )
        ],
        picture=Picture(
            kind="bars",
            title=f"Rollout of {len(lengths)} requests, trace {options.trace}, {engines.setup.ranks} ranks",
            y_label="seconds (mean, 95 % interval)",
        ),
        series={
            "lengths": lengths,
            "seconds": {name: [run.seconds for run in of_name] for name, of_name in runs.items()},
            "ms_by_live": {"EP": ep.points(), "TP": tp.points()},
            "switches": [run.ranks[0].switches for run in runs.get("switched", [])],
            "updates_s": updates,
        },
        notes=notes,
    )


def _ideal(runs: dict[str, list[Run]]) -> dict[str, float]:
    """The time with each iteration in its faster layout, and with one free switch, by our own static runs.

    What is not decoding is taken from the layout in which it was shorter, for one switch from EP, where it begins.
    """
    ep, tp = _curves(runs)
    live = [count for count, _ in _decode(runs["static_ep"][0])]
    static_ep = statistics.fmean(run.seconds for run in runs["static_ep"])
    static_tp = statistics.fmean(run.seconds for run in runs["static_tp"])
    # Prefills, admission and the end of the step: what the static runs took beyond their decode iterations.
    rest_ep_s = static_ep - sum(ep.at(count) for count in live) / 1e3
    rest_tp_s = static_tp - sum(tp.at(count) for count, _ in _decode(runs["static_tp"][0])) / 1e3
    best_threshold, best_ms = best_switch(live, ep, tp)
    ideal_s = min(rest_ep_s, rest_tp_s) + ideal_ms(live, ep, tp) / 1e3
    better = min(static_ep, static_tp)
    return {
        "ideal_s": ideal_s,
        "ideal_ratio": better / ideal_s,
        "best_single_switch_s": rest_ep_s + best_ms / 1e3,
        "best_threshold": best_threshold,
    }


def _gains(runs: dict[str, list[Run]], ideal: dict[str, float]) -> dict[str, float]:
    """Ratios against the better static layout, measured next to the switched run in the same repeat."""
    switched = [run.seconds for run in runs["switched"]]
    static = {name: [run.seconds for run in of_name] for name, of_name in runs.items() if name != "switched"}
    better = min(static, key=lambda name: statistics.fmean(static[name]))
    ratios = [a / b for a, b in zip(static[better], switched, strict=True)]
    mean, low, high = mean_interval(ratios)
    numbers = {"ratio_vs_better_static": mean, "ratio_ci_low": low, "ratio_ci_high": high}
    stock = [statistics.fmean(seconds) for name, seconds in static.items() if name.startswith("stock")]
    if stock:
        numbers["ratio_vs_better_stock"] = min(stock) / statistics.fmean(switched)
    own = min(statistics.fmean(static[name]) for name in ("static_ep", "static_tp"))
    numbers["ratio_vs_better_own_static"] = own / statistics.fmean(switched)
    if ideal["ideal_ratio"] >= 1 + _LEAST_GAIN:
        gained = own - statistics.fmean(switched)
        numbers["ideal_gain_realised_pct"] = 100 * gained / (own - ideal["ideal_s"])
    return numbers


def _switches(runs: Sequence[Run], notes: list[str]) -> dict[str, float]:
    """Means over repeats of the slowest rank's phases."""
    per_run: list[dict[str, float]] = []
    for run in runs:
        if not run.ranks[0].switches:
            why = run.ranks[0].cancelled[-1:] or ["it ended before its live requests fell to the threshold"]
            notes.append(f"a run that should have switched did not: {why[0]}")
            continue
        of_ranks = [series.switches[0] for series in run.ranks]
        phases = {name: max(s["phases_ms"].get(name, 0.0) for s in of_ranks) for name in of_ranks[0]["phases_ms"]}
        python = max(sum(ms for name, ms in s["phases_ms"].items() if name not in MOVING) for s in of_ranks)
        per_run.append(
            {f"switch_{name}_ms": ms for name, ms in phases.items()}
            | {
                "switch_ms": max(s["pause_ms"] for s in of_ranks),
                "switch_python_ms": python,
                "activate_ms": phases.get("activate", 0.0),
                "live_at_switch": of_ranks[0]["live"],
            }
        )
    if not per_run:
        return {}
    keys: Any = {key: None for row in per_run for key in row}
    return {key: statistics.fmean(row.get(key, 0.0) for row in per_run) for key in keys}
