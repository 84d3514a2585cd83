"""Runs of a sample's tokens: a value, and how many tokens in a row have it, in their order. No vLLM here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Value = TypeVar("Value")


def extended(runs: Sequence[tuple[Value, int]], value: Value, tokens: int) -> list[tuple[Value, int]]:
    """Runs of a sample's first `tokens` tokens. Those that `runs` do not tell of yet have `value`."""
    found = list(runs)
    new = tokens - sum(count for _, count in found)
    if new and found and found[-1][0] == value:
        found[-1] = (value, found[-1][1] + new)
    elif new:
        found.append((value, new))
    return found
