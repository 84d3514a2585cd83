"""What is looked through for garbage while vLLM is imported and when a rank ends."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from moebius.engine.garbage import imports_kept, nothing_collected


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """Generations that were collected, in order."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


def test_nothing_is_collected_in_an_import_even_if_it_asks_for_it(collections: list[int]) -> None:
    thresholds, frozen = gc.get_threshold(), gc.get_freeze_count()
    with imports_kept():
        assert collections == [2], "what is garbage before must not be kept"
        collections.clear()
        gc.enable()
        made: list[Any] = [[] for _ in range(30_000)]
        assert collections == []
    assert gc.get_threshold() == thresholds
    assert gc.get_freeze_count() >= frozen + len(made), "what was made is never looked at"


def test_a_failed_import_leaves_the_collector_as_it_was() -> None:
    thresholds = gc.get_threshold()
    with pytest.raises(ImportError), imports_kept():
        raise ImportError
    assert gc.isenabled() and gc.get_threshold() == thresholds


def test_nothing_is_collected_at_the_end(collections: list[int]) -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with nothing_collected():
        gc.unfreeze()
        assert gc.collect() == gc.collect(2) == 0
    assert collections == [] and gc.get_freeze_count() == frozen
    gc.collect()
    assert collections == [2]
