"""What lies in /dev/shm, but for that of tests which run beside these (tests/lanes.py)."""

from __future__ import annotations

import os
from pathlib import Path

from moebius.rollout.shm import SHM_DIR, owner_alive, parse_ident

LANE = "MOEBIUS_TEST_LANE"


def segment_names(directory: Path = SHM_DIR) -> set[str]:
    """All names, without those of a living owner that another lane has started."""
    return {name for name in os.listdir(directory) if not _of_another_lane(name)}


def _of_another_lane(name: str) -> bool:
    ident = parse_ident(name)
    if ident is None or not owner_alive(ident):
        return False
    return lane_of(ident.pid) not in (None, os.environ.get(LANE))


def lane_of(pid: int) -> str | None:
    """The lane a process was started in; None where it was started by hand, hides its environment, or has ended."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    found = [entry for entry in environment if entry.startswith(f"{LANE}=".encode())]
    return found[0].decode().partition("=")[2] if found else None
