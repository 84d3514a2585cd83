"""Live requests go to TP and back to EP, any number of times: tokens as if nothing had happened."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from tests.engine import stock_engine, work
from tests.engine.fleet import Fleet
from tests.engine.layouts import check_layouts

REQUESTS = work.rich_requests(12)


@pytest.fixture(scope="module")
def reference(plain_engines: list[Fleet]) -> dict:
    return plain_engines[0].call(stock_engine.plain_run, REQUESTS)[0]


@pytest.mark.parametrize("split", ["round", "first", "skew"])
def test_there_and_back(fleet: Fleet, reference: dict, split: str) -> None:
    """`first` and `skew` leave most requests with rank 0, so that some get a new rank and a new front."""
    outcomes = fleet.call(work.run_alternating, [6, 14, 22], per_rank=work.split(REQUESTS, 2, split))
    work.assert_same(work.collect(outcomes), reference)
    for outcome in outcomes:
        assert [s.to for s in outcome.stats.switches] == ["TP", "EP", "TP"]
        assert outcome.stats.switches[1].kv_bytes > 0
    assert min(check_layouts(outcomes).values()) > 0
    assert max(len(result.layouts) for outcome in outcomes for result in outcome.results) == 4
    spread = outcomes[0].stats.switches[1].live_by_rank
    assert min(spread) > 0, "requests should be spread over both ranks after the return"
    if split == "first":
        assert len(outcomes[1].results) > 1, "requests admitted on rank 0 should have ended on rank 1"


def test_without_prefix_cache_and_synchronously(fleet_without_cache: Fleet, reference: dict) -> None:
    outcomes = fleet_without_cache.call(work.run_alternating, [1, 2, 3, 30], per_rank=work.split(REQUESTS, 2, "skew"))
    work.assert_same(work.collect(outcomes), reference)
    assert len(outcomes[0].stats.switches) == 4 and check_layouts(outcomes)["TP"] > 0


def test_ends_in_ep_and_next_step_is_right(fleet: Fleet, reference: dict) -> None:
    outcomes = fleet.call(work.run_alternating, [5, 12], per_rank=work.split(REQUESTS, 2, "round"))
    work.assert_same(work.collect(outcomes), reference)
    outcomes = fleet.call(work.run, work.TP, per_rank=work.split(REQUESTS, 2, "round"))
    work.assert_same(work.collect(outcomes), reference)
    assert all(outcome.stats.return_reshard_ms == 0 for outcome in outcomes), "the experts stood in EP already"


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    iterations=st.lists(st.integers(0, 50), max_size=6),
    split=st.sampled_from(["round", "first", "skew"]),
)
def test_any_sequence_of_switches(fleet: Fleet, reference: dict, iterations: list[int], split: str) -> None:
    outcomes = fleet.call(work.run_alternating, iterations, per_rank=work.split(REQUESTS, 2, split))
    work.assert_same(work.collect(outcomes), reference)
