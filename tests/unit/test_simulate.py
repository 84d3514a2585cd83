"""The simulator: values by hand, bounds that hold for any trace, and the published length statistics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from moebius.engine.config import PolicyConfig
from moebius.engine.costs import CostModel, CostPoint, SwitchPoint
from moebius.engine.layout import Layout
from moebius.rollout.bench.traces import deepmath_like
from moebius.rollout.cli import app
from moebius.rollout.cost_cli import summary
from moebius.rollout.cost_files import load_costs
from moebius.rollout.errors import BadInput
from moebius.rollout.plan_model import load_gpu, load_model
from moebius.rollout.simulate import Limits, Simulator, Trace, compare, projection

EP, TP = Layout.EP, Layout.TP
SWEEP = Path(__file__).parents[2] / "docs" / "benchmarks" / "sweep_30b_x2.json"
runner = CliRunner()


def costs_of(ep: dict[int, float], tp: dict[int, float], switch: float, ranks: int = 1) -> CostModel:
    points = [
        CostPoint(layout=layout, batch=batch, context=0, ms=ms)
        for layout, curve in ((EP, ep), (TP, tp))
        for batch, ms in curve.items()
    ]
    switches = [SwitchPoint(to=to, live=1, kv_tokens=0, ms=switch) for to in (EP, TP)]
    return CostModel(ranks=ranks, points=points, switches=switches)


# EP takes 10 ms at any batch, TP 4 ms with one sample and 16 with four (10 with two).
SIMPLE = costs_of({1: 10, 4: 10}, {1: 4, 4: 16}, 5)
TRACE = Trace((3, 3, 3, 7))  # three iterations of four samples, four of one


def test_by_hand() -> None:
    simulator = Simulator(TRACE, SIMPLE, lag=0)
    assert simulator.static(EP).seconds == pytest.approx(0.070)
    assert simulator.static(TP).seconds == pytest.approx((3 * 16 + 4 * 4) / 1e3)
    assert simulator.best_static().name == "static_tp"
    best = simulator.oracle_single()
    assert best.seconds == pytest.approx((30 + 5 + 16) / 1e3)
    assert [(s.iteration, s.to, s.live, s.ms) for s in best.switches] == [(3, TP, 1, 5)]
    assert simulator.oracle().seconds == pytest.approx(best.seconds)
    fixed = simulator.run(PolicyConfig(threshold=1))
    assert fixed.seconds == pytest.approx(best.seconds)
    assert simulator.run(PolicyConfig(threshold=4)).seconds == pytest.approx((5 + 48 + 16) / 1e3)
    assert simulator.run(PolicyConfig(kind="static_ep")).seconds == pytest.approx(0.070)
    assert simulator.run(PolicyConfig(kind="scheduled", at_iteration=5)).seconds == pytest.approx((50 + 5 + 8) / 1e3)


def test_counts_are_one_iteration_old() -> None:
    run = Simulator(TRACE, SIMPLE, lag=1).run(PolicyConfig(threshold=1))
    assert [switch.iteration for switch in run.switches] == [4]
    assert run.seconds == pytest.approx((40 + 5 + 12) / 1e3)


def test_ep_waits_for_its_fullest_rank() -> None:
    """For its KV: 1 us per token of what it holds, times the ranks. The rest goes by all samples."""
    costs = costs_of({2: 2, 4: 4}, {1: 1, 4: 1}, 0, ranks=2).model_copy(update={"kv_ns_per_token": {EP: 1e3}})
    # Samples 0 and 2 are on rank 0: after two iterations it has both that are left, and reads as much as with four.
    simulator = Simulator(Trace((4, 2, 4, 2), prompt_tokens=1000), costs)
    assert list(simulator.ms[EP]) == pytest.approx([8, 8.004, 2 + 4.008, 2 + 4.012])
    apart = Simulator(Trace((4, 4, 2, 2), prompt_tokens=1000), costs)
    assert list(apart.ms[EP]) == pytest.approx([8, 8.004, 2 + 2.004, 2 + 2.006])
    placed = Simulator(Trace((4, 4, 2, 2), prompt_tokens=1000, ranks=(0, 0, 1, 1)), costs)
    assert list(placed.ms[EP]) == pytest.approx(list(simulator.ms[EP]))


def test_context_and_prefill_count() -> None:
    points = [CostPoint(layout=layout, batch=1, context=c, ms=1 + c / 100) for layout in Layout for c in (0, 100)]
    costs = CostModel(ranks=1, points=points, switches=SIMPLE.switches, prefill_us_per_token={EP: 10.0, TP: 20.0})
    simulator = Simulator(Trace((2,), prompt_tokens=100), costs)
    assert simulator.static(EP).seconds == pytest.approx((1.0 + 2.0 + 2.01) / 1e3)
    assert simulator.static(TP).seconds == pytest.approx((2.0 + 2.0 + 2.01) / 1e3)


def test_a_switch_that_does_not_fit_waits() -> None:
    trace = Trace((2, 4, 6, 40))
    limits = Limits({TP: 30}, None)
    simulator = Simulator(trace, SIMPLE, limits, lag=0)
    run = simulator.run(PolicyConfig(threshold=4, cooldown_iterations=2))
    # KV: 4 x 0 tokens fit at once, so make prompts count.
    assert run.cancelled == 0
    simulator = Simulator(Trace((2, 4, 6, 40), prompt_tokens=10), SIMPLE, limits, lag=0)
    run = simulator.run(PolicyConfig(threshold=4, cooldown_iterations=2))
    # Tokens held before iterations 0, 2, 4: 40, 36, 28; at 4 they fit.
    assert (run.cancelled, [s.iteration for s in run.switches]) == (2, [4])
    assert simulator.oracle_single().switches[0].iteration >= 4


def test_more_samples_than_tp_runs_do_not_fit() -> None:
    assert "TP runs 3" in str(Limits(None, 3).refusal(TP, 4, 0))
    assert Limits(None, 3).refusal(EP, 4, 0) is None


def test_flatness_by_hand() -> None:
    flat = Simulator(TRACE, costs_of({1: 10, 4: 10}, {1: 10, 4: 10}, 0)).flatness()
    assert (flat.low, flat.high) == (0, 4), "equal curves: any threshold is as good"
    assert Simulator(TRACE, SIMPLE).flatness().best == 1


TRACES = st.lists(st.integers(1, 80), min_size=1, max_size=40).map(lambda lengths: Trace(tuple(lengths), 3, 128))
# Forecasts look at 64 iterations one by one and at later ones in groups, each by its middle: only short ones are exact.
SHORT_TRACES = st.lists(st.integers(1, 64), min_size=1, max_size=40).map(lambda given: Trace(tuple(given), 3, 64))
CURVES = st.dictionaries(st.integers(1, 64), st.floats(1, 50), min_size=2, max_size=4)


@settings(max_examples=60, deadline=None)
@given(
    trace=TRACES, ep=CURVES, tp=CURVES, switch=st.floats(0, 300), ranks=st.integers(1, 4), threshold=st.integers(0, 40),
    room=st.integers(1, 4000),
)  # fmt: skip
def test_hindsight_beats_everything(
    trace: Trace, ep: dict[int, float], tp: dict[int, float], switch: float, ranks: int, threshold: int, room: int
) -> None:
    simulator = Simulator(trace, costs_of(ep, tp, switch, ranks), Limits({TP: room}))
    best, single = simulator.oracle().seconds, simulator.oracle_single().seconds
    assert best <= single + 1e-12
    assert single <= simulator.best_static().seconds + 1e-12
    for config in (
        PolicyConfig(threshold=threshold),
        PolicyConfig(kind="predictive", threshold=threshold),
        PolicyConfig(kind="scheduled", at_iteration=threshold),
        PolicyConfig(kind="static_ep"),
    ):
        run = simulator.run(config)
        assert single <= run.seconds + 1e-12
        assert len(run.switches) <= 1
        assert all(simulator.kv_tokens[s.iteration] <= room for s in run.switches), "a switch that does not fit"
    to_and_fro = simulator.run(PolicyConfig(kind="interactive", threshold=threshold, window=2, cooldown_s=0.05))
    assert best <= to_and_fro.seconds + 1e-12


@settings(max_examples=40, deadline=None)
@given(trace=TRACES, curve=CURVES, switch=st.floats(0.01, 100))
def test_equal_curves_give_no_switch(trace: Trace, curve: dict[int, float], switch: float) -> None:
    # On one rank the layouts are the same thing; with more, EP also waits for its fullest rank.
    run = Simulator(trace, costs_of(curve, curve, switch)).run(PolicyConfig(kind="predictive"), exact=True)
    assert run.switches == []


@settings(max_examples=60, deadline=None)
@given(trace=SHORT_TRACES, ep=CURVES, tp=CURVES, switch=st.floats(0, 300))
def test_with_the_truth_predictive_loses_at_most_a_switch(
    trace: Trace, ep: dict[int, float], tp: dict[int, float], switch: float
) -> None:
    simulator = Simulator(trace, costs_of(ep, tp, switch), lag=0)
    run = simulator.run(PolicyConfig(kind="predictive", every=1), exact=True)
    # It starts in EP, so static TP can be missed by what the one switch costs.
    assert run.seconds <= simulator.static(EP).seconds + 1e-9
    assert run.seconds <= simulator.best_static().seconds + switch / 1e3 + 1e-9


def test_predictive_learns_from_the_step_before() -> None:
    # TP is faster below ten samples, but a switch costs more than it saves in the short tail of these steps.
    costs = costs_of({1: 10, 64: 10}, {1: 9, 10: 10, 64: 30}, 40)
    traces = [Trace(tuple([20] * 60 + [40] * 4), 0, 512)] * 3
    rows = compare(traces, costs, threshold=9)
    assert [row["switch_live_fixed"] for row in rows] == [4] * 3
    assert [row["switch_live_predictive"] for row in rows][1:] == [0, 0]
    assert rows[2]["predictive"] < rows[2]["fixed"]
    assert rows[2]["predictive"] == pytest.approx(rows[2]["static_ep"])


def published() -> CostModel:
    return load_costs(SWEEP, model=load_model("qwen3-30b-a3b", 2), gpu=load_gpu("h200"))


def test_the_measured_sweep_loads() -> None:
    costs = published()
    data = json.loads(SWEEP.read_text())
    assert costs.ranks == 2 and costs.measured_range(EP) == (8, 2048)
    context = costs.points[0].context
    assert float(costs.ms(TP, 128, context)) == pytest.approx(data["results"]["moebius_tp_128_ms"])
    assert float(costs.ms(EP, 512, context)) == pytest.approx(data["results"]["moebius_ep_512_ms"])
    assert costs.threshold(context) == pytest.approx(data["results"]["crossover_batch"], rel=0.03)
    assert costs.expected == ["switch", "context"]


def test_on_published_lengths_predictive_keeps_up_with_the_best() -> None:
    """Seeds of the published statistics with the measured curves; switch and context terms are expected ones."""
    traces = [Trace(tuple(deepmath_like(2048, seed=seed)), 120, 32768) for seed in range(3)]
    costs = published()
    numbers = summary(compare(traces, costs, costs.threshold(1630)))
    assert numbers["predictive_vs_fixed_worst_pct"] > -1
    assert numbers["predictive_vs_oracle_worst_pct"] < 3
    assert numbers["predictive_vs_better_static_worst_pct"] > 0


def test_the_published_results_hold_what_is_said_of_them() -> None:
    """Also that they are those of these costs and this simulator: the first steps' times are found again."""
    written = json.loads((SWEEP.parent / "policy_sim.json").read_text())
    numbers, rows = written["results"], written["series"]["steps"]
    assert len(rows) == 9 and numbers["requests"] == 2048
    assert numbers["predictive_vs_fixed_worst_pct"] > -1 and numbers["predictive_vs_fixed_mean_pct"] > -0.01
    assert numbers["predictive_vs_oracle_pct"] <= numbers["predictive_vs_oracle_worst_pct"] < 3
    cpu = written["series"]["cpu"]["steps"]
    worst = max(abs(step["error_pct"]) for step in cpu)
    if "gpu" in written["series"]:  # steps on GPUs take the name over
        assert worst == numbers["sim_error_cpu_pct"] < 10
        worst = max(abs(step["error_pct"]) for step in written["series"]["gpu"]["steps"])
    assert numbers["sim_error_median_pct"] <= numbers["sim_error_pct"] == worst
    assert any("extrapolated" in note for note in written["notes"])
    traces = [Trace(tuple(deepmath_like(2048, seed=seed)), 120, 32768) for seed in range(2)]
    for found, row in zip(compare(traces, published(), int(numbers["threshold"])), rows, strict=False):
        assert found == pytest.approx(row)


def test_projection() -> None:
    assert projection(2.0, 0.5) == pytest.approx(1 / 0.75)
    assert projection(1.25, 0.85) == pytest.approx(1.2048, abs=1e-4), "the paper's 1.20"
    with pytest.raises(BadInput, match="share from 0 to 1"):
        projection(1.2, 1.5)


def test_bad_traces_are_refused() -> None:
    with pytest.raises(BadInput, match="at least 1 token"):
        Trace((3, 0))
    with pytest.raises(BadInput, match="cap 4"):
        Trace((5,), cap=4)


def test_command(tmp_path: Path) -> None:
    arguments = ["simulate", "--costs", str(SWEEP), "--model", "qwen3-30b-a3b", "--requests", "200", "--steps", "2"]
    result = runner.invoke(app, [*arguments, "--group", "4", "--siblings", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "policy_sim.json").read_text())
    assert len(written["series"]["steps"]) == 2
    assert written["results"]["oracle_s"] <= written["results"]["predictive_s"]
    assert any("expected, not measured: switch" in note for note in written["notes"])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "neither costs"),
        ("{}", "neither costs"),
        ('{"benchmark": "sweep", "options": {"setup": {"ranks": 2}}}', "our engine in both layouts"),
        ('{"ranks": 2}', "not a file of `moebius calibrate`"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    result = runner.invoke(app, ["simulate", "--costs", str(path), "--model", "qwen3-30b-a3b"])
    assert result.exit_code == 2 and words in result.output


def test_a_sweep_needs_its_model() -> None:
    result = runner.invoke(app, ["simulate", "--costs", str(SWEEP)])
    assert result.exit_code == 2 and "name its model" in result.output
