"""Arithmetic of `moebius bench serving`: latencies by phase, running requests over time, gaps. Pure; no engine here."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from moebius.rollout.bench.serving_rank import Answered, ServingRun
from moebius.rollout.bench.serving_traces import Phase, Traffic

STATIC = ("static_ep", "static_tp")
# By what a phase is judged: who waits for an answer to begin in a burst, and for it to go on in quiet times.
_TTFT, _TPOT = ("ttft_mean_s", "ttft_p99_s"), ("tpot_mean_ms", "tpot_p99_ms")
JUDGED = {"burst_1": _TTFT, "quiet": _TPOT, "burst_2": _TTFT, "tail": _TPOT, "all": (*_TTFT, *_TPOT)}


def latencies(traffic: Traffic, answered: Sequence[Answered]) -> list[tuple[float, float | None]]:
    """(TTFT in seconds, TPOT in ms) of each request, from the moment the trace says it arrives.

    TPOT is the mean time between tokens after the first; None for requests of one token.
    """
    return [
        (a.first - traffic.at[a.index], 1e3 * (a.end - a.first) / (a.tokens - 1) if a.tokens > 1 else None)
        for a in answered
    ]


def phase_numbers(traffic: Traffic, answered: Sequence[Answered]) -> dict[str, dict[str, float]]:
    """By phase: requests, mean, p50 and p99 of TTFT (s) and TPOT (ms). Phases in which none arrives are left out."""
    pairs = latencies(traffic, answered)
    found: dict[str, dict[str, float]] = {}
    for i, phase in enumerate(traffic.phases):
        mine = [pair for a, pair in zip(answered, pairs, strict=True) if traffic.phase_of(a.index) == i]
        if not mine:
            continue
        found[phase.name] = _spread("ttft", "s", [ttft for ttft, _ in mine])
        found[phase.name] |= _spread("tpot", "ms", [tpot for _, tpot in mine if tpot is not None])
        found[phase.name]["requests"] = len(mine)
    return found


def _spread(name: str, unit: str, values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    p50, p99 = (float(q) for q in np.percentile(values, [50, 99]))
    return {f"{name}_mean_{unit}": statistics.fmean(values), f"{name}_p50_{unit}": p50, f"{name}_p99_{unit}": p99}


def running(traffic: Traffic, answered: Sequence[Answered], times: Sequence[float]) -> list[int]:
    """Requests that have arrived and are not finished at each of `times` (seconds), those that queue included."""
    arrivals = np.sort([traffic.at[a.index] for a in answered])
    ends = np.sort([a.end for a in answered])
    counts = np.searchsorted(arrivals, times, side="right") - np.searchsorted(ends, times, side="right")
    return [int(count) for count in counts]


def peak(traffic: Traffic, answered: Sequence[Answered]) -> int:
    """Most requests that were unfinished at once."""
    return max(running(traffic, answered, [traffic.at[a.index] for a in answered]), default=0)


def iteration_ms(run: ServingRun, phase: Phase) -> float | None:
    """Mean milliseconds of the iterations that ended within a phase; None if there were none."""
    ms = [ms for t, _, _, _, ms in run.iterations if phase.start <= t < phase.end]
    return statistics.fmean(ms) if ms else None


def in_tp(run: ServingRun, phase: Phase) -> float:
    """Share of a phase's time spent in TP."""
    overlap = sum(max(0.0, min(end, phase.end) - max(start, phase.start)) for start, end in tp_spans(run, phase.end))
    return overlap / (phase.end - phase.start)


def tp_spans(run: ServingRun, end: float) -> list[tuple[float, float]]:
    """When the engine was in TP, in seconds from 0 to `end`."""
    spans: list[tuple[float, float]] = []
    switches = [switch for switch in run.switches if switch["t"] >= 0]  # others came before the trace
    layout, since = run.layout, 0.0
    if switches:
        layout = "EP" if switches[0]["to"] == "TP" else "TP"
    for switch in switches:
        if switch["to"] == "TP":
            layout, since = "TP", switch["t"]
        elif layout == "TP":
            spans.append((since, switch["t"]))
            layout = "EP"
    if layout == "TP" and since < end:
        spans.append((since, end))
    return spans


def gaps(by_lane: dict[str, dict[str, dict[str, float]]]) -> dict[str, float]:
    """In per cent, by how much `interactive` is above the better static layout, per phase and what it is judged by.

    `by_lane` is policy -> phase -> number. Empty without both kinds of policy.
    """
    ours = by_lane.get("interactive")
    static = [by_lane[name] for name in STATIC if name in by_lane]
    if ours is None or not static:
        return {}
    found = {}
    for phase, numbers in ours.items():
        for name in JUDGED[phase]:
            best = [other[phase][name] for other in static if name in other.get(phase, {})]
            if name in numbers and best:
                found[f"gap_{phase}_{name.rpartition('_')[0]}_pct"] = 100 * (numbers[name] / min(best) - 1)
    return found
