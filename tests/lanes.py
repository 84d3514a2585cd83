"""What `make test` runs after lint: several lanes side by side, each a process of its own.

Tests that start engines keep two cores busy most of the time, so they follow each other; types and unit tests take what
these leave, with less right to the cores, so that engines are not late because of them.

While lanes run, their progress is shown line by line; what else a lane has to say comes in one piece when it ends, and
a table of all lanes last. The exit status is 1 if any lane failed. On Ctrl-C, SIGTERM or SIGHUP, each lane gets what
Ctrl-C sends, so that tests can end what they have started; what then still runs is killed, and the status is 128 + the
signal. A second signal kills at once.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.processes import descendants
from moebius.rollout.shm import start_ticks
from tests.segments import LANE

ROOT = Path(__file__).parents[1]
GRACE_S = 30.0  # for fixtures to end what they started; Ray takes some seconds
POLL_S = 0.2
PROGRESS = re.compile(r"\[ *\d+%\]$")
PR_SET_CHILD_SUBREAPER = 36  # prctl(2)


@dataclass(slots=True)
class Lane:
    """One command, its log, and how it went."""

    name: str
    command: list[str]
    nice: int = 0
    log: Path = Path()
    pid: int = 0
    status: int | None = None  # exit status; negative: the signal that ended it
    started: float = 0.0
    minutes: float = 0.0
    read: int = 0  # bytes of the log
    kept: list[str] = field(default_factory=list)  # lines that tell of no progress

    @property
    def runs(self) -> bool:
        return self.pid > 0 and self.status is None

    @property
    def outcome(self) -> str:
        if self.pid == 0:
            return "not run"
        if self.status is None:
            return "did not end, killed"
        if self.status == 0:
            return f"passed   {self.minutes:5.1f} min"
        cause = f"exit status {self.status}" if self.status > 0 else signal.Signals(-self.status).name
        return f"FAILED   {self.minutes:5.1f} min, {cause}"

    def start(self, logs: Path) -> None:
        self.log, self.started = logs / f"{self.name}.log", time.monotonic()
        with self.log.open("wb") as log:
            # In a session of its own: Ctrl-C on the terminal is for this program, which hands it on.
            process = subprocess.Popen(
                ["nice", "-n", str(self.nice), *self.command],
                cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=_environment() | {LANE: self.name}, start_new_session=True,
            )  # fmt: skip
        self.pid = process.pid
        process.returncode = 0  # it is waited for in `_reap`, where all children are

    def show(self) -> None:
        """Print the lines of progress that the log has got; all other lines when the lane has ended."""
        if self.pid == 0:
            return
        with self.log.open("rb") as log:
            log.seek(self.read)
            text = log.read()
        if self.runs:
            text = text[: text.rfind(b"\n") + 1]  # whole lines
        self.read += len(text)
        for line in text.decode(errors="replace").splitlines():
            if PROGRESS.search(line):
                print(f"{self.name:12}{line}", flush=True)
            else:
                self.kept.append(line)

    def tell(self) -> None:
        """Everything but progress."""
        self.show()
        print(f"\n---- {self.name}: {self.outcome}", *self.kept, "", sep="\n", flush=True)


def _environment() -> dict[str, str]:
    """This one's. Python keeps what it compiles: a hundred processes of the tests import the same modules."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def lanes() -> list[Lane]:
    """All of them; they may run at the same time."""
    pytest = [sys.executable, "-m", "pytest"]
    packages = [word for name in ("rollout", "engine", "kernels") for word in ("-p", f"moebius.{name}")]
    return [
        Lane("engines", [*pytest, "--durations=20", "tests/engine", "tests/integration", "tests/gpu"]),
        Lane("types", [sys.executable, "-m", "mypy", *packages], nice=5),
        Lane("unit", [*pytest, "tests/unit"], nice=5),
    ]


def run(todo: list[Lane], at_once: int, logs: Path) -> int:
    """Run lanes, at most `at_once` at a time, until all have ended; returns the exit status."""
    logs.mkdir(parents=True, exist_ok=True)
    # Processes whose parent has died become children of this one, whatever session they are in: so all can be ended.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda came, _: signals.append(came))
    waiting = list(todo)
    while (waiting or any(lane.runs for lane in todo)) and not signals:
        while waiting and sum(lane.runs for lane in todo) < at_once:
            waiting.pop(0).start(logs)
        _wait(todo)
    if signals:
        print(f"\n{signal.Signals(signals[0]).name}: ending the tests", flush=True)
        for lane in todo:
            if lane.runs:
                os.kill(lane.pid, signal.SIGINT)
        deadline = time.monotonic() + GRACE_S
        while any(lane.runs for lane in todo) and len(signals) == 1 and time.monotonic() < deadline:
            _wait(todo)
    _kill_all()
    for lane in todo:
        if lane.runs:
            lane.tell()
    width = max(len(lane.name) for lane in todo)
    print(*(f"{lane.name:{width}}  {lane.outcome}" for lane in todo), sep="\n", flush=True)
    return 128 + signals[0] if signals else int(any(lane.status != 0 for lane in todo))


def _wait(todo: Iterable[Lane]) -> None:
    """A moment, and what has happened in it."""
    time.sleep(POLL_S)
    ended = _reap(todo)
    for lane in todo:
        if lane in ended:
            lane.tell()
        elif lane.runs:
            lane.show()


def _reap(todo: Iterable[Lane]) -> list[Lane]:
    """Take note of children that have ended; returns the lanes among them."""
    ended = []
    by_pid = {lane.pid: lane for lane in todo if lane.runs}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:  # no child is left
            return ended
        if pid == 0:
            return ended
        if (lane := by_pid.get(pid)) is not None:
            lane.status, lane.minutes = os.waitstatus_to_exitcode(status), (time.monotonic() - lane.started) / 60
            ended.append(lane)


def _kill_all() -> None:
    """Kill every process that comes from this one, until there is none."""
    # Some only have to be waited for.
    while left := [pid for pid in descendants(os.getpid()) if start_ticks(pid) is not None]:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(POLL_S)
        _reap(())


if __name__ == "__main__":
    todo = lanes()
    sys.exit(run(todo, len(todo), ROOT / "build" / "lanes"))
