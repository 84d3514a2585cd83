"""benchmarks/two_gpus.sh: its commands are understood, its engines end with it, and results get their names."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from moebius.rollout.bench.results import make_results
from moebius.rollout.cli import app
from moebius.rollout.config import load_config

ROOT = Path(__file__).parents[2]
BENCH = ["python3", "-m", "moebius.rollout.cli", "bench"]

# In the place of Python: `bench up` is ready and stays, all else is written down.
STAND_IN = """#!/bin/bash
echo "$*" >> "$CALLS"
if [ "$4" = up ]; then
  mkdir -p "$6"; touch "$6/daemon.json"; echo $$ > "$CALLS.up"
  exec sleep 60
fi
test -z "$FAILING" || [ "$4" != "$FAILING" ]
"""


def script(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "benchmarks/two_gpus.sh", *words], cwd=ROOT, text=True, capture_output=True, timeout=60,
        env={"PYTHON": "python3"} | os.environ | environment, check=False,
    )  # fmt: skip


def listed() -> list[list[str]]:
    done = script("list", PYTHON="python3")
    assert done.returncode == 0, done.stderr
    return [shlex.split(line) for line in done.stdout.splitlines() if line.startswith("  ")]


def test_its_commands_are_understood() -> None:
    group: Any = typer.main.get_command(app)
    seen = set()
    for words in listed():
        if words[:4] == BENCH:
            name, *rest = words[4:]
            context = group.commands["bench"].commands[name].make_context(name, rest)
            if context.params.get("config"):
                load_config(context.params["config"], context.params["overrides"] or [])
            seen.add(name)
        else:
            assert words[:2] == ["python3", "-m"]
            source = ROOT.joinpath(*words[2].split(".")).with_suffix(".py").read_text(encoding="utf-8")
            for option in [word for word in words[3:] if word.startswith("--")]:
                assert f'"{option}"' in source, f"{words[2]} has no {option}"
    assert seen == {"up", "sweep", "rollout", "memory", "switch", "policies", "serving", "graphs", "strawmen"}


def test_engines_end_with_the_script(tmp_path: Path) -> None:
    stand_in = tmp_path / "python"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    calls = tmp_path / "calls"
    for failing, status in (("", 0), ("rollout", 1)):
        calls.unlink(missing_ok=True)
        done = script("sweep", str(tmp_path / "out"), PYTHON=str(stand_in), CALLS=str(calls), FAILING=failing)
        assert done.returncode == status, done.stderr
        names = [line.split()[3] for line in calls.read_text().splitlines()]
        assert names == ["up", "sweep", "rollout", "rollout"][: 3 if failing else 4]
        assert not Path(f"/proc/{Path(f'{calls}.up').read_text().strip()}").exists()


def test_results_get_the_names_of_the_documentation(tmp_path: Path) -> None:
    out, docs = tmp_path / "out", tmp_path / "docs"
    (out / "weights").mkdir(parents=True)
    docs.mkdir()
    results = make_results("weights", command="x /tmp/there", options={}, results={"ipc_gbps": 1.0})
    (out / "weights" / "weights.json").write_text(results.model_dump_json())
    (out / "tail_spec_x2.json").write_text("{}")
    done = script("publish", str(out), str(docs), PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in docs.iterdir()) == ["tail_spec_x2.json", "weights_x2.json"]
    assert "/tmp/there" not in (docs / "weights_x2.json").read_text()


@pytest.mark.parametrize("words", [("nothing",)])
def test_a_part_that_there_is_not(words: tuple[str, ...], tmp_path: Path) -> None:
    done = script(*words, str(tmp_path))
    assert done.returncode == 2 and "there is no part 'nothing'" in done.stderr
    parts = re.search(r"there are: (.*),", done.stderr)
    assert parts and {"sweep", "deepep"} <= set(parts[1].split())
