"""Lengths and prompts of the benchmarks."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from moebius.rollout.bench import traces
from moebius.rollout.bench.stats import LiveCurve
from moebius.rollout.bench.traces import Workload
from moebius.rollout.errors import BadInput
from moebius.rollout.types import LengthTrace


def test_deepmath_like_has_the_published_quantiles() -> None:
    lengths = sorted(traces.deepmath_like(20_000, seed=1))
    assert lengths[len(lengths) // 2] == pytest.approx(traces.DEEPMATH_MEDIAN, rel=0.05)
    assert lengths[int(0.99 * len(lengths))] == pytest.approx(traces.DEEPMATH_P99, rel=0.1)
    assert lengths[0] >= 1 and lengths[-1] <= traces.DEEPMATH_CAP
    assert traces.deepmath_like(50, seed=2) == traces.deepmath_like(50, seed=2) != traces.deepmath_like(50, seed=3)


def test_deepmath_like_scales_and_caps() -> None:
    small = traces.deepmath_like(5000, seed=1, scale=0.01, cap=40)
    assert statistics.median(small) == pytest.approx(15.1, rel=0.1)
    assert max(small) == 40


def test_long_tail_has_its_stragglers() -> None:
    lengths = traces.long_tail(64, seed=0, body=100, tail=1000, stragglers=4)
    assert sum(length >= 900 for length in lengths) == 4
    assert sum(90 <= length <= 110 for length in lengths) == 60
    with pytest.raises(BadInput, match="stragglers"):
        traces.long_tail(4, seed=0, body=1, tail=2, stragglers=4)


def test_live_counts_sum_to_the_tokens() -> None:
    assert traces.live_counts([1, 3, 3, 5]) == [4, 3, 3, 1, 1]
    lengths = traces.deepmath_like(300, seed=5, scale=0.02)
    assert sum(traces.live_counts(lengths)) == sum(lengths)


def test_predicted_ratio_by_hand() -> None:
    ep, tp = LiveCurve([(4, 10.0), (1, 6.0)]), LiveCurve([(4, 20.0), (1, 3.0)])
    # Live: 4, 4, then 1 six times. EP 2*10 + 6*6 = 56, TP 2*20 + 6*3 = 58, with a switch 2*10 + 6*3 = 38.
    assert traces.predicted_ratio([2, 2, 2, 8], ep, tp) == pytest.approx(56 / 38)


def test_tuned_long_tail_reaches_a_gain_of_three_percent() -> None:
    """Curves that lie as close as those of two GPUs: EP 15 % faster at 512, TP 10 % faster from 64 down."""
    ep = LiveCurve([(512, 17.0), (256, 14.0), (64, 11.0), (16, 9.0), (4, 6.0), (1, 5.0)])
    tp = LiveCurve([(512, 19.5), (256, 14.0), (64, 10.0), (16, 8.2), (4, 5.3), (1, 4.2)])
    lengths, ratio = traces.tuned_long_tail(512, ep, tp, seed=0, body=200, fits=lambda lengths: True)
    assert len(lengths) == 512
    assert ratio >= 1.03
    assert ratio == traces.predicted_ratio(lengths, ep, tp)


def test_tuned_long_tail_takes_only_what_fits() -> None:
    ep, tp = LiveCurve([(64, 10.0), (1, 6.0)]), LiveCurve([(64, 20.0), (1, 3.0)])
    lengths, _ = traces.tuned_long_tail(64, ep, tp, seed=0, body=50, fits=lambda lengths: max(lengths) < 200)
    assert max(lengths) < 200
    with pytest.raises(BadInput, match="no long-tail trace"):
        traces.tuned_long_tail(64, ep, tp, seed=0, body=50, fits=lambda lengths: False)


def test_peak_tokens_by_hand() -> None:
    # Live 4, 3, 3, 1, 1: 4 * 11, 3 * 12, 3 * 13, 14, 15.
    assert traces.peak_tokens([1, 3, 3, 5], 10) == 44
    assert traces.peak_tokens([], 10) == 0


def test_prompts_are_the_same_everywhere_and_differ() -> None:
    load = Workload.uniform(6, 20, 3, seed=7, vocab=100)
    again = Workload.uniform(6, 20, 3, seed=7, vocab=100)
    prompts = [load.prompt(i) for i in range(6)]
    assert prompts == [again.prompt(i) for i in range(6)]
    assert len({tuple(p) for p in prompts}) == 6
    assert all(len(p) == 20 and min(p) >= 10 and max(p) < 100 for p in prompts)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_every_request_has_one_rank(ranks: int) -> None:
    load = Workload.uniform(7, 1, 1, seed=0, vocab=50)
    dealt = [i for rank in range(ranks) for i in load.indices(rank, ranks)]
    assert sorted(dealt) == list(range(7))


def test_captured_lengths(tmp_path: Path) -> None:
    LengthTrace({(1, 0): 5, (0, 1): 0, (0, 0): 9}).save(tmp_path / "lengths.json")
    assert traces.captured(tmp_path / "lengths.json") == [9, 1, 5]
    LengthTrace({}).save(tmp_path / "empty.json")
    with pytest.raises(BadInput, match="no sample"):
        traces.captured(tmp_path / "empty.json")
