"""Output lengths of whole runs: captured from step reports, replayed step by step, or drawn like published ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from moebius.rollout.errors import BadInput
from moebius.rollout.report_types import StepReport
from moebius.rollout.types import LengthTrace

DEEPMATH = "deepmath"
StepLengths = Callable[[int], LengthTrace]

_STEP = re.compile(r"(?:step|lengths)_(\d{4,})\.json")


def capture(run: str | Path, out: str | Path) -> list[Path]:
    """Write lengths_NNNN.json into `out` for every step_NNNN.json of the run in `run`; returns their paths.

    Raises BadInput when there is no step report, or a step has aborted samples, whose lengths say nothing.
    """
    out = Path(out)
    traces = {}
    for step, path in _numbered(Path(run), "step_*.json").items():
        report = StepReport.load(path)
        aborted = report.counts.finish_reasons.get("abort", 0)
        if aborted:
            raise BadInput(f"{path}: {aborted} samples were aborted, so their lengths mean nothing; repeat the step")
        traces[step] = LengthTrace.from_report(report)
    if not traces:
        raise BadInput(f"{run}: no step_*.json in it; give the folder that a run wrote its reports to")
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for step, trace in sorted(traces.items()):
        paths.append(out / f"lengths_{step:04d}.json")
        trace.save(paths[-1])
    return paths


def summary(traces: Sequence[LengthTrace]) -> str:
    """One line: samples, and median, 99th percentile and longest output."""
    lengths = [tokens for trace in traces for tokens in trace.lengths.values()]
    if not lengths:
        return "no samples"
    p50, p99 = np.percentile(lengths, [50, 99])
    return (
        f"{len(lengths):,} samples in {len(traces)} steps: median {p50:,.0f} tokens, 99th percentile {p99:,.0f}, "
        f"longest {max(lengths):,}"
    )


def step_lengths(source: str, *, prompts: int, n: int, cap: int) -> StepLengths:
    """Lengths of step k as `source` says: a run's folder, a folder of lengths_NNNN.json, one file for every step, or
    "deepmath": drawn for `prompts` times `n` samples with the published statistics, at most `cap` tokens.

    Raises BadInput when there is nothing of the kind; the returned function does for a step that is missing.
    """
    if source == DEEPMATH:
        return lambda step: _drawn(step, prompts, n, cap)
    path = Path(source).expanduser()
    if path.is_file():
        trace = LengthTrace.load(path)
        return lambda step: trace
    found = _numbered(path, "lengths_*.json") or _numbered(path, "step_*.json")
    if not found:
        raise BadInput(f"replay_lengths={source}: no such file, and no folder with lengths_*.json or step_*.json")

    def of(step: int) -> LengthTrace:
        file = found.get(step)
        if file is None:
            raise BadInput(f"{path}: no lengths of step {step}, only of {sorted(found)}; lower job.steps")
        if file.name.startswith("lengths_"):
            return LengthTrace.load(file)
        return LengthTrace.from_report(StepReport.load(file))

    return of


def _numbered(folder: Path, pattern: str) -> dict[int, Path]:
    found = {path: _STEP.fullmatch(path.name) for path in folder.glob(pattern)}
    return {int(match[1]): path for path, match in found.items() if match}


def _drawn(step: int, prompts: int, n: int, cap: int) -> LengthTrace:
    from moebius.rollout.bench.traces import deepmath_like

    drawn = deepmath_like(prompts * n, seed=step, cap=cap)
    return LengthTrace({divmod(i, n): tokens for i, tokens in enumerate(drawn)})
