"""Which prompt is given up after losses, and what an open step does to find it, with stand-ins for the ranks."""

from __future__ import annotations

import random
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebius.engine import phases
from moebius.engine.config import EngineConfig, PolicyConfig
from moebius.engine.types import SampleKey, SampleRequest, SampleResult, StepOutcome, StepStats
from moebius.rollout import step_ranks
from moebius.rollout.backlog import Backlog, groups_of
from moebius.rollout.config import RolloutConfig
from moebius.rollout.errors import IncompleteStep, RankDied
from moebius.rollout.failure_types import FailureSettings, Loss
from moebius.rollout.open_step import OpenStep
from moebius.rollout.stream import RolloutStream
from moebius.rollout.suspicion import Suspicion
from moebius.rollout.worker import Progress


def test_one_loss_blames_nobody_and_being_alone_at_the_second_does() -> None:
    suspicion = Suspicion()
    assert suspicion.lost([(0, 4)]) is None and not suspicion.trying
    assert suspicion.lost([(0, 4)]) == (0, 4)
    assert suspicion.suspects == [] and not suspicion.trying


def test_losses_without_a_common_prompt_are_different_stories() -> None:
    suspicion = Suspicion()
    for prompt in range(10):
        assert suspicion.lost([(0, prompt)]) is None
    assert suspicion.lost([]) is None
    assert suspicion.lost([(0, 9)]) is None, "a loss that blames nobody ends the story"


def test_suspects_are_tried_in_halves() -> None:
    suspicion = Suspicion()
    suspicion.lost([(0, 2), (0, 3), (0, 5)])
    assert suspicion.lost([(0, p) for p in range(4)]) is None
    assert [p for p in range(9) if suspicion.may_run((0, p))] == [2, 3], "those that were there twice come first"
    assert not suspicion.ended([(0, 2)]) and suspicion.ended([(0, 3)])
    assert [p for p in range(9) if suspicion.may_run((0, p))] == [0]
    assert suspicion.lost([]) is None and suspicion.trying, "a loss of another cause changes nothing"
    assert suspicion.ended([(0, 0)]) and suspicion.lost([(0, 1)]) == (0, 1)
    assert not suspicion.trying


@given(st.integers(1, 60), st.integers(0, 59), st.integers(1, 8), st.randoms(use_true_random=False))
def test_the_guilty_one_is_found_and_no_other(prompts: int, guilty: int, ranks: int, luck: random.Random) -> None:
    """Attempts end some prompts in peace, at random, before the guilty one strikes on its rank."""
    guilty %= prompts
    left, suspicion, found, losses = set(range(prompts)), Suspicion(), None, 0
    while guilty in left and found is None:
        dealt = {prompt: luck.randrange(ranks) for prompt in left if suspicion.may_run((0, prompt))}
        done = [prompt for prompt in dealt if prompt != guilty and luck.random() < 0.2]
        left -= set(done)
        if suspicion.ended((0, prompt) for prompt in done):
            continue  # more are to be drawn
        if guilty not in dealt:  # held back: the others end first
            left -= set(dealt)
            assert suspicion.ended((0, prompt) for prompt in dealt)
            continue
        losses += 1
        found = suspicion.lost((0, p) for p in dealt if p in left and dealt[p] == dealt[guilty])
    assert found == (0, guilty)
    assert losses <= 3 + prompts.bit_length()


# ---- an open step on ranks that die --------------------------------------------------------------------------------


class Handle:
    """A rank: what was submitted ends at a look, some at a time; it dies of some prompts."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.live: list[SampleRequest] = []
        self.closed = False
        for name in ("submit", "close_step", "park_step"):
            setattr(self, name, SimpleNamespace(remote=getattr(self, f"_{name}")))

    def _submit(self, serial: int, requests: list[SampleRequest]) -> None:
        self.live += requests

    def _close_step(self, serial: int, sent: int) -> None:
        self.closed = True

    def _park_step(self, serial: int, sent: int) -> None:
        self.closed = True


class World:
    """Ranks, and the group that starts them again."""

    def __init__(self, poison: set[int], ranks: int, luck: random.Random, phase: str, **failures: Any) -> None:
        self.poison, self.size, self.luck, self.phase = poison, ranks, luck, phase
        engine = EngineConfig(model="fake", policy=PolicyConfig())
        settings = FailureSettings(**failures)
        self.config = RolloutConfig(ranks=max(2, ranks), engine=engine, failures=settings)
        self.losses: list[Loss] = []
        self.backlog, self.has_tokenizer, self.policy_version = Backlog(), False, 3
        self.report: Any = None
        self.hang = False
        self.interrupted: list[str] = []
        self.parked_at_the_end: list[SampleKey] = []
        self.silent_s = 60.0
        self.new()

    def new(self) -> World:
        self.handles = [Handle(self, rank) for rank in range(self.size)]
        return self

    # of the group
    def refusal(self, error: Any, step: int) -> None:
        return None

    def recover(self, ranks: Any, error: RankDied, during: str) -> World:
        self.losses.append(Loss(during, str(error), error.rank, error.phase, time.monotonic(), 0.1))
        return self.new()

    def send_again(self, ranks: Any, parts: list[list[SampleRequest]]) -> tuple[int, dict[Any, int]]:
        for handle, part in zip(self.handles, parts, strict=True):
            handle.live += part
        return len(self.losses), {}

    def step_closed(self) -> None:
        pass

    def interrupt(self, ranks: Any, refs: Any, what: str, why: BaseException) -> list[StepOutcome]:
        self.interrupted.append(what)
        of_ranks = [[], self.parked_at_the_end]
        return [StepOutcome([], StepStats(rank=r, world_size=2), parked=of_ranks[r]) for r in range(2)]

    def report_step(self, outcomes: list[StepOutcome], step: int, ids: Any, losses: list[Loss]) -> None:
        self.report = [result for outcome in outcomes for result in outcome.results]

    # of the ranks
    def tell(self, method: str, *args: Any) -> None:
        pass

    def submit(self, method: str, args: Any) -> dict[Any, int]:
        assert method == "take_results"
        return {"taken": 0}

    def gather(self, refs: Any, *, on_poll: Any = None, **how: Any) -> list[Any]:
        if "taken" in refs:
            return self.take()
        while not all(handle.closed for handle in self.handles) or any(handle.live for handle in self.handles):
            on_poll([Progress()] * self.size)
        return [StepOutcome([], StepStats(rank=r, world_size=self.size)) for r in range(self.size)]

    def take(self) -> list[list[SampleResult]]:
        ended = []
        for handle in self.handles:
            mine = [r for r in handle.live if not self.hang and self.luck.random() < 0.3]
            if any(r.key.prompt in self.poison for r in mine):
                raise RankDied(f"rank {handle.rank} ended", rank=handle.rank, phase=self.phase)
            handle.live = [r for r in handle.live if r not in mine]
            ended.append([result_of(r, handle.rank) for r in mine])
        return ended


def result_of(request: SampleRequest, rank: int) -> SampleResult:
    return SampleResult(request.key, [request.seed], None, None, "length", None, 3, rank, ended_iteration=4)


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_ranks.ray, "wait", lambda refs, timeout: ([], refs))
    monkeypatch.setattr(step_ranks, "PROGRESS_S", 0.0)


def opened(world: World, prompts: int, n: int, whole: bool = True) -> OpenStep:
    requests = [
        SampleRequest(SampleKey(p, s, 5), [p], {"max_tokens": 4}, 100 * p + s) for p in range(prompts) for s in range(n)
    ]
    groups = groups_of(requests, [[p] for p in range(prompts)], 5, 0)
    ranks_of = {request.key: request.key.prompt % world.size for request in requests}
    for request in requests:
        world.handles[ranks_of[request.key]].live.append(request)
    return OpenStep(world, world, 0, 5, {}, groups, ranks_of, whole=whole, replays=True)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 24), st.integers(1, 3), st.sets(st.integers(0, 23), max_size=2), st.integers(1, 4),
    st.sampled_from([phases.PREFILL, phases.decode("TP")]), st.booleans(), st.randoms(use_true_random=False),
)  # fmt: skip
def test_every_sample_comes_back_once_and_only_the_guilty_fail(
    prompts: int, n: int, poison: set[int], ranks: int, phase: str, whole: bool, luck: random.Random
) -> None:
    world = World(poison, ranks, luck, phase)
    rollouts = (step := opened(world, prompts, n, whole)).close()
    assert [(r.prompt_index, len(r.samples)) for r in rollouts] == [(p, n) for p in range(prompts)]
    guilty = {p for p in poison if p < prompts}
    for rollout in rollouts:
        for sample in rollout.samples:
            assert (sample.finish_reason == "failed") == (rollout.prompt_index in guilty), "no other is blamed"
            if rollout.prompt_index in guilty:
                assert sample.token_ids == [] and "given up" in str(sample.stop_reason)
            else:
                assert sample.token_ids == [100 * rollout.prompt_index + sample.sample_index], "the same seed"
    assert sorted(r.key for r in world.report) == [(p, s, 5) for p in range(prompts) for s in range(n)]
    assert {place for loss in world.losses for place in loss.given_up} == {(5, p) for p in guilty}
    assert step.losses == world.losses and step.keys() == []


def test_a_step_that_hangs_is_a_loss_that_is_replayed() -> None:
    world = World(set(), 2, random.Random(0), phases.PREFILL, step_deadline_s=0.05)
    world.hang = True
    step = opened(world, 3, 1)
    recover = world.recover

    def mended(*args: Any) -> World:
        world.hang = False
        return recover(*args)

    world.recover = mended  # type: ignore[method-assign]
    assert len(step.close()) == 3
    [loss] = world.losses
    assert "did not end within 0.05 s" in loss.why and loss.rank is None and loss.replayed == 3


@pytest.mark.parametrize("error", [ZeroDivisionError(), RankDied("of another group"), KeyboardInterrupt()])
def test_what_the_caller_raises_is_no_loss_and_parked_samples_are_kept(error: BaseException) -> None:
    """`on_progress` breaks a step off that goes on with samples of an earlier one: one of them is parked again."""
    world = World(set(), 2, random.Random(0), phases.PREFILL)
    world.hang = True
    own = [SampleRequest(SampleKey(0, 0, 5), [0], {}, 0)]
    older = [SampleRequest(SampleKey(p, 0, 4), [p], {}, p) for p in range(2)]
    groups = [*groups_of(older, [[0], [1]], 4, 0), *groups_of(own, [[0]], 5, 0)]
    ranks_of = {request.key: 0 for request in [*own, *older]}
    world.handles[0].live += [*own, *older]
    step = OpenStep(world, world, 0, 5, {}, groups, ranks_of, whole=True, replays=True)
    world.parked_at_the_end = [older[1].key]

    def broken(*now: Any) -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        step.run(broken)
    assert raised.value is error and not world.losses and world.interrupted == ["step 5"]
    kept = {(group.step, group.prompt): group.ranks for group in world.backlog.take()}
    assert kept == {(4, 0): {}, (4, 1): {0: 1}}, "the first is drawn anew, the second is with rank 1"


@pytest.mark.parametrize("kept", [True, False])
def test_ctrl_c_while_a_step_is_parked(kept: bool) -> None:
    """What was to be kept is kept, wherever it is."""
    world = World(set(), 2, random.Random(0), phases.PREFILL)
    world.hang = True
    step = opened(world, 1, 2, whole=False)
    world.parked_at_the_end = [SampleKey(0, 1, 5)] if kept else []

    def interrupt(*arguments: Any, **how: Any) -> Any:
        raise KeyboardInterrupt

    world.gather = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        step.park()
    [group] = world.backlog.take()
    assert (group.step, len(group.missing)) == (5, 2) and group.ranks == ({1: 1} if kept else {})


@pytest.mark.parametrize("taken", [1, 2])
def test_a_rollout_of_an_earlier_step_comes_once_though_the_step_is_lost(taken: int) -> None:
    """One that the stream has given out is not given out by the next step, too; one that it has not is."""
    world = World(set(), 2, random.Random(0), phases.PREFILL)
    own = [SampleRequest(SampleKey(0, 0, 5), [0], {}, 0)]
    older = [SampleRequest(SampleKey(p, 0, 4), [p], {}, p) for p in range(3)]
    groups = [*groups_of(older, [[0], [1], [2]], 4, 0), *groups_of(own, [[0]], 5, 0)]
    answers = [[[result_of(older[0], 0), result_of(older[1], 0)], []]]

    def die(*arguments: Any, **how: Any) -> Any:
        if answers:
            return answers.pop()
        raise RankDied("rank 0 ended", rank=0)

    def give_up(ranks: Any, error: RankDied, during: str) -> World:
        raise error

    world.take, world.recover = die, give_up  # type: ignore[method-assign]
    step = OpenStep(world, world, 0, 5, {}, groups, {r.key: 0 for r in [*own, *older]}, replays=True)
    step.progress = lambda: [Progress()]  # type: ignore[method-assign]
    stream = RolloutStream(step, [], None, None, None)
    given = [next(stream).prompt_index for _ in range(taken)]
    with pytest.raises(RankDied):
        stream._advance()
    stream.close()
    assert given == list(range(taken))
    assert [group.prompt for group in world.backlog.take_complete()] == [0, 1, 2][taken:2]
    assert [group.prompt for group in world.backlog.take()] == [2]


def test_a_group_that_cannot_come_back_ends_the_step() -> None:
    world = World({0}, 2, random.Random(0), phases.PREFILL)

    def give_up(ranks: Any, error: RankDied, during: str) -> World:
        raise error

    world.recover = give_up  # type: ignore[method-assign]
    step = opened(world, 3, 1)
    with pytest.raises(RankDied, match="rank 0") as death:
        step.close()
    assert death.value.step == 5


@pytest.mark.parametrize(("extra", "words"), [((0, 0), r"double: \(0, 0\)"), ((7, 0), r"not asked for: \(7, 0\)")])
def test_a_sample_that_comes_twice_or_unasked_is_an_error(extra: tuple[int, int], words: str) -> None:
    world = World(set(), 2, random.Random(0), phases.PREFILL)
    step = opened(world, 3, 1)
    take, more = world.take, [result_of(SampleRequest(SampleKey(*extra, 5), [1], {}, 0), 0)]

    def call(*args: Any, **how: Any) -> Any:
        ended = take(*args, **how)
        if any(r.key == (0, 0, 5) for r in ended[0]):
            ended[0] += more
        return ended

    world.take = call  # type: ignore[method-assign]
    with pytest.raises(IncompleteStep, match=words):
        step.close()
