"""Workloads of the benchmarks: prompts of random token ids and output lengths, all from a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from moebius.rollout.bench.stats import LiveCurve, best_switch
from moebius.rollout.errors import BadInput
from moebius.rollout.types import LengthTrace

# DeepMath rollouts of Qwen3-235B-A22B as published with the Moebius paper (arXiv:2606.26607, section 6.3): median
# output 1,510 tokens, 99th percentile 10,386, cap 32,768; median prompt 120.
DEEPMATH_MEDIAN, DEEPMATH_P99, DEEPMATH_CAP, DEEPMATH_PROMPT = 1510, 10386, 32768, 120
_Z99 = 2.3263  # 99 % quantile of the standard normal
_FIRST_TOKEN_ID = 10  # below lie special tokens in common vocabularies


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one run: request i has `prompt_tokens[i]` random ids and gives exactly `lengths[i]` tokens."""

    prompt_tokens: tuple[int, ...]
    lengths: tuple[int, ...]
    seed: int
    vocab: int

    @classmethod
    def uniform(cls, count: int, prompt: int, length: int, *, seed: int, vocab: int) -> Workload:
        """`count` requests of one prompt length and one output length."""
        return cls((prompt,) * count, (length,) * count, seed, vocab)

    def prompt(self, index: int) -> list[int]:
        """Token ids of request `index`; every rank and engine gets the same ones."""
        generator = random.Random(f"{self.seed}:{index}")
        return generator.choices(range(min(_FIRST_TOKEN_ID, self.vocab - 1), self.vocab), k=self.prompt_tokens[index])

    def indices(self, rank: int, ranks: int) -> range:
        """Requests of one EP rank: dealt out in turn, since a rollout does not know its lengths beforehand."""
        return range(rank, len(self.lengths), ranks)


def deepmath_like(count: int, *, seed: int, scale: float = 1.0, cap: int = DEEPMATH_CAP) -> list[int]:
    """Lognormal lengths with DeepMath's median and 99th percentile, both times `scale`, at most `cap` tokens."""
    generator = random.Random(seed)
    sigma = math.log(DEEPMATH_P99 / DEEPMATH_MEDIAN) / _Z99
    draws = (generator.lognormvariate(math.log(DEEPMATH_MEDIAN * scale), sigma) for _ in range(count))
    return [max(1, min(cap, round(length))) for length in draws]


def long_tail(count: int, *, seed: int, body: int, tail: int, stragglers: int) -> list[int]:
    """`stragglers` requests of about `tail` tokens in all, the others of about `body`, each within 10 %."""
    if not 0 < stragglers < count:
        raise BadInput(
            f"the long-tail trace needs 1 to {count - 1} stragglers among {count} requests, got {stragglers}"
        )
    generator = random.Random(seed)
    lengths = [round(generator.uniform(0.9, 1.1) * (tail if i < stragglers else body)) for i in range(count)]
    generator.shuffle(lengths)
    return [max(1, length) for length in lengths]


def live_counts(lengths: Sequence[int]) -> list[int]:
    """Live requests at each decode iteration when all start together: entry k counts lengths above k."""
    ends: dict[int, int] = {}
    for length in lengths:
        ends[length] = ends.get(length, 0) + 1
    live, counts = len(lengths), []
    for k in range(max(lengths, default=0)):
        live -= ends.get(k, 0)
        counts.append(live)
    return counts


def peak_tokens(lengths: Sequence[int], prompt: int) -> int:
    """Most tokens of KV held at once when all requests start together."""
    return max((count * (prompt + k + 1) for k, count in enumerate(live_counts(lengths))), default=0)


def predicted_ratio(lengths: Sequence[int], ep: LiveCurve, tp: LiveCurve) -> float:
    """Better static layout over the best single free switch, decode only, by measured curves."""
    live = live_counts(lengths)
    static = min(sum(ep.at(count) for count in live), sum(tp.at(count) for count in live))
    return static / best_switch(live, ep, tp)[1]


def tuned_long_tail(
    count: int, ep: LiveCurve, tp: LiveCurve, *, seed: int, body: int, fits: Callable[[Sequence[int]], bool]
) -> tuple[list[int], float]:
    """The long-tail trace in which a switch gains most by these curves, and the predicted ratio.

    Tries tails of 2 to 16 bodies and 1/64 to 1/4 of the requests in them, of those that `fits` takes. Raises BadInput
    when it takes none.
    """
    candidates = [
        long_tail(count, seed=seed, body=body, tail=body * factor, stragglers=max(1, count // share))
        for factor in (2, 3, 4, 6, 8, 12, 16)
        for share in (64, 32, 16, 8, 4)
        if count // share < count
    ]
    candidates = [lengths for lengths in candidates if fits(lengths)]
    if not candidates:
        raise BadInput("no long-tail trace of this size fits: fewer --requests, a shorter --body, or more KV memory")
    best = max(candidates, key=lambda lengths: predicted_ratio(lengths, ep, tp))
    return best, predicted_ratio(best, ep, tp)


def captured(path: Path) -> list[int]:
    """Lengths of a trace that `moebius rollout --capture-lengths` wrote, in order of prompt and sample."""
    trace = LengthTrace.load(path)
    if not trace.lengths:
        raise BadInput(f"{path}: the trace holds no sample")
    return [max(1, tokens) for _, tokens in sorted(trace.lengths.items())]
