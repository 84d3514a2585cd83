"""Whether switching to TP now is better than never, and better than later: calibrated costs times forecast lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from moebius.engine.costs import Array, CostModel
from moebius.engine.layout import Layout
from moebius.engine.survival import LiveForecast

_SINGLE = 64  # offsets that are looked at one by one; beyond, they grow by _RATIO
_RATIO = 1.1


class Forecaster(Protocol):
    """Anything that says how many samples run later; the estimator of lengths, or in tests the truth."""

    def forecast(self, offsets: Array) -> LiveForecast:
        """What runs `offsets` iterations from now."""
        ...


@dataclass(frozen=True, slots=True)
class Outlook:
    """Expected milliseconds until the last sample ends, by when the switch comes."""

    stay_ms: float  # never
    now_ms: float  # now, the switch included
    switch_ms: float  # of it, the switch
    wait_ms: float  # at the best later moment, the switch included
    wait_iterations: int  # which is in so many iterations
    iterations: float  # expected until the last sample ends

    @property
    def saved_ms(self) -> float:
        """Decoding time that TP saves from now on, before the switch is paid."""
        return self.stay_ms - (self.now_ms - self.switch_ms)

    @property
    def pays(self) -> bool:
        """Whether switching now beats both staying and waiting."""
        return self.saved_ms > self.switch_ms and self.now_ms <= self.wait_ms


def offset_grid(horizon: int) -> Array:
    """Offsets 0, 1, ..., then growing by 10 %, the last one `horizon` (at least 1)."""
    offsets = list(range(min(_SINGLE, horizon) + 1))
    while offsets[-1] < horizon:
        offsets.append(min(horizon, int(offsets[-1] * _RATIO) + 1))
    return np.asarray(offsets, dtype=np.float64)


def outlook(
    costs: CostModel,
    lengths: Forecaster,
    *,
    context: float,
    horizon: int,
    balanced: bool = False,
    tail_speed: float = 1.0,
    staged: float = 0.0,
) -> Outlook:
    """What staying in EP, switching now and switching later are expected to take.

    Args:
        lengths: forecast of the running samples.
        context: mean tokens (prompt and output) they hold now.
        horizon: most iterations that can follow.
        balanced: whether EP ranks hold equal shares always; else they are spread by chance.
        tail_speed: how many times as fast as by costs a sample gets its tokens in TP, as drafts make it.
        staged: share of the layers whose experts have been sent ahead, which shortens a switch now and later.
    """
    ends = offset_grid(max(1, horizon))
    starts, width = ends[:-1], np.diff(ends)
    seen = lengths.forecast(np.concatenate([ends, (starts + ends[1:] - 1) / 2]))
    # An iteration at offset x runs if anyone is unfinished after x; an interval stands for its middle iteration.
    any_, live = seen.any[len(ends) :], seen.live[len(ends) :]
    at = context + (starts + ends[1:] - 1) / 2
    fullest = None if balanced else costs.fullest(live)
    ep = np.concatenate([[0.0], np.cumsum(width * any_ * costs.ms(Layout.EP, live, at, fullest))])
    tp = np.concatenate([[0.0], np.cumsum(width * any_ * costs.ms(Layout.TP, live, at) / tail_speed)])
    running, chance = seen.live[: len(ends)], seen.any[: len(ends)]
    switch = chance * costs.switch_ms(Layout.TP, running, running * (context + ends), staged)
    total = ep + switch + (tp[-1] - tp)  # by the moment of the switch
    later = int(np.argmin(total[1:])) + 1
    return Outlook(
        stay_ms=float(ep[-1]),
        now_ms=float(total[0]),
        switch_ms=float(switch[0]),
        wait_ms=float(total[later]),
        wait_iterations=int(ends[later]),
        iterations=float((width * any_).sum()),
    )
