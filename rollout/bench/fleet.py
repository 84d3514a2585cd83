"""Processes that stay: one per rank, each holding an engine, driven over pipes. No Ray.

A rank is a session of its own, so that closing it also ends processes its engine started. It ends by itself when the
process that owns the fleet is gone.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

from moebius.rollout.errors import MoebiusError
from moebius.rollout.shm import clean_leftovers, make_ident, name_python_segments, parse_ident, remove_own

GRACE_S = 10.0  # after one rank failed: for the others to tell their errors; and for engines to close
KILLED_S = 60.0  # most to wait for a killed process to be gone, which takes long only on a busy machine
_PR_SET_PDEATHSIG = 1  # prctl(2)


class FleetError(MoebiusError):
    """A rank failed, died or did not answer; the fleet is ended. The message has the rank's own words."""


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Fleet:
    """`make(*arguments)` in every rank process; `call` runs a picklable function on what it made, in all of them.

    Args:
        name: for messages and log files.
        environments: variables of each rank; RANK, MASTER_PORT and the group's identity are set here.
        make: importable function that builds the rank's engine.
        logs: folder for the ranks' output, `<name>.<rank>.log`.
        start_s: longest start, in seconds.
        call_s: longest call, in seconds.

    Raises:
        FleetError: a rank did not start.
    """

    def __init__(
        self,
        name: str,
        environments: Sequence[dict[str, str]],
        make: Callable[..., Any],
        *arguments: Any,
        logs: Path,
        start_s: float = 1800,
        call_s: float = 1800,
        wait: bool = True,
    ) -> None:
        self.name, self.call_s, self._logs = name, call_s, logs
        logs.mkdir(parents=True, exist_ok=True)
        clean_leftovers()
        self.ident = make_ident()
        self.problem: str | None = None
        self._pipes: list[connection.Connection] = []
        self._processes: list[BaseProcess] = []
        context = get_context("spawn")
        port = str(free_port())
        started = time.monotonic()
        atexit.register(self.close)  # multiprocessing waits for its processes at exit: they must have been told to end
        for rank, variables in enumerate(environments):
            mine, theirs = context.Pipe()
            environment = variables | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(len(environments)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "MOEBIUS_GROUP_ID": str(self.ident),
            }
            arguments_of_rank = (theirs, str(self.log_of(rank)), os.getpid(), make, arguments)
            # Not a daemon in multiprocessing's sense: those may not start processes, which vLLM's own executor does.
            process = context.Process(target=_serve, args=arguments_of_rank, name=f"{name}.{rank}")
            with _environ(environment):  # libraries read it when the process loads them, so it must be there at once
                process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)
        self._started, self._start_s = started, start_s
        self.start_seconds = 0.0
        if wait:
            self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Wait for the engines, where the fleet was made with wait=False. Raises FleetError if they do not come up."""
        self._collect("start", self._start_s)
        self.start_seconds = time.monotonic() - self._started

    def __len__(self) -> int:
        return len(self._processes)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def log_of(self, rank: int) -> Path:
        """File with the rank's standard output and error."""
        return self._logs / f"{self.name}.{rank}.log"

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(engine, *args)` in every rank at once; results by rank. Raises FleetError, and ends the fleet."""
        if self.problem:
            raise FleetError(self.problem)
        try:
            try:
                for pipe in self._pipes:
                    pipe.send((function, args))
            except OSError:
                self._fail([f"a process of {self.name} has ended"])
            return self._collect(getattr(function, "__name__", "call"), self.call_s)
        except BaseException:  # Ctrl-C: answers that are still to come must not be taken for those of another call
            if self.problem is None:
                self.problem = f"{self.name} was ended in the middle of a call"
                self._end(0)
            raise

    def close(self) -> None:
        """Let the engines close, then end all processes and remove their shared memory."""
        for pipe in self._pipes:
            try:
                pipe.send(None)
            except OSError:
                continue  # that rank has ended already
        self._end(GRACE_S)
        self.problem = self.problem or f"{self.name} was closed"

    def _collect(self, what: str, limit_s: float) -> list[Any]:
        answers: dict[int, Any] = {}
        faults: list[str] = []
        ranks = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        deadline = time.monotonic() + limit_s
        while len(answers) < len(ranks) and (left := deadline - time.monotonic()) > 0:
            waiting = [pipe for pipe, rank in ranks.items() if rank not in answers]
            for pipe in connection.wait(waiting, timeout=left):
                assert isinstance(pipe, connection.Connection)
                rank = ranks[pipe]
                try:
                    ok, value = pipe.recv()
                except (EOFError, ConnectionError):
                    ok, value = False, "its process has ended"
                answers[rank] = value
                if not ok:
                    if not faults:  # the others may wait in a collective for this one
                        deadline = min(deadline, time.monotonic() + GRACE_S)
                    faults.append(f"rank {rank}: {value}; see {self.log_of(rank)}")
        if not faults and len(answers) < len(ranks):
            silent = sorted(set(ranks.values()) - set(answers))
            faults.append(f"no answer of ranks {silent} to {what} within {limit_s:.0f} s; see {self.log_of(silent[0])}")
        if faults:
            self._fail(faults)
        return [answers[rank] for rank in range(len(ranks))]

    def _fail(self, faults: list[str]) -> None:
        self.problem = f"{self.name} failed: " + "; ".join(faults)
        self._end(0)
        raise FleetError(self.problem)

    def _end(self, grace_s: float) -> None:
        deadline = time.monotonic() + grace_s
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            try:
                os.killpg(process.pid or 0, signal.SIGKILL)  # each rank leads a process group of its own
            except (ProcessLookupError, PermissionError):
                if process.is_alive():  # it has not come as far as making its group
                    process.kill()
            process.join(KILLED_S)
        atexit.unregister(self.close)
        for pipe in self._pipes:
            pipe.close()
        remove_own(self.ident)


@contextmanager
def _environ(variables: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _serve(
    pipe: connection.Connection,
    log: str,
    parent: int,
    make: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return  # the owner ended before it could be watched
    _log_to(log)
    ident = parse_ident(os.environ["MOEBIUS_GROUP_ID"])
    if ident is not None:
        name_python_segments(ident)
    try:
        engine = make(*arguments)
        pipe.send((True, None))
        while (message := pipe.recv()) is not None:
            function, args = message
            pipe.send((True, function(engine, *args)))
    except EOFError:
        return  # the owner is gone
    except Exception as error:  # noqa: BLE001  (told to the owner, which ends the fleet)
        traceback.print_exc()
        pipe.send((False, f"{type(error).__name__}: {error}"))
        return
    shutdown = getattr(engine, "shutdown", None)
    if shutdown is not None:
        shutdown()


def _log_to(path: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
