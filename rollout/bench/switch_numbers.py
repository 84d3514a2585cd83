"""Numbers of `moebius bench switch` from what was measured. Pure; no engine here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from moebius.rollout.bench.mover import ALL_TO_ALL, CEILING, DIRECTIONS, OVERLAPPED
from moebius.rollout.bench.results import Curve, Results
from moebius.rollout.bench.stats import Spread
from moebius.rollout.bench.switch_rank import Shapes
from moebius.rollout.bench.traffic import (
    EXPERT_WAYS,
    KV_WAYS,
    ExpertShape,
    KvShape,
    Traffic,
    expert_traffic,
    kv_traffic_to_tp,
)
from moebius.rollout.errors import BadInput

HEADLINE_FILL = 135_000  # tokens of KV of the switch that is named in the results
_BIN = 10  # per cent of KV pages
_FLAGS = dict(zip(DIRECTIONS, ("ep_tp", "tp_ep"), strict=True))


class Speed(BaseModel):
    """As `moebius.rollout.bench.mover.MoverSpeed`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    what: str
    ms: float
    gb_per_s: float
    share: float


class Movers(BaseModel):
    """Speeds of all movers, and what they moved: layers of experts and of KV, tokens of KV over all ranks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    speeds: list[Speed]
    layers: int
    kv_layers: int
    tokens: int

    @classmethod
    def load(cls, path: Path) -> Movers:
        """From a file of `moebius.rollout.bench.mover`. Raises BadInput when it is none."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            shape, ranks = data["shape"], data["ranks"]
            layers = shape["layers"]
            tokens = shape["pages"] * shape["page_tokens"] * ranks
            heads = shape["kv_heads"] // max(1, shape["kv_heads"] // ranks)  # as many TP ranks as have no copies
            tokens = tokens * min(heads, ranks) // ranks
            return cls(speeds=data["speeds"], layers=layers, kv_layers=layers, tokens=tokens)
        except OSError as error:
            raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise BadInput(f"{path}: not a file of moebius.rollout.bench.mover: {error}") from error

    def row(self, name: str, what: str, direction: str) -> Speed | None:
        """One measurement, or None."""
        return next((s for s in self.speeds if s.name == name and s.what == f"{what} {direction}"), None)


def memory_overhead(path: Path) -> float:
    """What ours holds more than the larger static engine, in per cent of a GPU, from results of `bench memory`.

    Raises BadInput when the file has no such number.
    """
    try:
        results = Results.model_validate_json(path.read_text(encoding="utf-8"))
        return results.results["memory_overhead_pct"]
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"{path}: no memory_overhead_pct in it; give the memory.json of moebius bench memory") from error


def mover_numbers(movers: Movers, engines_own: str, notes: list[str]) -> dict[str, float]:
    """Of the mover that the engine uses, or else the first of the direct ones. Ratios are the worse direction's."""
    names = list(dict.fromkeys(speed.name for speed in movers.speeds))
    candidates = [engines_own, *(name for name in names if name.startswith("direct")), ALL_TO_ALL]
    ours = next((name for name in candidates if movers.row(name, "experts", DIRECTIONS[0])), "")
    ours_kv = next((n for n in (ours, *candidates[1:]) if movers.row(n, "KV", DIRECTIONS[0])), "")
    if ours != engines_own:
        notes.append(f"the engine's own switches move by {engines_own}; the movers' numbers are of {ours}")
    numbers: dict[str, float] = {}
    ceiling = next((speed.gb_per_s for speed in movers.speeds if speed.name == CEILING), None)
    if ceiling is not None:
        numbers["ceiling_gbps"] = ceiling
    ratios = []
    for direction, short in _FLAGS.items():
        row = movers.row(ours, "experts", direction)
        if row is None:
            continue
        numbers[f"reshard_{short}_ms"] = row.ms
        numbers[f"reshard_{short}_pct"] = 100 * row.share
        # Against the better of the two forms of NCCL.
        others = [movers.row(name, "experts", direction) for name in (ALL_TO_ALL, OVERLAPPED)]
        if times := [other.ms for other in others if other is not None]:
            ratios.append(min(times) / row.ms)
    if ratios:
        numbers["reshard_nccl_ratio"] = min(ratios)
    return numbers | _kv_numbers(movers, ours_kv)


def _kv_numbers(movers: Movers, ours: str) -> dict[str, float]:
    rows = {short: movers.row(ours, "KV", direction) for direction, short in _FLAGS.items()}
    found = {short: row for short, row in rows.items() if row is not None}
    if not found:
        return {}
    numbers: dict[str, float] = {"kv_tokens_moved": movers.tokens}
    for short, row in found.items():
        numbers[f"kv_{short}_ms_per_layer"] = row.ms / movers.kv_layers
    numbers[f"kv_{movers.tokens // 1024}k_ms_per_layer"] = max(row.ms for row in found.values()) / movers.kv_layers
    numbers["kv_pct"] = 100 * min(row.share for row in found.values())
    others = {short: movers.row(ALL_TO_ALL, "KV", direction) for direction, short in _FLAGS.items()}
    if ratios := [other.ms / found[s].ms for s, other in others.items() if other is not None and s in found]:
        numbers["kv_nccl_ratio"] = min(ratios)
    return numbers


def live_numbers(
    switches: Sequence[dict[str, Any]], live: int, shapes: Shapes, notes: list[str]
) -> tuple[dict[str, float], list[Curve]]:
    """Medians at the fill nearest to HEADLINE_FILL and by bin of KV use; curves of phases by direction and bin."""
    numbers: dict[str, float] = {"live_switches": len(switches)}
    plain = [switch for switch in switches if not switch["prepared"]]
    staged = sorted({switch["staged_layers"] for switch in switches if switch["prepared"]})
    prepared = [switch for switch in switches if switch["prepared"] and switch["staged_layers"] == staged[-1]]
    for name, chosen in ((f"switch_live{live}", plain), (f"commit_pause_live{live}", prepared)):
        if not chosen:
            continue
        at_fill = _at_headline(chosen)
        numbers[f"{name}_ms"] = _median(at_fill)
        numbers[f"{name}_kv_tokens"] = Spread.of([switch["kv_tokens"] for switch in at_fill]).median
        for to, short in (("TP", "ep_tp"), ("EP", "tp_ep")):
            if same := [switch for switch in at_fill if switch["to"] == to]:
                numbers[f"{name}_{short}_ms"] = _median(same)
        drains = [switch["phases_ms"]["drain"] for switch in at_fill if "drain" in switch["phases_ms"]]
        if drains:
            numbers[f"{name}_drain_ms"] = Spread.of(drains).median
    for layers in staged:
        at_fill = _at_headline([s for s in switches if s["staged_layers"] == layers])
        numbers[f"commit_pause_{layers}_layers_ms"] = _median(at_fill)
        numbers[f"commit_experts_{layers}_layers_ms"] = Spread.of([s["device_ms"]["experts"] for s in at_fill]).median
    bins = binned(switches)
    for (kind, low), of_bin in bins.items():
        numbers[f"switch_{kind.replace(' ', '_').lower()}_{low}_{low + _BIN}_pct_ms"] = _median(of_bin)
    _check_sent(switches, shapes, notes)
    return numbers, _phase_curves(bins)


def binned(switches: Sequence[dict[str, Any]]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Switches by kind and by the share of the source's KV pages in use, in bins of 10 per cent, in order.

    Kinds are "to TP", "to TP prepared" (of several shares of layers staged, the largest), "to TP 12 layers ahead" and
    "to EP".
    """
    bins: dict[tuple[str, int], list[dict[str, Any]]] = {}
    most = max((switch["staged_layers"] for switch in switches), default=0)
    for switch in switches:
        low = min(100 - _BIN, int(100 * switch["kv_use_before"]) // _BIN * _BIN)
        kind, layers = f"to {switch['to']}", switch["staged_layers"]
        if switch["prepared"]:
            kind += " prepared" if layers == most else f" {layers} layers ahead"
        bins.setdefault((kind, low), []).append(switch)
    return dict(sorted(bins.items(), key=lambda item: (item[0][0] == "to EP", *item[0])))


def _phase_curves(bins: dict[tuple[str, int], list[dict[str, Any]]]) -> list[Curve]:
    labels: list[float | str] = [f"{kind}, {low}-{low + _BIN} %" for kind, low in bins]
    phases = dict.fromkeys(name for of_bin in bins.values() for switch in of_bin for name in switch["phases_ms"])
    return [
        Curve(
            name=phase + (" (before the pause)" if phase == "drain" else ""),
            x=list(labels),
            y=[Spread.of([s["phases_ms"].get(phase, 0.0) for s in of_bin]).median for of_bin in bins.values()],
        )
        for phase in phases
    ]


def _at_headline(switches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those at the fill nearest to HEADLINE_FILL."""
    fill = min({switch["fill"] for switch in switches}, key=lambda tokens: abs(tokens - HEADLINE_FILL))
    return [switch for switch in switches if switch["fill"] == fill]


def prepare_numbers(
    run: Sequence[tuple[str, int, float]], prepared_at: Sequence[int], window: int, live: int
) -> list[tuple[float, float]]:
    """By preparation: (ms of the `window` iterations beside it, ms of as many by the median of those before it).

    Iterations are (layout, tokens, ms), in all of which `live` requests decode in EP; others are left out.
    """

    def whole(some: Sequence[tuple[str, int, float]]) -> list[float]:
        return [ms for layout, tokens, ms in some if layout == "EP" and tokens == live]

    found = []
    for at in prepared_at:
        beside = whole(run[at : at + window])
        before = whole(run[max(0, at - window) : at])
        if beside and before:
            found.append((sum(beside), len(beside) * Spread.of(before).median))
    return found


def _median(switches: Sequence[dict[str, Any]]) -> float:
    return Spread.of([switch["pause_ms"] for switch in switches]).median


def _check_sent(switches: Sequence[dict[str, Any]], shapes: Shapes, notes: list[str]) -> None:
    wanted = expert_traffic("direct", _experts(shapes), shapes.ranks).link_sent
    if wrong := {switch["expert_bytes"] for switch in switches if switch["expert_bytes"] != wanted}:
        notes.append(f"switches sent {sorted(wrong)} bytes of experts, by the formula it is {wanted}")


def bytes_moved(
    shapes: Shapes, tokens: int, profiled: Sequence[dict[str, int]] | None, notes: list[str]
) -> dict[str, float]:
    """The paper's table 1 in GB per rank: a whole switch's experts, and `tokens` of KV spread evenly over the ranks."""
    experts = _experts(shapes)
    numbers: dict[str, float] = {}
    for way in EXPERT_WAYS:
        numbers |= _flat(f"experts_{way}", expert_traffic(way, experts, shapes.ranks))
    kv = KvShape(shapes.kv_layers, shapes.heads, shapes.kv_heads, shapes.head_bytes)
    pages = [tokens // shapes.page_tokens // shapes.ranks] * shapes.ranks
    for way in KV_WAYS:
        numbers |= _flat(f"kv_{way}", kv_traffic_to_tp(way, kv, pages, 0))
    if profiled is not None and any(profiled):
        one_layer = expert_traffic("direct", experts, shapes.ranks).hbm_read // shapes.layers
        counted = [sum(copies.values()) for copies in profiled]
        numbers["profiled_over_counted"] = max(counted, key=lambda n: abs(n - 2 * one_layer)) / (2 * one_layer)
        if any(total != 2 * one_layer for total in counted):
            notes.append(
                f"one layer there and back is {2 * one_layer} bytes by the formula; the profiler saw copies of "
                f"{', '.join(map(str, counted))}"
            )
    return numbers


def _experts(shapes: Shapes) -> ExpertShape:
    return ExpertShape(shapes.layers, shapes.experts, shapes.hidden, shapes.intermediate, shapes.itemsize)


def _flat(name: str, traffic: Traffic) -> dict[str, float]:
    kinds = ("hbm_read", "hbm_written", "link_sent", "staging")
    return {f"bytes_{name}_{kind}_gb": getattr(traffic, kind) / 1e9 for kind in kinds}


def soak_numbers(pauses: Sequence[float], held: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Growth from the first entry of `held` to the last one, on the rank where it is largest."""
    numbers: dict[str, float] = {"soak_switches": len(pauses)}
    for name, key in (
        ("device_bytes", "device_bytes"), ("torch_bytes", "torch_bytes"), ("rss_bytes", "rss_bytes"), ("fd", "fds"),
    ):  # fmt: skip
        pairs = zip(held[0]["ranks"], held[-1]["ranks"], strict=True)
        numbers[f"soak_{name}_delta"] = max(after[key] - before[key] for before, after in pairs)
    quarter = max(1, len(pauses) // 4)
    if pauses:
        numbers["soak_pause_first_quarter_ms"] = Spread.of(list(pauses[:quarter])).median
        numbers["soak_pause_last_quarter_ms"] = Spread.of(list(pauses[-quarter:])).median
    return numbers
