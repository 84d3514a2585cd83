"""What the tests of speculative decoding run inside rank processes: other drafters and texts."""

from __future__ import annotations

from typing import Any

import numpy as np

from moebius.engine.config import PolicyConfig
from moebius.engine.draft_index import Drafts
from moebius.engine.types import SampleKey, SampleRequest, StepOutcome
from tests.engine import work


def set_mode(engine: Any, mode: str) -> None:
    """Draft from other texts from the next tail on."""
    drafts = engine.switcher.drafts
    drafts.mode = drafts.drafter.mode = mode
    drafts.library = type(drafts.library)(mode, 1 << 16)


def run_guessing(
    engine: Any, kind: str, truth: dict[SampleKey, list[int]], switches: Any, requests: list[SampleRequest]
) -> StepOutcome:
    """A step whose drafts are the truth ("right"), never it ("wrong"), or sometimes ("both"). `truth` is all tokens."""
    drafter = engine.switcher.drafts.drafter
    names = {str(key): tokens for key, tokens in truth.items()}

    def guess(slots: Any, limits: Any, lengths: Any) -> Drafts:
        of_slot = {slot: name for name, slot in drafter._slot_of.items()}
        width = drafter.width
        found = Drafts(np.zeros((len(slots), width), np.int32), np.ones((len(slots), width)), np.zeros(len(slots), int))
        for row, (slot, limit, length) in enumerate(zip(slots, limits, lengths, strict=True)):
            step, prompt, sample = (int(part) for part in of_slot[slot].split("-")[0].split(":"))
            next_ones = names[str(SampleKey(prompt, sample, step))][length : length + limit]
            # The seventh vocabulary entry further on is another token, and a valid one.
            shift = {"right": 0, "wrong": 7, "both": 7 * (length % 3 == 0)}[kind]
            found.tokens[row, : len(next_ones)] = [(token + shift) % 512 for token in next_ones]
            if kind == "both" and len(next_ones) > 2:
                found.tokens[row, 2] = (next_ones[2] + 7 * (length % 2)) % 512
            found.counts[row] = len(next_ones)
        return found

    drafter.guess = guess
    try:
        if isinstance(switches, PolicyConfig):
            return work.run(engine, switches, requests)
        return work.run_alternating(engine, switches, requests)
    finally:
        del drafter.guess


def run_flipping(
    engine: Any,
    every: int,
    switches: Any,
    requests: list[SampleRequest],
    truth: dict[SampleKey, list[int]] | None = None,
) -> StepOutcome:
    """A step that goes from decoding ahead to drafting, and back, every so many iterations in TP.

    With `truth` (all tokens) drafts are sometimes right.
    """
    choice, passed = engine.switcher.drafts.choice, 0
    before = choice.force

    def flip() -> None:
        nonlocal passed
        passed += 1
        choice.force = passed // every % 2 == 1

    choice.passed = flip
    try:
        if truth is not None:
            return run_guessing(engine, "both", truth, switches, requests)
        if isinstance(switches, PolicyConfig):
            return work.run(engine, switches, requests)
        return work.run_alternating(engine, switches, requests)
    finally:
        del choice.passed
        choice.force = before


def run_choosing(engine: Any, kind: str, truth: dict[SampleKey, list[int]], requests: list[SampleRequest]) -> Any:
    """`run_guessing` from the start in TP, which drafts only if that is expected to be faster.

    By costs that let drafts pay if they are right; whatever iterations take here, where the host's time is all.
    """
    drafts = engine.switcher.drafts
    before = drafts.drafter.cost
    drafts.drafter.cost = lambda requests, context, tokens: np.full(len(tokens), 1.0)
    drafts.choice.force = None
    drafts.choice.timed_drafting = lambda *seen: None
    drafts.choice._overheads.clear()  # of earlier steps, by a clock that other programs on this machine hold up
    try:
        return run_guessing(engine, kind, truth, work.TP, requests)
    finally:
        del drafts.choice.timed_drafting
        drafts.drafter.cost, drafts.choice.force = before, True


def steady_iterations(engine: Any) -> int:
    """Iterations of TP that `engine.steady` has scheduled."""
    taken: int = engine.pair.tp.steady.taken
    return taken


def force(engine: Any, drafting: bool | None) -> None:
    """Drafting always, never, or as it pays."""
    engine.switcher.drafts.choice.force = drafting


def fail_once(engine: Any, rank: int) -> None:
    """The next texts cannot be put together on this rank."""
    drafts = engine.switcher.drafts
    make = drafts._make

    def failing(texts: Any, rows: Any) -> Any:
        made = make(texts, rows)
        if engine.rank == rank:
            raise MemoryError("no room for texts")
        return made

    drafts._make = failing


def wait_for_texts(engine: Any, wait: bool) -> None:
    """Drafts from the first pass of a tail on, so that short tests have any."""
    kind = type(engine.switcher.drafts)
    if wait:
        engine.switcher.drafts.begin = lambda live: (kind.begin(engine.switcher.drafts, live), _built(engine))
    else:
        del engine.switcher.drafts.begin


def _built(engine: Any) -> None:
    if engine.switcher.drafts._build is not None:
        engine.switcher.drafts._build.exception()  # waits


def library(engine: Any) -> tuple[int, int]:
    """Tokens and scopes of this rank's library."""
    held = engine.switcher.drafts.library
    return held.tokens, len(held._texts)


def speculation_of_runtimes(engine: Any) -> list[tuple[Any, bool, int]]:
    """EP, TP: drafted tokens, whether scheduled asynchronously, tokens per iteration."""
    return [
        (
            runtime.core.vllm_config.num_speculative_tokens,
            runtime.core.vllm_config.scheduler_config.async_scheduling,
            runtime.core.vllm_config.scheduler_config.max_num_batched_tokens,
        )
        for runtime in (engine.pair.ep, engine.pair.tp)
    ]


def demand(engine: Any, requests: list[SampleRequest]) -> tuple[int, int, int]:
    """Pages that the first capacity check of a switch to TP asked for, TP's pages, and requests with KV."""
    fits, seen = type(engine.switcher).fits_tp, []

    def fits_tp() -> Any:
        seen.append(fits(engine.switcher))
        return seen[-1]

    engine.switcher.fits_tp = fits_tp
    try:
        work.run(engine, PolicyConfig(kind="scheduled", at_iteration=9), requests)
    finally:
        del engine.switcher.fits_tp
    return seen[0].pages, seen[0].pages_available, seen[0].requests


def step_by_costs(engine: Any, requests: list[SampleRequest]) -> tuple[int, int, StepOutcome, float]:
    """Costs are measured, and a step chooses drafts' lengths by them.

    Returns the library's tokens before and after the measurement, the step's outcome, and the tail's speed afterwards.
    """
    from moebius.engine.calibrate import Grid, calibrate

    drafts = engine.switcher.drafts
    before = drafts.library.tokens
    costs, _ = calibrate(engine, Grid(batches=(2, 8), contexts=(16,), iterations=4), key={})
    after = drafts.library.tokens
    drafts.know(costs, engine.pair, adaptive=True)
    try:
        return before, after, work.run(engine, PolicyConfig(kind="scheduled", at_iteration=9), requests), drafts.speed
    finally:
        drafts.know(None, engine.pair, adaptive=False)


def graphs(engine: Any) -> tuple[list[int], list[int], list[int]]:
    """Token counts of TP's CUDA graphs: for one token per request, for any lengths, and in pieces."""
    from vllm.config import CUDAGraphMode

    keys = engine.pair.tp.runner.cudagraph_dispatcher.cudagraph_keys
    full = keys[CUDAGraphMode.FULL]
    return (
        sorted(key.num_tokens for key in full if key.uniform),
        sorted(key.num_tokens for key in full if not key.uniform),
        sorted(key.num_tokens for key in keys[CUDAGraphMode.PIECEWISE]),
    )
