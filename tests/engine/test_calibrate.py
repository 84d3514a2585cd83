"""Calibration on running engines: both layouts and switches in both directions are measured, and the cache is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moebius.engine.calibrate import Grid, calibrate
from moebius.engine.config import PolicyConfig
from moebius.engine.cost_cache import Known, cached_or_measured, cost_key
from moebius.engine.costs import CostModel
from moebius.engine.layout import Layout
from moebius.engine.types import SampleKey, SampleRequest
from moebius.rollout.hindsight import check
from moebius.rollout.report import build_report
from tests.engine.fleet import Fleet
from tests.engine.work import config, make_engine, rich_requests, split

GRID = Grid(batches=(2, 6, 64), contexts=(8, 100), iterations=4)


def calibrate_and_look(engine: Any, grid: Grid) -> tuple[CostModel, list[str], bool]:
    before = engine.policy
    model, notes = calibrate(engine, grid, key=cost_key(engine))
    return model, notes, engine.policy is before


def through_the_cache(engine: Any, folder: str) -> Known:
    return cached_or_measured(engine, Grid(batches=(2, 4), contexts=(8,), iterations=4), folder)


def test_both_layouts_and_both_directions(fleet: Fleet) -> None:
    answers = fleet.call(calibrate_and_look, GRID)
    models = [model for model, *_ in answers]
    assert models[0] == models[1], "ranks must hold equal costs, or they would decide differently"
    model, notes, restored = answers[0]
    assert {(p.layout, p.batch) for p in model.points} == {(lo, b) for lo in Layout for b in (2, 6)}
    assert len(model.points) == 8 and all(0 < p.ms < 60_000 for p in model.points)
    assert all(p.context > 8 for p in model.points)
    assert {p.to for p in model.switches} == set(Layout)
    assert all(p.live == 2 or p.live == 6 for p in model.switches)
    # A switch moves what every request has computed: its prompt and most of what it has sampled.
    assert all(p.kv_tokens >= p.live * 8 for p in model.switches)
    assert [note.split(":")[0] for note in notes] == ["batch 64, context 8", "batch 64, context 100"]
    assert restored, "the policy should be put back"
    assert model.key["ranks"] == 2 and model.key["gpu"]
    assert float(model.switch_ms(Layout.TP, 4, 400)) > 0


def run_a_step(engine: Any, policy: PolicyConfig, requests: list[Any]) -> Any:
    before, engine.policy.config = engine.policy.config, policy
    try:
        return engine.run_step(requests)
    finally:
        engine.policy.config = before


def test_costs_describe_a_step_they_were_not_made_from(fleet: Fleet) -> None:
    """That the whole chain works. On a shared CPU times vary, so the bound is wide; GPUs have a benchmark for it."""
    model = fleet.call(calibrate_and_look, Grid(batches=(1, 4, 12), contexts=(8, 60), iterations=8))[0][0]
    lengths = [12] * 6 + [30] * 4 + [80] * 2
    sampling = [{"temperature": 1.0, "max_tokens": length, "ignore_eos": True} for length in lengths]
    requests = [
        [SampleRequest(SampleKey(i, 0), [20 + i] * 12, sampling[i], i) for i in range(rank, 12, 2)] for rank in range(2)
    ]
    outcomes = fleet.call(run_a_step, PolicyConfig(threshold=6), per_rank=[(share,) for share in requests])
    report = build_report(outcomes, step=0, policy_version=0, model="tiny", device="cpu", prompt_tokens=[12] * 12)
    found = check(report, model)
    print(f"predicted {found.predicted_s:.3f} s, measured {found.measured_s:.3f} s ({found.error_pct:+.1f} %)")
    assert set(found.by_layout_pct) == {"EP", "TP"} and found.iterations > 60
    assert 0.2 < found.predicted_s / found.measured_s < 5


def test_the_cache_is_read_the_second_time(fleet: Fleet, tmp_path: Path) -> None:
    first = fleet.call(through_the_cache, str(tmp_path))
    assert len(list(tmp_path.glob("*.json"))) == 1
    second = fleet.call(through_the_cache, str(tmp_path))
    assert first[0].costs == first[1].costs == second[0].costs == second[1].costs
    assert first[0].seconds > 0 and first[0].origin.startswith("measured at start; kept in")
    assert second[0].origin.startswith("costs from") and second[0].seconds == 0
    (path,) = tmp_path.glob("*.json")
    path.write_text("{}")
    third = fleet.call(through_the_cache, str(tmp_path))
    assert "measured again" in third[0].notes[0] and third[0].costs == third[1].costs


def what_it_knows(engine: Any) -> tuple[CostModel | None, PolicyConfig, str, float, bool]:
    startup = engine.startup
    learnt = engine.policy.lengths.ready
    return engine.policy.costs, engine.policy.config, startup.costs, startup.calibration_s, learnt


def test_a_policy_that_needs_costs_gets_them_at_start(models: list[str], tmp_path: Path) -> None:
    """Measured at the first start, read at the second, where another policy's report uses them too."""
    policy = PolicyConfig(kind="predictive", threshold_source="calibrated", costs_cache=str(tmp_path))
    fleet = Fleet(2, make_engine, config(models[0], policy=policy))
    try:
        first = fleet.call(what_it_knows)
        outcomes = fleet.call(run_a_step, first[0][1], per_rank=split(rich_requests(6), 2))
    finally:
        fleet.close()
    costs, settings, origin, seconds, learnt = first[0]
    assert costs is not None and first[1][:2] == (costs, settings), "ranks must decide by equal costs"
    assert settings.threshold_source == "given" and settings.threshold == costs.threshold(512)
    assert "measured at start; kept in" in origin and seconds > 0
    assert not learnt, "lengths of calibration are no lesson about rollouts"
    assert outcomes[0].stats.decisions and outcomes[0].stats.decisions == outcomes[1].stats.decisions
    fleet = Fleet(2, make_engine, config(models[0], policy=PolicyConfig(costs_cache=str(tmp_path))))
    try:
        second = fleet.call(what_it_knows)
    finally:
        fleet.close()
    assert second[0][0] == second[1][0] == costs
    assert second[0][2].startswith("costs from") and second[0][3] == 0 and second[0][1].threshold == 64
