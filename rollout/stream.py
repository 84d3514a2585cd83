"""The rollouts of a step one by one, each as soon as it is whole, and steps that stop before all are."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from moebius.rollout.budget import Budget
from moebius.rollout.errors import MoebiusError, as_the_caller_raised, callers
from moebius.rollout.interrupts import held_back, pause, uninterrupted, waiting
from moebius.rollout.types import Rollout

if TYPE_CHECKING:
    from moebius.rollout.backlog import PromptGroup
    from moebius.rollout.open_step import OpenStep
    from moebius.rollout.shared_step import SharedStep

OnProgress = Callable[[int, int, int, int, str], None]  # samples done, in all, tokens so far, live samples, layout

POLL_S = 0.01
PROGRESS_S = 0.5
_log = logging.getLogger(__name__)


class RolloutStream(Iterator[Rollout]):
    """Made by `RolloutGroup.stream`. Each rollout comes once, with all its samples, in the order in which they end.

    The step runs whether or not anyone takes its rollouts. When it is over, the iteration ends, and the group serves
    other calls; so it does after `close()`, which ends a step that still runs as `budget.rest` says (without a budget:
    its samples are aborted).
    """

    def __init__(
        self,
        step: OpenStep | SharedStep,
        ready: list[PromptGroup],
        budget: Budget | None,
        limit_s: float | None,
        on_progress: OnProgress | None,
    ) -> None:
        self.step = step.step
        self._step, self._budget, self._on_progress = step, budget, on_progress
        self._ready: deque[PromptGroup] = deque(ready)
        self._waiting = [group for group in step.groups() if not group.complete]
        groups = len(self._waiting) + len(ready)
        self._samples = sum(len(group.requests) for group in self._waiting)
        self._wanted = groups if budget is None else budget.groups_wanted(groups) or groups
        self._most = groups if budget is None or budget.groups is None else budget.groups
        self._yielded = 0
        self._over = self._is_lost = False
        self._started = time.monotonic()
        self._limit_s, self._aborted, self._next_look = limit_s, False, 0.0
        self._tokens = 0

    def __iter__(self) -> RolloutStream:
        return self

    def __next__(self) -> Rollout:
        """The next whole rollout; waits for it.

        Raises:
            StopIteration: there are no more.
            RankDied, MoebiusError: the step is lost.
        """
        group: PromptGroup | None = None
        try:
            with held_back():
                group = self.take()
            if group is not None:
                return group.rollout()
        except BaseException:
            if group is not None:  # Ctrl-C came meanwhile, and nobody gets it
                self.untake([group])
            raise
        raise StopIteration

    def take(self) -> PromptGroup | None:
        """As `next`; None: there are no more. Within `held_back`."""
        while True:
            if self._ready and self._yielded < self._most:
                self._yielded += 1
                return self._ready.popleft()
            if self._over:
                self._leave_surplus()
                return None
            self._advance()

    @uninterrupted
    def untake(self, groups: list[PromptGroup]) -> None:
        """Nobody has got these after all: they are the next ones again."""
        self._yielded -= len(groups)
        self._ready.extendleft(reversed(groups))

    @uninterrupted
    def withdraw(self) -> None:
        """End the step, which nobody has seen: as if it had not begun, for what earlier steps have left."""
        try:
            if not self._over:
                self._step.break_off()
        finally:
            self._lost()

    @uninterrupted
    def close(self) -> None:
        """End the step, whatever it does; rollouts that were not taken are dropped, or come with the next step."""
        try:
            if not self._over:
                self._stop(self._budget.rest if self._budget else "abort")
        finally:
            self._most = self._yielded
            self._leave_surplus()

    def __enter__(self) -> RolloutStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _advance(self) -> None:
        """See what has ended, and end the step if it is time."""
        with as_the_caller_raised():
            try:
                self._step.finished()
                self._sort()
                self._look()
            except MoebiusError:
                self._lost()
                raise
            except BaseException:
                self.close()
                raise
        if not self._waiting:
            self._stop("park")
        elif self._yielded + len(self._ready) >= self._wanted or self._spent():
            assert self._budget is not None
            self._stop(self._budget.rest)
        elif not self._ready:
            pause(POLL_S)

    def _sort(self) -> None:
        self._ready.extend(group for group in self._waiting if group.complete)
        self._waiting = [group for group in self._waiting if not group.complete]

    def _spent(self) -> bool:
        seconds = time.monotonic() - self._started
        return self._budget is not None and self._budget.spent(tokens=self._tokens, seconds=seconds)

    def _look(self) -> None:
        """About twice a second: tokens, the caller's progress, the step's time limit."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + PROGRESS_S
        if self._limit_s is not None and not self._aborted and now - self._started > self._limit_s:
            _log.warning("step %d has run for %g s: unfinished samples are ended", self.step, self._limit_s)
            self._step.abort()
            self._aborted = True
        progress = self._step.progress()
        self._tokens = sum(rank.tokens for rank in progress)
        if self._on_progress is not None:
            done = self._samples - sum(len(group.missing) for group in self._waiting)
            with callers(), waiting():
                self._on_progress(done, self._samples, self._tokens, progress[0].live, progress[0].layout)

    def _stop(self, rest: str) -> None:
        """End the step; what is complete by then counts."""
        self._over = True
        try:
            self._end(rest)
        except MoebiusError:
            self._lost()
            raise
        except BaseException:  # Ctrl-C: nobody else ends it
            self._step.break_off()
            raise

    def _end(self, rest: str) -> None:
        if rest == "park":
            self._step.park()
            self._sort()
            return
        self._step.finished()
        self._sort()
        running = [(group, [key.sample for key in group.missing]) for group in self._waiting]
        try:
            self._step.abort()
            self._step.close()
        finally:
            self._ready.extend(group for group, samples in running if group.complete and not _cut(group, samples))
            if self._budget is None:
                for group, samples in running:
                    if group.step != self.step and _cut(group, samples):
                        self._put_back(group, samples)
            self._waiting = []

    def _lost(self) -> None:
        """The step is lost, and has been closed: it is to be repeated, so its own prompts are not the next step's."""
        self._over = self._is_lost = True
        self._sort()
        self._step.leave([group for group in self._ready if group.step != self.step])
        self._ready.clear()

    def _leave_surplus(self) -> None:
        """Complete groups beyond what was asked for are the next step's; so are those of earlier steps, in any case
        but that a budget gives them up: breaking this step off is no reason to lose them.
        """
        if self._is_lost:
            self._lost()
            return
        self._sort()  # what had ended when the step broke off
        surplus, self._ready = list(self._ready), deque()
        if self._budget is None:
            surplus = [group for group in surplus if group.step != self.step]
        if self._budget is None or self._budget.rest == "park":
            self._step.leave(surplus)

    def _put_back(self, group: PromptGroup, samples: list[int]) -> None:
        """Of an earlier step, broken off with this one: the next one draws what had not ended, with the same seeds."""
        for index in _ended(group, samples):
            if group.samples[index].finish_reason == "abort":
                del group.samples[index]
        group.ranks = {}
        self._step.leave([group])


def sealed_stream(
    step: OpenStep | SharedStep,
    ready: list[PromptGroup],
    budget: Budget | None,
    limit_s: float | None,
    on_progress: OnProgress | None,
) -> RolloutStream:
    """The stream of a step that gets no more prompts; arguments of RolloutStream."""
    try:
        step.seal()
        return RolloutStream(step, ready, budget, limit_s, on_progress)
    except BaseException:  # nobody else has it
        try:
            step.break_off()
        finally:  # after another Ctrl-C, too
            step.leave(ready)
        raise


def drawn(make: Callable[[], RolloutStream]) -> list[Rollout]:
    """All rollouts of a stream by step and number, those of its own step first. Raises as `RolloutStream.__next__`.

    The step has ended then, whatever happens; after an error, what was complete is where it would be had nobody taken
    it.
    """
    stream: RolloutStream | None = None
    taken: list[PromptGroup] = []
    try:
        with held_back():
            stream = make()
            with stream:
                while (group := stream.take()) is not None:
                    taken.append(group)
        own = stream.step
        return [g.rollout() for g in sorted(taken, key=lambda g: (g.step != own, g.step, g.prompt))]
    except BaseException:
        if stream is not None:
            stream.untake(taken)
            stream.close()  # again: it leaves what was taken to the next step
        raise


def _cut(group: PromptGroup, samples: list[int]) -> bool:
    return any(group.samples[index].finish_reason == "abort" for index in _ended(group, samples))


def _ended(group: PromptGroup, samples: list[int]) -> list[int]:
    """All of them, unless the end of the step was not waited for."""
    return [index for index in samples if index in group.samples]
