"""When to switch: pure decisions, the same on every rank."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from moebius.engine.config import PolicyConfig
from moebius.engine.costs import Array, CostModel, CostPoint, SwitchPoint
from moebius.engine.layout import Layout
from moebius.engine.policy import Finished, Observation, StepStart, SwitchPolicy, resolved
from moebius.engine.survival import LiveForecast


def first_switch(config: PolicyConfig, live: list[int], refused: frozenset[int] = frozenset()) -> list[int]:
    """Iterations at which the policy asks for a switch, when those in `refused` are cancelled."""
    policy = SwitchPolicy(config)
    policy.begin_step()
    asked = []
    for iteration, count in enumerate(live):
        if policy.wants_tp(iteration, count):
            asked.append(iteration)
            if iteration in refused:
                policy.cancelled(iteration)
            else:
                policy.switched()
    return asked


@pytest.mark.parametrize(
    ("config", "want"),
    [
        (PolicyConfig(threshold=4), [3]),
        (PolicyConfig(threshold=100), [0]),
        (PolicyConfig(threshold=0), []),
        (PolicyConfig(kind="scheduled", at_iteration=2), [2]),
        (PolicyConfig(kind="static_tp"), [0]),
        (PolicyConfig(kind="static_ep", threshold=100), []),
    ],
)
def test_first_switch(config: PolicyConfig, want: list[int]) -> None:
    assert first_switch(config, [9, 8, 5, 4, 4, 1, 0]) == want


def test_refused_switch_is_retried_after_the_cooldown() -> None:
    config = PolicyConfig(threshold=5, cooldown_iterations=3)
    assert first_switch(config, [5] * 10, refused=frozenset({0, 3})) == [0, 3, 6]


def test_each_step_begins_anew() -> None:
    policy = SwitchPolicy(PolicyConfig(threshold=5))
    for _ in range(2):
        policy.begin_step()
        assert policy.wants_tp(0, 5)
        policy.switched()
        assert not policy.wants_tp(1, 5)


@given(
    st.lists(st.integers(0, 40), max_size=60), st.integers(0, 40), st.integers(1, 9), st.frozensets(st.integers(0, 60))
)
def test_never_above_the_threshold_nor_within_the_cooldown(
    live: list[int], threshold: int, cooldown: int, refused: frozenset[int]
) -> None:
    asked = first_switch(PolicyConfig(threshold=threshold, cooldown_iterations=cooldown), live, refused)
    assert all(0 < live[i] <= threshold for i in asked)
    assert all(b - a >= cooldown for a, b in itertools.pairwise(asked))
    assert sum(i not in refused for i in asked) <= 1


def test_unknown_fields_are_errors() -> None:
    with pytest.raises(ValidationError):
        PolicyConfig(treshold=3)  # type: ignore[call-arg]


# ---- to and fro ------------------------------------------------------------------------------------------

INTERACTIVE = PolicyConfig(kind="interactive", threshold=256, window=8, cooldown_s=5.0)
EP, TP = Layout.EP, Layout.TP


def switches(
    config: PolicyConfig, live: list[int], refused: frozenset[int] = frozenset(), dt: float = 1.0
) -> list[Any]:
    """(iteration, target) of the switches when an iteration takes `dt` seconds; those in `refused` do not fit."""
    policy = SwitchPolicy(config)
    policy.begin_step()
    layout, done = EP, []
    for iteration, count in enumerate(live):
        decision = policy.decide(Observation(iteration, count, layout, seconds=iteration * dt))
        if decision.target is None:
            continue
        if iteration in refused:
            policy.cancelled(iteration)
        else:
            policy.switched()
            layout = decision.target
            done.append((iteration, layout))
    return done


def test_interactive_by_hand() -> None:
    assert INTERACTIVE.low == pytest.approx(204.8)
    # Eight iterations fill the window; 300 > T_h sends it back at once, but not within five seconds.
    assert switches(INTERACTIVE, [100] * 8 + [300] * 10) == [(7, TP), (12, EP)]
    # After the switch back the window starts anew: it is full with 13 to 20 (mean 125), and the cooldown is over then.
    assert switches(INTERACTIVE, [100] * 8 + [300] * 6 + [100] * 20) == [(7, TP), (12, EP), (20, TP)]
    # Between T_l and T_h nothing happens in either layout.
    assert switches(INTERACTIVE, [230] * 50) == []
    assert switches(INTERACTIVE, [100] * 8 + [256] * 50) == [(7, TP)]


def test_interactive_retries_a_refused_switch_after_the_cooldown() -> None:
    assert switches(INTERACTIVE, [10] * 30, frozenset({7, 12})) == [(17, TP)]


def test_a_cooldown_lasts_into_the_next_step() -> None:
    policy = SwitchPolicy(PolicyConfig(kind="interactive", threshold=100, window=1, cooldown_s=5))
    policy.begin_step()
    assert policy.decide(Observation(0, 10, EP, seconds=2.0)).target is TP
    policy.switched()
    policy.decide(Observation(1, 10, TP, seconds=3.0))
    policy.begin_step()
    assert policy.decide(Observation(0, 500, TP, seconds=3.9)).reason == "cooldown"
    assert policy.decide(Observation(1, 500, TP, seconds=4.1)).target is EP


def test_without_a_clock_the_cooldown_counts_iterations() -> None:
    policy = SwitchPolicy(PolicyConfig(kind="interactive", threshold=100, window=1, cooldown_iterations=4))
    policy.begin_step()
    assert policy.wants_tp(0, 10)
    policy.switched()
    assert [policy.wants_ep(i, 500) for i in range(1, 6)] == [False, False, False, True, True]


@given(
    live=st.lists(st.integers(0, 400), max_size=200),
    high=st.integers(1, 300),
    share=st.floats(0, 1),
    window=st.integers(1, 10),
    cooldown=st.floats(0, 20),
    refused=st.frozensets(st.integers(0, 200)),
    dt=st.floats(0.01, 3),
)
def test_hysteresis_holds_for_any_load(
    live: list[int], high: int, share: float, window: int, cooldown: float, refused: frozenset[int], dt: float
) -> None:
    low = int(share * high)
    config = PolicyConfig(kind="interactive", threshold=high, threshold_low=low, window=window, cooldown_s=cooldown)
    found = switches(config, live, refused, dt)
    for i, layout in found:
        if layout is EP:
            assert live[i] > high
        else:
            assert sum(live[i - window + 1 : i + 1]) / window < low
        assert live[i] > 0 and i not in refused
    assert all(a[1] is not b[1] for a, b in itertools.pairwise(found)), "never to the layout it is in"
    assert all((b - a) * dt >= cooldown - 1e-9 for (a, _), (b, _) in itertools.pairwise(found))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"threshold": 10, "threshold_low": 11}, "lower the first"),
        ({"at_iteration": 5, "back_at_iteration": 5}, "must come after"),
    ],
)
def test_impossible_bands_are_refused(fields: dict[str, int], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        PolicyConfig(**fields)  # type: ignore[arg-type]


def test_scheduled_goes_and_comes_back_once() -> None:
    config = PolicyConfig(kind="scheduled", at_iteration=2, back_at_iteration=5)
    assert switches(config, [9] * 10) == [(2, TP), (5, EP)]


def test_static_ep_leaves_tp() -> None:
    policy = SwitchPolicy(PolicyConfig(kind="static_ep"))
    policy.begin_step()
    assert policy.decide(Observation(0, 3, TP)).target is EP


# ---- predictive ------------------------------------------------------------------------------------------


def costs_of(ep: float, tp: float, switch: float) -> CostModel:
    """Constant costs, in ms."""
    points = [CostPoint(layout=layout, batch=1, context=0, ms=ms) for layout, ms in ((EP, ep), (TP, tp))]
    return CostModel(ranks=1, points=points, switches=[SwitchPoint(to=TP, live=1, kv_tokens=0, ms=switch)])


class Sure:
    """Every sample runs for exactly so many more iterations."""

    def __init__(self, left: int, live: int) -> None:
        self.left, self.live = left, live

    def forecast(self, offsets: Array) -> LiveForecast:
        return LiveForecast((offsets < self.left).astype(float), np.full(len(offsets), float(self.live)))


@pytest.mark.parametrize(("left", "target"), [(51, TP), (50, None), (10, None), (4000, TP)])
def test_predictive_switches_when_it_saves_more_than_it_costs(left: int, target: Layout | None) -> None:
    # Two milliseconds saved per iteration against a switch of 100 ms: worth it beyond 50 iterations.
    policy = SwitchPolicy(PolicyConfig(kind="predictive"), costs_of(10, 8, 100))
    policy.forecaster = Sure(left, 20)
    policy.begin_step(StepStart(20, 0, 8192))
    decision = policy.decide(Observation(0, 20))
    assert decision.target is target
    assert decision.inputs["saved_ms"] == pytest.approx(2 * left, rel=0.05)
    assert decision.inputs["switch_ms"] == pytest.approx(100)


def test_predictive_waits_while_ep_is_faster() -> None:
    # EP leads above 100 live samples, of which there are 200 for 30 more iterations and 50 for long after that.
    points = [CostPoint(layout=EP, batch=b, context=0, ms=10) for b in (1, 1000)]
    points += [CostPoint(layout=TP, batch=b, context=0, ms=ms) for b, ms in ((99, 5), (101, 20))]
    costs = CostModel(ranks=1, points=points, switches=[SwitchPoint(to=TP, live=1, kv_tokens=0, ms=50)])

    class Falling:
        now = 0

        def forecast(self, offsets: Array) -> LiveForecast:
            at = offsets + self.now
            return LiveForecast((at < 1000).astype(float), np.where(at < 30, 200.0, 50.0))

    policy, truth = SwitchPolicy(PolicyConfig(kind="predictive", every=1), costs), Falling()
    policy.forecaster = truth
    policy.begin_step(StepStart(200, 0, 8192))
    first = None
    for i in range(40):
        truth.now = i
        decision = policy.decide(Observation(i, 200 if i < 30 else 50))
        if i == 0:
            assert decision.reason == "better later" and decision.inputs["wait_iterations"] == 30
        if decision.target is not None:
            first = i
            break
    assert first == 30


def test_predictive_follows_the_threshold_until_lengths_are_known() -> None:
    policy = SwitchPolicy(PolicyConfig(kind="predictive", threshold=5), costs_of(10, 8, 1))
    policy.begin_step(StepStart(6, 0, 64))
    assert policy.decide(Observation(0, 6)).target is None
    decision = policy.decide(Observation(1, 5))
    assert decision.target is TP and "too few lengths known" in decision.reason


def test_predictive_without_costs_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="moebius calibrate"):
        SwitchPolicy(PolicyConfig(kind="predictive")).begin_step()


def test_the_threshold_can_come_from_the_calibration() -> None:
    points = [CostPoint(layout=EP, batch=b, context=0, ms=10) for b in (8, 128)]
    points += [CostPoint(layout=TP, batch=b, context=0, ms=ms) for b, ms in ((8, 6), (128, 14))]
    costs = CostModel(ranks=2, points=points)
    asked = PolicyConfig(threshold_source="calibrated", threshold=7)
    assert resolved(asked, costs).threshold == 31
    assert resolved(PolicyConfig(threshold=7), None).threshold == 7
    with pytest.raises(ValueError, match="no costs"):
        resolved(asked, None)


def test_decisions_are_logged_with_inputs_and_outcome() -> None:
    policy = SwitchPolicy(PolicyConfig(threshold=4, cooldown_iterations=2))
    policy.begin_step()
    for i, live in enumerate([9, 8, 4, 4, 4, 4]):
        if policy.wants_tp(i, live):
            if i == 2:
                policy.cancelled(i)
            else:
                policy.switched()
    assert [(entry.decision.reason, entry.outcome) for entry in policy.log] == [
        ("live > threshold", ""),
        ("live <= threshold", "cancelled"),
        ("cooldown", ""),
        ("live <= threshold", "switched"),
        ("live <= threshold, done", ""),
    ]
    assert policy.log[1].decision.inputs | {"context": 0} == {
        "policy": "rollout", "iteration": 2, "live": 4, "layout": "EP", "context": 0, "threshold": 4,
    }  # fmt: skip
    assert policy.log[1].decision.line().startswith("to TP: live <= threshold (policy=rollout")


@given(
    kind=st.sampled_from(["rollout", "interactive", "predictive", "scheduled"]),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=80),
    seed=st.integers(0, 3),
)
def test_ranks_decide_alike(kind: Any, lengths: list[int], seed: int) -> None:
    """Policies that never met, given the same observations."""
    config = PolicyConfig(kind=kind, threshold=len(lengths) // 2, window=3, cooldown_s=0.2, at_iteration=9)
    ranks = [SwitchPolicy(config, costs_of(10, 8, 30 * seed)) for _ in range(3)]
    logs: list[list[tuple[Any, ...]]] = [[], [], []]
    for policy, log in zip(ranks, logs, strict=True):
        for _ in range(2):
            policy.begin_step(StepStart(len(lengths), 5.0, 64))
            layout = EP
            for i in range(max(lengths)):
                live = sum(length > i for length in lengths)
                decision = policy.decide(Observation(i, live, layout, seconds=i / 100))
                log.append((i, decision.target, decision.reason))
                if decision.target is not None:
                    policy.switched()
                    layout = decision.target
    assert logs[0] == logs[1] == logs[2]


# ---- lengths that are told one by one ----------------------------------------------------------------------


def test_only_predictive_makes_use_of_lengths() -> None:
    kinds = ("rollout", "interactive", "predictive", "static_ep", "static_tp", "scheduled")
    assert [kind for kind in kinds if SwitchPolicy(PolicyConfig(kind=kind)).learns_lengths] == ["predictive"]


def test_lengths_told_late_or_at_the_end_are_not_lost() -> None:
    """`finished` lags behind `live` where an exchange has no place for all; the rest comes with the end of the step."""
    policy = SwitchPolicy(PolicyConfig(kind="predictive"), costs_of(10, 9, 50))
    lengths = [3] * 20 + [5, 9]
    told = [Finished(i % 4, n) for i, n in enumerate(lengths)]
    policy.begin_step(StepStart(22, 4.0, 64, {0: 6, 1: 6, 2: 5, 3: 5}))
    for k in range(9):
        live = sum(n > k for n in lengths)
        batch, told = (told[:3], told[3:]) if k >= 3 else ([], told)
        policy.decide(Observation(k, live, tokens=sum(n > k - 1 for n in lengths), finished=batch, came={}))
    policy.end_step(finished=told)
    table = policy.lengths._table
    assert table.deaths.sum() == 22 and table.cut.sum() == 0
    assert table.deaths[:10].tolist() == [0, 0, 20, 0, 1, 0, 0, 0, 1, 0]
    assert set(policy.lengths._running.values()) == {0}


def test_parked_samples_count_as_cut_short() -> None:
    policy = SwitchPolicy(PolicyConfig(kind="predictive"), costs_of(10, 9, 50))
    policy.begin_step(StepStart(4, 4.0, 64, {0: 4}))
    for k in range(6):
        policy.decide(Observation(k, 4 if k < 5 else 3, tokens=4 if k else 0, finished=[], came={}))
    policy.end_step(finished=[Finished(0, 5)], left=3)
    assert policy.lengths._table.deaths.sum() == 1 and policy.lengths._table.cut.sum() == 3


def test_samples_that_come_before_the_first_iteration_belong_to_their_prompts() -> None:
    """In an open step nothing runs when it begins, and few live samples are no tail until its burst has come."""
    policy = SwitchPolicy(PolicyConfig(kind="predictive"), costs_of(10, 9, 50))
    policy.begin_step(StepStart(0, 0.0, 64, {}))
    policy.observe(Observation(0, 6, tokens=0, finished=[], came={7: 4, 8: 2}))
    assert policy.lengths._running == {7: 4, 8: 2} and policy.lengths.age == 0
    policy.observe(Observation(1, 5, tokens=6, finished=[Finished(7, 1)], came={9: 1}))
    assert policy.lengths._running == {7: 3, 8: 2, 9: 1} and policy.lengths.age == 1


def test_costs_auto_is_no_file() -> None:
    config = PolicyConfig(kind="predictive")
    assert config.costs == "auto" and config.costs_file is None and config.needs_costs
    with pytest.raises(ValueError, match=r"set policy\.costs to auto"):
        SwitchPolicy(config).begin_step()
    assert PolicyConfig(costs="x.json").costs_file == "x.json" and not PolicyConfig().needs_costs
    assert PolicyConfig(threshold_source="calibrated").needs_costs
