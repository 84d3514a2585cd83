"""Several replicas as one group: who gets which prompts, parking, aborts, and a service over them."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebius.engine.types import SampleKey, SampleRequest
from moebius.rollout.backlog import PromptGroup, groups_of
from moebius.rollout.errors import BadInput
from moebius.rollout.replica_queue import Load, deal
from moebius.rollout.server_metrics import Metrics
from moebius.rollout.service import RolloutService
from moebius.rollout.service_types import ServiceSettings
from moebius.rollout.types import Rollout
from tests.unit.replica_world import PROMPTS, Make, fake, spread, tensors, tokens

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
