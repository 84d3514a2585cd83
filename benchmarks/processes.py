"""What processes hold, read from /proc (see proc(5)), and the shared memory of groups."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from moebius.rollout.shm import SHM_DIR, parse_ident

_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Usage:
    """Resident memory in bytes, that of the process alone and that which it may share, and open file descriptors."""

    rss: int
    shared: int  # files and shared memory, among it what it has read from Ray's object store
    fds: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        """Of a process of this user."""
        _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split())
        fds = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        return cls((resident - shared) * _PAGE, shared * _PAGE, fds)


def descendants(pid: int) -> list[int]:
    """Processes that a process has started, and those that they have."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):  # it has just ended
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, queue = [], [pid]
    while queue:
        own = children.get(queue.pop(), [])
        found += own
        queue += own
    return found


def segments(pids: Collection[int]) -> set[str]:
    """Names of the shared memory of groups that belongs to one of these processes, dead or alive."""
    named = ((path.name, parse_ident(path.name)) for path in SHM_DIR.iterdir())
    return {name for name, ident in named if ident is not None and ident.pid in pids}
