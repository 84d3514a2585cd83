"""No command of the documentation is left to chance: each is executed by a test or CI, or says what it needs."""

from __future__ import annotations

import ast
import re
import shlex
from collections import Counter
from typing import Any

import pytest
import typer.main

from moebius.rollout.cli import app
from tests.documented import ROOT, commands, commands_of, filled, register
from tests.lanes import lanes

REGISTER = register()
RUN = [command for part in REGISTER["run"].values() for command in part]
NEEDS = [command for part in REGISTER["needs"].values() for command in part]
LISTED = [*RUN, *REGISTER["ci"]["commands"], *REGISTER["test"], *NEEDS]


def test_how_commands_are_found() -> None:
    page = "\n".join(
        [
            "moebius is a word",
            "",
            "    moebius a  b \\",
            "        --c   # why",
            "    x = make",
            "```",
            "make d",
            "```",
            "    ray",
        ]
    )
    assert commands_of(page) == ["moebius a b --c", "make d", "ray"]


def test_every_command_of_the_pages_is_listed_once() -> None:
    found = commands()
    assert len(found) > 30
    missing = sorted({f"{f.page}: {f.command}" for f in found if f.command not in LISTED})
    assert not missing, "add them to tests/documented_commands.yaml, saying how they are tried"
    assert [command for command, count in Counter(LISTED).items() if count > 1] == []
    assert sorted(set(LISTED) - {f.command for f in found}) == [], "on no page any more"


def test_commands_of_ci_are_in_its_script() -> None:
    script = (ROOT / REGISTER["ci"]["file"]).read_text().splitlines()
    assert set(REGISTER["ci"]["commands"]) <= {line.strip() for line in script}


def test_make_test_runs_all_folders_of_tests() -> None:
    """As its parts `unit` and `engines` do, with lint and types."""
    makefile = (ROOT / "Makefile").read_text()
    named = [folder for line in re.findall(r"\(BIN\)/pytest (.+)", makefile) for folder in line.split()]
    folders = sorted({f"tests/{path.parent.name}" for path in (ROOT / "tests").glob("*/test_*.py")})
    assert sorted(named) == folders
    [recipe] = re.findall(r"^test:.*?^\n", makefile, re.M | re.S)
    assert {"lint", "tests.lanes"} <= set(re.findall(r"[\w.]+", recipe))
    words = [word for lane in lanes() for word in lane.command]
    assert sorted(word for word in words if word.startswith("tests/")) == folders
    packages = re.findall(r"-p (moebius\S+)", makefile)
    assert "mypy" in words and {"moebius.rollout", "moebius.engine", "moebius.kernels"} == set(packages) <= set(words)


@pytest.mark.parametrize("where", sorted(set(REGISTER["test"].values())))
def test_named_tests_exist(where: str) -> None:
    file, name = where.split("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


@pytest.mark.parametrize("command", [c for c in [*RUN, *NEEDS] if re.search(r"\bmoebius (?!bench)", c)])
def test_words_are_understood(command: str) -> None:
    """Also of what cannot be executed here: its options exist, and the configs it names are there."""
    words = shlex.split(filled(command, _dots(command)))
    words = words[words.index("moebius") + 1 :] if "moebius" in words else []
    if not words:
        return
    group: Any = typer.main.get_command(app)
    group.commands[words[0]].make_context(words[0], list(words[1:]))
    for name in re.findall(r"configs/\S+\.yaml", command):
        assert (ROOT / name).is_file()


def test_words_of_bench_are_understood() -> None:
    group: Any = typer.main.get_command(app)
    own = [shlex.split(command.split(" > ")[0]) for command in NEEDS if "moebius bench" in command]
    assert own
    for words in own:
        name, *rest = words[words.index("bench") + 1 :]
        group.commands["bench"].commands[name].make_context(name, rest)


def _dots(command: str) -> str:
    return next((dots for start, dots in REGISTER["dots"].items() if command.startswith(f"{start} ...")), "")
