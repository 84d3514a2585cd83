"""`moebius capture`, `replay`, `questions`, `report A B`, and `rollout` as a job: what they run and refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moebius.rollout import job, submit
from moebius.rollout.cli import app
from moebius.rollout.config import RolloutConfig
from moebius.rollout.deepmath_offline import prompt_lengths
from tests.unit.reports import step_report

runner = CliRunner()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text("ranks: 2\nengine: {model: tiny}\njob: {out: runs/a, steps: 2}\n")
    return path


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[RolloutConfig, bool]]:
    """Jobs that would have run here."""
    found: list[tuple[RolloutConfig, bool]] = []

    def guarded(config: RolloutConfig, *, fresh: bool = False) -> int:
        found.append((config, fresh))
        return 0

    monkeypatch.setattr(job, "guarded", guarded)
    return found


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Jobs that would have been submitted."""
    found: list[dict[str, Any]] = []

    def submit_job(config: Path, settings: list[str], **more: Any) -> int:
        found.append({"config": config, "settings": settings, **more})
        return 0

    monkeypatch.setattr(submit, "submit_job", submit_job)
    return found


@pytest.mark.parametrize("command", ["capture", "replay", "questions", "rollout", "report"])
def test_help(command: str) -> None:
    assert runner.invoke(app, [command, "--help"]).exit_code == 0


def test_rollout_without_prompts_is_the_configs_job(config: Path, ran: list[tuple[RolloutConfig, bool]]) -> None:
    arguments = ["rollout", "--config", str(config), "--n", "3", "--steps", "4", "--limit", "5", "--fresh"]
    result = runner.invoke(app, [*arguments, "--scorer", "a:b", "--set", "engine.policy.threshold=9"])
    assert result.exit_code == 0, result.output
    [(settings, fresh)] = ran
    assert settings.job is not None and fresh and settings.engine.policy.threshold == 9
    assert (settings.job.n, settings.job.steps, settings.job.data.limit, settings.job.scorer) == (3, 4, 5, "a:b")
    assert settings.job.out == "runs/a"


def test_exit_codes_come_through(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "guarded", lambda config, fresh: 143)
    assert runner.invoke(app, ["rollout", "--config", str(config)]).exit_code == 143


def test_submit_makes_paths_absolute(config: Path, sent: list[dict[str, Any]]) -> None:
    arguments = ["rollout", "--config", str(config), "--submit", "--prompts", "q.jsonl", "--address", "http://h:1"]
    result = runner.invoke(app, [*arguments, "--detach", "--set", "job.n=2"])
    assert result.exit_code == 0, result.output
    [job_sent] = sent
    assert job_sent["address"] == "http://h:1" and job_sent["wait"] is False
    chosen = dict(setting.split("=", 1) for setting in job_sent["settings"])
    assert chosen["job.n"] == "2"
    assert json.loads(chosen["job.data.source"]) == str(Path.cwd() / "q.jsonl")
    assert json.loads(chosen["job.out"]) == str(Path.cwd() / "runs/a")


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--submit", "--capture-lengths", "x"], "moebius capture RUN OUT"),
        (["--submit", "--profile"], "engine.profile.folder"),
        (["--submit", "--set", "job.stps=1"], "did you mean 'steps'"),
        (["--set", "job=null"], "no job: section"),
        (["--prompts", "q.jsonl"], "--out: give a folder"),
    ],
)
def test_refusals_are_one_line(
    config: Path, sent: list[dict[str, Any]], ran: list[Any], extra: list[str], words: str
) -> None:
    result = runner.invoke(app, ["rollout", "--config", str(config), *extra])
    assert result.exit_code == 2 and words in result.stderr and not sent and not ran


def test_capture_then_replay(config: Path, tmp_path: Path, ran: list[tuple[RolloutConfig, bool]]) -> None:
    for step in range(2):
        step_report(step, lengths=[1, 5]).write(tmp_path / "run")
    result = runner.invoke(app, ["capture", str(tmp_path / "run"), str(tmp_path / "lengths")])
    assert result.exit_code == 0 and "4 samples in 2 steps" in result.output
    arguments = ["replay", str(tmp_path / "lengths"), "--config", str(config), "--out", str(tmp_path / "again")]
    assert runner.invoke(app, arguments).exit_code == 0
    [(settings, _)] = ran
    assert settings.job is not None
    assert (settings.job.replay_lengths, settings.job.out) == (str(tmp_path / "lengths"), str(tmp_path / "again"))
    assert runner.invoke(app, ["capture", str(tmp_path), str(tmp_path / "x")]).exit_code == 2


def test_questions(tmp_path: Path) -> None:
    result = runner.invoke(app, ["questions", str(tmp_path / "q.jsonl"), "--count", "12"])
    assert result.exit_code == 0, result.output
    assert len((tmp_path / "q.jsonl").read_text().splitlines()) == len(prompt_lengths(12))
    assert runner.invoke(app, ["questions", str(tmp_path / "q.txt")]).exit_code == 2


def test_report_of_several_folders(tmp_path: Path) -> None:
    step_report(0, lengths=[2, 8]).write(tmp_path / "ep")
    step_report(0, lengths=[2, 8], switch_at=1, iteration_s=0.5).write(tmp_path / "switching")
    folders = [str(tmp_path / "ep"), str(tmp_path / "switching")]
    result = runner.invoke(app, ["report", *folders, "--out", str(tmp_path / "both")])
    assert result.exit_code == 0, result.output
    assert "over the better static run" in result.output.replace("\n", "")
    assert (tmp_path / "both/comparison.html").exists() and not (tmp_path / "ep/report.html").exists()
    assert runner.invoke(app, ["report", *folders, str(tmp_path / "none")]).exit_code == 2
