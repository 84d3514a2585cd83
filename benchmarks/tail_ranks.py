"""What `benchmarks.tail_spec` has every rank do, with an engine that drafts or one that does not."""

from __future__ import annotations

from typing import Any

import numpy as np

from moebius.engine.config import EngineConfig, PolicyConfig
from moebius.engine.types import SampleKey, SampleRequest, StepOutcome
from moebius.kernels.noise import derive_seed


def make(config: EngineConfig) -> Any:
    from moebius.engine.engine import MoebiusEngine

    return MoebiusEngine(config)


def measure(engine: Any, folder: str, batches: tuple[int, ...]) -> str:
    """Costs of iterations, once for all modes, so that drafts' lengths follow what this machine takes; their origin."""
    from moebius.engine.calibrate import Grid
    from moebius.engine.cost_cache import cached_or_measured

    grid = Grid(batches=batches, contexts=(engine.max_model_len // 4,), iterations=16)
    known = cached_or_measured(engine, grid, folder)
    engine.switcher.drafts.know(known.costs, engine.pair, adaptive=True)
    return known.origin


def set_mode(engine: Any, mode: str) -> None:
    """Draft from other texts from the next tail on; each mode keeps its own."""
    drafts = engine.switcher.drafts
    kept = engine.__dict__.setdefault("libraries", {drafts.mode: drafts.library})
    drafts.mode = drafts.drafter.mode = mode
    drafts.library = kept.setdefault(mode, type(drafts.library)(mode, drafts.library.capacity))


def requests_of(
    engine: Any, prompts: list[list[int]], n: int, step: int, sampling: dict[str, Any]
) -> list[SampleRequest]:
    """This rank's share: prompts dealt out in turn, all samples of a prompt on one rank."""
    return [
        SampleRequest(SampleKey(p, s, step), prompts[p], sampling, derive_seed(1, step, p, s))
        for p in range(engine.rank, len(prompts), engine.world_size)
        for s in range(n)
    ]


def a_step(
    engine: Any, texts: list[str], n: int, step: int, sampling: dict[str, Any], policy: PolicyConfig
) -> StepOutcome:
    """One step with these prompts."""
    engine.policy.config = policy
    prompts = [engine.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    outcome: StepOutcome = engine.run_step(requests_of(engine, prompts, n, step, sampling))
    return outcome


def iterations(
    engine: Any, batch: int, tokens: int, drafting: bool | None, drafted: int, rate: float | None
) -> tuple[float, float, int]:
    """Milliseconds of an iteration of `batch` samples in TP, tokens per sample that it gives, and changes of mode.

    `drafting`: always, never, or as it pays (None). Then `drafted` random tokens are drafted per sample, and all of
    them verified if always; `rate` of them count as right, whatever they are (None: those that are, next to none).
    Iterations with prompts and before the first draft are left out, and the ends when samples run out.
    """
    from moebius.engine.calibrate import typical

    drafts = engine.switcher.drafts
    undo = []
    if drafts is not None:
        undo = _rig(drafts, drafting, drafted, rate, engine.vocab_size)
    engine.policy.config = PolicyConfig(kind="static_tp")
    r_prompt = np.random.default_rng(1)
    prompts = [r_prompt.integers(10, engine.vocab_size, 64).tolist() for _ in range(batch)]
    sampling = {"temperature": 1.0, "max_tokens": tokens, "ignore_eos": True}
    try:
        outcome = engine.run_step(requests_of(engine, prompts, 1, 0, sampling))
    finally:
        for restore in undo:
            restore()
    whole = [i for i in outcome.stats.iterations if i.live == batch and i.layout == "TP" and i.tokens]
    kept = whole[max(6, len(whole) // 5) : -2]
    if not kept:
        raise ValueError(f"{batch} samples of {tokens} tokens gave {len(whole)} whole iterations: too few to time")
    changes = outcome.stats.drafts.changes if outcome.stats.drafts is not None else 0
    return typical([i.ms for i in kept]), sum(i.tokens for i in kept) / batch / len(kept), changes


def _rig(drafts: Any, drafting: bool | None, drafted: int, rate: float | None, vocab: int) -> list[Any]:
    """Random drafts, and a rate at which they count as right; returns what undoes it."""
    from moebius.engine.draft_index import Drafts

    drafter, choice, verifier = drafts.drafter, drafts.choice, drafts.drafter._verifier
    r, luck = np.random.default_rng(0), np.random.default_rng(1)  # the same on all ranks
    cost, force = drafter.cost, choice.force

    def guess(slots: Any, limits: Any, lengths: Any) -> Drafts:
        counts = np.minimum(limits, drafted).astype(np.int32)
        guesses = r.integers(10, vocab, (len(slots), drafter.width), dtype=np.int32)
        return Drafts(guesses, np.full((len(slots), drafter.width), 0.9), counts)

    def accepted(sampled: Any, found: Any) -> Any:
        import torch

        lucky = torch.from_numpy(luck.random(tuple(found.shape)) < rate).to(found.device)
        return (lucky & (found >= 0)).cumprod(dim=1).sum(dim=1)

    drafter.guess, choice.force = guess, drafting
    if drafting:
        drafter.cost = None  # all of them
    undo = [lambda: delattr(drafter, "guess"), lambda: setattr(choice, "force", force)]
    undo.append(lambda: setattr(drafter, "cost", cost))
    if rate is not None:
        verifier.accepted = accepted
        undo.append(lambda: delattr(verifier, "accepted"))
    return undo


def memory(engine: Any) -> list[tuple[str, int]]:
    """Where this rank's memory goes."""
    rows: list[tuple[str, int]] = engine.memory_account().rows()
    return rows
