"""`moebius bench sweep`: milliseconds per decode iteration against the global batch, ours beside stock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from moebius.engine.config import PolicyConfig
from moebius.rollout.bench import rank
from moebius.rollout.bench.engines import Engines
from moebius.rollout.bench.rank import Capacity, Layout, Series
from moebius.rollout.bench.results import Curve, Picture, Results, make_results
from moebius.rollout.bench.stats import Spread, crossover, full_durations, slowest_rank, window_means
from moebius.rollout.bench.traces import Workload
from moebius.rollout.errors import MoebiusError

STATIC = {"EP": PolicyConfig(kind="static_ep"), "TP": PolicyConfig(kind="static_tp")}


class SweepOptions(BaseModel):
    """What to measure."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    batches: list[int] = Field(default=[8, 16, 32, 64, 128, 256, 512, 1024, 2048], min_length=1)
    context: int = Field(512, ge=1, description="Prompt tokens of every request.")
    iterations: int = Field(60, ge=1, description="Whole-batch decode iterations measured in each run.")
    window: int = Field(10, ge=1, description="Iterations per window; a window's mean is one value.")
    rounds: int = Field(3, ge=1, description="Times each batch is measured, engines taking turns.")
    settle: int = Field(5, ge=0, description="Whole-batch iterations left out at first.")
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Lane:
    """One engine in one layout."""

    engine: str
    layout: Layout

    @property
    def name(self) -> str:
        """As in the results."""
        return f"{self.engine}_{self.layout.lower()}" if self.engine.startswith("moebius") else self.engine


def lanes_of(engines: Engines) -> list[Lane]:
    """Every layout of every running engine, layouts beside each other so that their opponents take turns."""
    lanes = [Lane(spec.name, layout) for spec in engines.specs for layout in spec.layouts]
    return sorted(lanes, key=lambda lane: lane.layout)  # stable


def output_tokens(batch: int, options: SweepOptions, budgets: Sequence[int]) -> int:
    """Tokens every request gives, so that `iterations` whole-batch iterations remain after all have been prefilled.

    The slowest prefill is that of TP: one scheduler admits all prompts, while those already prefilled decode.
    """
    room = min(budgets) - batch
    prefills = math.ceil(batch * options.context / room) if room > 0 else 0
    return prefills + options.settle + options.iterations + 4


def refusal(batch: int, tokens: int, layout: Layout, ranks: int, capacity: Capacity) -> str | None:
    """Why a batch cannot be measured; None when it can."""
    share = math.ceil(batch / ranks) if layout == "EP" else batch
    pages = share * math.ceil((tokens + 1) / capacity.page_tokens)
    if share > capacity.max_num_seqs:
        return f"{share} requests of one scheduler, engine.max_num_seqs is {capacity.max_num_seqs}"
    if share >= capacity.max_num_batched_tokens:
        return f"{share} tokens per iteration, engine.max_num_batched_tokens is {capacity.max_num_batched_tokens}"
    if tokens > capacity.max_model_len:
        return f"{tokens} tokens per request, the longest is {capacity.max_model_len} (engine.max_model_len)"
    if pages > capacity.pages[layout]:
        return f"{pages} KV pages, there are {capacity.pages[layout]} (engine.kv_cache_bytes)"
    return None


def windows_of(by_rank: Sequence[Series], options: SweepOptions) -> list[float]:
    """Milliseconds per iteration of each window: the slowest rank's."""
    means = []
    for series in by_rank:
        if series.full == 0:
            continue  # a rank without requests
        durations = full_durations(series.ends, series.tokens, series.full, options.settle, options.iterations)
        means.append([1e3 * seconds for seconds in window_means(durations, options.window)])
    return slowest_rank(means)


def run_sweep(engines: Engines, options: SweepOptions, command: str = "bench sweep") -> Results:
    """Measure all lanes at all batches that fit."""
    measured, notes = measure(engines, options)
    return summarise(engines, options, measured, notes, command)


def measure(engines: Engines, options: SweepOptions) -> tuple[dict[str, dict[int, list[list[float]]]], list[str]]:
    """Windows in ms by lane, batch and round, and notes about what was left out."""
    lanes = lanes_of(engines)
    budgets = [engines.capacity(lane.engine).max_num_batched_tokens for lane in lanes]
    vocab = min(engines.capacity(lane.engine).vocab for lane in lanes)
    measured: dict[str, dict[int, list[list[float]]]] = {lane.name: {} for lane in lanes}
    notes = engines.notes()
    for batch in sorted(set(options.batches)):
        length = output_tokens(batch, options, budgets)
        fitting = []
        for lane in lanes:
            capacity = engines.capacity(lane.engine)
            reason = refusal(batch, options.context + length, lane.layout, engines.setup.ranks, capacity)
            if reason is None:
                fitting.append(lane)
            else:
                notes.append(f"{lane.name}, batch {batch}: left out, it takes {reason}")
        for lane in fitting:  # kernels that are compiled or tuned on first use
            warm = Workload.uniform(batch, options.context, 2, seed=options.seed - 1, vocab=vocab)
            engines.fleet(lane.engine).call(rank.run, warm, STATIC[lane.layout])
        for turn in range(options.rounds):
            load = Workload.uniform(batch, options.context, length, seed=options.seed + turn, vocab=vocab)
            for lane in fitting:
                by_rank = engines.fleet(lane.engine).call(rank.run, load, STATIC[lane.layout])
                windows = windows_of(by_rank, options)
                measured[lane.name].setdefault(batch, []).append(windows)
                if not windows:
                    notes.append(f"{lane.name}, batch {batch}, round {turn}: no window of whole-batch iterations")
                    continue
                engines.say(f"batch {batch} round {turn} {lane.name}: {Spread.of(windows).median:.3f} ms")
    if not any(windows for by_batch in measured.values() for rounds in by_batch.values() for windows in rounds):
        raise MoebiusError("nothing was measured: " + "; ".join(notes))
    return measured, notes


def summarise(
    engines: Engines,
    options: SweepOptions,
    measured: dict[str, dict[int, list[list[float]]]],
    notes: list[str],
    command: str,
) -> Results:
    """Medians, spreads, ratios of rounds measured next to each other, and crossovers."""
    spreads = {
        name: {batch: Spread.pooled(rounds) for batch, rounds in by_batch.items() if any(rounds)}
        for name, by_batch in measured.items()
    }
    numbers: dict[str, float] = {}
    for name, by_batch in spreads.items():
        for batch, spread in by_batch.items():
            numbers[f"{name}_{batch}_ms"] = spread.median
    ratios: dict[str, dict[int, float]] = {}
    for ours, stock, layout in pairs(engines):
        slowdowns = ratios[f"{ours}/{stock}"] = _ratios(measured[ours], measured[stock])
        if slowdowns:
            worst = max(slowdowns, key=lambda batch: slowdowns[batch])
            other = stock.removesuffix(f"_{layout.lower()}") if stock.startswith("moebius") else stock
            suffix = layout.lower() if other in ("stock_ep", "stock_tp") else f"{layout.lower()}_vs_{other}"
            if not ours.startswith("moebius_"):  # one with other settings
                suffix += f"_of_{ours.removesuffix(f'_{layout.lower()}')}"
            numbers[f"max_slowdown_pct_{suffix}"] = 100 * (slowdowns[worst] - 1)
            numbers[f"max_slowdown_batch_{suffix}"] = worst
    for label, ep, tp in (("", "moebius_ep", "moebius_tp"), ("stock_", "stock_ep", "stock_tp")):
        both = sorted(set(spreads.get(ep, {})) & set(spreads.get(tp, {})))
        found = crossover(both, [spreads[ep][b].median for b in both], [spreads[tp][b].median for b in both])
        if found is not None:
            numbers[f"{label}crossover_batch"] = found
        elif both:
            notes.append(f"no {label}crossover: TP is not overtaken by EP between batches {both[0]} and {both[-1]}")
    curves = [_curve(name, by_batch) for name, by_batch in spreads.items() if by_batch]
    return make_results(
        "sweep",
        command=command,
        options=options.model_dump() | {"setup": engines.setup.model_dump(mode="json")},
        results=numbers,
        curves=curves,
        picture=Picture(
            title=f"Decode iteration, context {options.context}, {engines.setup.ranks} ranks",
            x_label="global batch",
            y_label="ms per iteration (median, p10 to p90)",
        ),
        series={
            "windows_ms": measured,
            "spread": {name: {b: asdict(s) for b, s in by_batch.items()} for name, by_batch in spreads.items()},
            "ratio": ratios,
        },
        notes=notes,
    )


def pairs(engines: Engines) -> list[tuple[str, str, Layout]]:
    """Lanes of our engine and of a stock engine with the same layout; ours with other settings also beside ours."""
    lanes = lanes_of(engines)
    return [
        (ours.name, stock.name, ours.layout)
        for ours in lanes
        if ours.engine == "moebius" or ours.engine.startswith("moebius:")
        for stock in lanes
        if stock.layout == ours.layout and (stock.engine == "moebius" or stock.engine.startswith("stock"))
        if stock is not ours
    ]


def _ratios(ours: dict[int, Any], stock: dict[int, Any]) -> dict[int, float]:
    """By batch the median over rounds of the ratio of the two medians of one round, which cancels slow drift."""
    ratios = {}
    for batch in sorted(set(ours) & set(stock)):
        pairs = [(a, b) for a, b in zip(ours[batch], stock[batch], strict=True) if a and b]
        if pairs:
            ratios[batch] = Spread.of([Spread.of(a).median / Spread.of(b).median for a, b in pairs]).median
    return ratios


def _curve(name: str, by_batch: dict[int, Spread]) -> Curve:
    batches = sorted(by_batch)
    return Curve(
        name=name,
        x=[float(batch) for batch in batches],
        y=[by_batch[batch].median for batch in batches],
        low=[by_batch[batch].p10 for batch in batches],
        high=[by_batch[batch].p90 for batch in batches],
    )
