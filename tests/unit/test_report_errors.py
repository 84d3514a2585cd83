"""Every message of an error that this package raises for its user is in docs/troubleshooting.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from moebius.engine.config import EngineConfig

ROOT = Path(__file__).parents[2]
OURS = {"BadInput", "MoebiusError", "GroupNotReady", "RankDied", "IncompleteStep"}
OURS |= {"PatchError", "RuntimeBuildError", "StartupError", "AttentionError"}  # of the engine, at its start
LENGTH = 40  # characters of a message that are looked for: its longest fixed part, up to a whole word


def phrase(message: ast.expr) -> str | None:
    """The longest part of a message that does not vary; None when all of it does."""
    if isinstance(message, ast.Constant):
        pieces = [str(message.value)]
    elif isinstance(message, ast.JoinedStr):
        pieces = [str(part.value) for part in message.values if isinstance(part, ast.Constant)]
        pieces = pieces[: next((i + 1 for i, piece in enumerate(pieces) if "\n" in piece), len(pieces))]
    else:
        return None
    pieces = [piece.partition("\n")[0] for piece in pieces]  # what follows the first line is advice
    longest = max((plain(piece).strip(" :;,.()='") for piece in pieces), key=len, default="")
    if len(longest) > LENGTH:
        longest = longest[: LENGTH + 1].rpartition(" ")[0] or longest[:LENGTH]
    return longest.strip(" :;,.()='") or None


def plain(text: str) -> str:
    return re.sub(r"\s+", " ", text.replace("`", ""))


def raised(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            name = node.exc.func.id if isinstance(node.exc.func, ast.Name) else ""
            found = phrase(node.exc.args[0]) if name in OURS else None
            if found:
                yield node.lineno, found


def test_phrases_by_hand() -> None:
    source = 'raise BadInput(f"{path}: a long fixed part of a message that is cut {x} here") from error\n'
    assert list(raised(source)) == [(1, "a long fixed part of a message that is")]
    assert list(raised("raise BadInput(str(error))")) == [] == list(raised("raise OSError('no')"))
    assert list(raised("raise BadInput(f'{a} {b}')")) == []


def test_settings_in_the_guide_to_tuning_exist() -> None:
    text = (ROOT / "docs" / "tuning.md").read_text(encoding="utf-8")
    named = re.findall(r"`engine\.([a-z_.]+)", text)
    assert len(named) > 8
    for name in named:
        model: type[BaseModel] = EngineConfig
        for key in name.rstrip(".").split("."):
            assert key in model.model_fields, name
            inner = model.model_fields[key].annotation
            model = inner if isinstance(inner, type) and issubclass(inner, BaseModel) else BaseModel


@pytest.mark.parametrize("folder", ["rollout", "engine"])
def test_every_message_is_in_the_docs(folder: str) -> None:
    text = plain((ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"))
    found = [
        (f"{path.relative_to(ROOT)}:{line}", words)
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, words in raised(path.read_text(encoding="utf-8"))
    ]
    assert len(found) > 8
    missing = [f"{where}: {words}" for where, words in found if words not in text]
    assert not missing, "add to docs/troubleshooting.md, with what to do:\n" + "\n".join(missing)
