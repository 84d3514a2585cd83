"""Output lengths learnt online: life tables by hand, recovered distributions, siblings, tails."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebius.engine.survival import LengthEstimator, LifeTable, Survival, age_grid, kaplan_meier

WHOLE = np.arange(0, 12, dtype=np.float64)


def test_kaplan_meier_by_hand() -> None:
    # Freireich's kind of table: events at 1, 3, 3, cut off at 2 and 5. 4/5, then 3 at risk, 2 die: 1/3 of that.
    survival = kaplan_meier([1, 2, 3, 3, 5], [True, False, True, True, False], WHOLE)
    assert survival[:7] == pytest.approx([1, 0.8, 0.8, 4 / 15, 4 / 15, 4 / 15, 4 / 15])


def test_without_cut_offs_it_is_the_share_that_is_left() -> None:
    assert kaplan_meier([1, 2, 2, 4], [True] * 4, WHOLE)[:5] == pytest.approx([1, 0.75, 0.25, 0.25, 0], abs=1e-9)


def test_a_cut_off_sample_is_at_risk_at_its_own_age() -> None:
    assert kaplan_meier([2, 2], [True, False], WHOLE)[2] == pytest.approx(0.5)


@given(st.lists(st.tuples(st.integers(1, 10), st.booleans()), min_size=1, max_size=40))
def test_kaplan_meier_is_the_product_limit(samples: list[tuple[int, bool]]) -> None:
    got = kaplan_meier([length for length, _ in samples], [ended for _, ended in samples], WHOLE)
    want = 1.0
    for age in range(1, 11):
        at_risk = sum(length >= age for length, _ in samples)
        deaths = sum(ended and length == age for length, ended in samples)
        want *= 1 - deaths / at_risk if at_risk else 1
        assert got[age] == pytest.approx(want, abs=1e-9)


def test_the_grid_reaches_the_cap_and_starts_with_single_tokens() -> None:
    grid = age_grid(32768)
    assert list(grid[:50]) == list(range(50)) and grid[-1] >= 32768
    assert (np.diff(grid) > 0).all() and len(grid) < 500


def deaths_of(lengths: list[int], cap: int) -> Survival:
    table = LifeTable(age_grid(cap))
    for length in lengths:
        table.add(length)
    return Survival(table.grid, *table.risk(), cap)


def test_a_lognormal_tail_is_recovered_beyond_what_was_seen() -> None:
    # Half of the lengths are seen; the other half is cut off at the median.
    generator = random.Random(1)
    lengths = [generator.lognormvariate(7, 0.8) for _ in range(4000)]
    median = math.exp(7)
    table = LifeTable(age_grid(32768))
    for length in lengths:
        table.add(min(length, median), ended=length <= median)
    curve = Survival(table.grid, *table.risk(), 32768)
    true_p90 = math.exp(7 + 1.2816 * 0.8)
    assert math.exp(float(curve.log_at(np.asarray([true_p90]))[0])) == pytest.approx(0.1, abs=0.03)


def test_nobody_outlives_the_cap() -> None:
    curve = deaths_of([100] * 30, 200)
    assert curve.log_at(np.asarray([199.0, 200.0]))[1] == -math.inf


def run_step(estimator: LengthEstimator, lengths: list[int], cap: int, until: int | None = None) -> None:
    estimator.begin_step(len(lengths), cap)
    for age in range(1, (until or max(lengths)) + 1):
        tokens = sum(length >= age for length in lengths)
        estimator.advance(sum(length > age for length in lengths), tokens)


def test_lengths_are_told_from_live_counts_alone() -> None:
    estimator = LengthEstimator()
    lengths = [3] * 10 + [7] * 20 + [11] * 10
    run_step(estimator, lengths, 32)
    estimator.begin_step(len(lengths), 32)
    curve, pace = estimator.survival()
    assert pace == 1
    assert np.exp(curve.log_at(np.asarray([2.0, 3.0, 6.0, 7.0, 10.0]))) == pytest.approx([1, 0.75, 0.75, 0.25, 0.25])


def test_samples_live_at_the_last_count_have_ended_unless_the_step_broke_off() -> None:
    for broken_off, beyond in ((False, 0.0), (True, 1.0)):
        estimator = LengthEstimator()
        run_step(estimator, [3] * 10 + [7] * 10, 32, until=6)
        if broken_off:
            estimator.end_step(broken_off=True)
        estimator.begin_step(20, 32)
        log = estimator.survival()[0].log_at(np.asarray([3.0, 7.0]))
        assert np.exp(log[1] - log[0]) == pytest.approx(beyond, abs=1e-9)


def test_forecast_of_a_second_like_step_is_what_then_happens() -> None:
    generator = random.Random(3)
    lengths = [min(4096, max(1, round(generator.lognormvariate(5, 0.7)))) for _ in range(1000)]
    estimator = LengthEstimator()
    run_step(estimator, lengths, 4096)
    run_step(estimator, lengths, 4096, until=150)
    offsets = np.asarray([0.0, 50.0, 150.0, 350.0])
    want = [sum(length > 150 + offset for length in lengths) for offset in offsets]
    seen = estimator.forecast(offsets)
    assert seen.any * seen.live == pytest.approx(want, rel=0.03, abs=2)


def test_a_step_that_runs_long_is_forecast_to_go_on_longer() -> None:
    generator = random.Random(4)
    lengths = [max(1, round(generator.lognormvariate(5, 0.7))) for _ in range(500)]
    longer = [2 * length for length in lengths]
    plain, slow = LengthEstimator(), LengthEstimator()
    for estimator, step in ((plain, lengths), (slow, longer)):
        run_step(estimator, lengths, 8192)
        run_step(estimator, step, 8192, until=sorted(step)[300])
    offsets = np.asarray([400.0])
    alive = [e.forecast(offsets).any * e.forecast(offsets).live for e in (plain, slow)]
    assert alive[1][0] > 1.5 * alive[0][0]


def test_siblings_of_slow_prompts_are_forecast_to_run_longer() -> None:
    estimator = LengthEstimator()
    run_step(estimator, [50] * 40 + [100] * 40 + [400] * 40, 1024)
    estimator.begin_step(40, 1024, {0: 20, 1: 20})
    for age in range(1, 101):
        done = [(0, age, True)] if age in (20, 22, 24, 26, 28) else []
        done += [(1, age, True)] if age in (60, 70, 80, 90) else []
        estimator.advance(40 - len(estimator._siblings.get(0, [])) - len(estimator._siblings.get(1, [])), None, done)
    paces = sorted(estimator._paces())
    assert len(paces) == 2 and paces[0][0] < 1 < paces[1][0]
    assert sum(count for _, count in paces) == pytest.approx(estimator._live)


def test_new_requests_lower_the_mean_age() -> None:
    estimator = LengthEstimator()
    estimator.begin_step(10, 100)
    for _ in range(8):
        estimator.advance(10)
    assert estimator.age == pytest.approx(8)
    estimator.advance(40)
    assert estimator.age == pytest.approx(9 * 10 / 40)


def test_nothing_is_forecast_before_enough_samples_ended() -> None:
    estimator = LengthEstimator()
    estimator.begin_step(20, 100)
    estimator.advance(14)
    assert not estimator.ready
    estimator.advance(12)
    assert estimator.ready


@given(
    st.lists(st.integers(1, 200), min_size=10, max_size=60), st.lists(st.integers(1, 200), min_size=1, max_size=60),
    st.integers(1, 150),
)  # fmt: skip
def test_forecasts_fall_and_are_possible(history: list[int], now: list[int], until: int) -> None:
    estimator = LengthEstimator()
    run_step(estimator, history, 256)
    run_step(estimator, now, 256, until=min(until, max(now)))
    seen = estimator.forecast(np.arange(0, 300, dtype=np.float64))
    mean = seen.any * seen.live
    assert (np.diff(mean) <= 1e-6).all() and (np.diff(seen.any) <= 1e-6).all()
    assert (seen.any >= 0).all() and (seen.any <= 1 + 1e-9).all()
    assert (seen.live >= 1).all() and (seen.live <= len(now) + 1e-6).all()
    assert seen.any[256:].max() == 0, "beyond the cap"
