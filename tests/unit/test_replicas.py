"""Several replicas as one group: who gets which prompts, losses, parking, aborts, updates and the report of it all."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebius.engine.types import SampleKey, SampleRequest
from moebius.rollout import replica_life, replica_weights, shared_step
from moebius.rollout.backlog import PromptGroup, groups_of
from moebius.rollout.config import RolloutConfig
from moebius.rollout.errors import BadInput, GroupNotReady, MoebiusError, RankDied, validate
from moebius.rollout.replica_queue import Load, deal
from moebius.rollout.replicas import RolloutReplicas
from moebius.rollout.server_metrics import Metrics
from moebius.rollout.service import RolloutService
from moebius.rollout.service_types import ServiceSettings
from moebius.rollout.types import LengthTrace, Rollout
from tests.unit.replica_group import FakeGroup, FakeHomes, folder_of, settings

PROMPTS = [[i + 1, i + 2] for i in range(12)]
Make = Callable[..., RolloutReplicas]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr(replica_life, "check_model", folder_of)
    monkeypatch.setattr(replica_life, "connect", lambda config: None)
    monkeypatch.setattr(replica_life, "resolve_device", lambda config: "cpu")
    monkeypatch.setattr(replica_weights.ray, "put", lambda bucket: bucket)
    monkeypatch.setattr(replica_life, "pause_s", lambda failed: 0.02 * failed)
    made: list[RolloutReplicas] = []

    def build(replicas: int = 2, **changes: Any) -> RolloutReplicas:
        group: Any = FakeGroup
        made.append(RolloutReplicas(settings(replicas, **changes), FakeHomes, group))
        return made[-1]

    yield build
    for replicas in made:
        replicas.shutdown()


def fake(replicas: RolloutReplicas, index: int) -> Any:
    return replicas._members[index].group


def tokens(rollouts: list[Rollout]) -> list[Any]:
    return [(r.step, r.prompt_index, [s.token_ids for s in r.samples]) for r in rollouts]


def spread(lengths: list[int]) -> LengthTrace:
    return LengthTrace({(p, s): length for p, length in enumerate(lengths) for s in range(2)})


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---- the queue -----------------------------------------------------------------------------------------------------


def waiting(sizes: list[int]) -> deque[PromptGroup]:
    found: deque[PromptGroup] = deque()
    for number, size in enumerate(sizes):
        requests = [SampleRequest(SampleKey(number, s, 0), [1], {}, 0) for s in range(size)]
        found.extend(groups_of(requests, [[1]], 0, number))
    return found


def test_the_emptiest_replica_gets_the_next_prompt() -> None:
    queue = waiting([2] * 5)
    shares = deal(queue, [Load(3, room=100), Load(0, room=100)])
    assert [[g.prompt for g in share] for share in shares] == [[2, 4], [0, 1, 3]]
    assert not queue


def test_what_does_not_fit_waits_in_order() -> None:
    queue = waiting([2] * 6)
    shares = deal(queue, [Load(room=4), Load(room=4, live=4), Load(room=4, kv_use=0.95, live=1)])
    assert [[g.prompt for g in share] for share in shares] == [[0, 1], [], []]
    assert [g.prompt for g in queue] == [2, 3, 4, 5]


def test_an_idle_replica_gets_a_prompt_however_large_and_old_news_do_not_matter() -> None:
    queue = waiting([50, 50])
    assert [len(share) for share in deal(queue, [Load(room=4, kv_use=1.0)])] == [1]
    assert len(queue) == 1


@given(
    sizes=st.lists(st.integers(1, 20), max_size=30),
    loads=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=5),
)
def test_no_prompt_is_lost_or_given_twice_and_rooms_are_kept(sizes: list[int], loads: list[tuple[int, int]]) -> None:
    queue = waiting(sizes)
    states = [Load(live, room=room) for live, room in loads]
    shares = deal(queue, states)
    given_out = [g.prompt for share in shares for g in share]
    assert sorted([*given_out, *(g.prompt for g in queue)]) == list(range(len(sizes)))
    for (live, room), share, state in zip(loads, shares, states, strict=True):
        assert state.live == live + sum(len(g.missing) for g in share)
        if len(share) > 1 or (share and live):
            assert state.live - len(share[-1].missing) + max(1, min(len(share[-1].missing), room // 4)) <= room
    if queue:
        assert all(state.live > 0 for state in states)


# ---- steps ---------------------------------------------------------------------------------------------------------


def test_samples_are_those_of_one_group_whatever_the_number_of_replicas(make: Make) -> None:
    lengths = spread([1 + 3 * (p % 4) for p in range(12)])
    found = [
        tokens(make(replicas, seqs=seqs).generate(PROMPTS, 2, step=3, lengths=lengths))
        for replicas, seqs in [(2, 64), (3, 1), (5, 2)]
    ]
    assert found[0] == found[1] == found[2]
    assert [row[1] for row in found[0]] == list(range(12))


def test_a_prompts_samples_stay_together_and_ranks_are_numbered_through(make: Make) -> None:
    rollouts = make(3).generate(PROMPTS, 2)
    owners = [{sample.rank // 2 for sample in rollout.samples} for rollout in rollouts]
    assert all(len(owner) == 1 for owner in owners)
    assert {next(iter(owner)) for owner in owners} == {0, 1, 2}


def test_a_replica_that_runs_dry_takes_what_waits_and_is_told_only_then(make: Make) -> None:
    replicas = make(2, seqs=2)  # four samples at once each, two prompts
    lengths = spread([40, 40] + [2] * 10)  # the first prompts go to different replicas
    replicas.generate(PROMPTS, 2, lengths=lengths)
    report = replicas.last_report
    assert report is not None
    assert sum(lane.prompts for lane in report.lanes) == 12
    assert [lane.later for lane in report.lanes] == [lane.prompts - 2 for lane in report.lanes]
    for index in range(2):
        [told] = [line for line in fake(replicas, index).log if line.startswith("filled")]
        assert int(told.split()[-1]) > 1  # not while prompts waited


def test_a_prompt_too_long_for_one_replica_does_not_keep_the_others_waiting(make: Make) -> None:
    replicas = make(2, seqs=2)
    replicas.generate(PROMPTS, 2, lengths=spread([60] + [3] * 11))
    report = replicas.last_report
    assert report is not None
    own = next(lane for lane in report.lanes if report.samples[0].rank // 2 == lane.replica)
    assert own.prompts < 12 - own.prompts  # the other one did more of them


def test_progress_counts_what_waits(make: Make) -> None:
    seen: list[Any] = []
    make(2, seqs=1).generate(PROMPTS, 2, on_progress=lambda *now: seen.append(now))
    assert seen[-1][:2] == (24, 24) and seen[-1][3] == 0
    assert seen[0][3] > 4


def test_prompts_one_by_one(make: Make) -> None:
    replicas = make(2)
    with replicas.open_step(step=3, expected=4) as step:
        assert step.submit(PROMPTS[:1], 2) == [0]
        assert not any(fake(replicas, i).step.told for i in range(2))
        assert step.submit(PROMPTS[1:2], 2) == [1]
        assert all(fake(replicas, i).step.told for i in range(2))
        assert step.wait(1).prompt_index == 1
    with replicas.open_step(step=3) as step:
        step.submit(PROMPTS[:2], 2, seeds=[[7, 14], [21, 28]])
        first = step.wait(0)
    assert first.samples[0].token_ids[0] == 1
    assert tokens(replicas.generate(PROMPTS[:2], 2, step=3)) == tokens(make(1 + 1).generate(PROMPTS[:2], 2, step=3))


def test_no_prompts_and_wrong_ones(make: Make) -> None:
    replicas = make()
    assert replicas.generate([], 2) == [] and replicas.last_report is None
    with pytest.raises(BadInput, match="prompt 1 is empty"):
        replicas.generate([[1], []], 2)
    with pytest.raises(BadInput, match="step"):
        replicas.generate([[1]], 1, step=-1)
    assert replicas.generate([[1]], 1)


# ---- budgets, parking, aborts --------------------------------------------------------------------------------------


def test_what_is_parked_and_what_no_replica_had_begun_goes_on_in_the_next_step(make: Make) -> None:
    lengths = spread([2, 2] + [9] * 10)
    replicas, whole = make(2, seqs=2), make(2)
    first = replicas.generate(PROMPTS, 2, step=0, lengths=lengths, budget={"groups": 2})
    assert len(first) == 2
    assert len(replicas.parked) == 20
    assert len(replicas.backlog.groups) > 0 and any(fake(replicas, i).parked for i in range(2))
    rest = replicas.generate([], 2, step=1)
    expected = tokens(whole.generate(PROMPTS, 2, step=0, lengths=lengths))
    assert sorted(tokens(first) + tokens(rest)) == expected
    report = replicas.last_report
    assert report is not None and report.counts.samples == 20
    assert sorted({s.prompt for s in report.samples}) == list(range(10))  # numbered anew, behind no own ones
    assert not replicas.parked


def test_an_abort_also_ends_what_waits(make: Make) -> None:
    replicas = make(2, seqs=1)

    def stop(done: int, total: int, now: int, live: int, layout: str) -> None:
        replicas.abort()

    rollouts = replicas.generate(PROMPTS, 2, {"max_tokens": 200}, on_progress=stop)
    assert len(rollouts) == 12
    assert {sample.finish_reason for rollout in rollouts for sample in rollout.samples} == {"abort"}
    report = replicas.last_report
    assert report is not None and report.counts.finish_reasons["abort"] == 24


def test_single_samples_are_aborted(make: Make) -> None:
    replicas = make(2)
    with replicas.open_step() as step:
        step.submit(PROMPTS[:3], 2, {"max_tokens": 50})
        replicas.abort([(1, 0)])
        rollout = step.wait(1)
        assert [sample.finish_reason for sample in rollout.samples] == ["abort", "length"]


def test_parked_samples_are_ended(make: Make) -> None:
    replicas = make(2, seqs=1)
    replicas.generate(PROMPTS, 2, budget={"groups": 1})
    there = replicas.parked
    ended = replicas.abort_parked(there[:3])
    assert sorted(key for key, _ in ended) == sorted(there[:3])
    assert len(replicas.abort_parked()) == len(there) - 3 and not replicas.parked
    assert len(replicas.incomplete) == 0


# ---- losses --------------------------------------------------------------------------------------------------------


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


# ---- behind a service -----------------------------------------------------------------------------------------------


def test_a_service_over_replicas(make: Make) -> None:
    replicas = make(2, seqs=2)

    async def ask() -> tuple[list[Rollout], list[Rollout]]:
        service = RolloutService(replicas, ServiceSettings(idle_s=0.05, quiet_s=0.05))
        prompts = range(1, 13)
        first = await asyncio.gather(*(service.generate([p, p], {"seed": 3, "max_tokens": 9}, n=2) for p in prompts))
        await service.update_weights(tensors(), 4)
        fake(replicas, 1).fail_at = 3
        again = await asyncio.gather(*(service.generate([p, p], {"seed": 3, "max_tokens": 9}, n=2) for p in prompts))
        stats = service.stats()
        assert (stats.version, stats.requests["ok"], stats.requests["failed"]) == (4, 24, 0)
        page = Metrics(service).text().decode()
        assert "moebius_replica_losses_total 1.0" in page and 'replicas="2"' in page
        assert "moebius_replicas_in_service 1.0" in page  # the other one waits for an update
        service.close()
        return first, again

    first, again = asyncio.run(ask())
    assert [[s.token_ids for s in r.samples] for r in first] == [[s.token_ids for s in r.samples] for r in again]
    assert {s.rank // 2 for r in first for s in r.samples} == {0, 1}


# ---- start, weights ------------------------------------------------------------------------------------------------


def test_one_replica_that_cannot_start_ends_the_others(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[FakeGroup] = []

    class Some(FakeGroup):
        def __init__(self, config: RolloutConfig) -> None:
            super().__init__(config)
            if self.node == "node-1":
                raise MoebiusError("out of memory")
            started.append(self)

    group: Any = Some
    with pytest.raises(MoebiusError, match="out of memory"):
        RolloutReplicas(settings(3), FakeHomes, group)
    assert len(started) == 2 and all(group.closed for group in started)


def test_place_is_for_one_group() -> None:
    values = {"ranks": 2, "replicas": 2, "engine": {"model": "m"}, "place": {"devices": ["0", "1"]}}
    with pytest.raises(BadInput, match="leave it out with replicas > 1"):
        validate(RolloutConfig, values, "settings")


def tensors() -> dict[str, Any]:
    import torch

    return {name: torch.ones(2) for name in "abc"}


def test_weights_go_to_all_replicas(make: Make) -> None:
    replicas = make(3)
    report = replicas.update_weights(tensors(), 7, bucket_bytes=8)
    assert report.version == replicas.policy_version == 7
    for index in range(3):
        assert fake(replicas, index).policy_version == 7
        assert sum(line.startswith("pull") for line in fake(replicas, index).log) == 3
    with pytest.raises(BadInput, match="at least 7"):
        replicas.update_weights(tensors(), 6)
    with pytest.raises(BadInput, match="reaches only ranks of its own host"):
        replicas.update_weights(tensors(), 8, transport="ipc")


def test_a_failed_update_is_given_up_everywhere(make: Make) -> None:
    replicas = make(2)
    fake(replicas, 1).fail_update = BadInput("unknown weight 'x'")
    with pytest.raises(BadInput, match="unknown weight"):
        replicas.update_weights(tensors(), 1)
    assert replicas.policy_version == 0
    with pytest.raises(GroupNotReady, match="send a full update"):
        replicas.generate(PROMPTS, 2)
    fake(replicas, 1).fail_update = None
    replicas.update_weights(tensors(), 1)
    assert replicas.generate(PROMPTS, 2)


def test_a_replica_lost_in_an_update_waits_for_the_next(make: Make) -> None:
    replicas = make(2)
    replicas.update_weights(tensors(), 1)
    fake(replicas, 1).fail_update = RankDied("rank 0 died")
    replicas.update_weights(tensors(), 2)
    fake(replicas, 1).fail_update = None
    until(lambda: replicas._members[1].reviving is None)
    assert replicas.in_service == [0]
    assert "waits for a weight update" in replicas._members[1].why_not
    assert len(replicas.generate(PROMPTS, 2)) == 12
    replicas.update_weights(tensors(), 3)
    assert replicas.in_service == [0, 1]


@pytest.mark.parametrize("told", [True, False])
def test_an_update_in_parts_goes_on_without_a_replica_that_is_back_by_now(make: Make, told: bool) -> None:
    replicas = make(2)
    args: list[Any] = [()] * 4
    replicas.begin_update(1)
    replicas.pull_tensors("a:b", args)
    group = fake(replicas, 1)
    group.running, group.open_update = False, None  # between two calls
    if told:
        replicas.reset_prefix_cache()  # which finds the loss
        until(lambda: replicas._members[1].reviving is None and group.running)
    replicas.pull_tensors("a:b", args)
    assert replicas.commit_update().version == 1
    until(lambda: replicas._members[1].reviving is None)
    assert group.policy_version == 0 and replicas.in_service == [0] and group.running
    replicas.update_weights(tensors(), 2)
    assert replicas.in_service == [0, 1]


def test_an_update_in_parts_whose_replicas_are_all_lost(make: Make) -> None:
    replicas = make(1)
    replicas.begin_update(1)
    fake(replicas, 0).running, fake(replicas, 0).open_update = False, None
    replicas._revive_lost()
    until(lambda: replicas._members[0].reviving is None)
    with pytest.raises(GroupNotReady, match="are all lost: send it again"):
        replicas.pull_tensors("a:b", [()] * 2)
    replicas.update_weights(tensors(), 1)
    assert replicas.in_service == [0]


@pytest.mark.parametrize("keep", [False, True])
def test_a_replica_that_comes_back_sleeps_as_the_others_do(make: Make, keep: bool) -> None:
    replicas = make(2)
    replicas.sleep(keep_weights=keep)
    fake(replicas, 1).running = False
    replicas.reset_prefix_cache()
    until(lambda: replicas._members[1].reviving is None and fake(replicas, 1).running)
    assert fake(replicas, 1).log == [f"sleep kv_cache weights {keep}", "restart", f"sleep kv_cache weights {keep}"]
    replicas.wake_up()
    assert fake(replicas, 1).log[-1] == "wake_up"
    assert (fake(replicas, 1).problem is None) == keep, "kept weights are whole"


@pytest.mark.parametrize("kept", [False, True])
def test_a_replica_that_is_back_before_the_commit_holds_older_weights(make: Make, kept: bool) -> None:
    """Also in the first update, before which all hold the checkpoint's, and with weights kept for restarts."""
    replicas = make(2)
    group = fake(replicas, 1)
    if kept:
        replicas.update_weights(tensors(), 1)
        restart = group.restart

        def with_weights() -> None:
            restart()
            group.problem = None

        group.restart = with_weights

    def slowly() -> Iterator[tuple[str, Any]]:
        yield from tensors().items()
        until(lambda: "restart" in group.log and replicas._members[1].reviving is None)

    group.fail_update = RankDied("rank 0 died")
    replicas.update_weights(slowly(), 1, bucket_bytes=8)  # the same number, other weights
    assert replicas.in_service == [0] and group.running
    assert "waits for a weight update" in replicas._members[1].why_not
    group.fail_update = None
    replicas.update_weights(tensors(), 1)
    assert replicas.in_service == [0, 1]


def test_what_was_wrong_with_a_bucket_is_told_however_late(make: Make) -> None:
    replicas = make(2)
    fake(replicas, 1).fail_update = BadInput("unknown weight 'x'")

    def slowly() -> Iterator[tuple[str, Any]]:
        for pair in tensors().items():
            yield pair
            time.sleep(0.05)  # the bucket before has failed when this one is sent

    with pytest.raises(BadInput, match="unknown weight"):
        replicas.update_weights(slowly(), 1, bucket_bytes=8)


def test_replicas_that_have_committed_what_others_have_not_wait_for_the_next_update(make: Make) -> None:
    replicas = make(2)

    def refuse() -> Any:
        raise BadInput("weights are missing")

    commit, fake(replicas, 1).commit_update = fake(replicas, 1).commit_update, refuse
    with pytest.raises(BadInput, match="missing"):
        replicas.update_weights(tensors(), 1)
    fake(replicas, 1).problem = None  # a staged one: the old weights serve on
    assert {s.rank // 2 for rollout in replicas.generate(PROMPTS, 2) for s in rollout.samples} == {1}
    assert replicas.in_service == [1]
    fake(replicas, 1).commit_update = commit
    replicas.update_weights(tensors(), 1)
    assert replicas.in_service == [0, 1]


def test_every_rank_gets_its_own_arguments(make: Make) -> None:
    replicas = make(2)
    replicas.pull_update(4, "a:b", [(i,) for i in range(4)])
    assert [line for i in range(2) for line in fake(replicas, i).log] == ["pull [(0,), (1,)]", "pull [(2,), (3,)]"]
    with pytest.raises(BadInput, match="all replicas, 4, got 2"):
        replicas.pull_update(5, "a:b", [(0,), (1,)])
