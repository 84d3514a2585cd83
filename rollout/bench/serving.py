"""`moebius bench serving`: requests that come and go, under static layouts and with the interactive policy.

The engine `moebius` only. An open loop: requests come when the trace says, however far behind the engine is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from moebius.engine.config import PolicyConfig
from moebius.rollout.bench import rank, serving_numbers, serving_rank, switch, switch_rank
from moebius.rollout.bench.engines import Engines
from moebius.rollout.bench.fleet import Fleet
from moebius.rollout.bench.rank import Capacity
from moebius.rollout.bench.results import Curve, Panel, Picture, Results, make_results
from moebius.rollout.bench.serving_rank import ServingRun
from moebius.rollout.bench.serving_traces import Phase, Traffic, bursty, of_arrivals
from moebius.rollout.bench.stats import Spread
from moebius.rollout.bench.sweep import STATIC, refusal
from moebius.rollout.bench.switch_rank import LiveRun
from moebius.rollout.bench.traces import Workload
from moebius.rollout.errors import BadInput, validate

PolicyName = Literal["static_ep", "static_tp", "interactive"]
_POINTS = 400  # of the pictures' time axis
_WARM = 16  # requests of the runs before, in which kernels are compiled
_SOAK_EVERY = 25  # switches between two weight updates


class ServingOptions(BaseModel):
    """What to replay."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    trace: Literal["bursty", "csv"] = "bursty"
    arrivals: list[tuple[float, int, int]] | None = Field(
        None, min_length=1, description="csv: seconds, prompt and output tokens of each request, scaled already."
    )
    time_scale: float = Field(1.0, gt=0, description="bursty: factor on all times.")
    requests_scale: float = Field(1.0, gt=0, description="bursty: factor on the number of requests.")
    length_scale: float = Field(1.0, gt=0, description="bursty: factor on prompts and outputs.")
    policies: list[PolicyName] = Field(default=["static_ep", "static_tp", "interactive"], min_length=1)
    threshold: int | None = Field(None, ge=0, description="interactive: T_h; None: as the engine is configured.")
    threshold_low: int | None = Field(None, ge=0, description="interactive: T_l; likewise.")
    window: int | None = Field(None, ge=1, description="interactive: W; likewise.")
    cooldown_s: float | None = Field(None, ge=0, description="interactive: C; likewise.")
    repeats: int = Field(1, ge=1, description="Times the trace is replayed under each policy, in turn.")
    soak: int = Field(100, ge=0, description="Live switches of the soak; 0: none.")
    seed: int = 0


def traffic_of(options: ServingOptions) -> Traffic:
    """The requests. Raises BadInput for a csv trace without them."""
    if options.trace == "bursty":
        scales = options.model_dump(include={"time_scale", "requests_scale", "length_scale"})
        return bursty(seed=options.seed, **scales)
    if options.arrivals is None:
        raise BadInput("a csv trace needs its requests: give --file FILE")
    return of_arrivals(options.arrivals, [Phase("all", 0.0, max(options.arrivals[-1][0], 1e-3))])


def policies_of(options: ServingOptions, own: dict[str, Any]) -> dict[str, PolicyConfig]:
    """By name. Raises BadInput when the settings do not go together; `own` are those of the engine."""
    given = options.model_dump(include={"threshold", "threshold_low", "window", "cooldown_s"}, exclude_none=True)
    if options.threshold is not None and options.threshold_low is None:
        given["threshold_low"] = None  # follows from the threshold
    found: dict[str, PolicyConfig] = {}
    for name in dict.fromkeys(options.policies):
        settings = own | {"kind": name} | (given if name == "interactive" else {})
        found[name] = validate(PolicyConfig, settings, f"policy {name}")
    return found


def run_serving(engines: Engines, options: ServingOptions, command: str = "bench serving") -> Results:
    """Replay the trace under every policy. Raises BadInput when it does not fit the engine."""
    if "moebius" not in {spec.name for spec in engines.specs}:
        raise BadInput("bench serving needs the engine moebius; add it to --engines")
    fleet, capacity, say = engines.fleet("moebius"), engines.capacity("moebius"), engines.say
    traffic = traffic_of(options)
    check_fits(traffic, capacity)
    policies = policies_of(options, fleet.call(serving_rank.own_policy)[0])
    notes = engines.notes()
    load = Workload(traffic.prompt_tokens, traffic.lengths, options.seed, capacity.vocab)
    _warm_up(fleet, traffic, capacity, engines.setup.ranks, options.seed)
    runs: dict[str, list[ServingRun]] = {name: [] for name in policies}
    for turn in range(options.repeats):
        for name, config in policies.items():
            # A server that has been quiet is in TP, with no cooldown running. Static ones get to their layout before
            # the first request of the trace.
            home = STATIC["EP" if name == "static_ep" else "TP"]
            fleet.call(rank.run, Workload((1,), (2,), options.seed, capacity.vocab), home)
            run = merged(fleet.call(serving_rank.replay, load, traffic.at, config), traffic)
            runs[name].append(run)
            numbers = serving_numbers.phase_numbers(traffic, run.answered)
            worst = max(part["ttft_p99_s"] for part in numbers.values())
            say(f"round {turn} {name}: {len(run.answered)} requests in {max(a.end for a in run.answered):.1f} s, "
                f"p99 of TTFT at most {worst:.2f} s, {len(_switches(run))} switches")  # fmt: skip
    results = summarise(traffic, runs, policies, capacity, engines.setup.ranks, notes)
    series: dict[str, Any] = {"phases": [asdict(phase) for phase in traffic.phases]}
    if options.soak:
        found, series["held"] = _soak(fleet, traffic, options, capacity, notes, say)
        results |= found
    series |= {
        "requests": {name: [_rows(traffic, run) for run in of_lane] for name, of_lane in runs.items()},
        "switches": {name: [run.switches for run in of_lane] for name, of_lane in runs.items()},
        "cancelled": {name: [run.cancelled for run in of_lane] for name, of_lane in runs.items()},
        "policies": {name: config.model_dump(mode="json") for name, config in policies.items()},
    }
    curves, picture, panels = pictures(traffic, {name: of_lane[0] for name, of_lane in runs.items()})
    given = options.model_dump(exclude={"arrivals"}) | {"setup": engines.setup.model_dump(mode="json")}
    return make_results(
        "serving",
        command=command,
        options=given,
        results=results,
        curves=curves,
        picture=picture,
        panels=panels,
        series=series,
        notes=notes,
    )


def check_fits(traffic: Traffic, capacity: Capacity) -> None:
    """Raise BadInput if a request is too long for the engine."""
    longest = max(p + n for p, n in zip(traffic.prompt_tokens, traffic.lengths, strict=True))
    if longest > capacity.max_model_len:
        raise BadInput(
            f"the trace needs {longest} tokens per request, the engine takes {capacity.max_model_len}; raise "
            "engine.max_model_len, or lower --length-scale"
        )
    layouts: tuple[rank.Layout, ...] = ("EP", "TP")
    for layout in layouts:
        reason = refusal(1, longest, layout, 1, capacity)
        if reason is not None:
            raise BadInput(f"no engine for the longest request of the trace, in {layout} it takes {reason}")


def merged(by_rank: Sequence[ServingRun], traffic: Traffic) -> ServingRun:
    """All ranks' answers by index, with the longest pause of each switch; the rest is rank 0's.

    Raises MoebiusError unless every request was answered once, with its length.
    """
    ended = [(a.index, a.tokens, a.reason) for run in by_rank for a in run.answered]
    switch.check_ends([LiveRun([], [], ended, [], [])], traffic.lengths)
    run = by_rank[0]
    run.answered = sorted((a for one in by_rank for a in one.answered), key=lambda a: a.index)
    for same in zip(*(one.switches for one in by_rank), strict=True):
        same[0]["pause_ms"] = max(record["pause_ms"] for record in same)
    return run


def summarise(
    traffic: Traffic,
    runs: dict[str, list[ServingRun]],
    policies: dict[str, PolicyConfig],
    capacity: Capacity,
    ranks: int,
    notes: list[str],
) -> dict[str, float]:
    """Latencies by phase and policy, of all rounds together; gaps to the better static layout; switches."""
    numbers: dict[str, float] = {"requests": len(traffic.at), "trace_s": traffic.duration}
    by_lane = {}
    for name, of_lane in runs.items():
        answered = [a for run in of_lane for a in run.answered]
        by_lane[name] = serving_numbers.phase_numbers(traffic, answered)
        for phase in traffic.phases:
            for key, value in by_lane[name].get(phase.name, {}).items():
                if key != "requests":
                    numbers[f"{phase.name}_{name}_{key}"] = value
            ms = [one for run in of_lane if (one := serving_numbers.iteration_ms(run, phase)) is not None]
            if ms:
                numbers[f"{phase.name}_{name}_iteration_ms"] = Spread.of(ms).median
        numbers[f"{name}_total_s"] = max(a.end for a in answered)
        most = max(serving_numbers.peak(traffic, run.answered) for run in of_lane)
        numbers[f"{name}_running_max"] = most
        room = capacity.max_num_seqs * (ranks if name == "static_ep" else 1)
        if most > room:
            notes.append(f"{name}: up to {most} requests at once, {room} of which decode (engine.max_num_seqs)")
    counts = next(iter(by_lane.values()))
    numbers |= {
        f"{phase}_requests": part["requests"] / len(next(iter(runs.values()))) for phase, part in counts.items()
    }
    found = serving_numbers.gaps(by_lane)
    numbers |= found
    if found:
        numbers["worst_gap_pct"] = max(found.values())
    if "interactive" in runs:
        numbers |= _switch_numbers(traffic, runs["interactive"], policies["interactive"], notes)
    return numbers


def _switch_numbers(
    traffic: Traffic, runs: Sequence[ServingRun], config: PolicyConfig, notes: list[str]
) -> dict[str, float]:
    switches = [record for run in runs for record in _switches(run)]
    numbers: dict[str, float] = {
        "threshold": config.threshold,
        "threshold_low": config.low,
        "switches": len(switches) / len(runs),
        "switches_refused": sum(len(run.cancelled) for run in runs) / len(runs),
    }
    for to in ("TP", "EP"):
        pauses = [record["pause_ms"] for record in switches if record["to"] == to]
        if pauses:
            numbers[f"pause_to_{to.lower()}_median_ms"] = Spread.of(pauses).median
    if switches:
        numbers["pause_max_ms"] = max(record["pause_ms"] for record in switches)
    else:
        notes.append("interactive: the load never asked for a switch; see threshold, threshold_low and cooldown_s")
    for phase in traffic.phases:
        numbers[f"{phase.name}_in_tp_pct"] = Spread.of([100 * serving_numbers.in_tp(run, phase) for run in runs]).median
    reasons = dict.fromkeys(reason for run in runs for _, reason in run.cancelled)
    notes += [f"a switch was refused: {reason}" for reason in reasons]
    return numbers


def _switches(run: ServingRun) -> list[dict[str, Any]]:
    """Those within the trace; a static layout is reached before."""
    return [record for record in run.switches if record["t"] >= 0]


def _rows(traffic: Traffic, run: ServingRun) -> list[list[float | None]]:
    """By request: seconds of arrival and of waiting for its rank, TTFT in s, TPOT in ms."""
    pairs = serving_numbers.latencies(traffic, run.answered)
    return [
        [round(traffic.at[a.index], 4), round(a.admitted - traffic.at[a.index], 4), round(ttft, 4),
         None if tpot is None else round(tpot, 3)]
        for a, (ttft, tpot) in zip(run.answered, pairs, strict=True)
    ]  # fmt: skip


def pictures(traffic: Traffic, runs: dict[str, ServingRun]) -> tuple[list[Curve], Picture, list[Panel]]:
    """Running requests over time with the time spent in TP shaded, and the arrival rate with the switches marked."""
    end = max(traffic.duration, *(a.end for run in runs.values() for a in run.answered))
    times = [end * i / _POINTS for i in range(_POINTS + 1)]
    curves = []
    for name, run in runs.items():
        counts = serving_numbers.running(traffic, run.answered, times)
        curves.append(Curve(name=name, x=list(times), y=[float(count) for count in counts]))
    ours = runs.get("interactive")
    spans = {} if ours is None else {"interactive is in TP": serving_numbers.tp_spans(ours, end)}
    first = Picture(
        kind="time", title="Running requests", x_label="seconds", y_label="requests that are not finished", spans=spans
    )
    middles, rates = traffic.rates(min(_POINTS, max(10, round(traffic.duration))))
    marks: dict[str, list[float]] = {}
    for record in _switches(ours) if ours else []:
        marks.setdefault(f"switch to {record['to']}", []).append(record["t"])
    second = Picture(
        kind="time", title="Arrivals and switches", x_label="seconds", y_label="requests per second", marks=marks
    )
    return curves, first, [Panel(picture=second, curves=[Curve(name="arrivals", x=list(middles), y=rates)])]


def _warm_up(fleet: Fleet, traffic: Traffic, capacity: Capacity, ranks: int, seed: int) -> None:
    """Both layouts and switches both ways once, so that the trace meets nothing that is compiled on first use."""
    live = min(_WARM, capacity.max_num_seqs, len(traffic.at))
    longest = max(range(len(traffic.at)), key=lambda i: traffic.prompt_tokens[i])
    prompt = min(traffic.prompt_tokens[longest], capacity.max_model_len - 4)
    for layout in ("EP", "TP"):
        fleet.call(rank.run, Workload.uniform(live, prompt, 4, seed=seed + 2, vocab=capacity.vocab), STATIC[layout])
        # A burst's passes are full of prompts and of other shapes than a few requests': a kernel compiled in one of
        # them would make all that wait for it look slow.
        burst = Workload.uniform(_burst(traffic, capacity), prompt, 4, seed=seed + 4, vocab=capacity.vocab)
        fleet.call(rank.run, burst, STATIC[layout])
    plan = switch.plan_step(live, min(traffic.prompt_tokens), 4, 3, ranks, capacity)
    layouts: tuple[rank.Layout, ...] = ("EP", "TP")
    if all(refusal(live, plan.prompt + plan.length, layout, ranks, capacity) is None for layout in layouts):
        load = Workload.uniform(live, plan.prompt, plan.length, seed=seed + 3, vocab=capacity.vocab)
        fleet.call(switch_rank.alternating_step, load, plan.iterations, 0)


def _burst(traffic: Traffic, capacity: Capacity) -> int:
    """Most requests that come within a second, as far as one scheduler takes them."""
    times = sorted(traffic.at)
    most = max(bisect_right(times, time + 1.0) - place for place, time in enumerate(times))
    return max(1, min(most, capacity.max_num_seqs))


def _soak(
    fleet: Fleet, traffic: Traffic, options: ServingOptions, capacity: Capacity, notes: list[str], say: Any
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Alternating switches with live requests of the trace's shortest prompt; what the ranks hold before and after."""
    wanted = switch.SwitchOptions(
        soak=options.soak,
        soak_live=min(64, capacity.max_num_seqs),
        soak_context=min(traffic.prompt_tokens),
        update_every=min(_SOAK_EVERY, options.soak),
        seed=options.seed,
    )
    shapes = fleet.call(switch_rank.shapes)[0]
    found, held = switch.live_soak(fleet, wanted, capacity, shapes, notes, say)
    if "soak_switches" in found:
        found["live_switch_soak"] = found["soak_switches"]
    return found, held
