"""Shared-memory names and clean-up, with real files and real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from moebius.rollout.shm import (
    Ident,
    clean_leftovers,
    leftovers,
    make_ident,
    name_python_segments,
    owner_alive,
    parse_ident,
    remove_own,
    start_ticks,
)


def touch(directory: Path, ident: Ident, tail: str = "-tp:0-[0-1]-cpushm_0") -> Path:
    path = directory / f"{ident}{tail}"
    path.write_bytes(b"x")
    return path


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def test_an_ident_survives_the_names_segments_get():
    ident = make_ident()
    assert ident.pid == os.getpid()
    for name in (f"{ident}", f"-{ident}-tp:0-[0-1]-cpushm_1", f"//{ident}-ep:0-[0-1-2-3]-cpushm_3", f"torch_{ident}_1"):
        assert parse_ident(name) == ident


@pytest.mark.parametrize(
    "name",
    [
        "-tp:0-[0-1]-cpushm_0",
        "moebius",
        "moebius-12",
        "moebius-12-34-xyzw1234",
        "moebius-12-34-abcdef012",
        "amoebius-12-34-abcdef01",
        "psm_1a2b3c",
    ],
)
def test_foreign_names_have_no_ident(name):
    assert parse_ident(name) is None


def test_idents_of_one_process_differ():
    assert len({make_ident() for _ in range(50)}) == 50


def test_own_process_is_alive_and_a_recycled_pid_is_not():
    ident = make_ident()
    assert owner_alive(ident)
    assert not owner_alive(Ident(ident.pid, ident.start_ticks - 1, ident.unique))


def test_start_time_of_a_command_with_parentheses(tmp_path):
    odd = tmp_path / "a) b (c"
    odd.symlink_to("/bin/sleep")
    process = subprocess.Popen([str(odd), "30"])
    try:
        ours = start_ticks(os.getpid())
        theirs = start_ticks(process.pid)
        assert ours is not None and theirs is not None and theirs >= ours
    finally:
        process.kill()
        process.wait()


def test_only_segments_of_dead_owners_are_removed(tmp_path, other):
    start = start_ticks(other.pid)
    assert start is not None
    dead = touch(tmp_path, Ident(other.pid, start, "0123abcd"))
    alive = touch(tmp_path, make_ident())
    foreign = tmp_path / "-tp:0-[0-1]-cpushm_0"
    foreign.write_bytes(b"x")
    assert clean_leftovers(tmp_path) == []
    other.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # dead, but still a zombie
    assert leftovers(tmp_path) == [dead]
    other.wait()
    assert clean_leftovers(tmp_path) == [dead]
    assert sorted(tmp_path.iterdir()) == sorted([alive, foreign])


def test_remove_own_leaves_other_groups_of_the_process(tmp_path):
    mine, sibling = make_ident(), make_ident()
    gone = [touch(tmp_path, mine, f"-tp:0-[0-1]-cpushm_{i}") for i in range(2)]
    kept = touch(tmp_path, sibling)
    assert remove_own(mine, tmp_path) == gone
    assert list(tmp_path.iterdir()) == [kept]


def test_segments_of_python_carry_the_ident(monkeypatch):
    for name in ("_SHM_NAME_PREFIX", "_SHM_SAFE_NAME_LENGTH"):
        monkeypatch.setattr(shared_memory, name, getattr(shared_memory, name))  # restored after the test
    ident = make_ident()
    name_python_segments(ident)
    created = [shared_memory.SharedMemory(create=True, size=16) for _ in range(2)]
    try:
        assert [parse_ident(segment.name) for segment in created] == [ident, ident]
        opened = shared_memory.SharedMemory(created[0].name)
        created[0].buf[0] = 7
        assert opened.buf[0] == 7
        opened.close()
    finally:
        for segment in created:
            segment.close()
            segment.unlink()


def test_a_missing_directory_has_no_leftovers(tmp_path):
    assert clean_leftovers(tmp_path / "none") == []
