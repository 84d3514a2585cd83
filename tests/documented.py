"""Shell commands in the documentation, and what documented_commands.yaml says about how each is tried."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
REGISTER = Path(__file__).with_name("documented_commands.yaml")

# What a line of a code block begins with when it is for a shell.
_PROGRAM = re.compile(
    r"(?:[A-Z_][A-Z0-9_]*=\S* )*"
    r"(?:moebius|make|bash|python3?|pip|ray|pytest|mkdir|setsid|nohup|hf|curl|export|source|git|docker|verl|torchrun|ruff|"
    r"\.venv/bin/\w+)(?: |$)"
)


@dataclass(frozen=True)
class Found:
    """A command, and the page it stands on."""

    command: str
    page: str


def commands() -> list[Found]:
    """Every shell command of PAGES: lines of code blocks (fenced or indented) that begin with a program."""
    return [
        Found(command, str(page.relative_to(ROOT)))
        for page in PAGES
        for command in commands_of(page.read_text(encoding="utf-8"))
    ]


def commands_of(text: str) -> list[str]:
    """The same of one page; continued lines are joined, comments and runs of blanks removed."""
    found, fenced = [], False
    lines = iter(text.splitlines())
    for line in lines:
        if line.lstrip().startswith("```"):
            fenced = not fenced
            continue
        body = line.strip() if fenced or line.startswith("    ") else ""
        body = body.removeprefix("$ ")
        if not _PROGRAM.match(body):
            continue
        while body.endswith("\\"):
            body = body[:-1].rstrip() + " " + next(lines).strip()
        found.append(re.sub(r"\s+", " ", re.sub(r"\s+#.*$", "", body)).strip())
    return found


def register() -> dict[str, Any]:
    """The sections of documented_commands.yaml."""
    content: dict[str, Any] = yaml.safe_load(REGISTER.read_text(encoding="utf-8"))
    return content


def filled(command: str, dots: str) -> str:
    """`command` with what stands for "..." in it."""
    return command.replace(" ... ", f" {dots} ")
