"""Requests on their way through a service: taken in on any thread, submitted to the open step, answered, aborted."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

from moebius.engine.types import SampleKey
from moebius.kernels.noise import derive_seed
from moebius.rollout.errors import BadInput, GroupNotReady, MoebiusError, QueueFull, RankDied
from moebius.rollout.failure_types import FAILED
from moebius.rollout.service_types import Mode, ServiceSettings, ServiceStats, Ticket
from moebius.rollout.types import Rollout, Sample

if TYPE_CHECKING:
    from moebius.rollout.open_step import OpenStep
    from moebius.rollout.shared_step import SharedStep
    from moebius.rollout.start import AnyGroup

T = TypeVar("T")


class RequestFlow:
    """The part of a service's driver that moves requests. Only `add`, `abort` and `post` are for any thread."""

    def __init__(self, group: AnyGroup, settings: ServiceSettings) -> None:
        self.group, self.settings = group, settings
        self.stats = ServiceStats(version=group.policy_version)
        self.paused: Mode | None = None
        self.asleep: set[str] = set()
        self._updating = False  # an update is open that comes in parts
        self._changed = threading.Condition()  # guards the following
        self._waiting: deque[Ticket] = deque()
        self._to_abort: set[Ticket] = set()
        self._commands: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._closing = False
        self._pending = 0  # samples of all tickets that are not done
        # What follows belongs to the thread.
        self._live: dict[tuple[int, int], Ticket] = {}  # in the open step, or parked; by step and prompt number
        self._step: OpenStep | SharedStep | None = None
        self._announced: tuple[int, int | None] | None = None  # samples still to come, number of the step
        self._hold = False  # the announced burst ends when somebody says so
        self._filled = False  # the open step's burst is in
        self._seed_step, self._seed_number = -1, 0  # that seeds of the next request depend on
        self._peak = 0  # most samples that were live at once in the step
        self._last_arrival = self._last_busy = 0.0
        self._losses_of_step = 0  # of the open step, that are known

    # ---- for any thread -------------------------------------------------------------------------------------------

    def add(self, tickets: Sequence[Ticket]) -> None:
        """Take requests in, all or none. Raises QueueFull, or GroupNotReady when none will be served any more."""
        samples = sum(ticket.n for ticket in tickets)
        with self._changed:
            if self._closing or self.stats.dead:
                raise GroupNotReady(self.stats.dead or "the service was closed")
            if self._pending + samples > self.settings.max_pending:
                self.stats.requests["refused"] += len(tickets)
                raise QueueFull(
                    f"the service holds {self._pending} unfinished samples and takes {self.settings.max_pending} at "
                    "most: send fewer at a time, or raise service.max_pending"
                )
            self._pending += samples
            self._waiting.extend(tickets)
            self._changed.notify()

    def abort(self, tickets: Iterable[Ticket]) -> None:
        """End requests with the tokens they have."""
        with self._changed:
            self._to_abort.update(tickets)
            self._changed.notify()

    def post(self, call: Callable[[], T]) -> Future[T]:
        """Have the thread do something, in the order of these calls."""
        future: Future[T] = Future()
        with self._changed:
            if self._closing:
                future.set_exception(GroupNotReady("the service was closed"))
                return future
            self._commands.append((future, call))
            self._changed.notify()
        return future

    # ---- into the step --------------------------------------------------------------------------------------------

    def _admits(self) -> bool:
        stats = self.stats
        held = self.paused is not None or self.asleep or self._updating
        return not held and stats.blocked is None and stats.dead is None

    def _submit_waiting(self) -> None:
        """Give the open step all that waits."""
        with self._changed:
            tickets = list(self._waiting)
        if not tickets:
            return
        for (n, sampling, streams), alike in groupby(tickets, key=_likeness):
            self._submit(list(alike), n, sampling, streams)
        self._last_arrival = self._last_busy = time.monotonic()
        self._peak = max(self._peak, self._live_samples())

    def _submit(self, tickets: list[Ticket], n: int, sampling: Any, streams: bool) -> None:
        assert self._step is not None
        for ticket in tickets:
            if ticket.seeds is None:  # kept for a replay
                base = self.group.config.engine.seed if sampling.seed is None else sampling.seed
                seeds_of = (derive_seed(base, self._seed_step, self._seed_number, sample) for sample in range(n))
                ticket.seeds = list(seeds_of)
                self._seed_number += 1
        prompts, seeds = [ticket.prompt for ticket in tickets], [ticket.seeds or [] for ticket in tickets]
        try:
            numbers = self._step.submit(prompts, n, sampling, seeds=seeds, stream=streams)
        except BadInput as error:  # checked before, so only a group that has changed says so
            self._take_out(tickets)
            for ticket in tickets:
                self._fail(ticket, error)
            return
        if self._announced is not None:
            self._announced = (self._announced[0] - n * len(tickets), self._announced[1])
            self._filled = self._filled or (self._announced[0] <= 0 and not self._hold)  # the step has seen it itself
        for number, ticket in zip(numbers, tickets, strict=True):
            ticket.place = (self._step.step, number)
            self._live[ticket.place] = ticket
        self._take_out(tickets)

    def _take_out(self, tickets: Sequence[Ticket]) -> None:
        with self._changed:
            gone = set(tickets)
            self._waiting = deque(ticket for ticket in self._waiting if ticket not in gone)

    def _apply_aborts(self) -> None:
        with self._changed:
            asked, self._to_abort = self._to_abort, set()
            dropped = [ticket for ticket in self._waiting if ticket in asked]
        self._take_out(dropped)
        for ticket in dropped:
            self._end_early(ticket)
        live = [ticket for ticket in asked if ticket.place in self._live and not ticket.done.done()]
        for ticket in live:
            ticket.aborted = True
        if live and self._step is not None:
            self.group.abort([key for ticket in live for key in _keys(ticket)])
        elif live:
            self._abort_parked(live)

    def _abort_parked(self, tickets: Sequence[Ticket]) -> None:
        for key, sample in self.group.abort_parked([key for ticket in tickets for key in _keys(ticket)]):
            self._ended(key, sample)

    def _end_early(self, ticket: Ticket) -> None:
        """Of a request that no step has seen: its samples end without a token."""
        ticket.aborted = True
        for index in ticket.missing:
            logprobs: list[float] | None = None if ticket.sampling.logprobs is None else []
            ticket.end(Sample(index, [], logprobs, None, None, "abort", None, self.group.policy_version, 0))
        self._finish(ticket)

    # ---- out of it ------------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        assert self._step is not None
        finished = self._step.finished()
        self._note_losses(self._step)
        for piece in self._step.pieces():
            ticket = self._live.get((piece.key.step, piece.key.prompt))
            if ticket is not None:
                ticket.piece(
                    piece.key.sample, piece.start, piece.token_ids, piece.logprobs, piece.top_logprobs,
                    piece.text_start, piece.text,
                )  # fmt: skip
        for key, sample in finished:
            self._ended(key, sample)
        if self._live:
            self._last_busy = time.monotonic()

    def _note_losses(self, step: OpenStep | SharedStep) -> None:
        """The step may have gone on after a loss of ranks. What streams have told of cannot be taken back."""
        new = len(step.losses) - self._losses_of_step
        if new <= 0:
            return
        self._losses_of_step += new
        self.stats.restarts += new
        for place, ticket in list(self._live.items()):
            if ticket.sent and not ticket.done.done():
                self.group.abort(_keys(ticket))
                del self._live[place]
                self._fail(ticket, RankDied(f"{step.losses[-1].why}; what was streamed cannot be drawn again"))

    def _ended(self, key: SampleKey, sample: Sample) -> None:
        place = (key.step, key.prompt)
        ticket = self._live.get(place)
        if ticket is None:
            return
        if sample.finish_reason == "abort" and isinstance(sample.stop_reason, str) and not sample.token_ids:
            del self._live[place]
            self._fail(ticket, BadInput(f"the engine refuses this request: {sample.stop_reason}"))
            return
        if sample.finish_reason == FAILED:
            del self._live[place]
            self._fail(ticket, MoebiusError(str(sample.stop_reason)))
            return
        ticket.end(sample)
        self.stats.samples[sample.finish_reason] += 1
        self.stats.output_tokens += len(sample.token_ids)
        if not ticket.missing:
            del self._live[place]
            self._finish(ticket)

    def _finish(self, ticket: Ticket) -> None:
        self.stats.requests["aborted" if ticket.aborted else "ok"] += 1
        self.stats.prompt_tokens += len(ticket.prompt)
        number = ticket.place[1] if ticket.place else 0
        step = ticket.place[0] if ticket.place else 0
        rollout = Rollout(number, ticket.prompt, [ticket.samples[index] for index in range(ticket.n)], step)
        self._settled(ticket)
        ticket.done.set_result(rollout)

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        self.stats.requests["failed"] += 1
        self._settled(ticket)
        ticket.done.set_exception(error)

    def _settled(self, ticket: Ticket) -> None:
        with self._changed:
            self._pending -= ticket.n

    def _live_samples(self) -> int:
        return sum(len(ticket.missing) for ticket in self._live.values())


def _likeness(ticket: Ticket) -> tuple[int, Any, bool]:
    return ticket.n, ticket.sampling, ticket.sink is not None


def _keys(ticket: Ticket) -> list[SampleKey]:
    assert ticket.place is not None
    step, number = ticket.place
    return [SampleKey(number, index, step) for index in ticket.missing]
