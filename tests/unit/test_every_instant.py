"""SIGINT at every line of a call on a group: nothing is lost, whatever the line.

Ranks are stand-ins that know what they have, so that the group's view can be compared with theirs.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moebius.engine.types import SampleKey
from moebius.rollout import group_life, recovery
from moebius.rollout.backlog import PromptGroup
from tests.unit.instant_world import Group, World, every_line, no_ray, prompts, with_scenario

__all__ = ["no_ray"]  # a fixture
pytestmark = pytest.mark.usefixtures("no_ray")
SOURCE, ARGS = "a.module:function", [(), ()]


def check(group: Any, number: int, own: int | None = 0) -> None:
    """The group serves other calls, agrees with its ranks, and nothing of step 0 is gone; `own` of step 1 is parked."""
    world, line = group.world, f"line {number}"
    assert not group._one_call.locked() and group._running is None and group._live_step is None, line
    assert world.live is None, f"{line}: no step is open on the ranks"
    assert (group._ranks is world) == (not world.closed), line
    parked = set(group.parked)
    known = parked | {key for g in group.backlog.groups.values() for key in keys_of(g)} | set(group.got)
    known |= {key for key, _ in group._ended}
    assert {key for older in group.older for key in keys_of(older)} <= known, line
    there = {key for g in group.backlog.groups.values() for key in g.missing if key.sample in g.ranks}
    assert there == world.parked, f"{line}: what is said to be on ranks is there, and all that is there is said"
    assert own is None or len([key for key in parked if key.step == 1]) == own, line


def keys_of(group: PromptGroup) -> list[SampleKey]:
    return [request.key for request in group.requests.values()]


def note(group: Any, rollouts: Any) -> None:
    group.got += [SampleKey(r.prompt_index, sample.sample_index, r.step) for r in rollouts for sample in r.samples]


# ---- steps ---------------------------------------------------------------------------------------------------------


def test_a_step_is_opened() -> None:
    held: list[Any] = []

    def scenario(group: Any) -> None:
        held.append(group.open_step(groups=prompts(1, 2)))

    for number, group in every_line(with_scenario(scenario)):
        if held:  # it was not interrupted
            assert not number and group.running and not held.pop().park()
            check(group, number, own=None)
        else:
            check(group, number)


@pytest.mark.parametrize("end", ["close", "park", "break_off"])
def test_a_step_runs(end: str) -> None:
    def scenario(group: Any) -> None:
        with group.open_step() as step:
            step.submit([[1], [1]])
            step.wait(0)
            group.got += [key for key, _ in step.finished()]
            getattr(step, end)()
            group.got += [key for key, _ in step.finished()]

    for number, group in every_line(with_scenario(scenario)):
        check_step_0(group, number)


def check_step_0(group: Any, number: int) -> None:
    """As `check`; what had ended of step 0 when the caller's block was left counts as told."""
    group.got += [key for older in group.older if older.complete for key in keys_of(older)]
    check(group, number, own=None)


def test_a_stream() -> None:
    def scenario(group: Any) -> None:
        with group.stream([[1], [1]], 1) as stream:
            for rollout in stream:
                note(group, [rollout])

    for number, group in every_line(with_scenario(scenario)):
        check(group, number)


@pytest.mark.parametrize("budget", [None, {"groups": 1}, {"groups": 3}, {"groups": 1, "rest": "abort"}])
def test_generate_gives_all_or_keeps_all(budget: Any) -> None:
    def scenario(group: Any) -> None:
        note(group, group.generate([[1], [1]], 1, budget=budget))

    gives_up = budget is not None and budget.get("rest") == "abort"  # also what earlier steps have left
    for number, group in every_line(with_scenario(scenario)):
        if gives_up:
            group.older = []
        check(group, number, own=None)
        told = [key for key in group.got if key.step == 0]
        left = [key for g in group.backlog.groups.values() if g.step == 0 for key in keys_of(g)]
        assert not set(told) & set(left), f"line {number}: no rollout is given twice"


def test_parked_samples_are_aborted() -> None:
    def scenario(group: Any) -> None:
        group.got += [key for key, _ in group.abort_parked()]

    for number, group in every_line(with_scenario(scenario)):
        check(group, number)
        if (untold := list(group._ended)) and not group.parked:
            assert [sample.token_ids for _, sample in group.abort_parked()] == [[7], [7]], f"line {number}"
            assert len(untold) == 2 and not group.abort_parked()


def test_one_that_insists_leaves_no_parked_samples_in_doubt() -> None:
    group: Any = Group()

    def interrupted(*calls: Any, **how: Any) -> Any:
        raise KeyboardInterrupt

    group.world.gather = interrupted
    with pytest.raises(KeyboardInterrupt):
        group.abort_parked()
    assert not group.parked and not group.world.parked


# ---- life and weights ----------------------------------------------------------------------------------------------


def test_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[World] = []
    info = SimpleNamespace(costs=None, max_model_len=9, vocab_size=9, has_tokenizer=False)

    def start(config: Any, device: str) -> Any:
        made.append(World())
        made[-1].starts = [SimpleNamespace(calibration_s=0.0, costs="")]
        return made[-1], info

    monkeypatch.setattr(group_life.Ranks, "start", start)
    monkeypatch.setattr(recovery, "connect", lambda config: None)

    def scenario(group: Any) -> None:
        group.device = "cpu"
        group.restart()

    for number, group in every_line(with_scenario(scenario)):
        line = f"line {number}"
        assert not group._one_call.locked() and all(w.closed for w in made if w is not group._ranks), line
        assert len(group.parked) == 2 and (group.running or "restart()" in group.problem), line
        if group._ranks is not group.world:
            assert group.world.closed and not any(g.ranks for g in group.backlog.groups.values()), line
        made.clear()


@pytest.mark.parametrize("parts", [False, True])
def test_a_staged_update(parts: bool) -> None:
    """The version that tokens are stamped with is the one that the group goes by."""

    def scenario(group: Any) -> None:
        if not parts:
            group.pull_update(9, SOURCE, ARGS)
            return
        group.begin_update(9)
        group.pull_tensors(SOURCE, ARGS)
        group.commit_update()

    for number, group in every_line(with_scenario(scenario)):
        line = f"line {number}"
        assert not group._one_call.locked() and group.running and group.problem is None, line
        assert group.policy_version == group.world.version, line
        group.pull_update(10, SOURCE, ARGS)
        assert group.policy_version == group.world.version == 10 and group._ready() is group.world, line


def test_an_update_is_dropped() -> None:
    def scenario(group: Any) -> None:
        group.begin_update(9, mode="in_place")
        group.drop_update()

    for number, group in every_line(with_scenario(scenario)):
        assert not group._one_call.locked() and group.running and group.policy_version == 3, f"line {number}"
        if group.problem is None:
            assert not hasattr(group.world, "coming"), f"line {number}: a mixture of weights is a problem"


def test_sleep_and_waking() -> None:
    """A group whose ranks sleep knows it, and whose weights are gone, too."""

    def scenario(group: Any) -> None:
        group.sleep()
        group.wake_up()

    for number, group in every_line(with_scenario(scenario)):
        line = f"line {number}"
        assert not group._one_call.locked() and group.running, line
        assert not group.world.asleep or group._asleep == {"weights", "kv_cache"}, line
        if group._asleep:
            assert "send them with update_weights" in group.problem, line
            group.wake_up()
        assert not group.world.asleep and not group._asleep, line
