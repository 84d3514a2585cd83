"""Runs of tokens by version or layout."""

from __future__ import annotations

from itertools import groupby

import hypothesis.strategies as st
from hypothesis import given

from moebius.engine.runs import extended


@given(st.lists(st.tuples(st.sampled_from(["EP", "TP"]), st.integers(0, 4))))
def test_runs_are_those_of_the_tokens_one_by_one(parts: list[tuple[str, int]]) -> None:
    """Noted at any moments, also where nothing has come since, or where the value has not changed."""
    runs: list[tuple[str, int]] = []
    tokens: list[str] = []
    for value, count in parts:
        before = list(runs)
        tokens += [value] * count
        found = extended(runs, value, len(tokens))
        assert runs == before, "what was given is left as it is"
        runs = found
    assert runs == [(value, len(list(run))) for value, run in groupby(tokens)]
