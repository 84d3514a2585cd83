"""Arithmetic of the benchmarks against values worked out by hand."""

from __future__ import annotations

import math

import pytest

from moebius.rollout.bench.stats import (
    LiveCurve,
    Spread,
    best_switch,
    bin_of,
    crossover,
    full_durations,
    ideal_ms,
    mean_interval,
    slowest_rank,
    split_prefill,
    window_means,
)

# EP: 10 ms at 4 live, 8 ms at 2, 7 ms at 1; TP: 12, 8 and 4.
EP = LiveCurve([(4, 9.0), (4, 11.0), (2, 8.0), (1, 7.0)])
TP = LiveCurve([(4, 12.0), (2, 8.0), (1, 4.0)])
LIVE = [4, 4, 4, 2, 2, 1, 1, 1, 1, 1]


def test_spread_of_known_values() -> None:
    spread = Spread.of([float(v) for v in range(11)])
    assert (spread.n, spread.median, spread.p10, spread.p90, spread.iqr) == (11, 5.0, 1.0, 9.0, 5.0)
    assert Spread.pooled([[1.0], [], [2.0, 3.0]]).median == 2.0
    with pytest.raises(ValueError, match="no values"):
        Spread.of([])


def test_interval_of_the_mean() -> None:
    mean, low, high = mean_interval([1.0, 2.0, 3.0])
    half = 4.303 / math.sqrt(3)  # t for two degrees of freedom, standard deviation 1
    assert (mean, low, high) == (2.0, pytest.approx(2 - half), pytest.approx(2 + half))
    assert mean_interval([5.0]) == (5.0, 5.0, 5.0)
    assert mean_interval([0.0, 1.0] * 40)[2] == pytest.approx(0.5 + 1.96 * math.sqrt(20 / 79) / math.sqrt(80))


def test_only_iterations_of_the_whole_batch_count() -> None:
    #         -     prefill   mixed     whole ...                      one request has ended
    tokens = [0, 1, 2, 2, 4, 4, 4, 4, 4, 3]
    ends = [0.5, 1.0, 2.0, 3.0, 4.0, 4.1, 4.3, 4.6, 5.0, 9.0]
    assert full_durations(ends, tokens, 4, settle=0, most=10) == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert full_durations(ends, tokens, 4, settle=2, most=10) == pytest.approx([0.2, 0.3, 0.4])
    assert full_durations(ends, tokens, 4, settle=0, most=2) == pytest.approx([0.3, 0.4])


def test_an_iteration_after_an_interruption_does_not_count() -> None:
    """Its duration holds what went on before it."""
    assert full_durations([1, 2, 3, 9, 10], [4, 4, 3, 4, 4], 4, settle=0, most=9) == [1, 1]


def test_windows() -> None:
    assert window_means([1, 3, 5, 7, 100], 2) == [2, 6]
    assert slowest_rank([[1, 5, 2], [3, 4]]) == [3, 5]
    assert slowest_rank([]) == []


def test_crossover_interpolates_the_ratio() -> None:
    # The ratio EP/TP is 2 at 16 and 1/2 at 64: it is 1 in the middle of the logarithms.
    assert crossover([16, 64], [20.0, 10.0], [10.0, 20.0]) == pytest.approx(32.0)
    assert crossover([16, 64], [10.0, 10.0], [20.0, 20.0]) is None
    assert crossover([], [], []) is None
    # TP ahead, EP, TP, EP: the last change to EP counts.
    assert crossover([1, 2, 4, 8], [2.0, 1.0, 2.0, 1.0], [1.0, 2.0, 1.0, 2.0]) == pytest.approx(math.sqrt(32))


def test_bins_are_single_counts_then_grow() -> None:
    assert [bin_of(live) for live in (1, 7, 8, 9, 10)] == [1, 7, 8, 8, 9]
    bins = [bin_of(live) for live in range(1, 4000)]
    assert bins == sorted(bins)


def test_ideal_takes_the_faster_layout_of_every_iteration() -> None:
    # 3 iterations at 10, 2 at 8 and 5 at 4; static EP takes 3*10 + 2*8 + 5*7, static TP 3*12 + 2*8 + 5*4.
    assert ideal_ms(LIVE, EP, TP) == 3 * 10 + 2 * 8 + 5 * 4
    assert ideal_ms(LIVE, EP, EP) == 81
    assert ideal_ms(LIVE, TP, TP) == 72


def test_best_single_switch() -> None:
    assert best_switch(LIVE, EP, TP) == (1, 66.0)  # at 2 live the two are equal: the later switch is taken
    assert best_switch(LIVE, EP, EP) == (0, 81.0)
    slower_at_two = LiveCurve([(4, 12.0), (2, 30.0), (1, 4.0)])
    assert best_switch(LIVE, EP, slower_at_two)[0] == 1


def test_a_live_count_never_seen_takes_the_nearest_bin() -> None:
    assert EP.at(3) in (8.0, 10.0)
    assert EP.at(1000) == 10.0
    with pytest.raises(ValueError, match="no iterations"):
        LiveCurve([])


def test_prefill_ends_when_every_live_request_sampled() -> None:
    assert split_prefill([0, 2, 3, 4, 4], [4, 4, 4, 4, 4]) == 3
    assert split_prefill([0, 2, 3], [4, 4, 4]) == 0
