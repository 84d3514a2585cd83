"""Which prompt brings ranks down: found by replaying suspects in parts, so that prompts beside it are not blamed.

Prompts that were in the batch when ranks were lost are suspects. After the first loss everything is replayed at once:
most losses have another cause. If some of them are in the batch at the next loss again, that batch is tried by halves,
these first, with everything else held back; the half that ranks are lost with is halved again. A prompt is given up
when ranks are lost while it is alone, after it was in the batch at an earlier loss.
"""

from __future__ import annotations

from collections.abc import Iterable

Place = tuple[int, int]  # a prompt: the step it was given to, and its number there


class Suspicion:
    """The suspects of one step; `lost` and `ended` tell it of what happens."""

    def __init__(self) -> None:
        self.suspects: list[Place] = []
        self._trial: set[Place] | None = None  # what may be drawn at present; None: everything

    @property
    def trying(self) -> bool:
        """Whether prompts are held back."""
        return self._trial is not None

    def may_run(self, place: Place) -> bool:
        """Whether a prompt is to be drawn at present."""
        return self._trial is None or place in self._trial

    def lost(self, batch: Iterable[Place]) -> Place | None:
        """Ranks were lost with these prompts in the batch; returns the prompt to give up, if it is found."""
        there = sorted(set(batch))
        again = [place for place in self.suspects if place in there]
        if self.trying and not there:
            return None  # whatever it was: the same once more
        if not again:
            self.suspects = there
            return None
        if len(there) == 1:
            self.suspects, self._trial = [], None
            return there[0]
        self.suspects = again + [place for place in there if place not in again]
        self._try_half(len(again))
        return None

    def ended(self, places: Iterable[Place]) -> bool:
        """These prompts have ended in peace; returns whether others may be drawn now that might not before."""
        done = set(places)
        self.suspects = [place for place in self.suspects if place not in done]
        if self._trial is None or self._trial.intersection(self.suspects):
            return False
        self._try_half()
        return True

    def _try_half(self, most: int | None = None) -> None:
        self._trial = set(self.suspects[: (len(self.suspects) + 1) // 2][:most]) or None
