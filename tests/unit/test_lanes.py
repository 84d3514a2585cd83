"""The program behind `make test`: what it shows, its exit status, and that nothing outlives it."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moebius.rollout.shm import make_ident, start_ticks
from tests.lanes import ROOT
from tests.segments import LANE, segment_names

PROGRAM = """
import sys
from pathlib import Path
from tests import lanes
lanes.GRACE_S = 1.0
todo = [lanes.Lane(f"lane{i}", ["sh", "-c", command]) for i, command in enumerate(sys.argv[3:])]
sys.exit(lanes.run(todo, int(sys.argv[2]), Path(sys.argv[1])))
"""
# A process in a session of its own, whose parent ends at once.
ORPHAN = "(setsid sh -c 'echo $$ > {note}; exec sleep 600' &) ; sleep 0.2; "


def start(logs: Path, *commands: str, at_once: int = 9) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", PROGRAM, str(logs), str(at_once), *commands]
    return subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def pid_in(note: Path) -> int:
    deadline = time.monotonic() + 30
    while not (note.exists() and (text := note.read_text().strip())):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return int(text)


def test_output_and_status(tmp_path: Path) -> None:
    good = start(tmp_path, "echo one; echo 'tests/a.py ..  [ 50%]'; echo two", "echo three")
    output = good.communicate(timeout=60)[0]
    assert good.returncode == 0
    lines = output.splitlines()
    assert "lane0       tests/a.py ..  [ 50%]" in lines
    assert [line for line in lines if line in ("one", "two")] == ["one", "two"] and "three" in lines
    assert all("passed" in line for line in lines[-2:])


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(("how", "words"), [("exit 3", "exit status 3"), ("kill -SEGV $$", "SIGSEGV")])
def test_any_lane_that_fails_makes_all_fail(tmp_path: Path, failing: int, how: str, words: str) -> None:
    commands = ["echo first", "echo second"]
    commands[failing] += f"; printf 'no line end'; {how}"
    program = start(tmp_path, *commands, at_once=1)
    output = program.communicate(timeout=60)[0]
    assert program.returncode == 1
    assert "first" in output and "second" in output and "no line end" in output
    assert [words in line for line in output.splitlines()[-2:]] == [failing == 0, failing == 1]


def test_what_a_lane_leaves_is_ended(tmp_path: Path) -> None:
    program = start(tmp_path, ORPHAN.format(note=tmp_path / "note"))
    assert program.wait(60) == 0
    assert start_ticks(pid_in(tmp_path / "note")) is None


def test_ctrl_c_works_in_lanes_of_a_program_that_was_told_to_ignore_it(tmp_path: Path) -> None:
    """As a shell tells what it starts in the background; tests that interrupt themselves would fail."""
    interrupt = shlex.quote(f"{sys.executable} -c 'import os, signal; os.kill(os.getpid(), signal.SIGINT)'")
    arguments = [sys.executable, "-c", PROGRAM, str(tmp_path), "9", f"sh -c {interrupt}"]
    command = ["sh", "-c", f"trap '' INT; exec {shlex.join(arguments)}"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False).stdout
    assert "KeyboardInterrupt" in output and "FAILED" in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all(tmp_path: Path, number: signal.Signals) -> None:
    """One lane ends by itself when interrupted, one takes no notice; a third was not begun."""
    commands = [
        ORPHAN.format(note=tmp_path / "orphan")
        + f"trap 'echo tidied up; exit 2' INT; echo $$ > {tmp_path}/tidy; while :; do sleep 0.1; done",
        f"trap '' INT; echo $$ > {tmp_path}/deaf; sleep 600; sleep 600",
        "echo never",
    ]
    program = start(tmp_path, *commands, at_once=2)
    pids = [pid_in(tmp_path / name) for name in ("orphan", "tidy", "deaf")]
    program.send_signal(number)
    output = program.communicate(timeout=60)[0]
    assert program.returncode == 128 + number
    assert all(start_ticks(pid) is None for pid in pids)
    assert "tidied up" in output and "never" not in output
    words = ["exit status 2", "killed", "not run"]
    assert all(word in line for word, line in zip(words, output.splitlines()[-3:], strict=True))


def test_segments_of_another_lane_do_not_count(tmp_path: Path) -> None:
    (tmp_path / f"{make_ident()}-own").touch()
    command = ["sh", "-c", "echo up; read until_the_end"]
    environment = os.environ | {LANE: "another"}
    other = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None and other.stdout.readline() == b"up\n"
    theirs = f"moebius-{other.pid}-{start_ticks(other.pid)}-00000000-theirs"
    (tmp_path / theirs).touch()
    assert [name.rpartition("-")[2] for name in segment_names(tmp_path)] == ["own"]
    other.communicate()
    assert theirs in segment_names(tmp_path), "left by one that is gone"


def test_python_keeps_what_it_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    output = start(tmp_path, "echo told: ${PYTHONDONTWRITEBYTECODE:-nothing}").communicate(timeout=60)[0]
    assert "told: nothing" in output.splitlines()
