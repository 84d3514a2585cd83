"""Figures of step reports in TensorBoard's files and wandb's, and the metrics page of a job."""

from __future__ import annotations

import builtins
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from moebius.rollout.config import RolloutConfig
from moebius.rollout.errors import BadInput, validate
from moebius.rollout.job_metrics import JobMetrics
from moebius.rollout.report_writers import ReportSettings, figures, open_writers
from tests.unit.reports import step_report


def test_tensorboard(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    reports = [step_report(step, switch_at=2) for step in range(3)]
    with open_writers(ReportSettings(writers=["tensorboard"]), tmp_path) as writers:
        for report in reports:
            writers.write(report, {"reward": report.step / 2, "absent": None})
    assert [path.name for path in tmp_path.iterdir()] == ["tensorboard"]
    found = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    speeds = found.Scalars("rollout/tokens_per_s")
    assert [(event.step, pytest.approx(event.value)) for event in speeds] == [(r.step, r.tokens_per_s) for r in reports]
    assert [event.value for event in found.Scalars("rollout/reward")] == [0.0, 0.5, 1.0]
    assert found.Scalars("rollout/pause_ms")[0].value == 500.0
    assert {f"rollout/{name}" for name in figures(reports[0])} <= set(found.Tags()["scalars"])
    assert "rollout/absent" not in found.Tags()["scalars"]


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DATA_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    with open_writers(ReportSettings(writers=["wandb"], name="a run"), tmp_path) as writers:
        writers.write(step_report(0))
        writers.write(step_report(1))
    [run] = (tmp_path / "wandb").glob("offline-run-*")
    [file] = run.glob("*.wandb")
    deadline = time.monotonic() + 60  # a process of wandb's writes it, and may be behind
    while b"rollout/tokens_per_s" not in file.read_bytes():
        assert time.monotonic() < deadline, "the numbers were not written"
        time.sleep(0.1)


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_writer_that_is_not_installed(name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(module: str, *arguments: Any, **more: Any) -> Any:
        if module.partition(".")[0] == name:
            raise ImportError(f"No module named {name!r}")
        return real(module, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(BadInput, match=rf"{name} is not installed .*pip install -e '\.\[{name}\]'"):
        open_writers(ReportSettings(writers=[name]), tmp_path)


def test_settings() -> None:
    values = {"ranks": 2, "engine": {"model": "m"}, "report": {"writers": ["tensorbord"]}}
    with pytest.raises(BadInput, match=r"report\.writers\.0"):
        validate(RolloutConfig, values, "settings")


def metric(text: str, name: str) -> float:
    [line] = [line for line in text.splitlines() if line.startswith(f"{name} ")]
    return float(line.split()[-1])


def test_metrics_of_a_job() -> None:
    config = validate(RolloutConfig, {"ranks": 2, "engine": {"model": "m"}}, "settings")
    group: Any = SimpleNamespace(config=config, policy_version=3)
    with JobMetrics(group, 0) as metrics:
        url = f"http://127.0.0.1:{metrics.port}/metrics"
        metrics.progress(4, 0, 4, "EP")
        metrics.progress(4, 400, 2, "TP")
        page = httpx.get(url).text
        assert metric(page, "moebius_live_samples") == 2 and metric(page, "moebius_sampled_tokens") == 400
        assert metric(page, 'moebius_layout{layout="TP"}') == 1 and metric(page, "moebius_policy_version") == 3
        assert 0 < metric(page, "moebius_iteration_ms") < 1000
        report = step_report(4, switch_at=2)
        metrics.step_ended(report)
        metrics.restarted()
        page = httpx.get(url).text
        assert metric(page, "moebius_live_samples") == 0 and metric(page, "moebius_steps_total") == 1
        assert metric(page, "moebius_output_tokens_total") == report.counts.output_tokens
        assert metric(page, 'moebius_switch_phase_ms_total{phase="kv",to="TP"}') == 500
        assert metric(page, "moebius_kv_use_ratio") == 0.1 and metric(page, "moebius_restarts_total") == 1
        with pytest.raises(BadInput, match="cannot listen there"):
            JobMetrics(group, metrics.port)
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)
