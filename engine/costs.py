"""What an iteration and a switch cost on this machine: measured points, and what lies between them.

An iteration's time is a curve over the batch plus a term for the KV entries that attention reads, which grows with
batch * context; so every measured batch gives an intercept and a time per KV token. Pure, no torch: rollout's simulator
and planner use the same numbers as the engine's policy.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from moebius.engine.layout import Layout

Array = npt.NDArray[np.float64]
_LAYOUTS: tuple[Layout, Layout] = (Layout.EP, Layout.TP)


class CostPoint(BaseModel):
    """Milliseconds of one decode iteration of `batch` requests in all, each attending to `context` tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    layout: Layout
    batch: int = Field(ge=1)
    context: float = Field(ge=0)
    ms: float = Field(gt=0)


class SwitchPoint(BaseModel):
    """Milliseconds of one switch to `to`, with `live` requests that hold `kv_tokens` in all."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    to: Layout
    live: int = Field(ge=0)
    kv_tokens: int = Field(ge=0)
    ms: float = Field(ge=0)
    staged: float = Field(0.0, ge=0, le=1, description="Share of the layers whose experts had been sent ahead.")


class ExpertMs(BaseModel):
    """Milliseconds that the experts of all layers take: over the link, and copied within a rank once they are staged.

    The two go on beside each other (moebius.kernels.rooms), so that of a switch the longer one counts.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    link: float = Field(gt=0)
    local: float = Field(ge=0)

    def saved(self, staged: npt.ArrayLike) -> Array:
        """By which a switch to TP is shorter with this share of the layers staged."""
        share = np.asarray(staged, dtype=np.float64)
        found: Array = self.link - np.maximum((1 - share) * self.link, share * self.local)
        return found


class CostModel(BaseModel):
    """Costs of both layouts on `ranks` ranks. `expected` names the parts that were computed and not measured."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    schema_version: Literal[1] = 1
    key: dict[str, str | int] = Field(default_factory=dict, description="Model shape, GPU, ranks, versions.")
    ranks: int = Field(ge=1)
    points: list[CostPoint] = Field(min_length=2)
    switches: list[SwitchPoint] = Field(default_factory=list)
    kv_ns_per_token: dict[Layout, float] = Field(
        default_factory=dict, description="Time per KV token read where only one context was measured, else unused."
    )
    experts: ExpertMs | None = Field(None, description="Needed to tell what a prepared switch takes.")
    prefill_us_per_token: dict[Layout, float] = Field(default_factory=dict)
    source: str = ""
    expected: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _both_layouts(self) -> CostModel:
        for layout in _LAYOUTS:
            if not any(point.layout is layout for point in self.points):
                raise ValueError(f"no point of layout {layout.value}: costs need both layouts, calibrate again")
        return self

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> CostModel:
        """As pydantic's, but what was computed from the old values does not go along."""
        copy = super().model_copy(update=update, deep=deep)
        for name in ("_curves", "_switch_fit"):
            copy.__dict__.pop(name, None)
        return copy

    # ---- iterations -----------------------------------------------------------------------------------------------

    def ms(
        self, layout: Layout, batch: npt.ArrayLike, context: npt.ArrayLike, fullest: npt.ArrayLike | None = None
    ) -> Array:
        """Milliseconds of an iteration, shaped as `batch` and `context` broadcast together.

        Between measured batches linear in log(batch); below the smallest constant; above the largest linear in the
        batch with the last slope. `batch` may be a fraction (an expected number), and is at least 1.

        `fullest` is for EP: `ranks` times the requests of the rank that has most, whose KV all wait for.
        The rest goes by the whole batch: which experts are read and how much is sent depends on all tokens, and the
        dense weights that a rank reads on none.
        """
        curve = self._curves[layout]
        wanted = np.maximum(1.0, np.asarray(batch, dtype=np.float64))
        base = np.interp(np.log(wanted), curve.log_batch, curve.base)
        base = np.where(wanted > curve.top, curve.base[-1] + (wanted - curve.top) * curve.slope, base)
        per_token = np.interp(np.log(wanted), curve.log_batch, curve.per_token)
        held = wanted if fullest is None else np.maximum(wanted, np.asarray(fullest, dtype=np.float64))
        found: Array = base + per_token * held * np.asarray(context, dtype=np.float64)
        return found

    def fullest(self, live: npt.ArrayLike) -> Array:
        """`ranks` times the requests of the rank that has most, when `live` ones are spread over them by chance.

        The expected maximum of a multinomial, by the normal approximation with Blom's score for the largest of
        `ranks` values; at least one request and at most all of them.
        """
        count = np.asarray(live, dtype=np.float64)
        share = count / self.ranks
        most = share + np.sqrt(share) * largest_of(self.ranks)
        found: Array = self.ranks * np.clip(most, np.minimum(count, 1.0), count)
        return found

    def threshold(self, context: float) -> int:
        """Largest batch up to which TP is the faster one, by the last crossing; 0 where EP always is.

        Where TP still leads at the largest batch that both layouts were measured at, it is that batch.
        """
        top = min(self._curves[layout].top for layout in _LAYOUTS)
        batches = np.arange(1, round(top) + 1, dtype=np.float64)
        faster = np.nonzero(self.ms(Layout.TP, batches, context) < self.ms(Layout.EP, batches, context))[0]
        return int(batches[faster[-1]]) if len(faster) else 0

    def measured_range(self, layout: Layout) -> tuple[int, int]:
        """Smallest and largest measured batch."""
        batches = [point.batch for point in self.points if point.layout is layout]
        return min(batches), max(batches)

    # ---- switches -------------------------------------------------------------------------------------------------

    def switch_ms(
        self, to: Layout, live: npt.ArrayLike, kv_tokens: npt.ArrayLike, staged: npt.ArrayLike = 0.0
    ) -> Array:
        """Milliseconds of a switch: fixed + per KV token + per request, fitted to the measured ones.

        `staged` is the share of the layers whose experts were sent ahead, which only helps on the way to TP, and about
        which nothing is known without `experts`.

        Where a direction was not measured with live requests, those of the other one stand in. Raises ValueError when
        no switch was measured.
        """
        fixed, per_token, per_live = self._switch_fit[to]
        found: Array = fixed + per_token * np.asarray(kv_tokens, dtype=np.float64) + per_live * np.asarray(live)
        if self.experts is not None and to is Layout.TP and np.any(staged):
            found = np.maximum(found - self.experts.saved(staged), 0.0)
        return found

    def _plain_ms(self, point: SwitchPoint) -> float:
        """What the switch would have taken with nothing staged."""
        if self.experts is None or point.to is Layout.EP or not point.staged:
            return point.ms
        return point.ms + float(self.experts.saved(point.staged))

    @cached_property
    def _switch_fit(self) -> dict[Layout, tuple[float, float, float]]:
        fits = {}
        for layout in _LAYOUTS:
            own = [point for point in self.switches if point.to is layout]
            points = own if any(point.live for point in own) else [*own, *(p for p in self.switches if p.live)]
            points = points or self.switches
            if not points:
                raise ValueError("no switch was measured: calibrate with `moebius calibrate`, or state its cost")
            rows = [[1.0, point.kv_tokens, point.live] for point in points]
            fixed, per_token, per_live = nonnegative_fit(rows, [self._plain_ms(point) for point in points])
            fits[layout] = (float(fixed), float(per_token), float(per_live))
        return fits

    @cached_property
    def _curves(self) -> dict[Layout, _Curve]:
        return {
            layout: _Curve(
                [point for point in self.points if point.layout is layout],
                self.kv_ns_per_token.get(layout, 0.0) / 1e6,
                self.ranks if layout is Layout.EP else 1,
            )
            for layout in _LAYOUTS
        }

    # ---- files ----------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write as JSON; readers never see half a file."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, path)

    @classmethod
    def load(cls, path: str | Path) -> CostModel:
        """Read what `save` wrote. Raises ValueError, saying what to do, for a missing or another file."""
        try:
            return cls.model_validate(json.loads(Path(path).read_text(encoding="utf-8")))
        except OSError as error:
            raise ValueError(f"{path}: cannot be read ({error.strerror}); make it with `moebius calibrate`") from error
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in fault["loc"])
            raise ValueError(f"{path}: not a file of `moebius calibrate`: {where} {fault['msg']}") from error
        except ValueError as error:
            raise ValueError(f"{path}: not valid JSON: {error}") from error


class _Curve:
    """One layout: for each measured batch an intercept in ms and ms per KV token."""

    def __init__(self, points: Sequence[CostPoint], assumed: float, ranks: int) -> None:
        rows: dict[int, list[CostPoint]] = {}
        for point in points:
            rows.setdefault(point.batch, []).append(point)
        batches = sorted(rows)
        held = {
            batch: ranks * math.ceil(batch / ranks) for batch in batches
        }  # dealt out in turn, all wait for the fullest
        known = {batch: found for batch in batches if (found := _slope(rows[batch])) is not None}
        log_batch = np.log(np.asarray(batches, dtype=np.float64))
        if known:
            # Small batches hold so little KV that reading it is lost in the noise of their times, which contexts beyond
            # the measured ones would multiply: each goes by all together, the more the less its own times can tell.
            told = {batch: held[batch] ** 2 * spread for batch, (_, spread) in known.items()}
            pooled = sum(told[batch] * slope / held[batch] for batch, (slope, _) in known.items()) / sum(told.values())
            doubt = sum(told.values()) / len(told)
            rates = [
                max(0.0, (told[batch] * slope / held[batch] + doubt * pooled) / (told[batch] + doubt))
                for batch, (slope, _) in known.items()
            ]
            # A batch of one context reads its KV as fast as its neighbours do.
            per_token = np.interp(log_batch, np.log(list(known)), rates)
        else:
            per_token = np.full(len(batches), assumed)
        base = [
            np.mean([point.ms - per_token[i] * held[batch] * point.context for point in rows[batch]])
            for i, batch in enumerate(batches)
        ]
        self.log_batch: Array = log_batch
        self.base: Array = np.asarray(base, dtype=np.float64)
        self.per_token: Array = np.asarray(per_token, dtype=np.float64)
        self.top = float(batches[-1])
        rise = (self.base[-1] - self.base[-2]) / (batches[-1] - batches[-2]) if len(batches) > 1 else 0.0
        self.slope = max(0.0, float(rise))


def _slope(points: Sequence[CostPoint]) -> tuple[float, float] | None:
    """Least-squares ms per token of context, and the contexts' sum of squares; None where all have one context."""
    context = np.asarray([point.context for point in points])
    spread = context - context.mean()
    if not spread.any():
        return None
    squares = float((spread * spread).sum())
    return float((spread * [point.ms for point in points]).sum()) / squares, squares


def largest_of(count: int) -> float:
    """Expected largest of `count` standard normal values, by Blom's approximation; 0 for one."""
    if count < 2:
        return 0.0
    from statistics import NormalDist

    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def nonnegative_fit(rows: Sequence[Sequence[float]], values: Sequence[float], weights: Any = None) -> Array:
    """Least squares with coefficients >= 0, exact: the best unconstrained fit over all subsets of columns.

    `rows` is (points, columns) with few columns; `weights` multiply the residuals. Fewer columns win a tie, so one
    point gives a constant when the first column is 1.
    """
    scale = np.ones(len(values)) if weights is None else np.asarray(weights, dtype=np.float64)
    a = np.asarray(rows, dtype=np.float64) * scale[:, None]
    b = np.asarray(values, dtype=np.float64) * scale
    columns = a.shape[1]
    best, best_error = np.zeros(columns), math.inf
    for size in range(columns + 1):
        for chosen in itertools.combinations(range(columns), size):
            fit = np.zeros(columns)
            if chosen:
                fit[list(chosen)] = np.linalg.lstsq(a[:, list(chosen)], b, rcond=None)[0]
            error = float(((a @ fit - b) ** 2).sum())
            if (fit >= 0).all() and error < best_error * (1 - 1e-9) - 1e-18:
                best, best_error = fit, error
    return best
