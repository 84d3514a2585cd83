"""When a service opens and closes steps, and what comes between them: pauses, updates."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from moebius.rollout.errors import GroupNotReady, MoebiusError
from moebius.rollout.service_flow import RequestFlow
from moebius.rollout.service_types import Mode, ServiceSettings, note_report

if TYPE_CHECKING:
    from moebius.rollout.group_weights import UpdateReport
    from moebius.rollout.report import StepReport
    from moebius.rollout.start import AnyGroup

T = TypeVar("T")
POLL_S = 0.02  # between looks at a running step
BUSY_S = 0.2  # before another try, when the group serves somebody else

_log = logging.getLogger(__name__)


class StepFlow(RequestFlow):
    """The part of a service's driver that opens and closes steps. All of it belongs to the driver's thread."""

    def __init__(
        self, group: AnyGroup, settings: ServiceSettings, on_report: Callable[[StepReport], None] | None
    ) -> None:
        super().__init__(group, settings)
        self.on_report = on_report
        self.last_report: StepReport | None = None
        self._ending: list[Future[Any]] = []  # of `end`
        self._highest = -1  # number of a step so far
        self._opened = 0.0
        self._losses = 0  # restarts since a step ended well

    def _lost(self, error: MoebiusError) -> None:
        raise NotImplementedError

    # ---- opening --------------------------------------------------------------------------------------------------

    def announce(self, expected: int, number: int | None, hold: bool) -> None:
        """A step of so many samples begins, or so many more come. What is live belongs to it."""
        if self._step is not None and not self._live and self._announced is None:
            self._close_step()
        left = 0 if self._announced is None else max(0, self._announced[0])
        self._announced = (left + expected, number)
        self._hold = hold
        if number is not None:
            if number != self._seed_step:  # else it goes on, and seeds with it
                self._seed_step, self._seed_number = number, 0
        elif self._step is None:
            self._seed_step, self._seed_number = self._highest + 1, 0
        if self._step is not None:
            self._step.expect(None if hold else left + expected)
            self._filled = False

    def filled(self) -> None:
        """The burst of the announced step is in."""
        self._hold = False
        if self._announced is not None:
            self._announced = (0, self._announced[1])
        if self._step is not None and not self._filled:
            self._step.filled()
            self._filled = True

    def end(self, future: Future[StepReport | None]) -> None:
        """No more requests come for the announced step; `future` gets its report when it is over."""
        if self.stats.dead is not None:
            raise GroupNotReady(self.stats.dead)
        future.set_running_or_notify_cancel()  # nobody may cancel it from now on
        self._ending.append(future)
        self.filled()

    def _admit(self) -> None:
        with self._changed:
            anything = bool(self._waiting or self._live)
        if anything and (self._step is not None or self._open()):
            self._submit_waiting()

    def _open(self) -> bool:
        expected, number = self._announced or (None, None)
        if self._hold:
            expected = None  # the count alone does not end the burst
        # Steps count up: the number of an announced one is kept where that is so. Seeds depend on what was announced.
        unused = number is not None and number > self._highest
        how: dict[str, Any] = {} if self.settings.on_loss == "replay" else {"replay": False}
        try:
            self._step = self.group.open_step(step=number if unused else None, expected=expected, **how)
        except GroupNotReady as error:
            if not self.group.running:
                self._lost(error)
                return False
            # Requests wait for what the message asks for, a weight update.
            _log.warning("requests wait: %s", error)
            self.stats.blocked = str(error)
            return False
        except MoebiusError as error:
            if not self.group.running:
                self._lost(error)
                return False
            with self._changed:
                refused = list(self._waiting)
            self._take_out(refused)
            for ticket in refused:
                self._fail(ticket, error)
            time.sleep(BUSY_S)  # what is parked is tried again
            return False
        self._highest = max(self._highest, self._step.step)
        if self._announced is None:
            self._seed_step, self._seed_number = self._step.step, 0
        self._filled, self._losses_of_step = False, 0
        self._peak = self._live_samples()
        self._opened = self._last_arrival = self._last_busy = time.monotonic()
        return True

    # ---- closing --------------------------------------------------------------------------------------------------

    def _look_after_step(self) -> None:
        assert self._step is not None
        settings, now = self.settings, time.monotonic()
        if not self._live:
            with self._changed:
                if self._waiting:
                    return
            complete = self._announced is None or (self._announced[0] <= 0 and not self._hold)
            if self._ending or (complete and now - self._last_busy >= settings.idle_s):
                self._close_step()
            return
        if self._announced is not None or self._ending:
            return
        falling = self._live_samples() < self._peak
        if not self._filled and falling and now - self._last_arrival >= settings.quiet_s:
            self._step.filled()
            self._filled = True
        if now - self._opened >= settings.step_max_s:
            self._park()

    def _close_step(self) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        step.close()
        self._step_over()

    def _step_over(self) -> None:
        self._losses = 0
        self.stats.steps += 1
        # An update may have come in between: what is still to come of the step opens another one.
        if self._announced is not None and (self._ending or (self._announced[0] <= 0 and not self._hold)):
            self._announced = None
        self._note_report(self.group.last_report)
        if not self._live:
            self._resolve_ending()

    def _resolve_ending(self) -> None:
        ending, self._ending = self._ending, []
        self._announced, self._hold = None, False
        for future in ending:
            future.set_result(self.last_report)
        if ending:
            self.last_report = None

    def _note_report(self, report: StepReport | None) -> None:
        if report is None:
            return
        self.last_report = report
        if self.on_report is not None:
            try:
                self.on_report(report)
            except Exception:  # noqa: BLE001  (of the caller's making: the service goes on)
                _log.exception("on_report failed for step %d", report.step)
        note_report(self.stats, report)
        if self.settings.reports is not None:
            try:
                report.write(self.settings.reports)
            except OSError as error:
                _log.error(
                    "step %d: its report could not be written to %s: %s", report.step, self.settings.reports, error
                )

    def _park(self) -> None:
        """End the step; what is not finished stays with the ranks, for the next one."""
        step, self._step = self._step, None
        assert step is not None
        step.park()
        self._note_losses(step)
        for key, sample in step.finished():
            self._ended(key, sample)
        self._step_over()

    # ---- between steps --------------------------------------------------------------------------------------------

    def pause(self, mode: Mode) -> None:
        """Sample nothing until `paused` is None again."""
        if mode == "finish" and self._admits():
            self._admit()  # what came before the pause is to be finished, too
        self.paused = mode
        self.quiesce(mode)

    def quiesce(self, mode: Mode) -> None:
        """End the open step, and what is live as `mode` says."""
        if mode == "abort":
            with self._changed:
                self._to_abort.update(self._waiting, self._live.values())
        self._apply_aborts()
        if self._step is None:
            return
        if mode == "park":
            self._poll()
            if self._live:
                self._park()
        while self._live and self._step is not None:
            self._apply_aborts()
            self._poll()
            if self._closing and mode != "abort":
                mode = "abort"
                with self._changed:
                    self._to_abort.update(self._waiting, self._live.values())
            time.sleep(POLL_S)
        self._close_step()

    def update(self, update: Callable[[], UpdateReport]) -> UpdateReport:
        """Change the weights by calling `update`, between two steps."""
        self.quiesce(self.settings.on_update)
        return self._updated(update())

    def _updated(self, report: UpdateReport) -> UpdateReport:
        self.stats.updates += 1
        self.stats.update_s = report.seconds
        self.unblock()
        return report

    def begin_update(self, version: int) -> None:
        """Open an update that comes in parts."""
        self.quiesce(self.settings.on_update)
        self.drop_update()
        self.group.begin_update(version)
        self._updating = True

    def within_update(self, part: Callable[[], T]) -> T:
        """A part of the open update, which is over if that fails."""
        try:
            return part()
        except BaseException:
            self._updating = False
            raise

    def commit_update(self) -> UpdateReport:
        """End it."""
        report = self.within_update(self.group.commit_update)
        self._updating = False
        return self._updated(report)

    def drop_update(self) -> None:
        """Give it up."""
        if self._updating:
            self._updating = False
            self.group.drop_update()

    def unblock(self) -> None:
        """What kept requests waiting may be over."""
        self.stats.blocked = None
