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

from benchmarks.paper import Runner, check_machine
from benchmarks.paper_merge import merge
from benchmarks.paper_steps import SETTINGS
from moebius.rollout.bench import daemon
from moebius.rollout.bench.results import Results, make_results, read_results
from moebius.rollout.cli import app
from moebius.rollout.demo_assets import make_tiny_model
from tests.segments import segment_names

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
  prepare: "on"
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


def test_kernels(up: Path, tmp_path: Path) -> None:
    """Operators on CPU: an iteration has as many as the model's layers and no prefill's, whatever else runs."""
    results = bench(up, tmp_path, "kernels", "--batches", "4", "--context", "20", "--iterations", "8", "--top", "3")
    for lane in ("moebius_ep", "moebius_tp", "stock_tp"):
        rows = {row["kernel"]: row for row in results.series["kernels"][lane]["4"]}
        attention = [row["calls"] for name, row in rows.items() if "cpu_attention" in name]
        assert attention == [2.0], f"{lane}: two layers, got {sorted(rows)}"
        assert results.results[f"{lane}_4_device_ms"] == pytest.approx(
            sum(r["us"] for r in rows.values()) / 1e3, rel=1e-3
        )
    told = [note for note in results.notes if note.startswith("batch 4, moebius_tp less stock_tp: ")]
    assert len(told) == 3 and all(" us (" in note for note in told)


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


def test_switch(up: Path, tmp_path: Path) -> None:
    memory = make_results("memory", command="x", options={}, results={"memory_overhead_pct": 1.5}).write(tmp_path)
    arguments = ["--live", "6", "--fills", "150,300,4000", "--switches", "3", "--every", "3", "--drained", "2"]
    arguments += ["--prepare", "4", "--prepare-layers", "1,2"]
    arguments += ["--kv-tokens", "2048", "--repeats", "2", "--soak", "7", "--soak-live", "5", "--soak-context", "12"]
    results = bench(up, tmp_path, "switch", *arguments, "--update-every", "3", "--memory-json", str(memory))
    numbers = results.results
    wanted = "ceiling_gbps reshard_ep_tp_ms reshard_tp_ep_ms reshard_ep_tp_pct reshard_tp_ep_pct reshard_nccl_ratio "
    wanted += "kv_2k_ms_per_layer kv_nccl_ratio kv_pct switch_drained_ms switch_live6_ms memory_overhead_pct "
    wanted += "commit_pause_live6_ms prepare_slowdown_pct soak_switches soak_device_bytes_delta soak_fd_delta"
    assert set(wanted.split()) <= numbers.keys()
    assert all(numbers[name] > 0 for name in wanted.split() if not name.startswith(("soak_", "prepare_")))
    assert numbers["live_switches"] == 18, "three at each of the two fills that fit, plain and prepared in two ways"
    assert [switch["to"] for switch in results.series["live"]] == ["TP", "EP", "TP"] * 6
    staged = [switch["staged_layers"] for switch in results.series["live"]]
    assert staged == [0, 0, 0, 1, 0, 1, 2, 0, 2] * 2
    assert all(switch["prepared"] == bool(switch["staged_layers"]) for switch in results.series["live"])
    assert {"commit_pause_1_layers_ms", "commit_pause_2_layers_ms"} <= numbers.keys()
    for switch in results.series["live"]:
        assert switch["live"] == 6
        assert abs(switch["kv_tokens"] - switch["fill"]) < 120
        assert {"export", "reshard", "import", "kv", "activate"} <= switch["phases_ms"].keys()
    assert numbers["soak_switches"] == 7 and numbers["soak_fd_delta"] == 0
    assert [held["switches"] for held in results.series["held"]] == [0, 3, 6, 7]
    # 4000 tokens are more than max_model_len takes; what switches send is what the formula says, or there were a note.
    assert [note for note in results.notes if "CPU changes" not in note] == [
        note for note in results.notes if note.startswith("4000 tokens of KV with 6 live requests: left out")
    ]
    assert {curve.name for panel in results.panels for curve in panel.curves} == {
        "peer copy", "all to all", "all to all, overlapped",
    }  # fmt: skip
    # Movers and switches leave experts and requests whole: a sweep of the same engine goes on.
    bench(up, tmp_path, "sweep", "--batches", "2", "--context", "5", "--iterations", "4", "--window", "2")


def test_policies(up: Path, tmp_path: Path) -> None:
    arguments = ["--requests", "9", "--prompt", "12", "--scale", "0.02", "--cap", "60", "--steps", "1"]
    results = bench(up, tmp_path, "policies", *arguments, "--batches", "1,8", "--contexts", "16", "--iterations", "4")
    names = ["static_ep", "static_tp", "fixed", "fixed_low", "predictive"]
    rows = results.series["steps"]
    assert [row["policy"] for row in rows] == names
    for row in rows:
        assert row["measured_s"] > 0 and row["simulated_s"] > 0 and row["iterations"] >= 30
        assert len(row["switch_live"]) <= (0 if row["policy"].startswith("static") else 1)
    assert results.results["sim_error_pct"] == pytest.approx(max(abs(row["error_pct"]) for row in rows))
    assert results.results["output_tokens"] == sum(results.series["lengths"][0])


def test_a_part_of_the_papers_script(up: Path, tmp_path: Path) -> None:
    """Its cheapest part, by the engines that are up, then again (nothing is left), and the file made of it."""
    setting = SETTINGS[2, "tiny"]
    folder = tmp_path / setting.name
    check_machine(setting, folder)
    (folder / "engine").symlink_to(up)
    assert Runner(setting, folder, 8.0, keep_up=True).run(1) == 0
    written = folder / "switch" / "switch.json"
    before = written.stat().st_mtime_ns
    assert Runner(setting, folder, 8.0, keep_up=True).run(1) == 0 and written.stat().st_mtime_ns == before
    results = read_results(merge(setting, folder, tmp_path))
    figures = {"startup_s", "switch_drained_ms", "switch_live_min_ms", "switch_live_max_ms", "commit_pause_ms"}
    assert figures <= results.results.keys() and all(results.results[name] > 0 for name in figures)
    assert not {"reshard_pct_nominal", "memory_overhead_pct", "rollout_steps"} & results.results.keys()
    assert results.results["switch_live_max_kv_tokens"] > results.results["switch_live_min_kv_tokens"]
    assert "account_over_static_ep_gb" in results.results and "account_over_static_ep_pct" not in results.results


def test_serving(up: Path, tmp_path: Path) -> None:
    """The bursty trace in 1.5 seconds: 31 requests, of which 8 and 12 come in bursts."""
    arguments = ["--time-scale", "0.004", "--requests-scale", "0.01", "--length-scale", "0.06", "--soak", "2"]
    # On a busy machine all of a burst begin at once: their lengths, 48 to 72, lie so far apart that the last five take
    # more iterations than the window has.
    arguments += ["--threshold", "5", "--threshold-low", "5", "--window", "2", "--cooldown-s", "0.02"]
    results = bench(up, tmp_path, "serving", *arguments)
    numbers, policies = results.results, ("static_ep", "static_tp", "interactive")
    for policy in policies:
        for phase in ("burst_1", "quiet", "burst_2", "tail"):
            prefix = f"{phase}_{policy}"
            assert 0 < numbers[f"{prefix}_ttft_p50_s"] <= numbers[f"{prefix}_ttft_p99_s"] < 60
            assert 0 < numbers[f"{prefix}_tpot_mean_ms"] <= 2 * numbers[f"{prefix}_tpot_p99_ms"]
        (rows,) = results.series["requests"][policy]
        assert len(rows) == numbers["requests"] == 31
        # A request is taken in after it has come, and answered after that; ranks begin a step nearly at once.
        assert all(-0.1 < waited <= ttft for _, waited, ttft, _ in rows)
    # It begins in TP as after a quiet time, and follows the load both ways with requests in flight.
    switches = results.series["switches"]["interactive"][0]
    assert [switch["to"] for switch in switches][:2] == ["EP", "TP"]
    assert numbers["switches"] == len(switches) and all(switch["live"] > 0 for switch in switches)
    assert 0 < numbers["pause_max_ms"] == max(switch["pause_ms"] for switch in switches)
    assert [switch["to"] for switch in results.series["switches"]["static_tp"][0]] == ["TP"]
    assert results.series["switches"]["static_ep"] == [[]]
    assert numbers["worst_gap_pct"] == max(value for name, value in numbers.items() if name.startswith("gap_"))
    assert numbers["live_switch_soak"] == 2 and numbers["soak_fd_delta"] == 0
    trace = tmp_path / "trace.csv"
    lines = [f"2024-05-10 00:00:{i / 10:010.7f},{5 + i},{3 + i % 4}" for i in range(10)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    found = bench(up, tmp_path, "serving", "--file", str(trace), "--policies", "static_ep", "--soak", "0")
    assert found.results["all_requests"] == 10 and "worst_gap_pct" not in found.results


def test_a_failed_job_says_why_and_the_engines_go_on(up: Path, tmp_path: Path) -> None:
    arguments = ["bench", "rollout", "--dir", str(up), "--out", str(tmp_path), "--requests", "4"]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2
    assert "raise engine.max_model_len" in result.output
    bench(up, tmp_path, "sweep", "--batches", "2", "--context", "5", "--iterations", "4", "--window", "2")


def test_down_ends_the_engines(up: Path) -> None:
    owner = (daemon.running(up) or {})["owner"]
    pid = owner.split("-")[1]
    assert [name for name in segment_names() if f"moebius-{pid}-" in name]
    result = runner.invoke(app, ["bench", "down", "--dir", str(up)])
    assert result.exit_code == 0, result.output
    assert daemon.running(up) is None
    assert not [name for name in segment_names() if f"moebius-{pid}-" in name]
