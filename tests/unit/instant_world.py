"""Ranks that know what they have, a group of them, and SIGINT at every line of its calls."""

from __future__ import annotations

import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import moebius.rollout
from moebius.engine.types import (
    MemoryChange,
    SampleKey,
    SampleRequest,
    SampleResult,
    StepOutcome,
    StepStats,
    UpdateStats,
)  # fmt: skip
from moebius.rollout import open_step, step_ranks, stream
from moebius.rollout.backlog import Backlog, PromptGroup, groups_of
from moebius.rollout.failure_types import FailureSettings
from moebius.rollout.group import RolloutGroup
from moebius.rollout.interrupts import waiting
from moebius.rollout.ranks import ProgressWatch
from moebius.rollout.step_block import StepBlock
from moebius.rollout.stream import RolloutStream
from moebius.rollout.worker import Progress

HERE = str(Path(moebius.rollout.__file__).parent)
# A step on its way from our `return` to the caller's block: only the caller could end it.
NOT_OURS = {StepBlock.__enter__.__code__, RolloutStream.__enter__.__code__}


class Remote:
    """A method of a rank's handle."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.remote = call


class World:
    """Two ranks that do at once what they are sent, whether or not anyone waits for their answers."""

    silent_s = 60.0

    def __init__(self) -> None:
        self.parked: set[SampleKey] = set()  # on rank 1
        self.live: set[SampleKey] | None = None  # of the running step
        self.ended: list[SampleResult] = []  # and not taken
        self.version, self.ends, self.closed = 3, "", False
        self.asleep = False
        self.answers: dict[int, Any] = {}
        self.starts: list[Any] = []
        self.handles = [self._handle() for _ in range(2)]

    def _handle(self) -> Any:
        def submit(serial: int, part: list[SampleRequest]) -> None:
            assert self.live is not None
            self.live.update(request.key for request in part)

        def end(how: str) -> Remote:
            return Remote(lambda serial, sent: setattr(self, "ends", how))

        return SimpleNamespace(submit=Remote(submit), close_step=end("close"), park_step=end("park"))

    def submit(self, method: str, args: Any = None) -> dict[Any, int]:
        self.answers[len(self.answers)] = getattr(self, method, lambda calls: [None, None])(args)
        return {len(self.answers) - 1: 0}

    def gather(self, refs: dict[Any, int], *, held: bool = False, **how: Any) -> Any:
        if not held:
            with waiting():
                pass
        answers = [self.answers[ref] for ref in refs]
        return answers[0]() if callable(answers[0]) else answers[0]

    def call(self, method: str, args: Any = None, **how: Any) -> Any:
        return self.gather(self.submit(method, args), **how)

    def tell(self, method: str, serial: int, keys: Any = None) -> None:
        if method == "abort" and self.live is not None:
            self._end(set(self.live if keys is None else keys) & self.live, "abort")

    def close(self, *, gently: bool) -> None:
        self.closed, self.live = True, None
        self.parked.clear()

    def _end(self, keys: set[SampleKey], why: str) -> None:
        assert self.live is not None
        self.live -= keys
        self.ended += [SampleResult(key, [1], None, None, why, None, self.version, 1) for key in sorted(keys)]

    # what ranks do
    def run_step(self, calls: Any) -> Callable[[], list[StepOutcome]]:
        assert self.live is None, "one step at a time"
        self.live, self.parked, self.ends = {r.key for _, part, *_ in calls for r in part} | self.parked, set(), ""

        def wait() -> list[StepOutcome]:
            live, self.live = self.live or set(), None
            if self.ends == "park":
                self.parked = live
                live = set()
            self.ended += [SampleResult(key, [1, 2], None, None, "length", None, self.version, 1) for key in live]
            stats = [StepStats(rank=rank, world_size=2) for rank in range(2)]
            return [StepOutcome([], stats[0]), StepOutcome([], stats[1], parked=sorted(self.parked))]

        return wait

    def take_results(self, calls: Any) -> list[list[SampleResult]]:
        if self.live is not None and self.ends != "park":  # one ends at every look
            self._end(set(sorted(self.live)[:1]), "length")
        taken, self.ended = self.ended, []
        return [[], taken]

    def abort_parked(self, calls: Any) -> list[list[SampleResult]]:
        gone = self.parked & set(calls[0][0])
        self.parked -= gone
        return [[], [SampleResult(key, [7], None, None, "abort", None, self.version, 1) for key in sorted(gone)]]

    def pull_update(self, calls: Any) -> list[UpdateStats]:
        self.version = calls[0][0]
        return [UpdateStats(self.version, "staged", 1, 1.0)] * 2

    def begin_update(self, calls: Any) -> list[None]:
        self.coming = calls[0][0]
        return [None, None]

    def commit_update(self, calls: Any) -> list[UpdateStats]:
        self.version = self.coming
        return [UpdateStats(self.version, "staged", 1, 1.0)] * 2

    def drop_update(self, calls: Any) -> list[int]:
        return [self.version] * 2

    def sleep(self, calls: Any) -> list[MemoryChange]:
        self.asleep = True
        return [MemoryChange(rank, 100, 90, 0.1) for rank in range(2)]

    def wake_up(self, calls: Any) -> list[MemoryChange]:
        self.asleep = False
        return [MemoryChange(rank, 100, 90, 0.1) for rank in range(2)]


def set_up(group: Any, ranks: Any) -> None:
    """What a group of these two ranks has between steps, without any start."""
    engine = SimpleNamespace(policy=SimpleNamespace(kind="rollout", back_at_iteration=None), seed=0)
    group.config = SimpleNamespace(
        ranks=2, failures=FailureSettings(), step_timeout_s=None, engine=engine, update_mode="staged", sampling=None
    )
    group.policy_version, group.backlog, group._next_step = 3, Backlog(), 1
    group._ranks = ranks
    group._problem, group._updated, group._shut_down = None, False, False
    group._one_call, group._serial, group._running = threading.Lock(), 0, None
    group._asleep = set()


class Group(RolloutGroup):
    """One of two ranks; two prompts of step 0 are parked, and one of it is complete, that nobody was given."""

    def __init__(self) -> None:
        self.world = World()
        set_up(self, self.world)
        self.older = prompts(0, 2)
        self.world.parked = {request.key for group in self.older for request in group.requests.values()}
        self.backlog.keep(self.older, dict.fromkeys(self.world.parked, 1))
        self.got: list[SampleKey] = []  # by the caller

    def report_step(self, outcomes: Any, step: int, *more: Any, **rest: Any) -> None:
        self._next_step = step + 1

    def _sampling(self, sampling: Any) -> Any:
        return sampling

    def _requests(self, given: Any, n: int, sampling: Any, step: Any, lengths: Any, first: int = 0) -> Any:
        number = self._step_number(step)
        own = prompts(number, len(given))
        return [r for group in own for r in group.requests.values()], [group.ids for group in own], number


def prompts(step: int, count: int) -> list[PromptGroup]:
    requests = [SampleRequest(SampleKey(i, 0, step), [1], {"max_tokens": 9}, 0) for i in range(count)]
    return groups_of(requests, [[1]] * count, step, 0)


def at_line(number: int, call: Callable[[], Any], seen: list[Any] | None = None) -> bool:
    """Call, with a SIGINT before the line of that number, of all lines of rollout/ in order; False: there is none.

    `seen` gets the lines. By the signal, and not by an error in the tracer: a signal can be held back.
    """
    count = 0
    seen = [] if seen is None else seen

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(HERE) or frame.f_code in NOT_OURS:
            return None
        if event == "line":
            count += 1
            seen.append((frame.f_code, frame.f_lineno))
            if count == number:
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    try:
        sys.settrace(trace)
        call()
    except KeyboardInterrupt:
        assert count >= number
        return True
    finally:
        sys.settrace(before)
    assert not number or count < number, f"line {number}: Ctrl-C was swallowed"
    return False


def every_line(make: Callable[[], Any]) -> Iterator[tuple[int, Any]]:
    """Numbers of lines, and groups whose call was interrupted there; `make` gives groups that have `scenario`.

    Of a line that is passed again and again, the first and the second time.
    """
    handler = signal.getsignal(signal.SIGINT)
    group, seen = make(), []  # type: Any, list[Any]
    assert not at_line(0, group.scenario, seen) and len(seen) > 10
    yield 0, group
    times: Counter[Any] = Counter()
    for number, line in enumerate(seen, 1):
        times[line] += 1
        if times[line] > 2:
            continue
        group = make()
        at_line(number, group.scenario)
        assert signal.getsignal(signal.SIGINT) == handler, "the handler outside is as it was"
        yield number, group


def with_scenario(scenario: Callable[[Any], Any]) -> Callable[[], Any]:
    def make() -> Any:
        group: Any = Group()
        group.scenario = lambda: scenario(group)
        return group

    return make


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_ranks.ray, "wait", lambda refs, timeout: ([], refs))
    for module in (open_step, stream):
        monkeypatch.setattr(module, "POLL_S", 0.0)
    monkeypatch.setattr(ProgressWatch, "look", lambda self: [Progress()] * 2)
