"""The account of trajectories, and numbers for verl's metrics."""

from __future__ import annotations

import pytest

from moebius.rollout.integrations.verl.metrics import merge, step_metrics
from moebius.rollout.integrations.verl.steps import Trajectories
from tests.unit.reports import step_report


def test_single_turns_are_over_by_their_number() -> None:
    account = Trajectories(threshold=4)
    assert account.begin(16) == 16
    for _ in range(16):
        account.arrived()
    assert not account.few_left  # the number of requests says it; 16 are unfinished
    account.ended(12)
    assert account.few_left
    account.ended(4)
    assert not account.few_left  # nothing is announced any more: requests now follow the rule of quiescence


def test_turns_of_one_trajectory_do_not_count_as_new_ones() -> None:
    account = Trajectories(threshold=2)
    account.begin(3)
    for _ in range(7):  # three first turns, four later ones
        account.arrived()
    assert (account.to_come, account.unfinished) == (0, 3)
    assert not account.few_left  # three may come back, though perhaps none has a request at the moment
    account.ended(1)
    assert account.few_left


def test_a_batch_below_the_threshold_waits_for_its_requests() -> None:
    account = Trajectories(threshold=8)
    account.begin(2)
    assert not account.few_left
    account.arrived()
    assert not account.few_left
    account.arrived()
    assert account.few_left


def test_what_was_sent_back_is_expected_again_once() -> None:
    account = Trajectories(threshold=1)
    account.begin(4)
    for _ in range(4):
        account.arrived()
    account.sent_back()
    account.sent_back()
    account.sent_back()
    account.arrived()  # one came back before the next batch was announced
    assert account.begin(4) == 4 + 2
    assert account.begin(1) == 1
    assert account.unfinished == 9


def test_a_share_that_came_out_smaller_is_over_when_few_are_left() -> None:
    account = Trajectories(threshold=2)
    account.begin(5)
    for _ in range(4):  # the load balancer sent the fifth elsewhere
        account.arrived()
    account.ended(2)
    assert not account.few_left
    account.ended(1)
    assert account.few_left


def test_numbers_of_several_engine_steps_are_added() -> None:
    report = step_report(0, lengths=(1, 2, 5), switch_at=2)
    numbers = step_metrics([report, report])
    assert numbers["burst_s"] == pytest.approx(2 * report.durations_s.burst)
    assert numbers["tail_s"] == pytest.approx(2 * report.durations_s.tail)
    assert numbers["tokens"] == 2 * report.counts.output_tokens
    assert numbers["engine_steps"] == 2
    assert (numbers["switches"], numbers["live_at_switch"]) == (2, 2)


def test_seconds_are_the_slowest_replicas_and_counts_everybodys() -> None:
    def replica(burst: float, tail: float, live: float) -> dict[str, float]:
        return {
            "burst_s": burst, "switch_s": 0.5, "tail_s": tail, "tokens": 10.0, "switches": 1.0,
            "cancelled_switches": 0.0, "engine_steps": 1.0, "live_at_switch": live,
        }  # fmt: skip

    merged = merge([replica(3.0, 1.0, 8), replica(2.0, 4.0, 6), step_metrics([])])
    assert merged["timing_s/gen/burst"] == 2.0
    assert merged["timing_s/gen/switch"] == 0.5
    assert merged["timing_s/gen/tail"] == 4.0
    assert (merged["moebius/tokens"], merged["moebius/switches"], merged["moebius/live_at_switch"]) == (20, 2, 7)
    assert merged["moebius/tail_share"] == pytest.approx(4 / 6.5)
    assert merge([step_metrics([])]) == {}
