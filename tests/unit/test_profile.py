"""When recording begins and ends, and that a trace holds the iterations it should. CPU only."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest
import torch

from moebius.engine.config import PolicyConfig, ProfileConfig
from moebius.engine.layout import Layout
from moebius.engine.profile import SwitchProfiler
from moebius.engine.switch import PhaseTimer

ROLLOUT = PolicyConfig(kind="rollout", threshold=10)


def step(profiler: SwitchProfiler, live: list[int], policy: PolicyConfig, switch_at: int | None) -> None:
    """A step as the engine runs it: `live[i]` samples before iteration i, a switch before `switch_at`."""
    layout = Layout.EP
    for i, count in enumerate([*live, 0]):
        profiler.before_iteration(i, count, layout, policy)
        if count == 0:
            return
        if i == switch_at:
            with PhaseTimer().phase("reshard"):
                torch.ones(3)
            layout = Layout.TP
            profiler.after_switch()
        torch.ones(2, 2) @ torch.ones(2, 2)


def iterations(path: Path) -> list[tuple[str, int]]:
    """Layout and number of the iterations in a trace."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {e.get("name", "") for e in events}
    found = [re.fullmatch(r"(EP|TP) iteration (\d+), \d+ live", name) for name in names]
    return sorted(((m[1], int(m[2])) for m in found if m), key=lambda pair: pair[1])


def numbers(path: Path) -> list[int]:
    return [number for _, number in iterations(path)]


def test_window_around_the_switch(tmp_path):
    profiler = SwitchProfiler(ProfileConfig(folder=str(tmp_path / "new"), before=4, after=3, margin=0.2), 1)
    step(profiler, [50, 30, 12, 11, 10, 9, 8, 7, 6, 5], ROLLOUT, switch_at=4)
    (path,) = (tmp_path / "new").iterdir()
    assert path.name == "step_0000_rank_1.json.gz"
    # The range of an iteration is named before the switch that comes first in it.
    assert iterations(path) == [("EP", 2), ("EP", 3), ("EP", 4), ("TP", 5), ("TP", 6)]
    assert b"switch: reshard" in gzip.decompress(path.read_bytes())


def test_recording_begins_anew_when_the_switch_is_long_in_coming(tmp_path):
    profiler = SwitchProfiler(ProfileConfig(folder=str(tmp_path), before=4, after=2), 0)
    step(profiler, [11] * 10 + [10] * 9, ROLLOUT, switch_at=10)
    assert numbers(tmp_path / "step_0000_rank_0.json.gz") == [8, 9, 10, 11]


@pytest.mark.parametrize(
    ("policy", "switch_at", "want"),
    [
        (PolicyConfig(kind="scheduled", at_iteration=6), 6, [3, 4, 5, 6, 7]),
        (PolicyConfig(kind="static_tp"), 0, [0, 1]),
        (PolicyConfig(kind="static_ep"), None, None),
        (ROLLOUT, None, None),  # refused switches only
    ],
)
def test_policies(tmp_path, policy, switch_at, want):
    profiler = SwitchProfiler(ProfileConfig(folder=str(tmp_path), before=4, after=2), 0)
    step(profiler, [9] * 12, policy, switch_at)
    found = sorted(tmp_path.iterdir())
    assert (numbers(found[0]) if found else None) == want


def test_given_iteration(tmp_path):
    profiler = SwitchProfiler(ProfileConfig(folder=str(tmp_path), at_iteration=2, after=3), 0)
    step(profiler, [9] * 12, PolicyConfig(kind="static_ep"), None)
    step(profiler, [9] * 4, PolicyConfig(kind="static_ep"), None)  # ends before the window does
    assert numbers(tmp_path / "step_0000_rank_0.json.gz") == [2, 3, 4]
    assert numbers(tmp_path / "step_0001_rank_0.json.gz") == [2, 3]


def test_steps_are_counted_and_limited(tmp_path):
    profiler = SwitchProfiler(ProfileConfig(folder=str(tmp_path), steps=2, after=1), 0)
    for _ in range(3):
        step(profiler, [9] * 4, ROLLOUT, switch_at=1)
    step(profiler, [], ROLLOUT, None)
    assert sorted(path.name[:9] for path in tmp_path.iterdir()) == ["step_0000", "step_0001"]


def test_a_step_that_broke_off_leaves_no_trace(tmp_path):
    profiler = SwitchProfiler(ProfileConfig(folder=str(tmp_path), after=2), 0)
    profiler.before_iteration(0, 9, Layout.EP, ROLLOUT)
    step(profiler, [9] * 4, ROLLOUT, switch_at=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_0001_rank_0.json.gz"]


def test_off_by_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    step(SwitchProfiler(ProfileConfig(), 0), [9] * 4, ROLLOUT, switch_at=1)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_costs_the_trace_and_no_step(tmp_path, caplog):
    """An error within the step would leave the other ranks waiting."""
    (tmp_path / "file").write_text("")
    profiler = SwitchProfiler(ProfileConfig(folder=str(tmp_path / "file"), before=4, after=2), 0)
    step(profiler, [12, 11, 10, 9, 8, 7, 6], ROLLOUT, switch_at=3)
    assert "no trace was written to engine.profile.folder" in caplog.text and len(list(tmp_path.iterdir())) == 1
