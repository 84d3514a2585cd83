"""The thread that owns a group on behalf of a service: its loop, and what it does when ranks are lost."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from moebius.rollout.errors import BadInput, GroupNotReady, MoebiusError
from moebius.rollout.service_steps import POLL_S, StepFlow
from moebius.rollout.service_types import ServiceSettings

if TYPE_CHECKING:
    from moebius.rollout.report import StepReport
    from moebius.rollout.start import AnyGroup

STREAM_POLL_S = 0.005  # between looks at a running step if somebody waits for every token
IDLE_POLL_S = 0.05  # if nothing is live in it
WATCH_S = 0.5  # between questions for its progress

_log = logging.getLogger(__name__)


class Driver(StepFlow):
    """Started by its constructor; `close` ends it.

    `add`, `abort`, `post` and `close` are for any thread, everything else for functions that are posted.
    """

    def __init__(
        self, group: AnyGroup, settings: ServiceSettings, on_report: Callable[[StepReport], None] | None = None
    ) -> None:
        super().__init__(group, settings, on_report)
        self._next_watch = 0.0
        self._thread = threading.Thread(target=self._run, name="rollout-service", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 60.0) -> None:
        """End all requests early, the step and the thread. The group is left to its owner."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._has_work():
                    self._changed.wait(self._patience())
                commands = list(self._commands)
                self._commands.clear()
                closing = self._closing
            for future, call in commands:
                self._do(future, call)
            if closing:
                break
            self._guarded(self._turn)
        self._wind_up()

    def _has_work(self) -> bool:
        return bool(self._commands or self._closing or self._to_abort or (self._waiting and self._admits()))

    def _patience(self) -> float | None:
        """Seconds until the thread must look again though nothing was asked of it."""
        if self._step is not None and self._live:
            return STREAM_POLL_S if any(ticket.sink for ticket in self._live.values()) else POLL_S
        if self._step is not None:
            return max(IDLE_POLL_S, min(self._last_busy + self.settings.idle_s - time.monotonic(), 1.0))
        return None if not (self._live and self._admits()) else 0.0

    def _do(self, future: Future[Any], call: Callable[[], Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            found = call()
            self._describe()  # who asked may ask for the state next
        except Exception as error:  # noqa: BLE001  (the one who asked gets it)
            future.set_exception(error)
            if isinstance(error, MoebiusError):
                self._recover_if_lost(error)
        else:
            future.set_result(found)
        self._describe()

    def _guarded(self, turn: Callable[[], None]) -> None:
        try:
            turn()
        except MoebiusError as error:
            self._lost(error)
        except Exception as error:  # noqa: BLE001  (nobody would be answered any more)
            _log.exception("the service's thread failed")
            self._give_up(f"the service failed ({type(error).__name__}: {error}); restart it")
        self._describe()

    def _turn(self) -> None:
        self._apply_aborts()
        if self._admits():
            self._admit()
        if self._step is not None:
            self._poll()
            self._look_after_step()
        elif self._ending and not self._live and not self._waiting:
            self._resolve_ending()

    # ---- losses ---------------------------------------------------------------------------------------------------

    def _recover_if_lost(self, error: MoebiusError) -> None:
        if not self.group.running and not self.stats.dead:
            self._lost(error)

    def _lost(self, error: MoebiusError) -> None:
        """The step cannot go on: bring the group up again if need be, and repeat what was live, or give up."""
        self._step = None
        _log.error("the step was lost: %s", error)
        victims = [ticket for ticket in self._live.values() if not ticket.done.done()]
        self._live.clear()
        again = []
        for ticket in victims:
            ticket.losses += 1
            ticket.place = None
            repeatable = self.settings.on_loss == "replay" and not isinstance(error, BadInput) and not ticket.sent
            if repeatable and ticket.losses < self.settings.max_losses and not self._closing:
                again.append(ticket)
            else:
                self._fail(ticket, error)
        with self._changed:
            self._waiting.extendleft(reversed(again))
        if self._announced is not None:
            self._announced = (self._announced[0] + sum(ticket.n for ticket in again), self._announced[1])
        lost = not self.group.running
        spent = self._losses >= self.settings.max_restarts or self.group.gave_up
        if lost and (self.group.closed or self._closing or spent):
            self._give_up(str(error))
            return
        try:
            if lost:
                self._losses += 1
                self.stats.restarts += 1
                self.group.restart()
            self.group.abort_parked()  # their requests have failed, or are drawn anew from here
        except MoebiusError as problem:
            self._give_up(f"the group could not be restarted: {problem}")

    def _give_up(self, why: str) -> None:
        self.stats.dead = why
        self._step = None
        with self._changed:
            left = [*self._live.values(), *self._waiting]
            self._waiting.clear()
        self._live.clear()
        for ticket in left:
            self._fail(ticket, GroupNotReady(why))
        ending, self._ending = self._ending, []
        for future in ending:
            future.set_exception(GroupNotReady(why))

    def _wind_up(self) -> None:
        if self.stats.dead is None:
            self._guarded(lambda: self.quiesce("abort"))
        self._give_up(self.stats.dead or "the service was closed")
        with self._changed:
            commands, self._commands = list(self._commands), deque()
        for future, _ in commands:
            if future.set_running_or_notify_cancel():
                future.set_exception(GroupNotReady("the service was closed"))

    # ---- what is told ---------------------------------------------------------------------------------------------

    def _describe(self) -> None:
        stats = self.stats
        live = self._live_samples()
        with self._changed:
            stats.waiting = sum(ticket.n for ticket in self._waiting)
        stats.live, stats.parked = (live, 0) if self._step is not None else (0, live)
        stats.paused, stats.asleep = self.paused is not None, sorted(self.asleep)
        stats.version = self.group.policy_version
        stats.step = None if self._step is None else self._step.step
        now = time.monotonic()
        if self._step is None or now < self._next_watch:
            return
        self._next_watch = now + WATCH_S
        progress = self._step.progress()
        stats.layout, stats.iteration_ms = progress[0].layout, progress[0].iteration_ms
        stats.kv_use = max(rank.kv_use for rank in progress)
        stats.step_tokens = sum(rank.tokens for rank in progress)
