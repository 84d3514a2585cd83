"""When a step may stop before all its prompts are done, and what becomes of the others then."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Budget(BaseModel):
    """Limits of a step; the first that is reached ends it.

    A group is complete when all samples of its prompt have ended. Groups of earlier steps, which a step goes on with,
    count like its own. Groups that are complete always come back; of the others, `rest` says what becomes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    tokens: int | None = Field(None, ge=1, description="Output tokens sampled by the step, looked at twice a second.")
    seconds: float | None = Field(None, gt=0, description="Time since the step began.")
    fraction: float | None = Field(None, gt=0, le=1, description="Share of the groups that must be complete.")
    groups: int | None = Field(
        None, ge=1, description="So many complete groups: the first ones come back, and never more (over-sampling)."
    )
    rest: Literal["park", "abort"] = Field(
        "park", description="Incomplete groups go on in the next step (park), or are given up (abort)."
    )

    @model_validator(mode="after")
    def _some_limit(self) -> Budget:
        if self.tokens is None and self.seconds is None and self.fraction is None and self.groups is None:
            raise ValueError("a budget needs tokens, seconds, fraction or groups")
        return self

    def groups_wanted(self, groups: int) -> int | None:
        """Complete groups that end a step of so many; None: no limit of this kind."""
        wanted = [] if self.fraction is None else [math.ceil(self.fraction * groups - 1e-9)]
        wanted += [] if self.groups is None else [self.groups]
        return min(wanted, default=None)

    def spent(self, *, tokens: int, seconds: float) -> bool:
        """Whether the step has sampled, or taken, as much as it may."""
        return (self.tokens is not None and tokens >= self.tokens) or (
            self.seconds is not None and seconds >= self.seconds
        )
