"""Numbers of a trainer step for verl's metrics, from the reports of the engine steps it consisted of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moebius.rollout.report import StepReport

Metrics = dict[str, float]

_SUMMED = ("burst_s", "switch_s", "tail_s", "tokens", "switches", "cancelled_switches", "engine_steps")


def step_metrics(reports: Iterable[StepReport]) -> Metrics:
    """What a replica did since its numbers were last taken: seconds by part, tokens, switches, live samples at each.

    One trainer step may be several engine steps (an update or a validation in between ends one), which are added up.
    """
    found: Metrics = dict.fromkeys(_SUMMED, 0.0)
    live: list[float] = []
    for report in reports:
        for part in ("burst", "switch", "tail"):
            found[f"{part}_s"] += getattr(report.durations_s, part)
        found["tokens"] += report.counts.output_tokens
        found["switches"] += len(report.switches)
        found["cancelled_switches"] += len(report.cancelled)
        found["engine_steps"] += 1
        live += [float(switch.live) for switch in report.switches]
    if live:
        found["live_at_switch"] = live[0]
    return found


def merge(replicas: Iterable[Metrics]) -> Metrics:
    """Numbers of all replicas under the names that verl shows: the slowest one's seconds, everybody's counts.

    verl's `timing_s/gen` is the time until the last trajectory was in; burst, switch and tail are those of the replica
    that worked longest, so they add up to less than that: what is missing is waiting, tools and scoring.
    """
    ran = [numbers for numbers in replicas if numbers.get("engine_steps")]
    if not ran:
        return {}
    slowest = max(ran, key=lambda numbers: numbers["burst_s"] + numbers["switch_s"] + numbers["tail_s"])
    seconds = slowest["burst_s"] + slowest["switch_s"] + slowest["tail_s"]
    merged = {f"timing_s/gen/{part}": slowest[f"{part}_s"] for part in ("burst", "switch", "tail")}
    merged["moebius/tokens"] = sum(numbers["tokens"] for numbers in ran)
    merged["moebius/switches"] = sum(numbers["switches"] for numbers in ran)
    merged["moebius/cancelled_switches"] = sum(numbers["cancelled_switches"] for numbers in ran)
    merged["moebius/tail_share"] = slowest["tail_s"] / seconds if seconds else 0.0
    switched = [numbers["live_at_switch"] for numbers in ran if "live_at_switch" in numbers]
    if switched:
        merged["moebius/live_at_switch"] = sum(switched) / len(switched)
    return merged
