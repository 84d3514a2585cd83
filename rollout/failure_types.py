"""Settings for what happens when ranks fail, and what is told of a failure afterwards. docs/reliability.md explains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

FAILED = "failed"  # finish reason of a sample that was given up because its prompt brings ranks down


class FailureSettings(BaseModel):
    """What a group does when a rank dies, fails or hangs."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    on_failure: Literal["replay", "raise"] = Field(
        "replay",
        description="replay: start all ranks again with the last weights and draw what was unfinished anew, with the "
        "same seeds; raise: give the error to the caller, who calls restart().",
    )
    max_restarts: int = Field(
        8, ge=1, description="Restarts in a row without a step that ended well; after so many the error is raised."
    )
    step_deadline_s: float | None = Field(
        None,
        gt=0,
        description="Seconds after which a step counts as hung, as if a rank had died; of an open step: since anything "
        "was submitted or ended. Above what a step may take. None: no limit.",
    )
    silent_s: float = Field(60, gt=0, description="A rank that answers nothing for so many seconds counts as dead.")
    keep_weights: Literal["none", "host"] = Field(
        "none",
        description="host: keep a copy of the last committed update in the host's shared memory, for restarts. "
        "none: after a restart `on_restart` or an update must send weights again.",
    )


def pause_s(failed: int) -> float:
    """Seconds to wait before ranks are started again, after so many starts in a row that failed: 0, 1, 2, 4 ... 30.

    What keeps ranks from starting is mostly something that passes: memory of dead processes that is not free yet, a
    node that is coming back, a file system that does not answer.
    """
    return min(30.0, 2.0 ** (failed - 1)) if failed else 0.0


@dataclass(frozen=True, slots=True)
class Loss:
    """The ranks were lost and started again."""

    during: str  # "step 12", "sleep", ...
    why: str  # one line
    rank: int | None  # that is to blame, where that is known
    phase: str | None  # it was in, likewise
    seen_at: float  # time.monotonic() when the group learnt of it
    seconds: float  # from then until the new ranks were ready
    replayed: int = 0  # samples that are drawn anew
    given_up: tuple[tuple[int, int], ...] = ()  # (step, prompt) of prompts that are not tried again
