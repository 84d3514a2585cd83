"""Ctrl-C, again while what the first one broke off is being cleaned up: no lock, step or rank is left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from moebius.engine.types import SampleKey
from moebius.rollout import placement, ranks, replica_homes, replica_life, shared_step
from moebius.rollout.errors import GroupNotReady, MoebiusError
from moebius.rollout.group import RolloutGroup
from moebius.rollout.ranks import Ranks
from moebius.rollout.replica_task import Task
from moebius.rollout.replicas import RolloutReplicas
from moebius.rollout.shared_lanes import SharedLanes
from moebius.rollout.types import Rollout
from tests.unit.instant_world import prompts, set_up
from tests.unit.replica_group import FakeGroup, FakeStep
from tests.unit.replica_world import PROMPTS, Make, fake, spread, tokens

Patch = pytest.MonkeyPatch


def interrupt(*arguments: Any, **more: Any) -> Any:
    raise KeyboardInterrupt


def once_before(real: Callable[..., Any], at: int = 1) -> Callable[..., Any]:
    """Ctrl-C comes as call number `at` begins."""
    calls = 0

    def call(*arguments: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise KeyboardInterrupt
        return real(*arguments, **more)

    return call


def once_after(real: Callable[..., Any], at: int = 1) -> Callable[..., Any]:
    """Ctrl-C comes while call number `at` is at work, which ends all the same (as `OpenStep` does)."""
    calls = 0

    def call(*arguments: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        mine = calls
        found = real(*arguments, **more)
        if mine == at:
            raise KeyboardInterrupt
        return found

    return call


# ---- replicas ------------------------------------------------------------------------------------------------------


LENGTHS = spread([2] + [9] * 11)


def begun(make: Make) -> tuple[RolloutReplicas, list[Rollout], list[Any]]:
    """Replicas that have parked samples of step 0, its rollouts so far, and tokens of all."""
    expected = tokens(make(2).generate(PROMPTS, 2, step=0, lengths=LENGTHS))
    replicas = make(2)
    return replicas, replicas.generate(PROMPTS, 2, step=0, lengths=LENGTHS, budget={"groups": 1}), expected


def serves(replicas: RolloutReplicas, first: list[Rollout], expected: list[Any], own: int = 0) -> None:
    """The replicas serve other calls, of step 1 `own` samples are parked, and step 0 is whole at last."""
    assert all(fake(replicas, index).step is None for index in range(2)), "no replica's step is open"
    assert len([key for key in replicas.parked if key.step == 1]) == own
    rest = replicas.generate([], 1, step=2)
    assert sorted(tokens(first) + tokens([r for r in rest if r.step == 0])) == expected


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("during", ["park", "abort_parked"])
def test_while_a_step_is_broken_off(make: Make, monkeypatch: Patch, during: str, at: int) -> None:
    replicas, first, expected = begun(make)
    step = replicas.open_step(step=1)
    step.submit(PROMPTS[:3], 1, {"max_tokens": 20})
    monkeypatch.setattr(shared_step.time, "sleep", once_before(lambda seconds: None))
    owner: Any = FakeStep if during == "park" else FakeGroup
    monkeypatch.setattr(owner, during, once_after(getattr(owner, during), at))
    with pytest.raises(KeyboardInterrupt):
        step.close()
    serves(replicas, first, expected)


@pytest.mark.parametrize("at", [1, 2])
def test_while_a_step_begins(make: Make, monkeypatch: Patch, at: int) -> None:
    replicas, first, expected = begun(make)
    monkeypatch.setattr(FakeGroup, "open_step", once_before(FakeGroup.open_step, at))
    with pytest.raises(KeyboardInterrupt):
        replicas.open_step(step=1)
    serves(replicas, first, expected)


def test_while_a_stream_is_sealed(make: Make, monkeypatch: Patch) -> None:
    replicas, first, expected = begun(make)
    monkeypatch.setattr(shared_step.SharedStep, "seal", interrupt)
    with pytest.raises(KeyboardInterrupt):
        replicas.stream(PROMPTS[:3], 1, {"max_tokens": 20}, step=1)
    monkeypatch.undo()
    serves(replicas, first, expected)


@pytest.mark.parametrize("where", ["look", "abort", "close"])
def test_while_a_stream_is_closed(make: Make, monkeypatch: Patch, where: str) -> None:
    replicas, first, expected = begun(make)
    stream = replicas.stream(PROMPTS[:3], 1, {"max_tokens": 20}, step=1)
    name = {"look": "_look", "abort": "_apply_aborts", "close": "_end"}[where]
    monkeypatch.setattr(SharedLanes, name, once_before(getattr(SharedLanes, name)))
    with pytest.raises(KeyboardInterrupt), stream:
        raise KeyboardInterrupt
    serves(replicas, first, expected)


def test_while_a_block_is_left(make: Make, monkeypatch: Patch) -> None:
    replicas, first, expected = begun(make)
    monkeypatch.setattr(SharedLanes, "_apply_aborts", once_before(SharedLanes._apply_aborts, 2))
    step = replicas.open_step(step=1)
    step.submit(PROMPTS[:3], 1, {"max_tokens": 20})
    with pytest.raises(KeyboardInterrupt), step:
        raise KeyboardInterrupt
    serves(replicas, first, expected)


def test_while_a_step_is_parked(make: Make, monkeypatch: Patch) -> None:
    """All that it has is parked all the same."""
    replicas, first, expected = begun(make)
    step = replicas.open_step(step=1)
    step.submit(PROMPTS[:3], 1, {"max_tokens": 20})
    monkeypatch.setattr(SharedLanes, "_look", once_before(SharedLanes._look))
    with pytest.raises(KeyboardInterrupt):
        step.park()
    serves(replicas, first, expected, own=3)


def test_what_is_still_being_parked_is_waited_for_and_is_not_there_twice(make: Make, monkeypatch: Patch) -> None:
    replicas, first, expected = begun(make)
    step = replicas.open_step(step=1)
    step.submit(PROMPTS[:3], 1, {"max_tokens": 20})
    may, park, join = threading.Event(), FakeStep.park, Task.join

    def late(self: FakeStep) -> None:
        may.wait(10)
        park(self)

    monkeypatch.setattr(FakeStep, "park", late)
    monkeypatch.setattr(Task, "join", interrupt)  # of the step's end, and of the wait for that
    with pytest.raises(KeyboardInterrupt):
        step.park()
    monkeypatch.setattr(Task, "join", join)
    monkeypatch.setattr(replica_life, "ENDING_S", 0.05)
    with pytest.raises(MoebiusError, match="a call that was broken off has begun is still running; try again"):
        replicas.generate(PROMPTS, 1)
    monkeypatch.setattr(replica_life, "ENDING_S", 10)
    may.set()
    assert replicas.abort_parked([SampleKey(99, 0, 1)]) == []  # any call, which waits for it
    keys = replicas.parked
    assert len(keys) == len(set(keys))
    serves(replicas, first, expected, own=3)


def test_while_replicas_are_shut_down(make: Make, monkeypatch: Patch) -> None:
    replicas = make(2)
    monkeypatch.setattr(FakeGroup, "shutdown", once_before(FakeGroup.shutdown))
    with pytest.raises(KeyboardInterrupt):
        replicas.shutdown()
    homes: Any = replicas._homes
    assert fake(replicas, 1).closed and homes.closed


# ---- one group -----------------------------------------------------------------------------------------------------


class FakeRanks:
    """Ranks that answer nothing: Ctrl-C comes first."""

    silent_s = 60.0

    def __init__(self) -> None:
        self.handles = [MagicMock(), MagicMock()]
        self.told: list[str] = []
        self.closed = False
        self.interrupts = 0
        self.answers: list[Any] = []

    def submit(self, method: str, args: Any = None) -> dict[Any, int]:
        return {}

    def tell(self, method: str, *args: Any) -> None:
        self.told.append(method)

    def gather(self, refs: Any, **how: Any) -> list[Any]:
        self.interrupts += 1
        raise KeyboardInterrupt

    def call(self, method: str, args: Any = None, **how: Any) -> list[Any]:
        return self.gather({})

    def close(self, *, gently: bool) -> None:
        self.closed = True


class Group(RolloutGroup):
    """One of FakeRanks, with a sample of step 0 parked on rank 1."""

    def __init__(self) -> None:
        self.ranks = FakeRanks()
        set_up(self, self.ranks)
        self.older = prompts(0, 1)
        self.backlog.keep(self.older, {SampleKey(0, 0, 0): 1})


def lost(group: Group, kept: int = 1) -> None:
    """Its ranks are given up, since nobody knows what they have; what was parked is kept, to be drawn anew."""
    assert group.ranks.closed and not group.running and not group._one_call.locked()
    with pytest.raises(GroupNotReady, match=r"call restart\(\)"):
        group.open_step()
    assert [key.step for key in group.parked].count(0) == kept
    assert all(not prompt.ranks for prompt in group.backlog.groups.values())


@pytest.mark.parametrize("end", ["close", "park", "break_off"])
def test_while_a_groups_step_is_broken_off(end: str) -> None:
    group = Group()
    step = group.open_step(groups=prompts(1, 1))
    with pytest.raises(KeyboardInterrupt):
        getattr(step, end)()
    assert "abort" in group.ranks.told and group.ranks.interrupts == (1 if end == "break_off" else 2)
    assert [key.step for key in group.parked].count(1) == (end == "park")
    lost(group)


def test_while_a_groups_block_is_left(monkeypatch: Patch) -> None:
    """Ctrl-C even before the samples are aborted."""
    group = Group()
    step = group.open_step(groups=prompts(1, 1))
    monkeypatch.setattr(type(step), "abort", interrupt)
    with pytest.raises(KeyboardInterrupt), step:
        raise KeyboardInterrupt
    lost(group)


def test_while_a_groups_step_is_made(monkeypatch: Patch) -> None:
    group = Group()
    monkeypatch.setattr("moebius.rollout.group_steps.OpenStep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        group.open_step()
    lost(group)


def test_while_a_groups_stream_is_sealed(monkeypatch: Patch) -> None:
    group = Group()
    monkeypatch.setattr("moebius.rollout.open_step.OpenStep.seal", interrupt)
    monkeypatch.setattr(group, "_requests", lambda *arguments: ([], [], 1))
    monkeypatch.setattr(group, "_sampling", lambda given: given)
    with pytest.raises(KeyboardInterrupt):
        group.stream([[1]], 1)
    lost(group)


def test_while_parked_samples_are_aborted() -> None:
    """The ranks have been asked: the group does not go on with what they have dropped."""
    group = Group()
    with pytest.raises(KeyboardInterrupt):
        group.abort_parked()
    assert group.running and not group.parked and not group.backlog and not group._one_call.locked()


def test_while_a_group_is_started_again(monkeypatch: Patch) -> None:
    group = Group()
    monkeypatch.setattr("moebius.rollout.recovery.connect", lambda config: None)
    monkeypatch.setattr(group, "_start", interrupt)
    with pytest.raises(KeyboardInterrupt):
        group.restart()
    lost(group)


# ---- what ranks hold ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["ray.wait", "first kill", "exit"])
def test_while_ranks_are_closed(monkeypatch: Patch, at: str) -> None:
    done: list[str] = []
    handles: list[Any] = [MagicMock(), MagicMock()]
    made = Ranks(handles, MagicMock())
    monkeypatch.setattr(ranks.ray, "is_initialized", lambda: True)
    wait = interrupt if at == "ray.wait" else lambda *refs, **how: None
    monkeypatch.setattr(ranks.ray, "wait", wait)

    def kill(handle: Any, no_restart: bool) -> None:
        done.append("kill")
        if at == "first kill" and done.count("kill") == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(ranks.ray, "kill", kill)
    monkeypatch.setattr(ranks, "remove_placement_group", lambda group: done.append("placement"))
    monkeypatch.setattr(made, "_wait_for_exit", interrupt if at == "exit" else lambda: done.append("exit"))
    monkeypatch.setattr(made, "_remove_segments", lambda: done.append("segments"))
    with pytest.raises(KeyboardInterrupt):
        made.close(gently=True)
    assert done == ["kill", "kill", "placement", *([] if at == "exit" else ["exit"]), "segments"]


def interrupted_hand_out(monkeypatch: Patch) -> list[Any]:
    """Ctrl-C as a running step is handed prompts, before it has them; returns them."""
    real, seen = FakeStep.submit_groups, []

    def submit(self: FakeStep, groups: Any) -> None:
        if self.group.step is self and not seen:
            seen.append(list(groups))
            raise KeyboardInterrupt
        real(self, groups)

    monkeypatch.setattr(FakeStep, "submit_groups", submit)
    return seen


def test_a_block_that_is_left_while_prompts_are_handed_out(make: Make, monkeypatch: Patch) -> None:
    replicas, *_ = begun(make)
    step = replicas.open_step(step=1)
    seen, slept = interrupted_hand_out(monkeypatch), 0

    def sleep(seconds: float) -> None:
        nonlocal slept
        slept += 1
        assert slept < 300, "the step never ends"

    monkeypatch.setattr(shared_step.time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt), step:
        step.submit(PROMPTS[:3], 1, {"max_tokens": 20})
    assert seen and not replicas._one_call.locked()
    assert all(member.group.step is None for member in replicas._members)


def test_parking_while_prompts_are_handed_out_loses_none(make: Make, monkeypatch: Patch) -> None:
    replicas, first, expected = begun(make)
    step = replicas.open_step(step=1)
    deal = SharedLanes._deal
    monkeypatch.setattr(SharedLanes, "_deal", lambda self: None)
    step.submit(PROMPTS[:3], 1, {"max_tokens": 20})
    monkeypatch.setattr(SharedLanes, "_deal", deal)
    seen = interrupted_hand_out(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        step.park()
    assert seen
    serves(replicas, first, expected, own=3)


def test_while_replicas_wait_for_room(monkeypatch: Patch) -> None:
    removed: list[Any] = []
    node = {"Alive": True, "Resources": {"CPU": 8.0}}
    monkeypatch.setattr(replica_homes.ray, "nodes", lambda: [node])
    monkeypatch.setattr(replica_homes.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(replica_homes, "placement_group", lambda *of, **how: SimpleNamespace(wait=interrupt))
    monkeypatch.setattr(replica_homes, "remove_placement_group", removed.append)
    config: Any = SimpleNamespace(ranks=2, cpus_per_rank=1, startup_timeout_s=60.0, replicas=2)
    with pytest.raises(KeyboardInterrupt):
        replica_homes.Homes(config, "cpu")
    assert len(removed) == 1


def test_while_ranks_wait_for_their_place(monkeypatch: Patch) -> None:
    removed: list[Any] = []
    node = {"Alive": True, "Resources": {"CPU": 8.0}}
    monkeypatch.setattr(placement.ray, "nodes", lambda: [node])
    monkeypatch.setattr(placement, "placement_group", lambda *of, **how: SimpleNamespace(wait=interrupt))
    monkeypatch.setattr(placement, "remove_placement_group", removed.append)
    config: Any = SimpleNamespace(ranks=2, cpus_per_rank=1, startup_timeout_s=60.0)
    with pytest.raises(KeyboardInterrupt):
        placement.reserve(config, "cpu")
    assert len(removed) == 1
