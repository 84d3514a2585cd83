"""Commands and settings in docs/deepmath.md exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from moebius.rollout.cli import app
from moebius.rollout.job import main
from moebius.rollout.job_config import DataSettings, JobSettings
from moebius.rollout.shards import shard_schema

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "deepmath.md").read_text(encoding="utf-8")
COMMANDS = [line.strip() for line in TEXT.splitlines() if re.match(r"    (moebius|python|ray) ", line)]


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("moebius ")])
def test_commands_parse(command: str) -> None:
    """Every word is taken by the command's own parser."""
    _, name, *words = shlex.split(command)
    group = typer.main.get_command(app)
    own = group.commands[name]  # type: ignore[attr-defined]
    own.make_context(name, words)


def test_configs_exist() -> None:
    named = set(re.findall(r"configs/[\w.]+\.yaml", TEXT)) | {
        f"configs/{n}" for n in re.findall(r"`(deepmath_\w+\.yaml)`", TEXT)
    }
    assert len(named) >= 3 and all((ROOT / name).is_file() for name in named)


def test_options_of_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    usage = capsys.readouterr().out
    for option in ("--config", "--set", "--out", "--steps", "--scorer", "--replay-lengths", "--fresh"):
        assert option in usage and option in TEXT


def test_settings_and_columns_are_described() -> None:
    rows = {
        name
        for line in TEXT.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    assert set(DataSettings.model_fields) - {"source"} <= rows
    assert set(shard_schema().names) <= rows
    for name in re.findall(r"`job\.(\w+)", TEXT):
        assert name == "json" or name in JobSettings.model_fields  # job.json is a file


def test_the_number_of_commands_is_not_zero() -> None:
    assert len(COMMANDS) >= 10
    assert CliRunner().invoke(app, ["--help"]).exit_code == 0
