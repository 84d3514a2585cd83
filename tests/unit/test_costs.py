"""Costs: interpolation over batch and context, fits, files. All values by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from moebius.engine.costs import CostModel, CostPoint, ExpertMs, SwitchPoint, largest_of, nonnegative_fit
from moebius.engine.layout import Layout

EP, TP = Layout.EP, Layout.TP


def point(layout: Layout, batch: int, ms: float, context: float = 0) -> CostPoint:
    return CostPoint(layout=layout, batch=batch, context=context, ms=ms)


def model(points: list[CostPoint], **more: object) -> CostModel:
    return CostModel(ranks=2, points=points, **more)  # type: ignore[arg-type]


def crossing() -> CostModel:
    """EP is 10 ms always; TP 6 ms at 8 and 14 ms at 128: equal in the middle of the logarithms, at 32."""
    return model([point(EP, 8, 10), point(EP, 128, 10), point(TP, 8, 6), point(TP, 128, 14)])


def test_linear_in_the_logarithm_between_batches() -> None:
    costs = crossing()
    assert costs.ms(TP, 32, 0) == pytest.approx(10)
    assert costs.ms(TP, [8, 128], 0) == pytest.approx([6, 14])


def test_constant_below_and_linear_above_what_was_measured() -> None:
    costs = crossing()
    assert costs.ms(TP, [0, 1, 4], 0) == pytest.approx([6, 6, 6])
    assert costs.ms(TP, 248, 0) == pytest.approx(14 + 120 * (14 - 6) / 120)


def test_context_costs_by_batch_times_context() -> None:
    # Batch 10: 1 ms per 1,000 tokens of context, so 0.1 us per KV token; batch 20 has one context and reads as fast.
    points = [
        point(EP, 10, 5, 1000),
        point(EP, 10, 7, 3000),
        point(EP, 20, 8, 1000),
        point(TP, 10, 1),
        point(TP, 20, 1),
    ]
    costs = model(points)
    assert costs.ms(EP, 10, [0, 1000, 5000]) == pytest.approx([4, 5, 9])
    assert costs.ms(EP, 20, [0, 1000, 2000]) == pytest.approx([6, 8, 10])


def test_an_assumed_reading_rate_serves_where_one_context_was_measured() -> None:
    points = [point(EP, 10, 5, 100), point(TP, 10, 5, 100)]
    costs = model(points, kv_ns_per_token={EP: 1000.0})
    assert costs.ms(EP, 10, [100, 1100]) == pytest.approx([5, 5 + 10 * 1000 * 1e-3])
    assert costs.ms(TP, 10, 9999) == pytest.approx(5)


@pytest.mark.parametrize(("tp", "want"), [((6, 14), 31), ((1, 2), 128), ((20, 30), 0)])
def test_threshold(tp: tuple[float, float], want: int) -> None:
    costs = model([point(EP, 8, 10), point(EP, 128, 10), point(TP, 8, tp[0]), point(TP, 128, tp[1])])
    assert costs.threshold(0) == want


def test_switch_is_fixed_plus_tokens_plus_requests() -> None:
    points = [
        SwitchPoint(to=TP, live=live, kv_tokens=tokens, ms=50 + 0.001 * tokens + 0.1 * live)
        for live, tokens in ((0, 0), (100, 0), (100, 50_000), (10, 90_000))
    ]
    costs = model(crossing().points, switches=points)
    assert costs.switch_ms(TP, 200, 100_000) == pytest.approx(50 + 100 + 20)
    assert costs.switch_ms(EP, 200, 100_000) == pytest.approx(170), "the other direction stands in"


def test_a_share_staged_leaves_the_longer_of_link_and_copies() -> None:
    """Of 40 ms on the link and 20 ms of copies: half staged, 20 remain; two thirds, 13.3 of both; all, 20."""
    points = [point(layout, batch, 1) for layout in (EP, TP) for batch in (1, 2)]
    switches = [SwitchPoint(to=to, live=0, kv_tokens=0, ms=50) for to in (EP, TP)]
    costs = model(points, switches=switches, experts=ExpertMs(link=40, local=20))
    assert costs.switch_ms(TP, 0, 0, [0, 0.25, 0.5, 2 / 3, 0.9, 1]) == pytest.approx([50, 40, 30, 70 / 3, 28, 30])
    assert costs.switch_ms(EP, 0, 0, 1.0) == 50, "only the way to TP is prepared"
    assert costs.model_copy(update={"experts": None}).switch_ms(TP, 0, 0, 1.0) == 50, "nothing is known"
    # A measured switch counts as what it would have taken unprepared.
    measured = [SwitchPoint(to=TP, live=0, kv_tokens=0, ms=30, staged=1.0), switches[0]]
    again = costs.model_copy(update={"switches": measured})
    assert (again.switch_ms(TP, 0, 0), again.switch_ms(TP, 0, 0, 0.5)) == (50, 30)
    assert CostModel.model_validate_json(again.model_dump_json()) == again


def test_one_switch_is_a_constant_and_none_an_error() -> None:
    costs = model(crossing().points, switches=[SwitchPoint(to=TP, live=5, kv_tokens=700, ms=60)])
    assert costs.switch_ms(TP, 999, 10**6) == pytest.approx(60)
    with pytest.raises(ValueError, match="moebius calibrate"):
        crossing().switch_ms(TP, 1, 1)


def test_ranks_wait_for_the_fullest() -> None:
    # Of 4 samples dealt to 2 ranks by chance, the fuller has 2.75 on average: (2*4 + 8*3 + 6*2) / 16.
    assert float(crossing().fullest(4)) / 2 == pytest.approx(2.75, abs=0.1)
    assert float(crossing().fullest(1)) == 2, "one sample's KV is read as if every rank had one"
    alone = crossing().model_copy(update={"ranks": 1})
    assert alone.fullest([1, 7]) == pytest.approx([1, 7])


@pytest.mark.parametrize(("count", "want"), [(1, 0.0), (2, 0.5642), (8, 1.4236), (16, 1.7660)])
def test_largest_normal_value(count: int, want: float) -> None:
    assert largest_of(count) == pytest.approx(want, abs=0.03)


@settings(deadline=None)
@given(st.lists(st.floats(0, 5), min_size=2, max_size=2))
def test_nonnegative_fit_finds_exact_coefficients(want: list[float]) -> None:
    rows = [[1.0, x] for x in (0.0, 1.0, 4.0)]
    assert nonnegative_fit(rows, [want[0] + want[1] * row[1] for row in rows]) == pytest.approx(want, abs=1e-6)


def test_nonnegative_fit_stops_at_zero() -> None:
    # The free fit would be 3 - x; without a negative slope the mean is best.
    assert nonnegative_fit([[1, 0], [1, 1], [1, 2]], [3, 2, 1]) == pytest.approx([2, 0])


def test_round_trip(tmp_path: Path) -> None:
    costs = model(crossing().points, switches=[SwitchPoint(to=TP, live=5, kv_tokens=700, ms=60)], key={"gpu": "x"})
    costs.save(tmp_path / "a" / "costs.json")
    assert CostModel.load(tmp_path / "a" / "costs.json") == costs


def test_bad_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    with pytest.raises(ValueError, match=r"cannot be read.*moebius calibrate"):
        CostModel.load(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        CostModel.load(path)
    path.write_text('{"ranks": 2, "points": []}')
    with pytest.raises(ValueError, match="not a file of `moebius calibrate`"):
        CostModel.load(path)


def test_one_layout_is_not_enough() -> None:
    with pytest.raises(ValidationError, match="no point of layout TP"):
        model([point(EP, 1, 1), point(EP, 2, 1)])


@given(st.lists(st.tuples(st.integers(1, 4096), st.floats(0.1, 500)), min_size=2, max_size=8, unique_by=lambda x: x[0]))
def test_interpolation_meets_the_points_and_stays_between_them(rows: list[tuple[int, float]]) -> None:
    costs = model([*(point(EP, b, ms) for b, ms in rows), point(TP, 1, 1)])
    batches = [b for b, _ in rows]
    assert costs.ms(EP, batches, 0) == pytest.approx([ms for _, ms in rows])
    inside = costs.ms(EP, np.arange(min(batches), max(batches) + 1), 0)
    values = [ms for _, ms in rows]
    assert inside.min() >= min(values) - 1e-9 and inside.max() <= max(values) + 1e-9


def test_noise_at_small_batches_is_not_multiplied_by_long_contexts() -> None:
    """Times within 2 % of 6 ms and more at contexts up to 2,048 say what a context of 30,000 costs."""
    rng = np.random.default_rng(4)

    def true_ms(batch: float, context: float) -> float:
        return 6 + batch / 64 + 4e-6 * batch * context

    points = [
        point(layout, batch, true_ms(batch, context) * (1 + 0.02 * float(rng.uniform(-1, 1))), context)
        for layout in (EP, TP)
        for batch in (1, 2, 8, 32, 64, 128, 256, 512)
        for context in (128, 2048)
    ]
    costs = model(points)
    for batch in (1, 2, 8, 64, 400):
        for context in (128, 2048, 30000):
            for layout in (EP, TP):
                assert float(costs.ms(layout, batch, context)) == pytest.approx(true_ms(batch, context), rel=0.1)
