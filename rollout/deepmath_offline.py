"""Questions with DeepMath's columns and the prompt lengths of DeepMath rollouts, made without a download.

The lengths follow the statistics published with the Moebius paper (arXiv:2606.26607, section 6.3) for the prompts of
nine DeepMath steps: 18,432 prompts, median 120 tokens, longest 1,352. The questions are chains of small sums with
right answers, so that a scorer has something to check; they say nothing about how hard real DeepMath questions are.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any

from moebius.rollout.errors import BadInput

MEDIAN, LONGEST, PUBLISHED_COUNT = 120, 1352, 18432
SHORTEST = 16
# A lognormal whose quantile at the middle of the last of 18,432 equal shares is the longest prompt.
_SIGMA = math.log(LONGEST / MEDIAN) / NormalDist().inv_cdf(1 - 0.5 / PUBLISHED_COUNT)
_MODULUS = 97
_WORDS = re.compile(r"[A-Za-z]+|\d|[^\sA-Za-z\d]")
COLUMNS = ("question", "final_answer", "difficulty", "topic", "r1_solution_1", "r1_solution_2", "r1_solution_3")


def prompt_lengths(count: int, seed: int = 0) -> list[int]:
    """`count` prompt lengths in tokens: the quantiles of the lognormal, in random order.

    18,432 of them have the published median and maximum; fewer have a shorter longest one.
    """
    if count < 1:
        raise BadInput(f"count must be at least 1, got {count}")
    normal = NormalDist(math.log(MEDIAN), _SIGMA)
    lengths = [round(math.exp(normal.inv_cdf((i + 0.5) / count))) for i in range(count)]
    random.Random(f"lengths:{seed}").shuffle(lengths)
    return [min(LONGEST, max(SHORTEST, length)) for length in lengths]


def count_words(text: str) -> int:
    """Words, digits and signs: about what tokenizers that split digits make of such a text."""
    return len(_WORDS.findall(text))


def make_deepmath(count: int, *, seed: int = 0, measure: Callable[[str], int] | None = None) -> list[dict[str, Any]]:
    """`count` rows with DeepMath's columns (COLUMNS).

    `measure(question)` tells how many tokens its whole prompt has; without one, words are counted. A prompt gets within
    a few tokens of its drawn length, never more unless even the shortest question is longer.
    """
    measure = measure or count_words
    chain = (_measure_chain(measure, 1), _measure_chain(measure, 9))
    per_link = max(1.0, (chain[1] - chain[0]) / 8)
    rows = []
    for i, target in enumerate(prompt_lengths(count, seed)):
        rng = random.Random(f"question:{seed}:{i}")
        links = int((target - chain[0]) // per_link)
        rows.append(_chain(rng, links, target, measure) if links >= 1 else _sum(rng, target, measure))
    return rows


def write_deepmath(path: str | Path, count: int, *, seed: int = 0, measure: Callable[[str], int] | None = None) -> Path:
    """Write `make_deepmath` to a .jsonl or .parquet file, its folder made if missing. Raises BadInput for others."""
    path = Path(path)
    if path.suffix not in (".jsonl", ".parquet"):
        raise BadInput(f"{path}: expected a name that ends in .jsonl or .parquet")
    rows = make_deepmath(count, seed=seed, measure=measure)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def _measure_chain(measure: Callable[[str], int], links: int) -> int:
    return measure(_chain_text(10, [(7, 25)] * links)[0])


def _chain_text(start: int, links: list[tuple[int, int]]) -> tuple[str, list[int]]:
    """a_0 = start, a_k = m a_(k-1) + c; the text, and every a_k by the modulus."""
    values = [start % _MODULUS]
    parts = [f"Let $a_0 = {start}$."]
    for k, (factor, constant) in enumerate(links, 1):
        values.append((factor * values[-1] + constant) % _MODULUS)
        parts.append(f"Let $a_{{{k}}} = {factor} a_{{{k - 1}}} + {constant}$.")
    parts.append(f"Find the remainder when $a_{{{len(links)}}}$ is divided by ${_MODULUS}$.")
    return " ".join(parts), values


def _chain(rng: random.Random, count: int, target: int, measure: Callable[[str], int]) -> dict[str, Any]:
    first = rng.randrange(10, 100)
    links = [(rng.randrange(2, 10), rng.randrange(10, 100)) for _ in range(count)]
    while len(links) > 1 and measure(_chain_text(first, links)[0]) > target:
        links.pop()

    def text(digits: int) -> str:
        return _chain_text(_number(first, digits), links)[0]

    start = _number(first, _digits(text, target, measure))
    question, values = _chain_text(start, links)
    work = [f"$a_{{{k}}} \\equiv {value} \\pmod{{{_MODULUS}}}$" for k, value in enumerate(values)]
    return _row(question, values[-1], min(9.0, 3.0 + 0.5 * (len(links) // 2)), "Number Theory -> Congruences", work)


def _sum(rng: random.Random, target: int, measure: Callable[[str], int]) -> dict[str, Any]:
    first, b = rng.randrange(1, 10), rng.randrange(1, 10)

    def text(digits: int) -> str:
        return f"Compute ${_number(first, digits)} + {b}$."

    a = _number(first, _digits(text, target, measure))
    return _row(f"Compute ${a} + {b}$.", a + b, 1.0, "Algebra -> Prealgebra -> Integers", [f"${a} + {b} = {a + b}$"])


def _number(first: int, digits: int) -> int:
    """`first` with `digits` more digits; equal arguments, equal number, however often it was called before."""
    more = random.Random(first * 1009 + digits)
    return int(f"{first}" + "".join(str(more.randrange(10)) for _ in range(digits)))


def _digits(text: Callable[[int], str], target: int, measure: Callable[[str], int]) -> int:
    """How many more digits bring the prompt nearest to `target` tokens from below."""
    digits = 0
    for _ in range(8):  # tokenizers merge digits, so one more is at most one token more
        missing = target - measure(text(digits))
        if missing <= 0:
            break
        digits += missing
    while digits > 0 and measure(text(digits)) > target:
        digits -= 1
    return digits


def _row(question: str, answer: int, difficulty: float, topic: str, work: list[str]) -> dict[str, Any]:
    solution = f"{', '.join(work)}. The answer is $\\boxed{{{answer}}}$."
    values = (question, str(answer), difficulty, f"Mathematics -> {topic}", solution, solution, solution)
    return dict(zip(COLUMNS, values, strict=True))
