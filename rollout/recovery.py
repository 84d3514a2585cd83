"""How a group comes back after it has lost its ranks: all are started again, with the last committed weights."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray

from moebius.rollout.errors import BadInput, GroupNotReady, MoebiusError, RankDied
from moebius.rollout.failure_types import Loss, pause_s
from moebius.rollout.group_life import GroupLife
from moebius.rollout.interrupts import pause, uninterrupted, waiting
from moebius.rollout.kept import SOURCE, Keeper
from moebius.rollout.placement import connect, on_node
from moebius.rollout.ranks import RankError, Ranks

KEEPER_S = 60.0  # for an answer of the keeper
RESTORE_S = 3600.0  # for the ranks to read kept weights
PAUSE_POLL_S = 0.05  # between looks for a shutdown

_log = logging.getLogger(__name__)


class GroupRecovery(GroupLife):
    """The part of a `RolloutGroup` that outlives its ranks.

    `on_restart` is called after ranks were started again, on the thread of the call that found them lost, or of
    `restart`. It may call `update_weights`, `pull_update` and `on_ranks`: a trainer that sends weights through process
    groups of its own has the new ranks join them there. If the ranks then lack committed weights, because none are
    kept, it must send them, as `policy_version` or newer; an error in it is raised to the caller.
    """

    on_restart: Callable[[], None] | None = None
    _keeper: Any = None  # the actor that owns kept weights
    _keeper_node: str | None = None
    _kept: str | None = None  # files of the last committed update
    _restarts = 0  # in a row without a step that ended well

    def restart(self) -> None:
        """End all ranks, whatever state they are in, and start new ones with the last committed weights.

        Those are the checkpoint's, or come from `failures.keep_weights` or `on_restart`; if there is neither,
        `generate` refuses until `update_weights` has sent them. Samples that were parked are drawn anew in the next
        step, with the same seeds.
        """
        with self._exclusively("restart"):
            ranks, gently = self._ranks, self._problem is None
            self._ranks, self._problem = None, "a restart was broken off; call restart()"
            self.backlog.lost()  # also after `shutdown`
            if ranks is not None:
                ranks.close(gently=gently)
            self._restarts, self._shut_down = 0, False
            self._start_again()

    @uninterrupted
    def shutdown(self) -> None:
        """End all ranks and free what they held. May be called again, and from another thread during a step."""
        try:
            super().shutdown()
        finally:
            self._end_keeper()

    def recover(self, ranks: Ranks, error: MoebiusError, during: str) -> Ranks:
        """Start all ranks again after `error` in a call that goes on; the last of `losses` tells of it.

        Raises `error`, with what to do, where that is not wanted or cannot be; GroupNotReady if it was `shutdown` that
        ended the ranks.
        """
        seen = time.monotonic()
        closed_by_user = self._ranks is not ranks
        self._lose(ranks, str(error))
        if closed_by_user:
            raise GroupNotReady(self._problem or f"the group was shut down during {during}") from error
        if self.config.failures.on_failure == "raise" or self._recovering is not None:
            raise error  # within `on_restart`, the call that waits for it tries again
        if (lack := self._lacks_weights()) is not None:
            raise _more(error, lack) from error
        self._come_back(error)
        assert self._ranks is not None
        if self._problem is not None:
            raise _more(error, self._problem) from error
        rank, phase = getattr(error, "rank", None), getattr(error, "phase", None)
        loss = Loss(during, str(error).splitlines()[0], rank, phase, seen, time.monotonic() - seen)
        self.losses.append(loss)
        _log.warning("%s; the ranks were started again in %.1f s", loss.why, loss.seconds)
        return self._ranks

    def after_loss(self, ranks: Ranks, error: MoebiusError, during: str) -> MoebiusError:
        """The same after a call that does not go on; returns what to raise instead of `error`, or `error`."""
        if self._ranks is not ranks or self.config.failures.on_failure == "raise" or self._recovering is not None:
            self._lose(ranks, str(error))
            return error
        lack = self._lacks_weights()
        if lack is None:
            try:
                self.recover(ranks, error, during)
            except MoebiusError as final:
                return final
            return _more(error, f"the ranks were started again and hold policy version {self.policy_version}")
        self._lose(ranks, str(error))
        try:
            self._come_back(error)
        except MoebiusError as final:
            return final
        return _more(error, self._problem or "the ranks were started again")

    def _come_back(self, error: MoebiusError) -> None:
        """New ranks, in as many attempts as are allowed. Raises `error` when those are used up.

        Whatever keeps ranks from starting is tried again, after a pause: the same settings have started ranks before.
        Final are what this process finds wrong before it asks for ranks (BadInput), and errors of `on_restart`.
        """
        most = self.config.failures.max_restarts
        failed, last = 0, ""
        while True:
            if self._restarts < most:
                self._pause(pause_s(failed))
            if self._shut_down:
                raise GroupNotReady(self._problem or "the group was shut down") from error
            if self._restarts >= most:
                self.gave_up = True
                words = f"{most} restarts without a step that ended well (failures.max_restarts){last}; call restart()"
                raise _more(error, words) from error
            self._restarts += 1
            try:
                self._start_again()
                return
            except BadInput:
                raise
            except MoebiusError as failure:
                if self._ranks is not None:
                    raise  # they did start: it is an error of `on_restart`
                failed, last = failed + 1, f", the last start failed: {_first_line(failure)}"
                _log.warning("new ranks did not start, attempt %d of %d: %s", self._restarts, most, failure)

    def _pause(self, seconds: float) -> None:
        """Wait; a shutdown from another thread ends it."""
        until = time.monotonic() + seconds
        while not self._shut_down and time.monotonic() < until:
            pause(PAUSE_POLL_S)

    def _start_again(self) -> None:
        with waiting():
            connect(self.config)
        self._start()
        if self._shut_down:  # by another thread, meanwhile: these ranks, too
            self.shutdown()
            raise GroupNotReady(self._problem or "the group was shut down")
        self.gave_up = False
        if self._updated:
            self._problem = (
                f"the group was restarted and holds the checkpoint's weights, not policy version "
                f"{self.policy_version}; send them with update_weights"
            )
            self._restore()
        if self.on_restart is not None:
            with self._on_behalf(), waiting():
                self.on_restart()

    def _restore(self) -> None:
        """Fill the ranks from the kept copy, if there is one."""
        if self._kept is None:
            return
        ranks = self._alive()
        call = (self.policy_version, SOURCE, (self._kept, self.config.ranks), "in_place")
        try:
            ranks.call("pull_update", [call] * self.config.ranks, what="reading kept weights", timeout_s=RESTORE_S)
        except RankError as error:
            if not error.by_all:
                self._lose(ranks, str(error))
                raise
            _log.error("%s", error)
            self._kept = None
            return
        except RankDied as error:
            self._lose(ranks, str(error))
            raise
        self._problem = None

    def _lacks_weights(self) -> str | None:
        """Why new ranks would not have the last committed weights, and what helps; None if they will."""
        if not self._updated or self._kept is not None or self.on_restart is not None:
            return None
        return (
            f"policy version {self.policy_version} is lost with the ranks: call restart(), then update_weights; to go "
            "on without, set failures.keep_weights: host or the group's on_restart"
        )

    @contextmanager
    def _on_behalf(self) -> Iterator[None]:
        """This thread may call the group though a call is running."""
        before, self._recovering = self._recovering, threading.get_ident()
        try:
            yield
        finally:
            self._recovering = before

    # ---- kept weights ---------------------------------------------------------------------------------------------

    def _new_set(self, ranks: Ranks) -> str | None:
        """Where the ranks are to keep the weights of an update that begins; None: nowhere."""
        if self.config.failures.keep_weights == "none":
            return None
        node = ranks.hosts[0].node
        if self._keeper is not None and self._keeper_node != node:
            self._end_keeper()  # the ranks were started on another machine, whose files it does not see
        if self._keeper is None:
            self._keeper = ray.remote(Keeper).options(num_cpus=0, scheduling_strategy=on_node(node)).remote()
            self._keeper_node = node
        files: str | None = self._ask_keeper("new_set", self._kept)
        return files

    def _keep_only(self, files: str | None) -> None:
        """The update with these files was committed (or none was): forget all others."""
        if self._keeper is not None:
            self._kept = files
            self._ask_keeper("keep_only", files)

    def _ask_keeper(self, method: str, *arguments: Any) -> Any:
        try:
            return ray.get(getattr(self._keeper, method).remote(*arguments), timeout=KEEPER_S)
        except (ray.exceptions.RayError, TimeoutError) as error:
            # Updates work on; the next one starts another.
            _log.warning("the process that keeps weights for restarts is gone: %s", error)
            self._keeper = self._kept = None
            return None

    def _end_keeper(self) -> None:
        keeper, self._keeper, self._kept = self._keeper, None, None
        if keeper is not None and ray.is_initialized():
            try:
                with waiting():
                    ray.wait([keeper.close.remote()], timeout=KEEPER_S)
            finally:
                ray.kill(keeper, no_restart=True)


def _first_line(error: MoebiusError) -> str:
    return str(error).splitlines()[0].partition("; its log is ")[0]


def _more(error: MoebiusError, words: str) -> MoebiusError:
    """`error` with `words` at the end of its first line, but before the path of a log."""
    first, newline, rest = str(error).partition("\n")
    said, log, path = first.partition("; its log is ")
    text = f"{said}; {words}{log}{path}{newline}{rest}"
    if isinstance(error, RankDied):
        return RankDied(text, rank=error.rank, step=error.step, phase=error.phase)
    if isinstance(error, RankError):
        return RankError(text, error.cause, error.by_all, error.rank, error.phase)
    return MoebiusError(text)
