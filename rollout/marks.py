"""Where each rank of a group is, readable after the rank has died: a small file in shared memory per rank.

A killed process leaves no words. What it wrote last stays in /dev/shm until the group's segments are removed.
"""

from __future__ import annotations

import mmap
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from moebius.rollout.shm import SHM_DIR, Ident, parse_ident

_RECORD = struct.Struct("<d120s")  # time.monotonic() at the phase's begin; its name, padded with zeros


@dataclass(frozen=True, slots=True)
class Mark:
    """The phase a rank is, or was, in, and since when by the clock of its machine (time.monotonic())."""

    phase: str
    since: float


def mark_path(ident: Ident, rank: int, directory: Path = SHM_DIR) -> Path:
    """The file of one rank; removed with the other segments of the group."""
    return directory / f"{ident}-phase-{rank}"


class Marker:
    """Writes a rank's mark. An observer of `moebius.engine.phases`: a call costs about a microsecond."""

    def __init__(self, path: Path) -> None:
        """Raises OSError when the file cannot be made."""
        with path.open("wb+") as file:
            file.write(_RECORD.pack(time.monotonic(), b""))
            file.flush()
            self._map = mmap.mmap(file.fileno(), _RECORD.size)

    def __call__(self, phase: str) -> None:
        # One assignment, so that a kill in between cannot leave half a record.
        self._map[:] = _RECORD.pack(time.monotonic(), phase.encode()[:120])

    def close(self) -> None:
        """Give the mapping up; the file stays."""
        self._map.close()


def read_mark(ident: str, rank: int, directory: Path = SHM_DIR) -> Mark | None:
    """What a rank wrote last; None when there is no such file on this machine, or nothing in it yet."""
    parsed = parse_ident(ident)
    if parsed is None:
        return None
    try:
        since, name = _RECORD.unpack(mark_path(parsed, rank, directory).read_bytes()[: _RECORD.size])
    except (OSError, struct.error):
        return None
    phase = name.rstrip(b"\0").decode("utf-8", "replace")
    return Mark(phase, since) if phase else None
