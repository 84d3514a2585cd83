"""The benchmarks end to end on CPU: engines that stay up, ours and stock, driven by the commands a user types."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moebius.rollout.bench import daemon
from moebius.rollout.bench.results import Results
from moebius.rollout.cli import app
from moebius.rollout.demo_assets import make_tiny_model

START_S = 240
CONFIG = """
ranks: 2
device: cpu
engine:
  model: {model}
  dtype: float32
  max_model_len: 256
  max_num_seqs: 16
  max_num_batched_tokens: 256
  kv_cache_bytes: 16777216
sampling: {{max_tokens: 64}}
"""
runner = CliRunner()


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder whose daemon holds two ranks of ours and two of stock TP."""
    root = tmp_path_factory.mktemp("bench")
    make_tiny_model(root / "model", num_layers=2)
    (root / "c.yaml").write_text(CONFIG.format(model=root / "model"))
    folder, output = root / "run", root / "up.log"
    command = [sys.executable, "-m", "moebius.rollout.cli", "bench", "up", "--dir", str(folder)]
    command += ["--config", str(root / "c.yaml"), "--engines", "moebius,stock_tp", "--largest-batch", "8"]
    with output.open("w") as log, subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True) as process:
        try:
            deadline = time.monotonic() + START_S
            while not (daemon.running(folder) or {}).get("ready"):
                assert process.poll() is None and time.monotonic() < deadline, output.read_text()
                time.sleep(0.2)
            yield folder
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)


def bench(folder: Path, out: Path, command: str, *arguments: str) -> Results:
    result = runner.invoke(app, ["bench", command, "--dir", str(folder), "--out", str(out), *arguments])
    assert result.exit_code == 0, result.output
    assert (out / f"{command}.png").stat().st_size > 5000
    return Results.model_validate(json.loads((out / f"{command}.json").read_text()))


def test_sweep(up: Path, tmp_path: Path) -> None:
    arguments = ["--batches", "4,5,64", "--context", "20", "--iterations", "12", "--window", "4", "--rounds", "2"]
    results = bench(up, tmp_path, "sweep", *arguments)
    windows = results.series["windows_ms"]
    # 12 iterations are 3 windows; 5 requests do not divide by two ranks; 64 are more than max_num_seqs.
    for lane in ("moebius_ep", "moebius_tp", "stock_tp"):
        assert {batch: [len(values) for values in rounds] for batch, rounds in windows[lane].items()} == {
            "4": [3, 3],
            "5": [3, 3],
        }
        assert all(0 < ms < 10_000 for rounds in windows[lane].values() for values in rounds for ms in values)
    assert sum("max_num_seqs is 16" in note for note in results.notes) == 3
    assert any("CPU changes" in note for note in results.notes)
    assert "max_slowdown_pct_tp" in results.results and "max_slowdown_pct_ep" not in results.results
    assert results.options["setup"]["engine"]["load_format"] == "dummy"


def test_rollout(up: Path, tmp_path: Path) -> None:
    arguments = ["--trace", "long-tail", "--requests", "9", "--prompt", "12", "--body", "10", "--tail", "40"]
    results = bench(up, tmp_path, "rollout", *arguments, "--stragglers", "3", "--threshold", "3", "--repeats", "2")
    numbers = results.results
    assert set(results.series["seconds"]) == {"static_ep", "static_tp", "switched", "stock_tp"}
    assert all(len(seconds) == 2 for seconds in results.series["seconds"].values())
    assert numbers["output_tokens"] == sum(results.series["lengths"])
    # Requests that end in the iteration before are counted before the switch moves the rest.
    assert 1 <= numbers["live_at_switch"] <= 3
    assert 0 < numbers["switch_python_ms"] < numbers["switch_ms"]
    assert numbers["activate_ms"] < numbers["switch_ms"]
    assert 0 < numbers["ideal_s"] <= numbers["static_ep_s"] + 1e-9
    assert numbers["weight_update_s"] > 0 and numbers["stock_reload_s"] > 0
    assert numbers["ratio_ci_low"] <= numbers["ratio_vs_better_static"] <= numbers["ratio_ci_high"]
    assert {"EP", "TP"} == set(results.series["ms_by_live"])


def test_a_failed_job_says_why_and_the_engines_go_on(up: Path, tmp_path: Path) -> None:
    arguments = ["bench", "rollout", "--dir", str(up), "--out", str(tmp_path), "--requests", "4"]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2
    assert "raise engine.max_model_len" in result.output
    bench(up, tmp_path, "sweep", "--batches", "2", "--context", "5", "--iterations", "4", "--window", "2")


def test_down_ends_the_engines(up: Path) -> None:
    owner = (daemon.running(up) or {})["owner"]
    segments = [path for path in os.listdir("/dev/shm") if "moebius" in path]
    assert segments
    result = runner.invoke(app, ["bench", "down", "--dir", str(up)])
    assert result.exit_code == 0, result.output
    assert daemon.running(up) is None
    pid = owner.split("-")[1]
    assert not [path for path in os.listdir("/dev/shm") if f"moebius-{pid}-" in path]
