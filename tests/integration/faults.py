"""Ways to bring a rank down at a named moment: functions that `RolloutGroup.on_ranks` calls in the ranks' processes.

They watch what every rank tells of its phases (moebius.engine.phases); the product has no part in it.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moebius.engine import phases

if TYPE_CHECKING:
    from moebius.rollout.group import RolloutGroup

KILL, POISON = f"{__name__}:kill_in", f"{__name__}:poison"


def arm(group: RolloutGroup, rank: int, phase: str, note: Path, times: int = 1, signum: int = signal.SIGKILL) -> None:
    """`rank` will get a signal when it enters `phase` for the `times`-th time from now on."""
    ranks = range(group.config.ranks)
    group.on_ranks(KILL, [(phase if r == rank else None, times, str(note), int(signum)) for r in ranks])


def kill_in(phase: str | None, times: int, note: str, signum: int) -> None:
    """A signal for this process in that phase; `note` then holds its name and the time (time.monotonic())."""
    left = times

    def watch(entered: str) -> None:
        nonlocal left
        left -= entered == phase
        if left == 0:
            Path(note).write_text(f"{time.monotonic()} {entered}", encoding="utf-8")
            os.kill(os.getpid(), signum)

    if phase is not None:
        phases.observers.append(watch)


def read_note(note: Path) -> tuple[float, str]:
    """When the rank was killed, and in which phase."""
    at, _, phase = note.read_text(encoding="utf-8").partition(" ")
    return float(at), phase


def poison(token: int) -> None:
    """From now on this process dies of every prompt that begins with that token, when its core gets it."""
    from moebius.engine.step import Step

    give_to_core = Step._give_to_core

    def give(self: Any, prepared: Any) -> None:
        if prepared.prompt_token_ids[0] == token:
            os.kill(os.getpid(), signal.SIGKILL)
        give_to_core(self, prepared)

    Step._give_to_core = give  # type: ignore[method-assign]
