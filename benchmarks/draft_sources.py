"""Where the tail's drafts come from: this engine's ring of texts beside the suffix trees of arctic-inference.

    python -m benchmarks.draft_sources      # from the repository root; on CPU, about a minute

Nothing is sampled: answers of `benchmarks.arithmetic_model` are replayed, 16 for each prompt, from the moment on at
which so many are left, and a draft is kept as far as the text goes on with it. So all sources see the same text. What
counts is how much of it they foresee, and what the host needs for that per iteration of all samples: adding what is
new, and drafting. Both draft up to --draft-tokens tokens wherever they can; arctic-inference with vLLM's settings.

Writes docs/benchmarks/draft_sources_cpu.json. Where arctic-inference is not installed (no extra has it) it is left out,
and a note says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import statistics
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from benchmarks.arithmetic_model import answer, make_tokenizer, problem, question
from moebius.engine.draft_index import DraftIndex
from moebius.engine.draft_library import scope_of
from moebius.rollout.bench.results import make_results, portable

N = 16  # samples of a prompt
MODES = ("siblings", "suffix", "ngram")
DEPTH, FACTOR, LEAST = 24, 1.0, 0.1  # vLLM's suffix_decoding_max_tree_depth, _max_spec_factor and _min_token_prob
CAPACITY = 1 << 21  # tokens in the ring: engine.tail.draft_memory_tokens
Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer."""

    name: str
    prompt: Tokens
    output: Tokens


class Source(Protocol):
    """What drafts for samples that are decoded together."""

    def begin(self, finished: list[Sample], live: list[Sample], at: int) -> None:
        """The tail begins: these have ended, and those have `at` tokens each."""

    def draft(self, new: list[Tokens], rows: list[int], limits: list[int]) -> list[list[int]]:
        """Drafts for the live samples `rows`, which have got `new` tokens since the last call."""


class Ring:
    """Ours, as `moebius.engine.tail_drafts` fills it."""

    def __init__(self, mode: str, width: int) -> None:
        self.mode, self.width = mode, width

    def begin(self, finished: list[Sample], live: list[Sample], at: int) -> None:
        """See Source."""
        self.index = DraftIndex(CAPACITY, len(live))
        for sample in finished if self.mode != "ngram" else []:
            self.index.add(scope_of(self.mode, sample.prompt, sample.name), sample.output)
        for slot, sample in enumerate(live):
            self.index.begin(slot, scope_of(self.mode, sample.prompt, sample.name))
            self._append([slot], [np.concatenate([sample.prompt, sample.output[:at]])])

    def draft(self, new: list[Tokens], rows: list[int], limits: list[int]) -> list[list[int]]:
        """See Source."""
        self._append(rows, new)
        found = self.index.drafts(np.array(rows), np.array(limits), self.width)
        return [line[:count] for line, count in zip(found.tokens.tolist(), found.counts.tolist(), strict=True)]

    def _append(self, rows: list[int], new: list[Tokens]) -> None:
        self.index.append(np.array(rows), np.concatenate(new), np.cumsum([len(tokens) for tokens in new]))


class Arctic:
    """arctic-inference, as vLLM's own proposer calls it."""

    def __init__(self, width: int) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self.cache: Any = SuffixDecodingCache(max_tree_depth=DEPTH)
        self.width = width

    def begin(self, finished: list[Sample], live: list[Sample], at: int) -> None:
        """See Source."""
        for sample in finished:
            self.cache.start_request(sample.name, sample.prompt)
            self.cache.add_active_response(sample.name, sample.output)
            self.cache.stop_request(sample.name)
        self.names = [sample.name for sample in live]
        self.texts = [[*sample.prompt.tolist(), *sample.output[:at].tolist()] for sample in live]
        for sample in live:
            self.cache.start_request(sample.name, sample.prompt)
            self.cache.add_active_response(sample.name, sample.output[:at])

    def draft(self, new: list[Tokens], rows: list[int], limits: list[int]) -> list[list[int]]:
        """See Source."""
        found = []
        for row, tokens, limit in zip(rows, new, limits, strict=True):
            if len(tokens):
                self.cache.add_active_response(self.names[row], tokens)
                self.texts[row] += tokens.tolist()
            draft = self.cache.speculate(
                self.names[row], self.texts[row][-DEPTH:], max_spec_tokens=min(limit, self.width),
                max_spec_factor=FACTOR, min_token_prob=LEAST,
            )  # fmt: skip
            found.append(list(draft.token_ids) if limit else [])
        return found


def samples(prompts: int, tokenizer: Any, seed: int) -> list[Sample]:
    """N answers of each prompt."""
    r = random.Random(seed)
    found = []
    for p in range(prompts):
        asked = problem(r)
        prompt = np.array(tokenizer.encode(question(*asked)), dtype=np.int32)
        for s in range(N):
            output = np.array([*tokenizer.encode(answer(*asked, r)), tokenizer.eos_token_id], dtype=np.int32)
            found.append(Sample(f"{p}-{s}", prompt, output))
    return found


def replay(source: Source, everything: list[Sample], batch: int) -> dict[str, float]:
    """The tail of `batch` samples."""
    ordered = sorted(everything, key=lambda sample: len(sample.output))
    finished, live = ordered[:-batch], ordered[-batch:]
    at = len(finished[-1].output)
    began = time.thread_time()
    source.begin(finished, live, at)
    build = time.thread_time() - began
    known = [at] * batch
    new = [np.empty(0, dtype=np.int32)] * batch
    spent, iterations, steps, right, drafted = 0.0, 0, 0, 0, 0
    while rows := [row for row in range(batch) if known[row] < len(live[row].output)]:
        limits = [len(live[row].output) - known[row] - 1 for row in rows]
        began = time.thread_time()
        drafts = source.draft([new[row] for row in rows], rows, limits)
        spent += time.thread_time() - began
        iterations += 1
        for row, draft in zip(rows, drafts, strict=True):
            output, first = live[row].output, known[row]
            same = next((i for i, token in enumerate(draft) if token != output[first + i]), len(draft))
            known[row] = first + same + 1
            new[row] = output[first : known[row]]
            steps, right, drafted = steps + 1, right + same, drafted + len(draft)
    return {
        "us_per_sample": 1e6 * spent / steps,
        "us_per_iteration": 1e6 * spent / iterations,
        "tokens_per_iteration": 1 + right / steps,
        "right_pct": 100 * right / max(1, drafted),
        "build_ms": 1e3 * build,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")], default=[8, 32, 128])
    parser.add_argument("--draft-tokens", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5, help="each with other texts; the median counts")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    given = parser.parse_args()
    width, notes = given.draft_tokens, []
    makers: dict[str, Any] = {mode: lambda mode=mode: Ring(mode, width) for mode in MODES}
    if not _has_arctic():
        notes.append("arctic-inference is not installed, and left out")
    else:
        makers["arctic"] = lambda: Arctic(width)
    tokenizer = make_tokenizer(random.Random(0))
    found: dict[str, list[dict[str, float]]] = {}
    for turn in range(-1, given.rounds):  # the first compiles
        texts = samples(given.prompts, tokenizer, turn)
        for batch in given.batches:
            for name, make in makers.items():
                numbers = replay(make(), texts, batch)
                if turn >= 0:
                    found.setdefault(f"{name}_{batch}", []).append(numbers)
    results = {
        f"{name}_{key}": statistics.median(one[key] for one in of_round)
        for name, of_round in found.items()
        for key in of_round[0]
    }
    options = vars(given) | {"out": given.out.name}
    if "arctic" in makers:
        options["arctic_inference"] = _version()
    command = "python -m benchmarks.draft_sources " + " ".join(sys.argv[1:])
    made = make_results(
        "draft_sources_cpu", command=command.strip(), options=options, results=results, series=found, notes=notes
    )
    portable(made).write(given.out)
    for name, value in results.items():
        print(f"{name:45s} {value:12.3f}")


def _has_arctic() -> bool:
    return importlib.util.find_spec("arctic_inference") is not None


def _version() -> str:
    try:
        return metadata.version("arctic-inference")
    except metadata.PackageNotFoundError:
        return "from its sources"


if __name__ == "__main__":
    main()
