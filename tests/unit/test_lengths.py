"""Output lengths of runs: captured from reports, read back, drawn."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from moebius.rollout.errors import BadInput
from moebius.rollout.lengths import capture, step_lengths, summary
from moebius.rollout.types import LengthTrace
from tests.unit.reports import step_report


def run(folder: Path, steps: int = 2, **more: str) -> Path:
    for step in range(steps):
        step_report(step, lengths=[step + 1, 10, 20], **more).write(folder)
    return folder


def test_captured_lengths_are_read_back_by_step(tmp_path: Path) -> None:
    folder = run(tmp_path / "run")
    paths = capture(folder, tmp_path / "lengths")
    assert [path.name for path in paths] == ["lengths_0000.json", "lengths_0001.json"]
    expected = [{(0, 0): step + 1, (1, 0): 10, (2, 0): 20} for step in range(2)]
    for source in (tmp_path / "lengths", folder):  # a run's folder needs no capture
        of = step_lengths(str(source), prompts=3, n=1, cap=100)
        assert [of(step).lengths for step in range(2)] == expected
        with pytest.raises(BadInput, match=r"no lengths of step 2, only of \[0, 1\]"):
            of(2)
    for_all = step_lengths(str(paths[0]), prompts=3, n=1, cap=100)
    assert for_all(0).lengths == for_all(5).lengths == expected[0]
    traces = [LengthTrace.load(path) for path in paths]
    assert summary(traces) == "6 samples in 2 steps: median 10 tokens, 99th percentile 20, longest 20"
    assert summary([]) == "no samples"


def test_what_cannot_be_captured(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no step_\*\.json"):
        capture(tmp_path, tmp_path / "out")
    with pytest.raises(BadInput, match="3 samples were aborted"):
        capture(run(tmp_path / "run", 1, reason="abort"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(BadInput, match="no such file, and no folder"):
        step_lengths(str(tmp_path / "none"), prompts=1, n=1, cap=1)


def test_drawn_lengths() -> None:
    of = step_lengths("deepmath", prompts=1024, n=2, cap=32768)
    lengths = of(3).lengths
    assert lengths.keys() == {(p, s) for p in range(1024) for s in range(2)}
    assert lengths == of(3).lengths != of(4).lengths
    assert 1300 < statistics.median(lengths.values()) < 1750 and max(lengths.values()) <= 32768
    assert max(step_lengths("deepmath", prompts=1024, n=2, cap=900)(3).lengths.values()) == 900
