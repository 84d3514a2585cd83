"""Replicas that are lost in a step: who goes on with their prompts, and how they come back."""

from __future__ import annotations

import time
from typing import Any

import pytest

from moebius.engine.types import SampleKey
from moebius.rollout import replica_life, shared_step
from moebius.rollout.errors import BadInput, GroupNotReady, MoebiusError, RankDied
from tests.unit.replica_world import PROMPTS, Make, fake, spread, tensors, tokens, until


def test_the_others_go_on_with_the_prompts_of_a_lost_replica(make: Make) -> None:
    lengths = spread([1 + p for p in range(12)])
    expected = tokens(make(2).generate(PROMPTS, 2, step=1, lengths=lengths))
    replicas = make(3, failures={"on_failure": "raise"})
    fake(replicas, 1).fail_at = 4
    assert tokens(replicas.generate(PROMPTS, 2, step=1, lengths=lengths)) == expected
    report = replicas.last_report
    assert report is not None
    assert [lane.lost for lane in report.lanes] == [None, "rank 1 of node-1 died", None]
    assert report.counts.samples == 24 and report.sample_times is None
    assert report.lanes[1].durations_s is None and report.lanes[1].samples > 0
    assert replicas.in_service == [0, 2], "restart() is the caller's"
    replicas.restart()
    assert replicas.in_service == [0, 1, 2] and "restart" not in fake(replicas, 0).log
    assert tokens(replicas.generate(PROMPTS, 2, step=1, lengths=lengths)) == expected
    assert all(lane.lost is None for lane in replicas.last_report.lanes)  # type: ignore[union-attr]


def test_a_replica_that_comes_back_takes_part_in_the_running_step(make: Make) -> None:
    lengths = spread([30] * 12)
    expected = tokens(make(2).generate(PROMPTS, 2, step=1, lengths=lengths))
    replicas = make(2, seqs=1)  # most prompts wait
    fake(replicas, 1).fail_at = 4
    assert tokens(replicas.generate(PROMPTS, 2, step=1, lengths=lengths)) == expected
    report = replicas.last_report
    assert report is not None and replicas.in_service == [0, 1]
    again = report.lanes[1]
    assert again.lost == "rank 1 of node-1 died" and again.durations_s is not None and again.later > 0
    assert len(report.lanes) == 2 and sum(lane.samples for lane in report.lanes) == 24


def test_a_step_waits_for_replicas_that_come_back_when_all_are_lost(make: Make) -> None:
    expected = tokens(make(2).generate(PROMPTS, 2, step=1))
    replicas = make(2)
    for index in range(2):
        fake(replicas, index).fail_at = 2
    assert tokens(replicas.generate(PROMPTS, 2, step=1)) == expected


def test_a_prompt_that_brings_ranks_down_is_given_up_and_no_other(make: Make) -> None:
    replicas = make(3, seqs=4)
    for index in range(3):
        fake(replicas, index).poison = 5
    rollouts = replicas.generate(PROMPTS, 2, step=1)
    reasons = [{sample.finish_reason for sample in rollout.samples} for rollout in rollouts]
    assert reasons == [{"failed"} if number == 5 else {"length"} for number in range(12)]
    assert "again and again" in str(rollouts[5].samples[0].stop_reason)
    assert replicas.last_report is not None and replicas.last_report.counts.finish_reasons["failed"] == 2


def test_what_was_streamed_is_not_drawn_again(make: Make) -> None:
    replicas = make(2)
    fake(replicas, 0).fail_at = 5
    with replicas.open_step() as step:
        step.submit(PROMPTS[:2], 1, stream=True)  # one each
        step.submit(PROMPTS[2:4], 1)
        step.filled()
        found = [step.wait(number).samples[0] for number in range(4)]
    assert sorted(sample.finish_reason for sample in found) == ["failed", "length", "length", "length"]
    assert "cannot be drawn again" in str(next(s.stop_reason for s in found if s.finish_reason == "failed"))


def test_a_caller_that_wants_no_replay(make: Make) -> None:
    replicas = make(2)
    fake(replicas, 0).fail_at = 3
    with replicas.open_step(replay=False) as step:
        step.submit(PROMPTS[:4], 1)
        reasons = [step.wait(number).samples[0].finish_reason for number in range(4)]
    assert sorted(reasons) == ["failed", "failed", "length", "length"]


@pytest.mark.parametrize("at", range(2, 12))
def test_every_sample_is_told_of_once_whenever_ranks_are_lost(make: Make, at: int) -> None:
    """Also where a hand-over of prompts finds them lost, and what had ended at the look before."""
    replicas = make(2, seqs=1)  # most prompts wait
    fake(replicas, 1).fail_at = at
    told: list[SampleKey] = []
    with replicas.open_step(step=1) as step:
        for number, prompt in enumerate(PROMPTS):
            step.submit([prompt], 2, {"max_tokens": 1 + number % 4})  # some end as soon as they are handed over
            told += [key for key, _ in step.finished()]
        step.seal()
        deadline = time.monotonic() + 10
        while len(told) < 24 and time.monotonic() < deadline:
            told += [key for key, _ in step.finished()]
            time.sleep(0.001)
    assert sorted(told) == [SampleKey(p, s, 1) for p in range(12) for s in range(2)]
    report = replicas.last_report
    assert report is not None and report.counts.samples == 24
    assert replicas.generate(PROMPTS, 2, step=2), "the replicas serve other calls"


def test_an_abort_holds_with_the_next_replica(make: Make) -> None:
    replicas = make(2, failures={"on_failure": "raise"})
    with replicas.open_step(step=1) as step:
        step.submit(PROMPTS, 2, {"max_tokens": 200})
        fake(replicas, 1).fail_at = fake(replicas, 1).step.looks + 1
        step.abort()
        rollouts = step.close()
    assert {sample.finish_reason for rollout in rollouts for sample in rollout.samples} == {"abort"}
    assert replicas.losses == 1


def test_a_loss_that_no_call_has_told_of_is_mended(make: Make) -> None:
    replicas = make(2)
    fake(replicas, 1).running = False  # as after an abort of parked samples
    assert len(replicas.generate(PROMPTS, 2)) == 12
    until(lambda: replicas.in_service == [0, 1])
    assert replicas.losses == 1


def test_a_step_does_not_wait_for_a_replica_that_lacks_weights(make: Make) -> None:
    replicas = make(2, failures={"on_failure": "raise"})
    fake(replicas, 1).problem = "send a full update"
    fake(replicas, 0).fail_at = 3
    with pytest.raises(RankDied, match="all replicas are lost"):
        replicas.generate(PROMPTS, 2)
    assert replicas._members[1].why_not == "send a full update"


def test_all_replicas_lost(make: Make) -> None:
    replicas = make(2, failures={"on_failure": "raise"})
    for index in range(2):
        fake(replicas, index).fail_at = 2
    with pytest.raises(RankDied, match="all replicas are lost: replica 0: rank 1 of node-0 died; replica 1"):
        replicas.generate(PROMPTS, 2, step=1)
    assert not replicas.running
    with pytest.raises(GroupNotReady, match="no replica is in service"):
        replicas.generate(PROMPTS, 2, step=1)
    replicas.restart()
    assert len(replicas.generate(PROMPTS, 2, step=1)) == 12


def test_parked_samples_of_a_lost_replica_are_drawn_anew(make: Make) -> None:
    lengths = spread([2] + [9] * 11)
    expected = tokens(make(2).generate(PROMPTS, 2, step=0, lengths=lengths))
    replicas = make(2)
    first = replicas.generate(PROMPTS, 2, step=0, lengths=lengths, budget={"groups": 1})
    fake(replicas, 0).fail_at = 2
    rest = replicas.generate([], 2, step=1)
    assert sorted(tokens(first) + tokens(rest)) == expected


@pytest.mark.parametrize("end", ["close", "park"])
def test_ctrl_c_keeps_what_earlier_steps_have_parked(make: Make, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """While a step runs to its end, or while it is parked; the replicas then serve other calls."""
    lengths = spread([2] + [40] * 11)
    expected = tokens(make(2).generate(PROMPTS, 2, step=0, lengths=lengths))
    replicas = make(2)
    first = replicas.generate(PROMPTS, 2, step=0, lengths=lengths, budget={"groups": 1})
    step = replicas.open_step(step=1)
    step.submit(PROMPTS[:3], 1, {"max_tokens": 200})

    def interrupt(*arguments: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    if end == "close":
        monkeypatch.setattr(shared_step.time, "sleep", interrupt)
    else:
        monkeypatch.setattr(replica_life.Task, "result", interrupt)
    with pytest.raises(KeyboardInterrupt):
        getattr(step, end)()
    own = [key for key in replicas.parked if key.step == 1]
    assert len(own) == (0 if end == "close" else 3), "a step that was to be parked is parked"
    rest = replicas.generate([], 1, step=2)
    assert sorted(tokens(first) + tokens([r for r in rest if r.step == 0])) == expected


def test_a_replica_whose_node_is_lost_starts_on_another(make: Make) -> None:
    replicas = make(2)
    before = fake(replicas, 1)
    homes: Any = replicas._homes
    before.fail_at, homes.nodes[1] = 2, "node-9"
    replicas.generate(PROMPTS, 2)
    until(lambda: replicas.in_service == [0, 1])
    assert fake(replicas, 1) is not before and fake(replicas, 1).node == "node-9"
    assert replicas._members[1].node == "node-9"


def refusing(group: Any, times: int, error: MoebiusError) -> list[int]:
    """The next starts of a group fail; the list gets an entry for each attempt."""
    restart, attempts = group.restart, []  # type: Any, list[int]

    def start() -> None:
        attempts.append(len(attempts))
        if len(attempts) <= times:
            raise error
        restart()

    group.restart = start
    return attempts


def test_a_replica_that_cannot_come_back(make: Make) -> None:
    replicas = make(2, failures={"max_restarts": 3})
    lost = fake(replicas, 1)
    attempts = refusing(lost, 99, MoebiusError("no room"))
    lost.fail_at = 2
    replicas.generate(PROMPTS, 2)
    until(lambda: replicas._members[1].reviving is None)
    assert replicas.in_service == [0] and "no room" in replicas._members[1].why_not and len(attempts) == 3
    assert len(replicas.generate(PROMPTS, 2)) == 12
    assert len(attempts) == 3, "nobody tries for ever"


@pytest.mark.parametrize("error", [MoebiusError("no room"), BadInput("rank 0: memory is not free yet")])
def test_a_start_that_fails_is_tried_again(make: Make, error: MoebiusError) -> None:
    replicas = make(2)
    attempts = refusing(fake(replicas, 1), 2, error)
    fake(replicas, 1).fail_at = 2
    replicas.generate(PROMPTS, 2)
    until(lambda: replicas.in_service == [0, 1])
    assert len(attempts) == 3


def test_updates_wait_for_an_attempt_and_not_for_the_pauses_between(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_life, "pause_s", lambda failed: 60.0 if failed else 0.0)
    replicas = make(2)
    refusing(fake(replicas, 1), 1, MoebiusError("no room"))
    fake(replicas, 1).fail_at = 2
    replicas.generate(PROMPTS, 2)
    begun = time.monotonic()
    replicas.update_weights(tensors(), 1)
    assert replicas.in_service == [0] and replicas._members[1].reviving is not None
    replicas.restart()  # at once, instead of the next attempt
    assert time.monotonic() - begun < 10 and fake(replicas, 1).running
    replicas.update_weights(tensors(), 2)
    assert replicas.in_service == [0, 1]


def test_ctrl_c_in_a_restart_leaves_lost_replicas_to_come_back(make: Make) -> None:
    replicas = make()
    member: Any = replicas._members[1]

    class Starting:
        def join(self) -> None:
            raise KeyboardInterrupt

    member.reviving = Starting()
    with pytest.raises(KeyboardInterrupt):
        replicas.restart()
    member.reviving = None
    fake(replicas, 1).running = False
    replicas.generate(PROMPTS, 1)
    replicas._await_revivals()
    assert replicas.in_service == [0, 1]


def test_a_shutdown_from_another_thread_ends_the_step(make: Make) -> None:
    replicas = make(2)
    for index in range(2):
        fake(replicas, index).fail_at = 3
    step = replicas.open_step()
    step.submit(PROMPTS, 2, {"max_tokens": 50})
    replicas.shutdown()
    with pytest.raises(GroupNotReady, match="shut down during the step"):
        step.wait(0)
    with pytest.raises(GroupNotReady, match="were shut down"):
        replicas.generate(PROMPTS, 2)


def test_one_call_at_a_time(make: Make) -> None:
    replicas = make(2)
    with replicas.open_step():
        with pytest.raises(MoebiusError, match="they serve one at a time"):
            replicas.generate(PROMPTS, 2)
        with pytest.raises(MoebiusError, match="they serve one at a time"):
            replicas.update_weights({}, 1)
    assert replicas.generate(PROMPTS, 2)
