"""Names of a group's shared-memory segments, and removal of those whose owner is gone.

Segments in /dev/shm outlive a killed process. So every group has an identity that is part of its segments' names and
says whose they are: `moebius-<pid>-<start time>-<hex>`, pid and start time (clock ticks since boot, field 22 of
/proc/<pid>/stat, see proc(5)) of the owner on that machine. The pair tells a living owner from a later process that
got the same pid. Removing a name does not disturb a process that has the segment mapped.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from dataclasses import dataclass
from multiprocessing import shared_memory
from pathlib import Path

SHM_DIR = Path("/dev/shm")
_IDENT = re.compile(r"(?<![0-9a-z])moebius-(?P<pid>\d+)-(?P<start>\d+)-(?P<unique>[0-9a-f]{8})(?![0-9a-z])")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ident:
    """Identity of one group on one machine; `str()` gives the form used in names."""

    pid: int
    start_ticks: int
    unique: str  # 8 hex digits

    def __str__(self) -> str:
        return f"moebius-{self.pid}-{self.start_ticks}-{self.unique}"


def make_ident() -> Ident:
    """A new identity owned by the calling process."""
    start = start_ticks(os.getpid())
    if start is None:
        raise RuntimeError("/proc/self/stat cannot be read; shared-memory clean-up needs a mounted /proc")
    return Ident(os.getpid(), start, secrets.token_hex(4))


def parse_ident(filename: str) -> Ident | None:
    """The identity in the name of a segment, or None when it is not one of ours."""
    match = _IDENT.search(filename)
    return Ident(int(match["pid"]), int(match["start"]), match["unique"]) if match else None


def name_python_segments(ident: Ident) -> None:
    """Make segments that this process creates through `multiprocessing.shared_memory` carry `ident` too.

    vLLM's message queues use them, under random names. Their clean-up is a helper process of Python's, which Ray ends
    together with a killed rank. Raises RuntimeError where Python keeps the prefix elsewhere (seen in 3.11 and 3.12).
    """
    if not isinstance(getattr(shared_memory, "_SHM_NAME_PREFIX", None), str):
        raise RuntimeError("this Python has no multiprocessing.shared_memory._SHM_NAME_PREFIX; use 3.11 or 3.12")
    prefix = f"/{ident}-py-"
    vars(shared_memory).update(_SHM_NAME_PREFIX=prefix, _SHM_SAFE_NAME_LENGTH=len(prefix) + 16)


def start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None when there is no such process (or it is a zombie)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command (field 2) is in parentheses and may itself hold spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def owner_alive(ident: Ident) -> bool:
    """Whether the process that made `ident` still runs on this machine."""
    return start_ticks(ident.pid) == ident.start_ticks


def leftovers(directory: Path = SHM_DIR) -> list[Path]:
    """Segments of this package whose owner is gone."""
    return sorted(path for path, ident in _segments(directory) if not owner_alive(ident))


def clean_leftovers(directory: Path = SHM_DIR) -> list[Path]:
    """Remove what `leftovers` finds and return it; segments of other users, which cannot be removed, are logged."""
    return [path for path in leftovers(directory) if _remove(path)]


def remove_own(ident: Ident, directory: Path = SHM_DIR) -> list[Path]:
    """Remove every segment of one group, whoever is alive: for the end of that group."""
    return [path for path, found in sorted(_segments(directory)) if found == ident and _remove(path)]


def _segments(directory: Path) -> list[tuple[Path, Ident]]:
    try:
        paths = list(directory.iterdir())
    except FileNotFoundError:
        return []
    named = [(path, parse_ident(path.name)) for path in paths]
    return [(path, ident) for path, ident in named if ident is not None and not path.is_dir()]


def _remove(path: Path) -> bool:
    try:
        path.unlink()
    except FileNotFoundError:  # another group's clean-up was faster
        return False
    except PermissionError as error:
        _log.warning("cannot remove %s, left over from a dead run: %s; remove it as its owner", path, error.strerror)
        return False
    return True
