"""The rank actors of one group as a unit: every call goes to all ranks and is answered by all, or fails in words."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from moebius.rollout.config import RolloutConfig
from moebius.rollout.errors import MoebiusError, RankDied
from moebius.rollout.interrupts import pause, uninterrupted, waiting
from moebius.rollout.marks import read_mark
from moebius.rollout.placement import on_node, reserve
from moebius.rollout.rank_setup import EngineInfo, RankHost, RankSetup
from moebius.rollout.report_startup import RankStart, rank_start
from moebius.rollout.shm import parse_ident, remove_own, start_ticks
from moebius.rollout.worker import EngineError, Progress, RankWorker, actor_options

POLL_S = 0.2  # between looks at the ranks while a call runs
PROGRESS_S = 0.5  # between questions for progress
GRACE_S = 5.0  # after one rank raised an error: for the others to raise theirs
SHUTDOWN_S = 15.0  # for engines to close in order
KILL_S = 3.0  # for Ray to end processes
EXIT_S = 10.0  # for killed processes to be gone
MARK_S = 2.0  # for another rank to say what a dead one did last

_log = logging.getLogger(__name__)

OnPoll = Callable[[Sequence[Progress]], None]


class RankError(MoebiusError):
    """A rank raised `cause`. `by_all`: every rank answered, so none is left waiting for another.

    `rank` is the one that failed, None if several did; `phase` what it did last, where that is known.
    """

    def __init__(
        self, message: str, cause: BaseException, by_all: bool, rank: int | None = None, phase: str | None = None
    ) -> None:
        super().__init__(message)
        self.cause = cause
        self.by_all = by_all
        self.rank = rank
        self.phase = phase


class Ranks:
    """Started rank actors. Build with `Ranks.start`; `close` ends them, however they are."""

    def __init__(self, handles: list[Any], placement: PlacementGroup | None, silent_s: float = 60.0) -> None:
        """A rank that does not answer for `silent_s` counts as dead."""
        self.handles = handles
        self.silent_s = silent_s
        self.hosts: list[RankHost] = []
        self.ident = ""
        self.starts: list[RankStart] = []  # how each rank started
        self._processes: dict[int, int | None] = {}  # pids on this machine, and their start times
        self._placement = placement

    @classmethod
    @uninterrupted
    def start(cls, config: RolloutConfig, device: str) -> tuple[Ranks, EngineInfo]:
        """Place and start all ranks. Raises MoebiusError (RankDied, RankError) in words; nothing is left running."""
        deadline = time.monotonic() + config.startup_timeout_s
        actor = ray.remote(RankWorker)
        placement: PlacementGroup | None = None
        if config.place is not None:  # the caller holds the resources
            options = actor_options("cpu", 0)
            where: list[Any] = [on_node(config.place.node)] * config.ranks
        else:
            placement = reserve(config, device)
            options = actor_options(device, config.cpus_per_rank)
            where = [PlacementGroupSchedulingStrategy(placement, rank) for rank in range(config.ranks)]
        handles = [actor.options(**options, scheduling_strategy=at).remote(rank) for rank, at in enumerate(where)]
        ranks = cls(handles, placement, config.failures.silent_s)
        try:
            return ranks, ranks._build_engines(config, device, deadline)
        except BaseException:
            ranks.close(gently=False)
            raise

    def _build_engines(self, config: RolloutConfig, device: str, deadline: float) -> EngineInfo:
        def left() -> float:
            return max(1.0, deadline - time.monotonic())

        self.hosts = self.call("host", what="start-up", timeout_s=left())
        here = ray.get_runtime_context().get_node_id()
        self._processes = {host.pid: start_ticks(host.pid) for host in self.hosts if host.node == here}
        devices = [device_id for host in self.hosts for device_id in host.devices]
        if config.place is not None:
            devices = config.place.devices
        if device == "cuda" and len(set(devices)) != config.ranks:
            raise MoebiusError(f"each rank needs a GPU of its own, Ray gave {[host.devices for host in self.hosts]}")
        self.ident, port = self.gather({self.handles[0].claim.remote(): 0}, what="start-up", timeout_s=left())[0]
        setups = [
            (RankSetup(config.engine, rank, config.ranks, device, devices, port, self.ident),)
            for rank in range(config.ranks)
        ]
        infos: list[EngineInfo] = self.call("start", setups, what="start-up", timeout_s=left())
        self.starts = [rank_start(info.startup, info.memory) for info in infos]
        return infos[0]

    def submit(self, method: str, args: Sequence[tuple[Any, ...]] | None = None) -> dict[Any, int]:
        """Send a call to every rank, `args[r]` to rank r; returns what `gather` takes."""
        args = args if args is not None else [()] * len(self.handles)
        return {getattr(h, method).remote(*a): r for r, (h, a) in enumerate(zip(self.handles, args, strict=True))}

    def call(self, method: str, args: Sequence[tuple[Any, ...]] | None = None, **how: Any) -> list[Any]:
        """`submit`, then `gather`."""
        return self.gather(self.submit(method, args), **how)

    def gather(
        self,
        refs: dict[Any, int],
        *,
        what: str,
        timeout_s: float | None = None,
        on_poll: OnPoll | None = None,
        quick: bool = False,
        held: bool = False,
    ) -> list[Any]:
        """Answers in rank order. `what` names the call in errors; `on_poll` gets every rank's progress as it runs.

        `quick`: the call waits for nothing, so that a rank that is late gives no sign of life. `held`: Ctrl-C waits for
        the answers.

        Raises:
            RankDied: a rank's process ended, was silent for `silent_s` (only with `on_poll`), or the time ran out.
            RankError: a rank raised an error.
        """
        pending = dict(refs)
        answers: dict[int, Any] = {}
        errors: dict[int, BaseException] = {}
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        watch = ProgressWatch(self) if on_poll else None
        while pending:
            with nullcontext() if held else waiting():
                ready, _ = ray.wait(list(pending), num_returns=len(pending), timeout=POLL_S)
            for ref in ready:
                rank = pending.pop(ref)
                try:
                    answers[rank] = ray.get(ref)
                except RayActorError as error:
                    raise self._dead(rank, self._obituary(rank, what, error)) from error
                except RayTaskError as error:
                    errors[rank] = error.cause if error.cause is not None else error
                    deadline = min(deadline or float("inf"), time.monotonic() + GRACE_S)
            now = time.monotonic()
            if watch and on_poll and pending:
                on_poll(watch.look())
                silent = watch.silent(now)
                if silent is not None:
                    raise self._dead(silent, f"rank {silent} {_silence(self.silent_s, what)}")
            if pending and deadline is not None and now > deadline:
                break
        if errors:
            rank = min(errors)
            cause = errors[rank]
            kind = "" if isinstance(cause, EngineError) else f"{type(cause).__name__}: "
            phase = self.phase(rank)
            message = f"rank {rank} failed during {what}{_in(phase, what)}: {kind}{cause}{self._log_path(rank)}"
            alone = rank if len(errors) == 1 else None
            raise RankError(message, cause, not pending, alone, phase) from cause
        if pending:
            late = sorted(pending.values())
            if quick:
                raise self._dead(late[0], f"rank {late[0]} {_silence(timeout_s or 0.0, what)}")
            raise self._dead(late[0], f"ranks {late} did not end {what} in time ({timeout_s or 0:.0f} s)")
        return [answers[rank] for rank in sorted(answers)]

    def tell(self, method: str, *args: Any) -> None:
        """Send a call to every rank without waiting for answers."""
        for handle in self.handles:
            getattr(handle, method).remote(*args)

    @uninterrupted
    def close(self, *, gently: bool) -> None:
        """End all ranks: `gently` lets engines close first. Frees the placement and the shared memory. Never raises.

        Ctrl-C shortens a wait and is raised in the end: all the rest is done.
        """
        with ExitStack() as rest:  # last in, first out
            rest.callback(self._remove_segments)
            if ray.is_initialized():
                rest.callback(self._wait_for_exit)
                if self._placement is not None:
                    rest.callback(remove_placement_group, self._placement)
                for handle in self.handles:
                    rest.callback(ray.kill, handle, no_restart=True)
                if gently:
                    refs = list(self.submit("shutdown"))
                    # A rank that cannot close in time or in order is killed, like all others.
                    with waiting():
                        ray.wait(refs, num_returns=len(refs), timeout=SHUTDOWN_S)

    def _remove_segments(self) -> None:
        ident = parse_ident(self.ident)
        if ident is not None:
            remove_own(ident)

    def _wait_for_exit(self) -> None:
        """Until the processes are gone, where that can be seen: only then are their devices and memory free.

        Ray asks a process to end; one that is stopped, or hangs, has to be killed.
        """
        begun = time.monotonic()
        while left := [pid for pid, ticks in self._processes.items() if ticks and start_ticks(pid) == ticks]:
            waited = time.monotonic() - begun
            if waited > EXIT_S:
                _log.warning("processes %s have not ended %g s after being killed", left, EXIT_S)
                return
            if waited > KILL_S:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError, PermissionError):  # gone, or not ours to kill
                        os.kill(pid, signal.SIGKILL)
            pause(0.05)

    def phase(self, rank: int) -> str | None:
        """What a rank did last, dead or alive; None where that cannot be seen."""
        if (mark := read_mark(self.ident, rank)) is not None:
            return mark.phase
        here = ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""
        if not self.hosts or self.hosts[rank].node == here:
            return None
        # The ranks' machine is another: whichever of them still answers can look there.
        asked = [handle.phase_of.remote(rank) for other, handle in enumerate(self.handles) if other != rank]
        for ref in ray.wait(asked, num_returns=len(asked), timeout=MARK_S)[0]:
            try:
                found: str | None = ray.get(ref)
                return found
            except (RayActorError, RayTaskError):  # it has died, too
                continue
        return None

    def _dead(self, rank: int, words: str) -> RankDied:
        phase = self.phase(rank)
        return RankDied(f"{words}{_in(phase, words)}{self._log(rank)}", rank=rank, phase=phase)

    def _obituary(self, rank: int, what: str, error: RayActorError) -> str:
        if not self.hosts:  # it never came up, and Ray knows why
            return f"the process of rank {rank} ended during {what}: {error}"
        return f"the process of rank {rank} (pid {self.hosts[rank].pid}) ended during {what}"

    def _log_path(self, rank: int) -> str:
        log_file = self.hosts[rank].log_file if self.hosts else None
        return f"; its log is {log_file}" if log_file else ""

    def _log(self, rank: int) -> str:
        """Where the rank's output is, and its end if the file is on this machine."""
        path = self._log_path(rank)
        log_file = self.hosts[rank].log_file if path else None
        if log_file is None or not Path(log_file).is_file():
            return path
        lines = Path(log_file).read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
        told = [line for line in lines if not line.startswith((":job_id:", ":actor_name:"))]  # Ray's own marks
        return path + "".join(f"\n  | {line}" for line in told[-5:])


def _silence(seconds: float, what: str) -> str:
    return f"gave no sign of life for {seconds:.0f} s during {what}"


def _in(phase: str | None, said: str) -> str:
    """ ", in PHASE", where the words before do not say so already."""
    return f", in {phase}" if phase and phase not in said else ""


class ProgressWatch:
    """Asks every rank for progress without ever waiting for an answer."""

    def __init__(self, ranks: Ranks) -> None:
        self._handles, self._silent_s = ranks.handles, ranks.silent_s
        self._latest = [Progress() for _ in self._handles]
        self._asked: dict[Any, int] = {}
        self._answered = [time.monotonic()] * len(self._handles)
        self._next = 0.0

    def look(self) -> list[Progress]:
        """The latest known progress of every rank."""
        now = time.monotonic()
        if self._asked:
            ready, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)
            for ref in ready:
                rank = self._asked.pop(ref)
                try:
                    self._latest[rank] = ray.get(ref, timeout=1)
                except (RayActorError, GetTimeoutError):  # the main call reports a dead rank
                    continue
                self._answered[rank] = now
        if now >= self._next:
            busy = set(self._asked.values())
            for rank, handle in enumerate(self._handles):
                if rank not in busy:
                    self._asked[handle.progress.remote()] = rank
            self._next = now + PROGRESS_S
        return list(self._latest)

    def silent(self, now: float) -> int | None:
        """A rank that has not answered for `silent_s`, if there is one."""
        return next((rank for rank, t in enumerate(self._answered) if now - t > self._silent_s), None)
