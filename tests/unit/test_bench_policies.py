"""Real steps beside their predictions: the arithmetic of `bench policies`, and its results put into policy_sim.json."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.policy_sim_gpu import keep_gpu_steps, with_gpu_steps
from moebius.engine.config import PolicyConfig
from moebius.engine.costs import CostModel, CostPoint, SwitchPoint
from moebius.engine.layout import Layout
from moebius.engine.policy import SwitchPolicy
from moebius.rollout.bench import policies
from moebius.rollout.bench.fleet import FleetError
from moebius.rollout.bench.policies import Played, agrees, compared, numbers_of, policies_of, simulate
from moebius.rollout.bench.results import Results, make_results, read_results
from moebius.rollout.errors import BadInput, MoebiusError
from moebius.rollout.simulate import Simulator, Trace
from tests.unit.reports import step_report

ROOT = Path(__file__).parents[2]
# EP takes a second whatever the batch, TP half of it for one sample and 0.5 s per further one; a switch takes 0.25 s.
COSTS = CostModel(
    ranks=1,
    points=[CostPoint(layout=Layout.EP, batch=b, context=1.0, ms=1000.0) for b in (1, 2, 4)]
    + [CostPoint(layout=Layout.TP, batch=b, context=1.0, ms=500.0 * b) for b in (1, 2, 4)],
    switches=[SwitchPoint(to=to, live=live, kv_tokens=0, ms=250.0) for to in Layout for live in (0, 4)],
)
LENGTHS = (1, 2, 3, 4)


def test_a_step_beside_its_predictions() -> None:
    """All four samples decode at once: two iterations of EP, a switch with one sample live, two of TP."""
    report = step_report(3, lengths=(2, 2, 2, 4), switch_at=1, iteration_s=1.0, pause_s=0.5)
    simulator = Simulator(Trace((2, 2, 2, 4), 1), COSTS, lag=0)
    expected = simulate(simulator, "fixed", policies_of(1)["fixed"], SwitchPolicy(policies_of(1)["predictive"], COSTS))
    assert expected == (pytest.approx(2 + 0.25 + 2 * 0.5), [1])
    found = compared(report, COSTS, "fixed", *expected)
    assert found.measured_s == pytest.approx(2 + 0.5 + 2)
    assert found.by_costs_s == pytest.approx(3.25) and found.switch_live == [1] == found.simulated_switch_live
    assert found.error_pct == pytest.approx(100 * (3.25 / 4.5 - 1)) == found.cost_error_pct


def test_the_switch_with_which_static_tp_begins_counts_on_neither_side() -> None:
    report = step_report(0, lengths=LENGTHS, switch_at=4, iteration_s=1.0, pause_s=0.5)
    found = compared(report, COSTS, "static_tp", 1.0, [])
    assert found.measured_s == pytest.approx(4.0) and found.switch_live == []
    with pytest.raises(MoebiusError, match="did not get into TP"):
        compared(step_report(0, lengths=LENGTHS), COSTS, "static_tp", 1.0, [])


def test_signs() -> None:
    assert agrees(3.0, 1.5) and not agrees(-0.1, 1.5) and agrees(-0.9, 0.2) and not agrees(1.2, 0.2)
    times = {"static_ep": 12.0, "static_tp": 11.0, "fixed": 10.05, "fixed_low": 10.5, "predictive": 10.0}
    played = [Played(name, step, s, 1.02 * s, 0.98 * s) for step in (0, 1) for name, s in times.items()]
    notes: list[str] = []
    numbers = numbers_of(played, notes)
    assert numbers["sim_error_pct"] == pytest.approx(2) == numbers["cost_error_pct"]
    assert numbers["predictive_vs_fixed_low_measured_pct"] == pytest.approx(5)
    assert numbers["predictive_vs_better_static_pct"] == pytest.approx(10)
    assert numbers["sign_agrees_fixed"] == numbers["sign_agrees_fixed_low"] == 1.0
    assert [note for note in notes if "against fixed:" in note] == notes, "only 0.5 % are too few to have a sign"


def _measured(device: str) -> Results:
    times = dict.fromkeys(policies_of(8), 10.0)
    numbers = numbers_of([Played(name, 0, s, 1.03 * s, s) for name, s in times.items()], [])
    series = {"steps": [{"policy": name, "error_pct": 3.0} for name in times], "costs": {}}
    options = {"setup": {"device": device, "engine": {"model": "/somewhere/else/model"}}}
    return make_results("policies", command="x", options=options, results=numbers, series=series)


def test_steps_on_gpus_take_the_name_over_and_the_cpus_figure_stays() -> None:
    before = read_results(ROOT / "docs" / "benchmarks" / "policy_sim.json")
    old = before.results.get("sim_error_cpu_pct", before.results["sim_error_pct"])
    merged = with_gpu_steps(before, _measured("cuda"))
    assert merged.results["sim_error_pct"] == pytest.approx(3) and merged.results["sim_error_cpu_pct"] == old
    assert merged.results["predictive_vs_fixed_mean_pct"] == before.results["predictive_vs_fixed_mean_pct"]
    assert "/somewhere" not in merged.model_dump_json() and len(merged.series["gpu"]["steps"]) == 5
    assert not any("No step on GPUs" in note for note in merged.notes)
    again = with_gpu_steps(merged, _measured("cuda"))
    assert again.results == merged.results and again.notes == merged.notes
    assert keep_gpu_steps(before, merged).results["sim_error_pct"] == pytest.approx(3)
    with pytest.raises(BadInput, match="did not run on GPUs"):
        with_gpu_steps(before, _measured("cpu"))


class OneRank:
    """A fleet whose only rank is this process: its engine has a policy, and steps end at once."""

    problem: str | None = None

    def __init__(self, policy: SwitchPolicy) -> None:
        self.engine = SimpleNamespace(policy=policy)
        self.subject: Any = SimpleNamespace(engine=self.engine, step=self.step)
        self.used: list[Any] = []  # costs that calibration and steps ran with
        self.fails = False

    def call(self, function: Any, *arguments: Any) -> list[Any]:
        return [function(self.subject, *arguments)]

    def step(self, load: Any) -> None:
        self.used.append(self.engine.policy.costs)
        if self.fails and len(self.used) > 2:
            self.fails = False
            raise MoebiusError("broken")


def test_a_failed_run_leaves_the_engine_its_own_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines may stay up: the next run begins with what the first did, and measures anew."""
    own = SwitchPolicy(PolicyConfig(kind="rollout", threshold=3), None)
    config, lengths = own.config, own.lengths
    fleet: Any = OneRank(own)
    measured = [COSTS, COSTS.model_copy(update={"source": "again"})]
    calibrated_with: list[Any] = []

    def calibrate(engine: Any, grid: Any, key: Any) -> tuple[CostModel, list[str]]:
        calibrated_with.append((engine.policy.config, engine.policy.costs, engine.policy.lengths))
        return measured[len(calibrated_with) - 1], []

    engines: Any = SimpleNamespace(
        specs=[SimpleNamespace(name="moebius")], fleet=lambda name: fleet, say=lambda words: None, notes=list,
        capacity=lambda name: SimpleNamespace(
            max_model_len=4096, page_tokens=16, pages={"EP": 9999, "TP": 9999}, max_num_seqs=64, vocab=100
        ),
        setup=SimpleNamespace(ranks=1, device="cpu"),
    )  # fmt: skip
    monkeypatch.setattr("moebius.engine.calibrate.calibrate", calibrate)
    monkeypatch.setattr(policies, "build_report", lambda *of, **more: None)
    monkeypatch.setattr(policies, "compared", lambda report, costs, name, *expected: Played(name, 0, 1.0, 1.0, 1.0))
    monkeypatch.setattr(policies, "_summarise", lambda engines, options, costs, *more: costs)
    options = policies.PoliciesOptions(requests=4, prompt=8, cap=16, steps=1)
    fleet.fails = True
    with pytest.raises(MoebiusError, match="broken"):
        policies.run_policies(engines, options)
    assert (own.config, own.costs, own.lengths) == (config, None, lengths)
    assert set(map(id, fleet.used)) == {id(COSTS)}
    fleet.used.clear()
    assert policies.run_policies(engines, options) is measured[1]  # type: ignore[comparison-overlap]
    assert calibrated_with == [(config, None, lengths)] * 2 and set(map(id, fleet.used)) == {id(measured[1])}
    assert (own.config, own.costs, own.lengths) == (config, None, lengths)


def test_a_fleet_that_failed_is_not_asked_to_tidy_up() -> None:
    fleet: Any = SimpleNamespace(problem="rank 0 has ended")  # it has no `call`
    with pytest.raises(FleetError, match="rank 0"), policies._lent(fleet):
        raise FleetError(fleet.problem)
