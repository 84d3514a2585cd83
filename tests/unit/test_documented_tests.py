"""Tests and files that the documentation names are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.documented import PAGES, ROOT

_TEST = re.compile(r"\b(test_\w+\.py)(?:::(test_\w+))?")
_LINK = re.compile(r"\]\(([^)\s#]+)(?:#([^)\s]+))?\)|\]\(#([^)\s]+)\)")
_SOURCES = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}


def missing_tests(text: str) -> list[str]:
    """Names of tests and of their files that are not there."""
    return [
        f"{file}::{name}" if name else file
        for file, name in _TEST.findall(text)
        if file not in _SOURCES or (name and f"def {name}(" not in _SOURCES[file])
    ]


def anchors(text: str) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path, text: str) -> list[str]:
    """Relative links that lead nowhere."""
    found = []
    for target, anchor, own in _LINK.findall(text):
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        file = page.parent / target if target else page
        at = anchor or own
        if not file.exists() or (at and file.suffix == ".md" and at not in anchors(file.read_text(encoding="utf-8"))):
            found.append(f"{target}#{at}" if at else target)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert missing_tests(text) == []
    assert broken_links(page, text) == []


def test_what_is_not_there_is_noticed() -> None:
    page = ROOT / "docs" / "reliability.md"
    assert missing_tests("`test_exact.py::test_nothing`, `test_none.py`") == [
        "test_exact.py::test_nothing",
        "test_none.py",
    ]
    assert broken_links(page, "[a](no.md), [b](weights.md#no), [c](#no), [d](weights.md#sleeping), [e](#settings)") == [
        "no.md", "weights.md#no", "#no"
    ]  # fmt: skip
