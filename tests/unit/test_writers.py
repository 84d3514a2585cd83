"""Figures of step reports in TensorBoard's files and wandb's, and the metrics page of a job."""

from __future__ import annotations

import builtins
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from moebius.rollout import report_writers
from moebius.rollout.config import RolloutConfig
from moebius.rollout.errors import BadInput, validate
from moebius.rollout.job_metrics import JobMetrics
from moebius.rollout.report_types import StepReport
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


def test_wandb_that_cannot_begin_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does where nobody is logged in; another writer that has been opened is closed."""
    wandb = pytest.importorskip("wandb")

    def refuse(**settings: Any) -> None:
        raise wandb.errors.UsageError("No API key configured.\nUse `wandb login` to log in.")

    monkeypatch.setattr(wandb, "init", refuse)
    closed: list[str] = []
    other = SimpleNamespace(close=lambda: closed.append("tensorboard"))
    monkeypatch.setitem(report_writers._MAKERS, "tensorboard", lambda settings, folder: other)
    words = r"wandb could not begin run 'a run' .*\(UsageError: No API key configured. Use .*WANDB_MODE=offline"
    with pytest.raises(BadInput, match=words):
        open_writers(ReportSettings(writers=["tensorboard", "wandb"], name="a run"), tmp_path)
    assert closed == ["tensorboard"]


def test_tensorboard_without_a_folder_to_write_to(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "tensorboard").write_text("")
    with pytest.raises(BadInput, match="tensorboard cannot write to"):
        open_writers(ReportSettings(writers=["tensorboard"]), tmp_path)


def spans_of(reports: list[StepReport], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    exporter = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()
    from moebius.rollout import report_spans

    monkeypatch.setattr(report_spans, "_exporter", lambda: exporter)
    with open_writers(ReportSettings(writers=["otel"], name="a run"), tmp_path) as writers:
        for report in reports:
            writers.write(report, {"reward": 0.5})
    return list(exporter.get_finished_spans())


def test_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Burst 0-2 s, switch 2-2.5 s, tail 2.5-4.5 s, and the update that ended a second before."""
    report = step_report(3, switch_at=2)
    report = report.model_copy(update={"began_at": 1000.0, "update_weights_s": 2.0, "update_ended_at": 999.0})
    spans = {span.name: span for span in spans_of([report], tmp_path, monkeypatch)}
    seconds = {name: (span.start_time / 1e9, span.end_time / 1e9) for name, span in spans.items()}
    assert seconds == {
        "weight update": (997, 999), "rollout step": (1000, 1004.5), "burst": (1000, 1002),
        "switch to TP": (1002, 1002.5), "kv": (1002, 1002.5), "tail": (1002.5, 1004.5),
    }  # fmt: skip
    step, switch = spans["rollout step"], spans["switch to TP"]
    assert step.parent is None and spans["weight update"].parent is None
    for name, parent in {"burst": step, "tail": step, "switch to TP": step, "kv": switch}.items():
        assert spans[name].parent.span_id == parent.context.span_id
    assert step.attributes["moebius.reward"] == 0.5 and step.attributes["moebius.run"] == "a run"
    assert step.attributes["moebius.output_tokens"] == report.counts.output_tokens
    assert spans["burst"].attributes["moebius.iterations"] == spans["tail"].attributes["moebius.iterations"] == 2
    assert step.resource.attributes["service.name"] == "moebius-rollout"


def test_spans_of_replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.unit.test_report_lanes import shared

    report = shared()
    spans = spans_of([report], tmp_path, monkeypatch)
    lanes = [lane for lane in report.lanes if lane.durations_s is not None]
    names = [span.name for span in spans]
    assert names.count("rollout step") == 1 and names.count("burst") >= len(lanes) > 1
    step = next(span for span in spans if span.name == "rollout step")
    for lane in lanes:
        span = next(span for span in spans if span.name == f"replica {lane.replica}")
        assert span.parent.span_id == step.context.span_id
        assert (span.start_time - step.start_time) / 1e9 == pytest.approx(lane.began_s, abs=1e-3)
        assert (span.end_time - span.start_time) / 1e9 == pytest.approx(lane.durations_s.total, abs=1e-3)
    assert sum(name.startswith("switch to") for name in names) == len(report.switches)


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "otel"])
def test_a_writer_that_is_not_installed(name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(module: str, *arguments: Any, **more: Any) -> Any:
        if module.partition(".")[0] == {"otel": "opentelemetry"}.get(name, name):
            raise ImportError(f"No module named {name!r}")
        return real(module, *arguments, **more)

    monkeypatch.delitem(sys.modules, "moebius.rollout.report_spans", raising=False)
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
