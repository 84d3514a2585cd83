"""Traces of requests that arrive over time: a generated one with two bursts, and CSV files of recorded traffic."""

from __future__ import annotations

import csv
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from moebius.rollout.errors import BadInput

# The bursty trace of the Moebius paper (arXiv:2606.26607, section 6.2): 3,107 requests in 375 s, bursts of 80 and 120
# requests per second around 300 s of 1 to 5 requests per second, prompts of 300 to 700 tokens, outputs U(800, 1200).
# How long each burst lasts is not said. 10 s make the totals come out: 2,000 requests in bursts, and 1,107 in the other
# 355 s, 3.1 per second.
PAPER_REQUESTS = 3107
PAPER_PHASES = (("burst_1", 10.0, 800), ("quiet", 300.0, None), ("burst_2", 10.0, 1200), ("tail", 55.0, None))
PAPER_RATES = (1.0, 5.0)  # requests per second outside of bursts
PAPER_PROMPT, PAPER_OUTPUT = (300, 700), (800, 1200)
_RATE_S = 5.0  # for which a rate outside of bursts holds
COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a trace, in seconds since its start; requests belong to the phase in which they arrive."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests in the order of their arrival: seconds since the trace began, prompt and output tokens."""

    at: tuple[float, ...]
    prompt_tokens: tuple[int, ...]
    lengths: tuple[int, ...]
    phases: tuple[Phase, ...]

    def phase_of(self, index: int) -> int:
        """Index of the phase in which a request arrives."""
        at = self.at[index]
        return next((i for i, phase in enumerate(self.phases) if at < phase.end), len(self.phases) - 1)

    @property
    def duration(self) -> float:
        """Seconds from the start to the end of the last phase."""
        return self.phases[-1].end

    def rates(self, bins: int) -> tuple[list[float], list[float]]:
        """Middles of `bins` equal parts of the trace in seconds, and requests per second that arrive in each."""
        width = self.duration / bins
        counts = [0] * bins
        for at in self.at:
            counts[min(bins - 1, int(at / width))] += 1
        return [(i + 0.5) * width for i in range(bins)], [count / width for count in counts]


def bursty(*, seed: int, time_scale: float = 1.0, requests_scale: float = 1.0, length_scale: float = 1.0) -> Traffic:
    """The paper's trace, or one like it: all times, the number of requests, or all tokens multiplied.

    With `time_scale` and `requests_scale` alike, the rates are the paper's.
    """
    generator = random.Random(seed)
    bursts = sum(count for _, _, count in PAPER_PHASES if count)
    calm_s = sum(seconds for _, seconds, count in PAPER_PHASES if count is None)
    at: list[float] = []
    phases: list[Phase] = []
    start = 0.0
    left = PAPER_REQUESTS - bursts  # outside of bursts
    for name, seconds, count in PAPER_PHASES:
        if count is None:
            share = round((PAPER_REQUESTS - bursts) * seconds / calm_s)
            share = left if name == PAPER_PHASES[-1][0] else share
            left -= share
            times = _varying(generator, seconds, _scaled(share, requests_scale))
        else:
            times = [generator.uniform(0.0, seconds) for _ in range(_scaled(count, requests_scale))]
        at += sorted(time_scale * (start + t) for t in times)
        phases.append(Phase(name, time_scale * start, time_scale * (start + seconds)))
        start += seconds
    prompts = tuple(_scaled(generator.randint(*PAPER_PROMPT), length_scale) for _ in at)
    lengths = tuple(_scaled(generator.randint(*PAPER_OUTPUT), length_scale) for _ in at)
    return Traffic(tuple(at), prompts, lengths, tuple(phases))


def _varying(generator: random.Random, seconds: float, count: int) -> list[float]:
    """`count` arrivals at a rate that is drawn anew every few seconds."""
    starts = [i * _RATE_S for i in range(max(1, round(seconds / _RATE_S)))]
    rates = [generator.uniform(*PAPER_RATES) for _ in starts]
    return [s + generator.uniform(0.0, _RATE_S) for s in generator.choices(starts, weights=rates, k=count)]


def _scaled(number: int, scale: float) -> int:
    return max(1, round(number * scale))


def read_csv(
    path: Path,
    *,
    seed: int = 0,
    first_s: float | None = None,
    time_scale: float = 1.0,
    requests_scale: float = 1.0,
    length_scale: float = 1.0,
) -> Traffic:
    """A trace of the columns TIMESTAMP, ContextTokens, GeneratedTokens, as Azure publishes; one phase, `all`.

    A time is a date with time (ISO 8601) or a number of seconds. Only the first `first_s` seconds of the file are
    taken; of these requests a share of `requests_scale` (at most 1), chosen by the seed. Raises BadInput for other
    files.
    """
    if not 0 < requests_scale <= 1:
        raise BadInput(
            f"--requests-scale of a file is the share of its requests, more than 0 and at most 1, got {requests_scale}"
        )
    rows = _rows(path)
    start = rows[0][0]
    rows = [(t - start, prompt, length) for t, prompt, length in rows]
    rows = [row for row in rows if first_s is None or row[0] < first_s]
    generator = random.Random(seed)
    chosen = sorted(generator.sample(range(len(rows)), _scaled(len(rows), requests_scale)))
    rows = [rows[i] for i in chosen]
    at = tuple(time_scale * t for t, _, _ in rows)
    return Traffic(
        at,
        tuple(_scaled(prompt, length_scale) for _, prompt, _ in rows),
        tuple(_scaled(length, length_scale) for _, _, length in rows),
        (Phase("all", 0.0, max(at[-1], 1e-3)),),
    )


def _rows(path: Path) -> list[tuple[float, int, int]]:
    """(seconds, prompt tokens, output tokens), by time."""
    rows = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise BadInput(f"{path}: a trace needs the columns {', '.join(COLUMNS)}; missing: {', '.join(missing)}")
            for row in reader:
                try:
                    rows.append((_seconds(row[COLUMNS[0]]), int(row[COLUMNS[1]]), int(row[COLUMNS[2]])))
                except (ValueError, TypeError) as error:
                    raise BadInput(f"{path}, line {reader.line_num}: not a request of a trace: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: the trace cannot be read: {error}") from error
    if not rows:
        raise BadInput(f"{path}: the trace holds no request")
    return sorted(rows)


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text.strip()).timestamp()


def arrivals_of(traffic: Traffic) -> list[tuple[float, int, int]]:
    """(seconds, prompt tokens, output tokens) of every request, for `of_arrivals`."""
    return list(zip(traffic.at, traffic.prompt_tokens, traffic.lengths, strict=True))


def of_arrivals(arrivals: Sequence[tuple[float, int, int]], phases: Sequence[Phase]) -> Traffic:
    """The inverse of `arrivals_of`."""
    at, prompts, lengths = zip(*arrivals, strict=True)
    assert all(a <= b for a, b in itertools.pairwise(at))
    return Traffic(at, prompts, lengths, tuple(phases))
