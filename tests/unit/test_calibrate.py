"""What calibration takes from a step, what fits, the cache, and hindsight on a report; engines in tests/engine."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from moebius.engine.calibrate import Grid, Measured, Room, calibrate, expert_ms, measured, schedule, slowest_of, typical
from moebius.engine.cost_cache import cache_path, keep
from moebius.engine.costs import CostModel, CostPoint, SwitchPoint
from moebius.engine.layout import Layout
from moebius.engine.types import Iteration, SampleKey, SampleRequest, SampleResult, StepOutcome, StepStats, SwitchRecord
from moebius.rollout.calibration import draw_costs
from moebius.rollout.cli import app
from moebius.rollout.errors import BadInput
from moebius.rollout.hindsight import check, counterfactual
from moebius.rollout.report import StepReport, build_report

EP, TP = Layout.EP, Layout.TP


def switch_record(to: str, iteration: int, ms: float) -> SwitchRecord:
    return SwitchRecord(to, iteration, 0.0, 4, [2, 2], 100, {}, ms, 0, 0, 0.0, 0.0)


def step_of(*parts: tuple[str, int, int, float]) -> StepStats:
    """Iterations from (layout, how many, tokens each, ms)."""
    stats = StepStats(0, 1)
    for layout, count, tokens, ms in parts:
        stats.iterations += [Iteration(0.0, layout, 4, tokens, ms) for _ in range(count)]
    return stats


def test_medians_of_whole_batches_only() -> None:
    # Prefill, decode of EP (five settle), the switch's slow neighbour, TP, and EP again after the way back.
    stats = step_of(
        ("EP", 2, 1, 99.0), ("EP", 6, 4, 50.0), ("EP", 5, 4, 8.0), ("TP", 7, 4, 70.0), ("TP", 4, 4, 6.0),
        ("EP", 9, 4, 1.0),
    )  # fmt: skip
    stats.switches = [switch_record("TP", 13, 30.0), switch_record("EP", 24, 40.0)]
    found = measured(stats, batch=4, context=100, iterations=3)
    assert (found.ep_ms, found.tp_ms) == (8.0, 6.0)
    # Whole batches begin with the third iteration; EP's last three are its 9th to 11th, TP's the 16th to 18th ...
    assert found.ep_context == pytest.approx(100 + 10) and found.tp_context == pytest.approx(100 + 21)
    assert [(p.to, p.live, p.kv_tokens, p.ms) for p in found.switches] == [(TP, 4, 100, 30.0), (EP, 4, 100, 40.0)]


def test_what_experts_take_over_the_link_and_staged() -> None:
    plain, prepared = switch_record("EP", 24, 40.0), switch_record("TP", 13, 30.0)
    plain.device_ms, prepared.device_ms = {"experts": 38.0}, {"experts": 15.0, "kv": 1.0}
    prepared.staged_layers, prepared.expert_layers = 36, 48
    stats = step_of(("EP", 20, 4, 8.0), ("TP", 20, 4, 6.0))
    stats.switches = [prepared, plain]
    found = measured(stats, batch=4, context=100, iterations=3)
    assert [point.staged for point in found.switches] == [0.75, 0.0]
    assert found.moves == ((0.75, 15.0),), "the way back is never prepared: it is of no preparation's share"
    plain.to = "TP"
    moves = measured(stats, batch=4, context=100, iterations=3).moves
    assert moves == ((0.75, 15.0), (0.0, 38.0))
    slower = Measured(1.0, 1.0, 0.0, 0.0, (), ((0.75, 18.0), (0.0, 36.0)))
    assert slowest_of([slower, Measured(1.0, 1.0, 0.0, 0.0, (), moves)]).moves == ((0.75, 18.0), (0.0, 38.0))
    costs = expert_ms(moves)
    assert costs is not None and (costs.link, costs.local) == (38.0, 20.0), "longer than a quarter of the link"
    costs = expert_ms([(0.0, 38.0), (0.5, 19.5)])
    assert costs is not None and costs.local == 0.0, "the link took that long, so what the copies took is not known"
    assert expert_ms([(1.0, 15.0)]) is None
    assert expert_ms([(0.0, 38.0)]) is None, "what a preparation saves was not seen"


class StepsByTheRules:
    """An engine whose steps go as the schedule says, 10 ms per EP iteration, and 25 ms while experts are sent ahead."""

    rank, world_size, max_model_len, vocab_size = 0, 1, 4096, 100
    policy: Any = None

    def __init__(self, why_not: str | None = None) -> None:
        config = SimpleNamespace(
            cache_config=SimpleNamespace(block_size=16),
            scheduler_config=SimpleNamespace(max_num_seqs=64, max_num_batched_tokens=8192),
        )
        pool = SimpleNamespace(usable_pages=10**6, core=SimpleNamespace(vllm_config=config))
        self.pair = SimpleNamespace(ep=pool, tp=pool)
        self.switcher = SimpleNamespace(drafts=None, cpu_group=None, staging=SimpleNamespace(why_not=why_not))
        self.prepared: list[bool] = []

    def run_step(self, requests: list[SampleRequest]) -> StepOutcome:
        config, batch = self.policy.config, len(requests)
        stats = StepStats(0, 1)
        tp_at, ep_at = config.at_iteration, config.back_at_iteration
        prepared_at = tp_at - config.prepare_iterations
        prepared = config.prepare_iterations > 0 and self.switcher.staging.why_not is None
        for i in range(requests[0].sampling["max_tokens"]):
            layout = "TP" if tp_at <= i < ep_at else "EP"
            ahead = prepared and prepared_at <= i < tp_at
            ms = 7.0 if layout == "TP" else 25.0 if ahead else 10.0
            stats.iterations.append(Iteration(0.0, layout, batch, batch, ms))
        stats.prepared_at = [prepared_at] if prepared else []
        stats.switches = [switch_record("TP", tp_at, 50.0), switch_record("EP", ep_at, 90.0)]
        to_tp, to_ep = stats.switches
        to_tp.expert_layers, to_tp.staged_layers = 4, 4 if prepared else 0
        to_tp.device_ms, to_ep.device_ms = {"experts": 12.0 if prepared else 40.0}, {"experts": 80.0}
        self.prepared.append(prepared)
        return StepOutcome([], stats)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank without processes."""
    gathered = lambda into, own, group: into.__setitem__(0, own)  # noqa: E731
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 1)
    monkeypatch.setattr("torch.distributed.all_gather_object", gathered)


@pytest.mark.usefixtures("alone")
def test_iterations_are_measured_without_experts_on_their_way_and_both_kinds_of_switches() -> None:
    engine = StepsByTheRules()
    costs, notes = calibrate(engine, Grid((1, 2, 4), (16, 32), iterations=6), key={})
    assert not notes and {p.ms for p in costs.points if p.layout is EP} == {10.0}
    # Two warm up, one of each kind; then they alternate, over batches and contexts.
    assert engine.prepared == [False, True, False, True, True, False, False, True]
    assert costs.experts is not None and (costs.experts.link, costs.experts.local) == (40.0, 12.0)
    assert float(costs.switch_ms(EP, 4, 100)) == pytest.approx(90), "the way back by itself"
    assert float(costs.switch_ms(TP, 4, 100)) > float(costs.switch_ms(TP, 4, 100, 1.0))


@pytest.mark.usefixtures("alone")
def test_an_engine_that_cannot_prepare_is_not_asked_to() -> None:
    engine = StepsByTheRules("engine.prepare is off")
    costs, _ = calibrate(engine, Grid((1, 2), (16,), iterations=6), key={})
    assert not any(engine.prepared) and len(engine.prepared) == 3 and costs.experts is None


def test_a_switch_is_prepared_where_the_measured_iterations_end() -> None:
    plan = schedule(3, 10, prepares=True)
    assert plan.at_iteration - plan.prepare_iterations == 3 + 5 + 10
    plain = schedule(3, 10, prepares=False)
    assert (plain.at_iteration, plain.prepare_iterations) == (plan.at_iteration, 0)


def test_slow_iterations_count_as_far_as_they_are_usual() -> None:
    assert typical([10, 10, 10, 14]) == 11 and typical([10, 10, 10, 1000]) == 12.5


def test_a_step_without_a_switch_has_no_tp() -> None:
    found = measured(step_of(("EP", 20, 4, 8.0)), batch=4, context=10, iterations=5)
    assert found.tp_ms is None and found.switches == () and found.ep_ms == 8.0


def test_the_slowest_rank_counts() -> None:
    def one(ep: float, tp: float | None, switch: float) -> Measured:
        return Measured(ep, tp, 10, 20, (SwitchPoint(to=TP, live=4, kv_tokens=9, ms=switch),))

    found = slowest_of([one(1, 5, 7), one(3, 4, 6)])
    assert (found.ep_ms, found.tp_ms, found.switches[0].ms) == (3, 5, 7)
    assert slowest_of([one(1, 5, 7), one(1, None, 7)]).tp_ms is None


ROOM = Room(2, {EP: 100, TP: 150}, 16, 64, 128, 512, 1000)


@pytest.mark.parametrize(
    ("batch", "tokens", "words"),
    [
        (65, 10, "engine.max_num_seqs is 64"),
        (4, 513, "engine.max_model_len is 512"),
        (64, 40, "192 KV pages in TP"),
        (60, 64, "150 KV pages in EP"),
        (4, 500, None),
    ],
)
def test_what_fits(batch: int, tokens: int, words: str | None) -> None:
    room = ROOM if batch != 60 else Room(2, {EP: 100, TP: 1000}, 16, 64, 128, 512, 1000)
    found = room.refusal(batch, tokens)
    assert found is None if words is None else words in str(found)


def test_prefills_by_hand() -> None:
    # Two requests a rank of 250 tokens; 126 of 128 tokens per iteration are free beside them: four, and one to be sure.
    assert ROOM.prefills(4, 250) == 5


def test_the_cache_depends_on_every_part_of_the_key(tmp_path: Path) -> None:
    key: dict[str, str | int] = {"gpu": "x", "ranks": 2}
    assert cache_path(key, tmp_path) == cache_path({"ranks": 2, "gpu": "x"}, tmp_path)
    assert cache_path(key, tmp_path) != cache_path(key | {"ranks": 4}, tmp_path)
    assert cache_path(key, tmp_path).parent == tmp_path


def test_grids_have_both_ends() -> None:
    assert Grid().batches[0] == 1 and len(Grid().contexts) >= 2


def test_the_grid_of_a_start_fits_the_engine() -> None:
    room = Room(2, {EP: 10**6, TP: 10**6}, 16, 300, 8192, 2048, 1000)
    grid = Grid.at_start(room, on_gpu=True)
    assert grid.batches == (1, 2, 8, 32, 64, 128, 256, 300) and grid.contexts == (128, 1024)
    small = Grid.at_start(ROOM, on_gpu=False)
    assert len(small.batches) * len(small.contexts) <= 6, "CPU starts should stay quick"
    assert small.batches[-1] == 16 and all(c + 60 < ROOM.max_model_len for c in small.contexts)


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "the next start measures again" in keep(COSTS, tmp_path / "file" / "below")
    assert keep(COSTS, tmp_path) == f"kept in {cache_path(COSTS.key, tmp_path)}"
    assert CostModel.load(cache_path(COSTS.key, tmp_path)) == COSTS


COSTS = CostModel(
    ranks=2,
    points=[CostPoint(layout=layout, batch=b, context=0, ms=ms) for layout, ms in ((EP, 10), (TP, 5)) for b in (1, 8)],
    switches=[SwitchPoint(to=TP, live=4, kv_tokens=100, ms=20), SwitchPoint(to=EP, live=4, kv_tokens=100, ms=25)],
)  # fmt: skip


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    draw_costs(COSTS, tmp_path / "deep" / "costs.png")
    assert (tmp_path / "deep" / "costs.png").read_bytes()[:4] == b"\x89PNG"


def report_of(ep_ms: float, tp_ms: float) -> StepReport:
    """Two ranks with two samples each: ten iterations of EP, a switch of 20 ms, twenty of TP."""
    outcomes = []
    for rank in range(2):
        stats = StepStats(rank, 2, total_s=(10 * ep_ms + 20 * tp_ms + 20) / 1e3)
        stats.burst_s, stats.tail_s, stats.switch_s = ep_ms / 100, tp_ms / 50, 0.02
        live, t = 4, 0.0
        for i in range(30):
            layout, ms = ("EP", ep_ms) if i < 10 else ("TP", tp_ms)
            t += ms / 1e3
            tokens, live = live, (4 if i < 9 else 2 if i < 29 else 0)
            stats.iterations.append(Iteration(t, layout, live, tokens, ms))
        results = [
            SampleResult(SampleKey(rank, s), [1] * (10 if s else 30), None, None, "length", None, 0, rank)
            for s in range(2)
        ]
        outcomes.append(StepOutcome(results, stats))
    return build_report(
        outcomes, step=0, policy_version=0, model="m", device="cpu", prompt_tokens=[5, 5], versions={},
        created=datetime(2026, 1, 1, tzinfo=UTC),
    )  # fmt: skip


def test_hindsight_by_hand() -> None:
    found = counterfactual(report_of(10, 5), COSTS)
    assert (found.static_ep_s, found.static_tp_s) == pytest.approx((0.3, 0.15))
    assert found.best_single_s == pytest.approx(0.15)
    assert found.measured_s == pytest.approx(0.22)
    assert found.gain == pytest.approx(0.15 / 0.22)


def test_check_meets_a_step_that_went_as_calibrated() -> None:
    found = check(report_of(10, 5), COSTS)
    assert found.error_pct == pytest.approx(0, abs=1e-6) and found.iterations == 30


def test_check_sees_a_step_that_went_otherwise() -> None:
    found = check(report_of(10, 10), COSTS)
    assert found.by_layout_pct == pytest.approx({"EP": 0, "TP": -50})
    assert found.error_pct == pytest.approx(100 * (0.2 / 0.3 - 1))


def test_simulate_states_the_error_for_reports(tmp_path: Path) -> None:
    COSTS.save(tmp_path / "costs.json")
    report_of(10, 10).write(tmp_path / "reports")
    arguments = ["simulate", "--costs", str(tmp_path / "costs.json"), "--requests", "8", "--steps", "1"]
    result = CliRunner().invoke(app, [*arguments, "--reports", str(tmp_path / "reports"), "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    numbers = json.loads((tmp_path / "policy_sim.json").read_text())["results"]
    assert numbers["sim_error_pct"] == pytest.approx(100 / 3)
    assert numbers["error_step_0000_pct"] == pytest.approx(-100 / 3)
    result = CliRunner().invoke(app, [*arguments, "--reports", str(tmp_path / "nothing")])
    assert result.exit_code == 2 and "no step_NNNN.json" in result.output


def test_costs_of_other_machines_are_refused() -> None:
    other = COSTS.model_copy(update={"ranks": 4})
    with pytest.raises(BadInput, match="calibrate there"):
        check(report_of(10, 5), other)
