"""Measures what iterations and switches cost on the running engine. Collective: every rank calls it alike.

One step per point of the grid gives everything: its samples decode in EP, switch with all they hold, decode in TP and
switch back. Results are those of the slowest rank, equal on all ranks. Where a switch to TP can be prepared, it is at
every other point, so that both kinds are measured: experts sent ahead, and all of them over the link.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moebius.engine.config import PolicyConfig
from moebius.engine.costs import CostModel, CostPoint, ExpertMs, SwitchPoint
from moebius.engine.layout import Layout
from moebius.engine.types import Iteration, SampleKey, SampleRequest, StepStats

_SETTLE = 5  # iterations left out after a prefill and after a switch: the first may compile or fill caches
_SLACK = 4  # iterations after the last one that is measured
# Iterations between the last one measured in EP and the switch. A switch is prepared so many ahead, and both must be
# one number: while experts are sent ahead, iterations share the memory's rate with them, and are not what EP takes; and
# the bytes must have arrived when the switch comes, which in the fastest iterations takes about as many.
_AHEAD = 8


@dataclass(frozen=True, slots=True)
class Grid:
    """What to measure."""

    batches: tuple[int, ...] = (1, 2, 8, 32, 64, 128, 256, 512)
    contexts: tuple[int, ...] = (128, 2048)  # prompt tokens
    iterations: int = 40  # per layout and point
    seed: int = 0

    @classmethod
    def at_start(cls, room: Room, *, on_gpu: bool) -> Grid:
        """What is measured when an engine starts that needs costs: up to what it runs at once, and no more than helps.

        On CPU a few points, which show that it works: times there describe nobody's rollouts.
        """
        if not on_gpu:
            return cls(batches=(1, 4, min(16, room.max_num_seqs)), contexts=(16, 96), iterations=6)
        batches = {1, 2, 8, 32, 64, 128, 256, 512, 1024}
        # Where all that TP runs at once does not fit with long contexts, a smaller batch stands in.
        batches = {b for b in batches if b < room.max_num_seqs} | {room.max_num_seqs}
        longest = max(1, room.max_model_len // 2)
        return cls(batches=tuple(sorted(batches)), contexts=(min(128, longest), min(2048, longest)), iterations=24)


@dataclass(frozen=True, slots=True)
class Room:
    """What an engine can hold; pages per rank."""

    ranks: int
    pages: dict[Layout, int]
    page_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab: int

    @classmethod
    def of(cls, engine: Any) -> Room:
        """Of a MoebiusEngine."""
        pair = engine.pair
        config = pair.ep.core.vllm_config
        return cls(
            ranks=engine.world_size,
            pages={Layout.EP: pair.ep.usable_pages, Layout.TP: pair.tp.usable_pages},
            page_tokens=config.cache_config.block_size,
            max_num_seqs=config.scheduler_config.max_num_seqs,
            max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
            max_model_len=engine.max_model_len,
            vocab=engine.vocab_size,
        )

    def prefills(self, batch: int, context: int) -> int:
        """Iterations until every request of an EP rank has its first token, at most."""
        share = math.ceil(batch / self.ranks)
        room = max(1, self.max_num_batched_tokens - share)  # those already prefilled decode
        return math.ceil(share * context / room) + 1

    def refusal(self, batch: int, tokens: int) -> str | None:
        """Why `batch` requests of `tokens` each cannot be measured in both layouts; None when they can."""
        share = math.ceil(batch / self.ranks)
        page_count = math.ceil((tokens + 1) / self.page_tokens)
        if batch > self.max_num_seqs:
            return f"{batch} requests at once, engine.max_num_seqs is {self.max_num_seqs}"
        if batch >= self.max_num_batched_tokens:
            return f"{batch} tokens per iteration, engine.max_num_batched_tokens is {self.max_num_batched_tokens}"
        if tokens > self.max_model_len:
            return f"{tokens} tokens per request, engine.max_model_len is {self.max_model_len}"
        for layout, requests in ((Layout.EP, share), (Layout.TP, batch)):
            if requests * page_count > self.pages[layout]:
                return f"{requests * page_count} KV pages in {layout.value}, there are {self.pages[layout]}"
        return None


@dataclass(frozen=True, slots=True)
class Measured:
    """What one step told: typical ms, contexts in tokens; None where nothing was measured."""

    ep_ms: float | None
    tp_ms: float | None
    ep_context: float
    tp_context: float
    switches: tuple[SwitchPoint, ...]
    moves: tuple[tuple[float, float], ...] = ()  # of the experts in those to TP: share staged before, ms


def calibrate(engine: Any, grid: Grid, *, key: dict[str, str | int]) -> tuple[CostModel, list[str]]:
    """Costs of a MoebiusEngine over `grid`, and notes about points that were left out.

    Leaves the engine as after any step, with its policy as it was: what is decoded here is no lesson for it. Raises
    ValueError when no point could be measured.
    """
    import torch.distributed as dist

    from moebius.engine.policy import SwitchPolicy

    room, rank = Room.of(engine), engine.rank
    points: list[CostPoint] = []
    switches: list[SwitchPoint] = []
    moves: list[tuple[float, float]] = []
    notes: list[str] = []
    contexts = sorted(set(grid.contexts))
    prepares = {context: bool(i % 2) for i, context in enumerate(contexts)}  # whether the next of its points does
    before, engine.policy = engine.policy, SwitchPolicy(PolicyConfig(costs=None))
    drafts = engine.switcher.drafts
    if drafts is not None:
        drafts.is_paused = True  # every iteration is to yield one token of each request
    warm = True
    try:
        for batch in sorted(set(grid.batches)):
            for context in contexts:
                prefills = room.prefills(batch, context)
                policy = schedule(prefills, grid.iterations, prepares=prepares[context])
                assert policy.back_at_iteration is not None
                length = policy.back_at_iteration + _SLACK
                reason = room.refusal(batch, context + length)
                if reason is not None:
                    notes.append(f"batch {batch}, context {context}: left out, it takes {reason}")
                    continue
                engine.policy.config, prepares[context] = policy, not prepares[context]
                if warm:  # the first step and the first switch of either kind compile and connect
                    engine.run_step(_requests(batch, context, length, rank, room, grid.seed - 1))
                    if engine.switcher.staging.why_not is None:
                        engine.policy.config = schedule(prefills, grid.iterations, prepares=True)
                        engine.run_step(_requests(batch, context, length, rank, room, grid.seed - 2))
                        engine.policy.config = policy
                    warm = False
                stats = engine.run_step(_requests(batch, context, length, rank, room, grid.seed)).stats
                own = measured(stats, batch, context, grid.iterations)
                slowest = _slowest(own, engine.switcher.cpu_group, dist)
                _add(points, switches, batch, slowest)
                moves += slowest.moves
                if slowest.tp_ms is None:
                    why = stats.cancelled[-1].reason if stats.cancelled else "the step ended before it"
                    notes.append(f"batch {batch}, context {context}: no switch, {why}")
    finally:
        engine.policy = before
        if drafts is not None:
            drafts.is_paused = False
    if not {Layout.EP, Layout.TP} <= {point.layout for point in points}:
        raise ValueError("nothing was measured in both layouts: " + "; ".join(notes))
    model = CostModel(
        key=key,
        ranks=room.ranks,
        points=points,
        switches=switches,
        experts=expert_ms(moves),
        source="calibration",
    )
    return model, notes


def schedule(prefills: int, iterations: int, *, prepares: bool) -> PolicyConfig:
    """When a step of calibration switches and goes back, so that `iterations` of each layout are undisturbed.

    `prepares`: experts are sent ahead of the switch, by engines that can.
    """
    at = prefills + _SETTLE + iterations + _AHEAD
    return PolicyConfig(
        kind="scheduled",
        at_iteration=at,
        back_at_iteration=at + _SETTLE + iterations + _SLACK,
        prepare_iterations=_AHEAD if prepares else 0,
    )


def expert_ms(moves: Sequence[tuple[float, float]]) -> ExpertMs | None:
    """From (share of the layers staged before, ms of the experts' move) of switches to TP.

    None unless some moved everything over the link and some had staged a part: what a preparation saves is the
    difference. Where part was staged, what the copies took is known only if it was longer than the link; if it never
    was, it is 0.
    """
    alone = [ms for staged, ms in moves if not staged]
    if not alone or len(alone) == len(moves) or not statistics.median(alone):
        return None
    link = statistics.median(alone)
    local = [ms / staged for staged, ms in moves if staged and ms > 1.1 * (1 - staged) * link]
    return ExpertMs(link=link, local=statistics.median(local) if local else 0.0)


def measured(stats: StepStats, batch: int, context: int, iterations: int) -> Measured:
    """Typical times of the last `iterations` whole-batch iterations of each layout of one rank's step."""
    first_tp = next((i for i, it in enumerate(stats.iterations) if it.layout == Layout.TP.value), None)
    alone = min([*stats.prepared_at, *([] if first_tp is None else [first_tp])], default=None)  # so many of EP
    ep = _whole(stats.iterations[:alone], Layout.EP, batch)[_SETTLE:][-iterations:]
    tp = _whole(stats.iterations, Layout.TP, batch)[_SETTLE:][-iterations:]
    # Every request has one token more after each iteration in which all of them decode.
    ages = {id(iteration): i for i, iteration in enumerate(stats.iterations)}
    first = next((i for i, it in enumerate(stats.iterations) if it.tokens >= batch), 0)

    def context_of(chosen: Sequence[Iteration]) -> float:
        return context + statistics.fmean(ages[id(it)] - first + 1 for it in chosen) if chosen else float(context)

    return Measured(
        ep_ms=typical([it.ms for it in ep]) if ep else None,
        tp_ms=typical([it.ms for it in tp]) if tp else None,
        ep_context=context_of(ep),
        tp_context=context_of(tp),
        switches=tuple(
            SwitchPoint(
                to=Layout(record.to),
                live=record.live,
                kv_tokens=record.kv_tokens,
                ms=record.pause_ms,
                staged=record.staged_layers / max(1, record.expert_layers),
            )
            for record in stats.switches
        ),
        moves=tuple(
            (record.staged_layers / max(1, record.expert_layers), record.device_ms["experts"])
            for record in stats.switches
            # Only to TP: the way back is never prepared and writes in another pattern, so its speed says nothing about
            # what a preparation saves. What it takes is in `switches`.
            if record.to == Layout.TP.value and "experts" in record.device_ms
        ),
    )


def typical(ms: Sequence[float]) -> float:
    """The mean, with what is beyond twice the median taken as that.

    Steps last as long as the sum of their iterations, of which a few are slower than most: the median would promise too
    short a step, and a single hiccup among few iterations must not count for all.
    """
    most = 2 * statistics.median(ms)
    return statistics.fmean(min(value, most) for value in ms)


def _whole(iterations: Sequence[Iteration], layout: Layout, batch: int) -> list[Iteration]:
    """Iterations of `layout` in which every request decoded, as it did in the one before."""
    return [
        b
        for a, b in itertools.pairwise(iterations)
        if b.layout == layout.value == a.layout and a.tokens == b.tokens == batch
    ]


def _slowest(own: Measured, group: Any, dist: Any) -> Measured:
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, own, group=group)
    return slowest_of(gathered)


def slowest_of(ranks: Sequence[Measured]) -> Measured:
    """The longest times over ranks; None where a rank has none."""

    def longest(values: Sequence[float | None]) -> float | None:
        return None if any(value is None for value in values) else max(value for value in values if value is not None)

    return Measured(
        ep_ms=longest([m.ep_ms for m in ranks]),
        tp_ms=longest([m.tp_ms for m in ranks]),
        ep_context=ranks[0].ep_context,
        tp_context=ranks[0].tp_context,
        switches=tuple(
            max(same, key=lambda point: point.ms) for same in zip(*(m.switches for m in ranks), strict=True)
        ),
        moves=tuple(max(same) for same in zip(*(m.moves for m in ranks), strict=True)),
    )


def _add(points: list[CostPoint], switches: list[SwitchPoint], batch: int, found: Measured) -> None:
    for layout, ms, context in (
        (Layout.EP, found.ep_ms, found.ep_context),
        (Layout.TP, found.tp_ms, found.tp_context),
    ):
        if ms is not None:
            points.append(CostPoint(layout=layout, batch=batch, context=context, ms=ms))
    switches.extend(found.switches)


def _requests(batch: int, context: int, length: int, rank: int, room: Room, seed: int) -> list[SampleRequest]:
    """This rank's share of `batch` requests with random prompts, which give exactly `length` tokens."""
    from moebius.kernels.noise import derive_seed

    requests = []
    for i in range(rank, batch, room.ranks):
        # Prompts of no two steps may share pages: a prefix cache would skip the prefill.
        ids = random.Random(f"{seed}:{batch}:{context}:{i}").choices(
            range(min(10, room.vocab - 1), room.vocab), k=context
        )
        sampling = {"temperature": 1.0, "max_tokens": length, "ignore_eos": True}
        requests.append(SampleRequest(SampleKey(i, 0), ids, sampling, derive_seed(max(0, seed), 0, i, 0)))
    return requests
