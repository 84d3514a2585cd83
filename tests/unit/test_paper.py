"""benchmarks/paper.sh without engines: what it asks of a machine, what is left to do, how results become one file."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.paper import Runner, estimate
from benchmarks.paper_merge import merge
from benchmarks.paper_steps import SETTINGS, Setting, needs_gb, settings_of, steps_of
from moebius.rollout.bench.engines import EngineSpec
from moebius.rollout.bench.results import Curve, Results, make_results
from moebius.rollout.config import load_config
from moebius.rollout.errors import BadInput

ROOT = Path(__file__).parents[2]
X8, X2 = SETTINGS[8, "235b"], SETTINGS[2, "235b"]
MOVERS = [
    {"name": "direct, copy engine", "what": "experts EP->TP", "ms": 100.0, "gb_per_s": 360.0, "share": 0.95},
    {"name": "direct, copy engine", "what": "experts TP->EP", "ms": 110.0, "gb_per_s": 351.0, "share": 0.93},
    {"name": "all to all", "what": "experts EP->TP", "ms": 200.0, "gb_per_s": 180.0, "share": 0.5},
]


def _switch(fill: int, to: str, ms: float, prepared: bool = False) -> dict[str, Any]:
    return {"fill": fill, "to": to, "pause_ms": ms, "prepared": prepared, "live": 256, "kv_tokens": fill + 9,
            "kv_bytes": 10**9, "kv_use_before": 0.25}  # fmt: skip


def _results(name: str, numbers: dict[str, float], **parts: Any) -> Results:
    made = make_results(
        name,
        command=f"moebius bench {name} --out /home/x/y",
        options=parts.pop("options", {}),
        results=numbers,
        **parts,
    )
    return made.model_copy(update={"machine": {"gpus": ["NVIDIA H200"] * 8, "gpu_count": 8}})


def _sweep(**curves: dict[int, float]) -> Results:
    drawn = [Curve(name=name, x=list(points), y=list(points.values())) for name, points in curves.items()]
    return _results("sweep", {}, curves=drawn, options={"context": 128, "settle": 5, "iterations": 40})


def _measured() -> dict[str, Results]:
    account = {"overhead_bytes": {"EP": 3e9, "TP": 15e9}, "account": {"device": "cuda", "device_bytes": 150e9}}
    live = [_switch(35000, "TP", 160.0), _switch(35000, "EP", 170.0), _switch(640000, "TP", 300.0)]
    live += [_switch(640000, "EP", 310.0), _switch(35000, "TP", 70.0, prepared=True)]
    numbers = {"startup_s": 200.0, "switch_drained_ms": 140.0, "ceiling_gbps": 380.0}
    numbers |= {
        "reshard_ep_tp_ms": 100.0,
        "reshard_tp_ep_ms": 110.0,
        "reshard_ep_tp_pct": 95.0,
        "reshard_tp_ep_pct": 93.0,
    }
    rollout = {"static_ep_s": 60.0, "static_tp_s": 66.0, "switched_s": 50.0}
    lengths = {"series": {"lengths": [100, 200, 900]}, "options": {"prompt": 120}}
    return {
        "switch": _results("switch", numbers, series={"movers": {"speeds": MOVERS}, "live": live, "ranks": [account]}),
        "memory_moebius": _results("memory", {"moebius_driver_used_gib": 120.0, "device_gib": 140.0}),
        "memory_stock_ep": _results("memory", {"stock_ep_driver_used_gib": 117.2, "device_gib": 140.0}),
        "memory_stock_tp": _results("memory", {"stock_tp_driver_used_gib": 105.0, "device_gib": 140.0}),
        "sweep_moebius": _sweep(
            moebius_ep={8: 24.0, 256: 30.0, 2048: 40.0}, moebius_tp={8: 16.0, 256: 30.0, 2048: 60.0}
        ),
        "sweep_stock_ep": _sweep(stock_ep={8: 24.0, 256: 25.0}),
        "sweep_eager": _sweep(**{"moebius+eager_ep": {8: 48.0}, "moebius+eager_tp": {8: 64.0}}),
        "rollout_0": _results("rollout", rollout, **lengths),
        "rollout_2": _results("rollout", rollout | {"switched_s": 48.0}, **lengths),
    }


def _write(setting: Setting, folder: Path, found: dict[str, Results]) -> Path:
    for step in steps_of(setting):
        if step.name in found:
            found[step.name].write((folder / step.file).parent)
    return folder


def test_one_file_of_all_that_was_measured(tmp_path: Path) -> None:
    folder = _write(X8, tmp_path / X8.name, _measured())
    path = merge(X8, folder, tmp_path / "to")
    assert path == tmp_path / "to" / "paper_x8.json"
    written = json.loads(path.read_text())
    numbers = written["results"]
    assert numbers["reshard_pct_nominal"] == pytest.approx(78) and numbers["reshard_pct_ceiling"] == 93
    assert numbers["switch_drained_ms"] == 140
    assert (numbers["switch_live_min_ms"], numbers["switch_live_max_ms"]) == (165, 305)
    assert numbers["switch_live_max_kv_tokens"] == 640009 and numbers["commit_pause_ms"] == 70
    assert (
        numbers["rollout_ratio_vs_better_static"] == pytest.approx((1.2 + 1.25) / 2) and numbers["rollout_steps"] == 2
    )
    assert numbers["memory_overhead_pct"] == pytest.approx(2.0)
    assert numbers["account_over_static_ep_pct"] == pytest.approx(2.0)
    assert (
        numbers["crossover_batch"] == pytest.approx(256)
        and numbers["tp_over_ep_2048"] == 1.5 == numbers["ep_over_tp_8"]
    )
    assert numbers["over_stock_ep_256"] == 1.2 and "over_stock_tp_8" not in numbers
    assert numbers["eager_over_graphs_tp_8"] == 4 and "moebius+eager" not in str(list(numbers))
    planned = {row["figure"]: row for row in written["series"]["planner"]}
    assert {"switch_drained_ms", "switch_live_35000_ms", "crossover_batch", "moebius_tp_2048_ms"} <= planned.keys()
    row = planned["switch_drained_ms"]
    assert row["planned"] == pytest.approx(148, abs=2) and row["off_pct"] == pytest.approx(
        100 * (row["planned"] / 140 - 1)
    )
    assert written["options"]["kv_head_copies_in_tp"] == 2 and written["options"]["layers"] == 94
    assert written["options"]["kv_bytes_per_token"] == {"EP": 192512, "TP": 48128}
    assert written["series"]["published"]["switch_drained_ms"] == "152"
    assert written["machine"]["gpu_count"] == 8 and "/home" not in path.read_text()
    assert [note for note in written["notes"] if note.startswith("not measured")] == [
        f"not measured: {name}" for name in ("sweep_stock_tp", "sweep_deepep", "rollout_1")
    ]


def test_no_figure_without_its_step(tmp_path: Path) -> None:
    """And none of a shallower model under the paper's name, nor beside the paper's figures."""
    found = {name: results for name, results in _measured().items() if name in ("memory_moebius", "memory_stock_ep")}
    written = json.loads(merge(X2, _write(X2, tmp_path / X2.name, found), tmp_path).read_text())
    assert written["results"] == {"memory_moebius_gib": 120.0, "memory_stock_ep_gib": 117.2}
    assert (tmp_path / "paper_x2_dry.json").is_file() and written["options"]["all_layers"] is False
    assert written["series"]["published"] == {} and written["options"]["kv_head_copies_in_tp"] == 1
    with pytest.raises(BadInput, match="no step has results yet"):
        merge(X8, tmp_path / X8.name, tmp_path)


@pytest.mark.parametrize("setting", [s for s in SETTINGS.values() if s.device == "cuda"], ids=lambda s: s.name)
def test_settings_are_understood_and_fit_an_h200(setting: Setting, tmp_path: Path) -> None:
    words = settings_of(setting, tmp_path)
    sets = [value for key, value in itertools.pairwise(words) if key == "--set"]
    config = load_config(Path(words[1]), sets)
    assert config.engine.max_num_seqs == 2048 and words[3] == str(setting.gpus)
    assert needs_gb(setting, tmp_path) < 0.93 * 150.7, "an H200 has 150.7 GB"
    for step in steps_of(setting):
        assert step.engine is None or EngineSpec.parse(step.engine)
        assert step.minutes + (setting.start_min if step.engine else 0) < 9, "parts have less than nine minutes"


def test_what_is_done_is_left_alone_and_the_rest_waits_for_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _write(X8, tmp_path / X8.name, {"switch": _measured()["switch"]})
    begun: list[str] = []
    monkeypatch.setattr(
        Runner, "_measure", lambda self, step: begun.append(step.name) or setattr(self, "_began", True) or True
    )
    assert Runner(X8, folder, 8.7, keep_up=False).run(1) == 0
    assert begun == ["memory_moebius", "memory_stock_ep", "memory_stock_tp"], "the clock stands still here"
    begun.clear()
    assert Runner(X8, folder, 5.0, keep_up=False).run(1) == 3, "one step is begun in any case, else nothing ever were"
    assert begun == ["memory_moebius"]
    assert "left: memory_stock_ep, memory_stock_tp; run the same command again" in capsys.readouterr().out
    _write(X8, folder, {"rollout_0": _measured()["rollout_0"]})
    table = estimate(X8, folder)
    assert "switch            done" in table and "memory_moebius    5.3 min" in table
    assert "rollout_0         done" in table
    assert "rollout_1         8.4 min with the start" in table and "rollout_2         3.4 min\n" in table


@pytest.mark.skipif(os.path.exists("/dev/nvidia7"), reason="eight GPUs are here")
def test_a_machine_without_the_gpus_is_refused(tmp_path: Path) -> None:
    command = [str(ROOT / "benchmarks" / "paper.sh"), "--gpus", "8", "--check", "--out", str(tmp_path)]
    done = subprocess.run(
        command, env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1 and "8 GPUs are needed, 0 are visible" in done.stderr
    assert "part 3: rollout steps" in done.stdout and "Traceback" not in done.stderr
