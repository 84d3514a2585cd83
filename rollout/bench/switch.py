"""`moebius bench switch`: what a switch costs, drained and with live requests, and how near its bytes come to the link.

The engine `moebius` only. Every number is the slowest rank's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from moebius.rollout.bench import probes, rank, switch_rank
from moebius.rollout.bench.engines import Engines
from moebius.rollout.bench.fleet import Fleet
from moebius.rollout.bench.mover import DIRECTIONS
from moebius.rollout.bench.rank import Capacity
from moebius.rollout.bench.results import Curve, Panel, Picture, Results, make_results
from moebius.rollout.bench.stats import Spread
from moebius.rollout.bench.sweep import STATIC, refusal
from moebius.rollout.bench.switch_numbers import (
    Movers,
    bytes_moved,
    live_numbers,
    mover_numbers,
    prepare_numbers,
    soak_numbers,
)
from moebius.rollout.bench.switch_rank import Held, LiveRun, Shapes
from moebius.rollout.bench.traces import Workload
from moebius.rollout.errors import BadInput, MoebiusError

_SETTLE = 5  # iterations between the last prefill and the first switch
_SLACK = 4  # tokens after the last switch
FILLS = (35_000, 135_000, 270_000, 540_000, 800_000)


class SwitchOptions(BaseModel):
    """What to measure."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    live: int = Field(256, ge=1, description="Live requests at every switch, but those of the soak.")
    fills: list[int] = Field(default=list(FILLS), min_length=1, description="Tokens of KV at the first switch.")
    switches: int = Field(4, ge=1, description="Switches at each fill, to and fro.")
    every: int = Field(6, ge=1, description="Iterations between two switches.")
    prepare: int = Field(8, ge=0, description="Iterations before a switch that it is prepared; 0: measure none such.")
    prepare_layers: list[int] = Field(
        default=[],
        description="Layers to send ahead, measured one after the other; empty: as many as there is room for.",
    )
    drained: int = Field(10, ge=1, description="Switches without requests, in each direction.")
    kv_tokens: int = Field(524_288, ge=1, description="Tokens of KV that the movers move, over all ranks.")
    repeats: int = Field(5, ge=1, description="Times each mover is timed, in each direction.")
    movers: Movers | None = Field(None, description="Speeds of movers measured before; None: measured here.")
    memory_overhead_pct: float | None = Field(None, description="As `moebius bench memory` measured it.")
    soak: int = Field(200, ge=0, description="Switches of the soak; 0: none.")
    soak_live: int = Field(64, ge=1, description="Live requests of the soak, half of which end on the way.")
    soak_context: int = Field(256, ge=1, description="Their prompt tokens.")
    update_every: int = Field(25, ge=1, description="Switches of the soak between two weight updates.")
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """One step with switches in it."""

    prompt: int
    length: int  # output tokens
    iterations: list[int]  # to switch before


def plan_step(
    live: int, prompt: int, switches: int, every: int, ranks: int, capacity: Capacity, settle: int = _SETTLE
) -> Plan:
    """Switches begin when an EP rank has surely prefilled its share, and no request ends before the last one."""
    share = math.ceil(live / ranks)
    room = max(1, capacity.max_num_batched_tokens - share)  # those already prefilled decode
    first = math.ceil(share * prompt / room) + settle
    iterations = [first + every * i for i in range(switches)]
    return Plan(prompt, iterations[-1] + _SLACK, iterations)


def plan_fill(fill: int, options: SwitchOptions, ranks: int, capacity: Capacity, prepare: int = 0) -> Plan | str:
    """The step whose first switch has about `fill` tokens of KV, or why there can be none.

    To be prepared, switches lie so far apart that as many iterations without a preparation come before it.
    """
    share, live = fill // options.live, options.live
    settle, every = _SETTLE, options.every
    if prepare:
        settle, every = settle + 2 * prepare, max(every, 2 * prepare)
    decoded = (settle + _SETTLE) // 2
    for _ in range(2):
        prompt = max(1, share - decoded)
        plan = plan_step(live, prompt, options.switches, every, ranks, capacity, settle)
        # What is decoded before the first switch counts too: on average half a prefill, and what follows.
        prefills = plan.iterations[0] - settle
        decoded = settle + prefills // 2
    layouts: tuple[rank.Layout, ...] = ("EP", "TP")
    for layout in layouts:
        reason = refusal(live, plan.prompt + plan.length, layout, ranks, capacity)
        if reason is not None:
            return f"{layout}: {reason}"
    return plan


def run_switch(engines: Engines, options: SwitchOptions, command: str = "bench switch") -> Results:
    """Measure everything on the running engine."""
    if "moebius" not in {spec.name for spec in engines.specs}:
        raise BadInput("bench switch needs the engine moebius; add it to --engines")
    fleet, capacity, say = engines.fleet("moebius"), engines.capacity("moebius"), engines.say
    shapes: Shapes = fleet.call(switch_rank.shapes)[0]
    notes = engines.notes()
    numbers: dict[str, float] = {"startup_s": fleet.start_seconds}
    series: dict[str, Any] = {"shapes": asdict(shapes), "ranks": fleet.call(probes.start_and_account)}

    live, found = _live(fleet, options, capacity, shapes, notes, say)
    numbers |= found
    drained = _drained(fleet, options, capacity, say)
    if options.movers is None:
        say("movers ...")
        _home(fleet, capacity, options.seed)
        speeds, tokens = fleet.call(switch_rank.movers, options.kv_tokens, options.repeats)[0]
        movers = Movers(speeds=speeds, layers=shapes.layers, kv_layers=shapes.kv_layers, tokens=tokens)
        if tokens < options.kv_tokens // (shapes.ranks * shapes.page_tokens) * shapes.ranks * shapes.page_tokens:
            notes.append(f"the pages have room for {tokens} tokens of KV, {options.kv_tokens} were asked for")
    else:
        movers = options.movers
        if movers.layers != shapes.layers:
            notes.append(f"movers were measured on {movers.layers} layers of experts, the engine has {shapes.layers}")
    numbers |= mover_numbers(movers, shapes.mover, notes)
    for to, name in (("TP", "switch_drained"), ("EP", "switch_drained_tp_ep")):
        numbers[f"{name}_ms"] = Spread.of([ms for layout, ms in drained if layout == to]).median
    found, curves = live_numbers(live, options.live, shapes, notes)
    numbers |= found
    if options.memory_overhead_pct is not None:
        numbers["memory_overhead_pct"] = options.memory_overhead_pct
    if shapes.device == "cuda":
        _home(fleet, capacity, options.seed)
        series["profiled_copies"] = fleet.call(switch_rank.profiled_copies)
    if options.soak:
        found, series["held"] = live_soak(fleet, options, capacity, shapes, notes, say)
        numbers |= found
    moved = bytes_moved(shapes, movers.tokens, series.get("profiled_copies"), notes)
    return make_results(
        "switch",
        command=command,
        options=options.model_dump(exclude={"movers"}) | {"setup": engines.setup.model_dump(mode="json")},
        results=numbers | moved,
        curves=curves,
        picture=Picture(
            kind="stack",
            title=f"Switch with {options.live} live requests, {shapes.ranks} ranks",
            x_label="direction, KV pages in use",
            y_label="ms (median)",
        ),
        panels=[_mover_panel(movers)],
        series=series | {"live": live, "drained_ms": drained, "movers": movers.model_dump()},
        notes=notes,
    )


# ---- the parts ------------------------------------------------------------------------------------------------------


def _home(fleet: Fleet, capacity: Capacity, seed: int) -> None:
    """The experts go back to EP, where a step ended in TP."""
    fleet.call(rank.run, Workload((1,), (1,), seed, capacity.vocab), STATIC["EP"])


def _drained(fleet: Fleet, options: SwitchOptions, capacity: Capacity, say: Any) -> list[tuple[str, float]]:
    _home(fleet, capacity, options.seed)
    by_rank = fleet.call(switch_rank.drained_switches, options.drained)
    times = [(same[0][0], max(ms for _, ms in same)) for same in zip(*by_rank, strict=True)]
    for to in ("TP", "EP"):
        say(f"drained, to {to}: {Spread.of([ms for layout, ms in times if layout == to]).median:.2f} ms")
    return times


def _live(
    fleet: Fleet, options: SwitchOptions, capacity: Capacity, shapes: Shapes, notes: list[str], say: Any
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Switches at every fill that fits, each with its `fill`, and what preparing them cost.

    Raises MoebiusError if there were none.
    """
    runs: list[tuple[int, int, int | None, Plan]] = []  # tokens of KV, iterations and layers of preparation, the step
    reasons = []
    prepares: list[tuple[int, int | None]] = [(0, None)]
    if options.prepare and shapes.prepares is None:
        chosen: list[int | None] = [*options.prepare_layers]
        prepares += [(options.prepare, layers) for layers in chosen or [None]]
    if options.prepare and shapes.prepares is not None:
        notes.append(f"no switch was prepared: {shapes.prepares}")
    for fill in sorted(set(options.fills)):
        for prepare, layers in prepares:
            plan = plan_fill(fill, options, shapes.ranks, capacity, prepare)
            if isinstance(plan, Plan):
                runs.append((fill, prepare, layers, plan))
            else:
                reasons.append(f"{fill} tokens of KV with {options.live} live requests: left out, it takes {plan}")
    notes += dict.fromkeys(reasons)
    if not runs:
        raise MoebiusError("no switch with live requests fits the engine: " + "; ".join(reasons))
    found: list[dict[str, Any]] = []
    slowed: list[tuple[float, float]] = []
    # The first ones compile what is left, and are not counted.
    warm = runs[: len(prepares)]
    for turn, (fill, prepare, layers, plan) in enumerate([*warm, *runs]):
        load = Workload.uniform(options.live, plan.prompt, plan.length, seed=options.seed + turn, vocab=capacity.vocab)
        of_ranks = _step(fleet, load, plan.iterations, prepare, notes, layers)
        if turn < len(warm):
            continue
        switches = slowest(of_ranks)
        found += [switch | {"fill": fill} for switch in switches]
        if layers in (None, max(options.prepare_layers, default=None)):
            slowed += prepare_numbers(of_ranks[0].iterations, of_ranks[0].prepared_at, prepare, options.live)
        if prepare and not of_ranks[0].prepared_at:
            notes.append(f"{fill} tokens of KV: too few pages were free to prepare a switch")
        pauses = ", ".join(f"{switch['pause_ms']:.1f}" for switch in switches)
        staged = max((switch["staged_layers"] for switch in switches), default=0)
        ahead = f", {staged} layers ahead" if staged else ""
        say(f"{fill} tokens of KV{ahead}: {pauses or 'no switch'} ms")
    if not found:
        raise MoebiusError("no switch with live requests fits the engine: " + "; ".join(notes))
    if not slowed:
        return found, {}
    return found, {
        "prepare_slowdown_pct": Spread.of([100 * (beside / usual - 1) for beside, usual in slowed]).median,
        "prepare_extra_ms": Spread.of([beside - usual for beside, usual in slowed]).median,
        "prepare_iterations": options.prepare,
    }


def _step(
    fleet: Fleet, load: Workload, iterations: list[int], prepare: int, notes: list[str], layers: int | None = None
) -> list[LiveRun]:
    """One step by rank, all requests of which must end as they should."""
    runs: list[LiveRun] = fleet.call(switch_rank.alternating_step, load, iterations, prepare, layers)
    check_ends(runs, load.lengths)
    notes += [f"a switch was refused: {reason}" for reason in dict.fromkeys(runs[0].cancelled)]
    return runs


def check_ends(runs: Sequence[LiveRun], lengths: Sequence[int]) -> None:
    """Raise MoebiusError unless every request ended once over all ranks, with as many tokens as it was to give."""
    ended = [end for run in runs for end in run.ended]
    if sorted(index for index, _, _ in ended) != list(range(len(lengths))):
        raise MoebiusError(f"{len(lengths)} requests were sent, {len(ended)} ended: a switch lost or doubled some")
    for index, tokens, reason in ended:
        if tokens != lengths[index] or reason != "length":
            raise MoebiusError(f"request {index} ended with {tokens} tokens of {lengths[index]} ({reason})")


def slowest(runs: Sequence[LiveRun]) -> list[dict[str, Any]]:
    """Every switch once, with the longest pause, phases and device times over the ranks."""
    switches = []
    for records in zip(*(run.switches for run in runs), strict=True):
        merged = dict(records[0]) | {"pause_ms": max(record["pause_ms"] for record in records)}
        for part in ("phases_ms", "device_ms"):
            names = dict.fromkeys(name for record in records for name in record[part])
            merged[part] = {name: max(record[part].get(name, 0.0) for record in records) for name in names}
        switches.append(merged)
    return switches


def live_soak(
    fleet: Fleet, options: SwitchOptions, capacity: Capacity, shapes: Shapes, notes: list[str], say: Any
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Steps of `update_every` switches, each followed by a weight update. Also what the ranks hold, step by step."""
    live, prompt = options.soak_live, options.soak_context
    plan = plan_step(live, prompt, options.update_every, options.every, shapes.ranks, capacity)
    layouts: tuple[rank.Layout, ...] = ("EP", "TP")
    for layout in layouts:
        reason = refusal(live, prompt + plan.length, layout, shapes.ranks, capacity)
        if reason is not None:
            notes.append(f"no soak: in {layout} it takes {reason}")
            return {}, []
    lengths = tuple(plan.length if i % 2 else max(1, plan.length // 2) for i in range(live))
    pauses: list[float] = []
    held: list[dict[str, Any]] = []
    for step in range(1 + math.ceil(options.soak / options.update_every)):
        count = min(options.update_every, options.soak - len(pauses)) if step else options.update_every
        load = Workload((prompt,) * live, lengths, options.seed + 1000 + step, capacity.vocab)
        # Every second step prepares its switches to TP, where the engine can.
        switches = slowest(_step(fleet, load, plan.iterations[:count], options.prepare * ((step + 1) % 2), notes))
        fleet.call(probes.full_update_s)
        of_ranks: list[Held] = fleet.call(switch_rank.held)
        held.append({"switches": len(pauses), "ranks": [asdict(one) for one in of_ranks]})
        if step == 0:
            continue  # that one allocated what is left
        if len(switches) < count:
            notes.append(f"the soak ended early: {count - len(switches)} switches of a step were refused")
            break
        pauses += [switch["pause_ms"] for switch in switches]
        held[-1]["switches"] = len(pauses)
        say(f"soak: {len(pauses)} of {options.soak} switches, {Spread.of(pauses[-count:]).median:.1f} ms")
    return soak_numbers(pauses, held), held


def _mover_panel(movers: Movers) -> Panel:
    names = dict.fromkeys(speed.name for speed in movers.speeds)
    labels = [f"{what} {direction}" for what in ("experts", "KV") for direction in DIRECTIONS]
    curves = []
    for name in names:
        rows = {speed.what: speed.gb_per_s for speed in movers.speeds if speed.name == name}
        if "contiguous" in rows:
            rows = dict.fromkeys(labels, rows["contiguous"])
        curves.append(
            Curve(name=name, x=[la for la in labels if la in rows], y=[rows[la] for la in labels if la in rows])
        )
    picture = Picture(kind="bars", title="Movers beside a contiguous copy", y_label="GB/s sent by a rank")
    return Panel(picture=picture, curves=curves)
