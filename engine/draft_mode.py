"""When TP decodes ahead and when it drafts. Plain arithmetic: no vLLM, no clocks of its own.

Decoding ahead, drafts are guessed now and then and compared with what was sampled since: how often they would have been
right is known before anything is verified, and costs nothing but the host's time. Drafting begins when by that it is
expected to be faster by `ENTER`, and ends when over the iterations since it has not been. All figures are the same on
all ranks (times are rank 0's, told to all), hence so are the decisions.

expected: tokens per ms of the best draft lengths in those without drafts, by costs, divided by the overhead of
synchronous iterations. That overhead and the scale of the costs are medians of what iterations have taken.
seen: tokens per iteration and request, times what iterations without drafts would have taken, in what they took.
"""

from __future__ import annotations

from collections import deque
from statistics import median

ENTER = 1.08  # expected speed from which drafting begins
EVIDENCE = 12.0  # right tokens promised by guesses that were judged: fewer say too little
PROBE, SELDOM = 16, 128  # iterations between two guesses while ahead, and when they have come to nothing
SOON = 2  # iterations more than a draft has tokens, between the first guesses
TRIAL, WINDOW = 8, 32  # iterations before drafting is judged by what it has come to, and over which it is
HOPELESS = 0.8  # seen speed at which half of `TRIAL` is enough
OVERHEAD = 1.4  # of a synchronous iteration, before any was timed: 1.3 to 1.4 on two H200 (Qwen3-30B-A3B, 2 to 128)
_TIMES = 9  # of which medians are taken


class ModeChoice:
    """One engine's choice; it outlives tails, since what iterations take does."""

    def __init__(self, width: int) -> None:
        self.force: bool | None = None  # drafting always or never
        self.drafting = self.wants = False
        self.changes = 0  # since `begin`
        self._width = width
        self._scales: deque[float] = deque(maxlen=_TIMES)
        self._overheads: deque[float] = deque(maxlen=_TIMES)
        self._every = PROBE
        self.begin()

    def begin(self) -> None:
        """A tail begins, ahead."""
        self.drafting = self.wants = False
        self.changes = 0
        self._since = self._probes = 0
        self._every = PROBE
        self._window: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    @property
    def scale(self) -> float | None:
        """What costs are to be multiplied with to be ms without drafts; None: no iteration was timed yet."""
        return median(self._scales) if self._scales else None

    @property
    def overhead(self) -> float:
        """Of an iteration with drafts over its costs.

        Never below 1: waiting makes no iteration faster, so less says that those ahead were timed while something else
        held the machine up. Taken as it is, drafts that are never right would be expected to pay.
        """
        return max(1.0, median(self._overheads)) if self._overheads else OVERHEAD

    # ---- ahead -----------------------------------------------------------------------------------------------------

    def passed(self) -> None:
        """An iteration is over."""
        self._since += 1

    def timed_ahead(self, ms: float, cost: float) -> None:
        """An iteration without drafts that costs `cost` took `ms`."""
        if ms > 0 and cost > 0:
            self._scales.append(ms / cost)

    @property
    def is_due(self) -> bool:
        """Whether to guess and compare now."""
        if self.drafting or self.force is not None:
            return False
        return self._since >= (self._width + SOON if 0 < self._probes < 3 else self._every if self._probes else 0)

    def probed(self, gain: float, judged: float) -> None:
        """Guesses that were compared promise `gain` by costs alone; of so many right tokens (`EVIDENCE`)."""
        self._since = 0
        self._probes += 1
        known = judged >= EVIDENCE and self.scale is not None
        self.wants = known and gain / self.overhead > ENTER
        if not known:
            self._probes = min(self._probes, 1)  # soon again
        elif not self.wants and self._probes >= 3:
            self._every = min(2 * self._every, SELDOM)

    # ---- drafting --------------------------------------------------------------------------------------------------

    def timed_drafting(self, ms: float, without: float, cost: float, rows: int, tokens: int) -> None:
        """An iteration of `rows` requests gave `tokens` and took `ms`; by costs: without drafts, and as it was."""
        if not self.drafting or ms <= 0 or rows <= 0 or (scale := self.scale) is None:
            return
        self._overheads.append(ms / (scale * cost))
        self._window.append((scale * without * tokens / rows, ms))
        if self.force is not None:
            return
        seen = self.seen
        count = len(self._window)
        if (count >= TRIAL and seen < 1.0) or (count >= TRIAL // 2 and seen < HOPELESS):
            self.wants = False
            self._every = min(2 * self._every, SELDOM)
        elif count >= TRIAL:
            self._every = PROBE

    @property
    def seen(self) -> float:
        """Speed of the last iterations with drafts against the same tokens without."""
        plain, spent = (sum(part) for part in zip(*self._window, strict=True)) if self._window else (1.0, 1.0)
        return plain / spent

    # ---- both ------------------------------------------------------------------------------------------------------

    def change(self, fits: bool) -> bool:
        """Whether the mode is to change; `fits`: drafting is possible now."""
        wants = fits and (self.wants if self.force is None else self.force)
        return wants != self.drafting

    def changed(self) -> None:
        """The mode has changed."""
        self.drafting = not self.drafting
        self.changes += 1
        self.wants = self.drafting
        self._since = 0
        self._probes = max(self._probes, 3)
        self._window.clear()
