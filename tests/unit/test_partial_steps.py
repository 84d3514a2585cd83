"""Budgets, streams and what a step leaves behind, with a stand-in for the open step."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from moebius.engine.types import SampleKey, SampleRequest
from moebius.rollout.backlog import Backlog, PromptGroup, groups_of, homeless_requests
from moebius.rollout.budget import Budget
from moebius.rollout.errors import BadInput, MoebiusError, RankDied
from moebius.rollout.stream import RolloutStream
from moebius.rollout.types import Sample
from moebius.rollout.worker import Progress


def sample(index: int, reason: str = "length") -> Sample:
    return Sample(index, [1, 2], None, None, None, reason, None, 0, 0)


def made(prompts: int, n: int, step: int = 3) -> list[PromptGroup]:
    requests = [SampleRequest(SampleKey(p, s, step), [p], {}, 0) for p in range(prompts) for s in range(n)]
    return groups_of(requests, [[p] for p in range(prompts)], step, 0)


class ScriptedStep:
    """An open step in which the scripted samples end, some at each look."""

    def __init__(self, groups: list[PromptGroup], script: list[list[tuple[int, int]]]) -> None:
        self.step, self.script, self._groups = 3, script, groups
        self.calls: list[str] = []
        self.left: list[PromptGroup] = []

    def groups(self) -> list[PromptGroup]:
        return self._groups

    def finished(self) -> None:
        for prompt, index in self.script.pop(0) if self.script else []:
            self._groups[prompt].samples[index] = sample(index)

    def progress(self) -> list[Progress]:
        return [Progress(1, 2, "EP", 50), Progress(1, 2, "EP", 60)]

    def abort(self) -> None:
        self.calls.append("abort")

    def close(self) -> None:
        self.calls.append("close")
        for group in self._groups:
            for key in group.missing:
                group.samples[key.sample] = sample(key.sample, "abort")

    def park(self) -> None:
        self.calls.append("park")

    def leave(self, groups: list[PromptGroup]) -> None:
        self.left += groups


def stream_of(step: ScriptedStep, budget: Budget | None = None, **more: Any) -> RolloutStream:
    settings: dict[str, Any] = {"ready": [], "limit_s": None, "on_progress": None} | more
    return RolloutStream(step, budget=budget, **settings)  # type: ignore[arg-type]


def test_rollouts_come_in_the_order_in_which_they_end() -> None:
    step = ScriptedStep(made(3, 2), [[(1, 0)], [(2, 1), (2, 0)], [(1, 1), (0, 0), (0, 1)]])
    seen: list[Any] = []
    stream = stream_of(step, on_progress=lambda *now: seen.append(now))
    assert [r.prompt_index for r in stream] == [2, 0, 1]
    assert step.calls == ["park"] and not step.left
    assert seen[0][1:] == (6, 110, 2, "EP")
    assert list(stream) == []


def test_a_share_of_the_groups_ends_the_step() -> None:
    step = ScriptedStep(made(4, 1), [[(3, 0)], [(0, 0), (1, 0)], [(2, 0)]])
    older = PromptGroup(2, 7, [7], {0: SampleRequest(SampleKey(7, 0, 2), [7], {}, 0)}, {0: sample(0)})
    stream = stream_of(step, Budget(fraction=0.4), ready=[older])  # 2 of 5
    assert [(r.step, r.prompt_index) for r in stream] == [(2, 7), (3, 3)]
    assert step.calls == ["park"] and len(step.script) == 2


def test_the_first_groups_and_never_more() -> None:
    step = ScriptedStep(made(4, 1), [[(3, 0), (0, 0), (1, 0)]])
    assert [r.prompt_index for r in stream_of(step, Budget(groups=2))] == [0, 1]
    assert step.calls == ["park"] and [group.prompt for group in step.left] == [3]
    step = ScriptedStep(made(4, 1), [[(3, 0), (0, 0), (1, 0)]])
    assert len(list(stream_of(step, Budget(groups=2, rest="abort")))) == 2
    assert step.calls == ["abort", "close"] and not step.left, "the third is given up with the fourth"


def test_cut_groups_do_not_come_back_but_those_that_just_made_it_do() -> None:
    step = ScriptedStep(made(3, 2), [[(0, 0), (0, 1)], [(1, 0), (1, 1), (2, 0)]])
    stream = stream_of(step, Budget(fraction=0.3, rest="abort"))
    found = list(stream)
    assert [r.prompt_index for r in found] == [0, 1]
    assert {s.finish_reason for r in found for s in r.samples} == {"length"}


def test_tokens_and_seconds_end_the_step() -> None:
    step = ScriptedStep(made(2, 1), [])
    assert list(stream_of(step, Budget(tokens=110))) == [] and step.calls == ["park"]
    step = ScriptedStep(made(2, 1), [])
    assert list(stream_of(step, Budget(seconds=1e-6, tokens=1000, rest="abort"))) == []
    assert step.calls == ["abort", "close"]


def test_the_time_limit_of_a_step_ends_its_samples() -> None:
    step = ScriptedStep(made(1, 1), [])
    step.abort = lambda: (step.calls.append("abort"), step.script.append([(0, 0)]))  # type: ignore[assignment,func-returns-value]
    assert len(list(stream_of(step, limit_s=0.0))) == 1
    assert step.calls == ["abort", "park"]


def test_closing_early() -> None:
    step = ScriptedStep(made(2, 1), [[(0, 0)]])
    with stream_of(step) as stream:
        next(stream)
    assert step.calls == ["abort", "close"] and not step.left
    step = ScriptedStep(made(3, 1), [[(0, 0), (1, 0)]])
    with stream_of(step, Budget(fraction=1.0)) as stream:
        next(stream)
    assert step.calls == ["park"] and [group.prompt for group in step.left] == [1]


def test_an_error_of_the_caller_ends_the_step_and_a_lost_step_does_not_end_twice() -> None:
    step = ScriptedStep(made(2, 1), [])

    for error in (ZeroDivisionError(), MoebiusError("of the caller"), RankDied("of another group")):
        step = ScriptedStep(made(2, 1), [])

        def broken(*now: Any, error: Exception = error) -> None:
            raise error

        with pytest.raises(type(error)) as raised:
            next(stream_of(step, on_progress=broken))
        assert raised.value is error and step.calls == ["abort", "close"], "the ranks are not lost"
    step = ScriptedStep(made(2, 1), [])

    def lost() -> None:
        raise MoebiusError("rank 1 is gone")

    step.finished = lost  # type: ignore[method-assign]
    stream = stream_of(step)
    with pytest.raises(MoebiusError, match="gone"):
        next(stream)
    stream.close()
    assert not step.calls


@pytest.mark.parametrize("budget", [None, Budget(groups=9), Budget(groups=9, rest="abort")])
def test_what_earlier_steps_have_left_outlives_a_step_that_breaks_off(budget: Budget | None) -> None:
    """But for a budget that gives it up."""
    older, own = made(3, 2, step=2), made(2, 1)
    older[1].ranks = {0: 1, 1: 0}
    for group in older:  # numbers that ScriptedStep finds them by
        group.prompt += 2
    step = ScriptedStep([*own, *older], [[(0, 0), (2, 0), (2, 1), (3, 0)]])

    def interrupted(*now: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(stream_of(step, budget, on_progress=interrupted))
    left = {group.prompt: sorted(group.samples) for group in step.left if group.step == 2}
    if budget is None:
        assert left == {2: [0, 1], 3: [0], 4: []} and not older[1].ranks, "what had not ended is drawn anew"
        assert [group.step for group in step.left].count(3) == 0
    else:
        assert left == ({2: [0, 1]} if budget.rest == "park" else {}) and step.calls[0] == budget.rest


@pytest.mark.parametrize("budget", [None, Budget(groups=9), Budget(groups=9, rest="abort")])
def test_a_lost_step_leaves_nothing_of_its_own(budget: Budget | None) -> None:
    """It is repeated: a prompt of its own that had ended would come twice. Those of earlier steps stay."""
    [older], own = made(1, 1, step=2), made(2, 1)
    older.prompt = 2
    step = ScriptedStep([*own, older], [[(0, 0), (2, 0)]])
    first = step.finished

    def lost() -> None:
        if not step.script:
            raise RankDied("rank 1 is gone")
        first()

    step.finished = step.park = step.close = lost  # type: ignore[method-assign]
    stream = stream_of(step, budget)
    stream._advance()
    with pytest.raises(RankDied):
        stream.close() if budget else stream._advance()
    stream.close()
    assert step.left == [older] and list(stream) == []


@pytest.mark.parametrize("wrong", [{}, {"tokens": 0}, {"fraction": 1.1}, {"groups": 0}, {"groups": 1, "rest": "no"}])
def test_budgets_that_are_none(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Budget(**wrong)


def test_groups_wanted() -> None:
    assert Budget(fraction=0.6).groups_wanted(5) == 3 and Budget(fraction=0.61).groups_wanted(5) == 4
    assert Budget(fraction=0.1, groups=3).groups_wanted(100) == 3 and Budget(tokens=1).groups_wanted(5) is None


def test_backlog() -> None:
    backlog = Backlog()
    groups = made(2, 2)
    groups[0].samples[0] = sample(0)
    where = {key: key.sample for group in groups for key in group.missing}
    backlog.keep(groups, where)
    assert backlog.keys == [(0, 1, 3), (1, 0, 3), (1, 1, 3)] and not homeless_requests(groups)
    with pytest.raises(BadInput, match="step 3 has parked samples"):
        backlog.check_step(3)
    backlog.check_step(4)
    backlog.end([(SampleKey(0, 1, 3), sample(1, "abort"))])
    assert list(backlog.groups) == [(3, 1)], "nothing of the first prompt is left"
    backlog.lost()
    taken = backlog.take()
    assert [r.key for r in homeless_requests(taken)] == [(1, 0, 3), (1, 1, 3)] and not backlog
    taken[0].samples |= {0: sample(0), 1: sample(1)}
    backlog.leave(taken)
    backlog.check_step(3)
    assert backlog and not backlog.keys and not backlog.take() and backlog.take_complete() == taken
