"""When to switch. Pure: equal observations give equal decisions, so ranks that see the same need not be told.

The step loop calls, on every rank alike: `begin_step`, before each iteration `decide`, and after a switch that was
carried out or refused `switched` or `cancelled`. docs/policies.md explains the kinds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from moebius.engine.config import PolicyConfig
from moebius.engine.costs import CostModel
from moebius.engine.layout import Layout
from moebius.engine.predict import Forecaster, outlook
from moebius.engine.survival import LengthEstimator

_CHANGE = 0.02  # of live samples, that makes a new forecast worth its time
_UNBOUNDED = 1 << 17  # tokens; where no longest output is known
_LOG = 256  # decisions kept per step

Value = float | int | str


@dataclass(frozen=True, slots=True)
class StepStart:
    """What a step begins with, over all ranks. EVERY FIELD MUST BE THE SAME ON ALL RANKS."""

    samples: int
    prompt_tokens: float = 0.0  # mean per sample
    max_tokens: int | None = None  # longest output any sample may get
    groups: Mapping[int, int] | None = None  # prompt -> samples; only of use with Observation.finished


@dataclass(frozen=True, slots=True)
class Finished:
    """One sample that ended."""

    prompt: int
    tokens: int  # output
    ended: bool = True  # False: cut short (aborted), it would have gone on


@dataclass(frozen=True, slots=True)
class Observation:
    """What is known before an iteration. EVERY FIELD MUST BE THE SAME ON ALL RANKS.

    `live` and `tokens` are sums of the loop's all-reduce. `seconds` is rank 0's clock: let rank 0 put its microseconds
    into the all-reduce and the others 0. Leave out (None) what is not exchanged; no local measurement may stand in.
    """

    iteration: int  # 0-based, of this step
    live: int  # unfinished samples
    layout: Layout = Layout.EP  # the present one
    seconds: float | None = None  # since the step began; None: cooldowns count iterations only
    tokens: int | None = None  # sampled since the last observation; None: one per live sample
    mean_context: float | None = None  # tokens held per live sample; None: mean prompt + estimated age
    finished: Sequence[Finished] | None = None  # since the last observation; None: told from `live`
    came: Mapping[int, int] | None = None  # prompt -> samples that joined since; only with `finished`
    staged: float = 0.0  # share of the layers whose experts have been sent ahead, for a switch to TP


@dataclass(frozen=True, slots=True)
class Decision:
    """The layout to switch to, or None; why, in a word or few; and the numbers it rests on."""

    target: Layout | None
    reason: str
    inputs: dict[str, Value] = field(default_factory=dict)

    def line(self) -> str:
        """For a log."""
        numbers = ", ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in self.inputs.items())
        return f"{'stay' if self.target is None else f'to {self.target.value}'}: {self.reason} ({numbers})"


@dataclass(slots=True)
class LoggedDecision:
    """A decision as it stands in the log; `outcome` is "switched", "cancelled" or "" (nothing to be done)."""

    decision: Decision
    outcome: str = ""


def resolved(config: PolicyConfig, costs: CostModel | None, context: float = 512.0) -> PolicyConfig:
    """`config` with the threshold of the calibration at this context, where it asks for that.

    Raises ValueError when costs are asked for and missing. Whatever depends on the threshold (capture sizes) takes the
    result.
    """
    if config.threshold_source == "given":
        return config
    if costs is None:
        raise ValueError(
            "policy.threshold_source is 'calibrated', but there are no costs: set policy.costs to auto or to a file of "
            "`moebius calibrate`, or give policy.threshold"
        )
    found = costs.threshold(context)
    low = None if config.threshold_low is None else min(config.threshold_low, found)
    return config.model_copy(update={"threshold": found, "threshold_low": low, "threshold_source": "given"})


class SwitchPolicy:
    """Decides before every iteration. `config` may be replaced between steps; `costs` likewise (calibration at start).

    Raises ValueError at construction for a file of costs that cannot be read.
    """

    def __init__(self, config: PolicyConfig, costs: CostModel | None = None) -> None:
        self.config = config
        file = config.costs_file
        self.costs = costs if costs is not None or file is None else CostModel.load(file)
        self.tail_speed = 1.0  # of TP with drafts against the costs; the same on all ranks
        self.lengths = LengthEstimator()
        self.forecaster: Forecaster | None = None  # stands in for `lengths`, in experiments
        self.log: list[LoggedDecision] = []  # of this step: every change of mind, every wish to switch
        self._start: StepStart | None = None
        self._prompt_tokens = 0.0
        self._done: set[Layout] = set()  # targets this step has reached, for kinds that go there once
        self._not_before = 0
        self._not_before_s = self._seconds = 0.0
        self._window: deque[int] = deque(maxlen=config.window)
        self._counted = -1  # the last iteration whose counts were taken in
        self._forecast_at: tuple[int, int] | None = None  # iteration and live count of the last forecast
        self._last = Decision(None, "")

    @property
    def learns_lengths(self) -> bool:
        """Whether it makes use of `StepStart.groups` and `Observation.finished`."""
        return self.config.kind == "predictive"

    @property
    def keeps_layout(self) -> bool:
        """Whether the next step may begin in the layout the last one ended in; else it begins in EP."""
        return self.config.kind == "interactive"

    @property
    def waits_for_burst(self) -> bool:
        """Whether few live samples mean a tail, so that nothing is to be decided before the burst has come in."""
        return self.config.kind in ("rollout", "predictive")

    def begin_step(self, start: StepStart | None = None) -> None:
        """Forget the previous step, but not its output lengths, nor a cooldown that still runs.

        Raises ValueError when the policy needs costs and has none.
        """
        if self.config.kind == "predictive" and self.costs is None:
            raise ValueError(
                "the predictive policy needs calibrated costs: set policy.costs to auto or to a file of `moebius "
                "calibrate`, or choose policy.kind rollout"
            )
        self._not_before_s = max(0.0, self._not_before_s - self._seconds)
        self._seconds, self._not_before, self._counted = 0.0, 0, -1
        self._done.clear()
        self._window = deque(maxlen=self.config.window)
        self._forecast_at, self._last = None, Decision(None, "")
        self.log = []
        self._start = start
        if start is not None:
            self._begin_lengths(start)

    def _begin_lengths(self, start: StepStart) -> None:
        self._prompt_tokens = start.prompt_tokens
        self.lengths.begin_step(start.samples, start.max_tokens or _UNBOUNDED, start.groups)

    def end_step(self, *, broken_off: bool = False, finished: Sequence[Finished] | None = None, left: int = 0) -> None:
        """The step is over. `finished` ended after the last observation, where lengths are told; `left` did not end.

        Else, if it is not called or `finished` is None, samples of the last observation are taken to have ended just
        after it, or to have been cut short (`broken_off`), as by an abort.
        """
        if finished is not None:
            self.lengths.advance(left, finished=[(f.prompt, f.tokens, f.ended) for f in finished])
        self.lengths.end_step(broken_off=broken_off or left > 0)

    def expects_tp(self, seen: Observation) -> bool:
        """Whether a switch to TP is near, so that it is worth preparing. As pure as `decide`; changes nothing."""
        config = self.config
        if seen.layout is not Layout.EP or Layout.TP in self._done or seen.iteration < self._not_before:
            return False
        match config.kind:
            case "rollout" | "predictive":
                return 0 < seen.live <= (1 + config.prepare_margin) * config.threshold
            case "scheduled":
                return seen.iteration >= config.at_iteration - config.prepare_iterations
            case "interactive":
                full = len(self._window) == config.window
                return full and not self._cools(seen) and fmean(self._window) < (1 + config.prepare_margin) * config.low
            case _:
                return False  # static: never, or at once

    def observe(self, seen: Observation) -> None:
        """Take note of an iteration before which nothing is to be decided."""
        self._take_in(seen)

    def decide(self, seen: Observation) -> Decision:
        """The decision before iteration `seen.iteration`. Call it once per iteration, in order."""
        self._take_in(seen)
        decision = self._decide(seen)
        if decision.target is not None or decision.reason != self._last.reason:
            self.log.append(LoggedDecision(decision))
            del self.log[:-_LOG]
        self._last = decision
        return decision

    def wants_tp(self, iteration: int, live: int) -> bool:
        """`decide` for a loop that is in EP and knows no more than this."""
        return self.decide(Observation(iteration, live)).target is Layout.TP

    def wants_ep(self, iteration: int, live: int) -> bool:
        """`decide` for a loop that is in TP and knows no more than this."""
        return self.decide(Observation(iteration, live, Layout.TP)).target is Layout.EP

    def switched(self) -> None:
        """The switch last decided on has happened."""
        if self.log:
            self.log[-1].outcome = "switched"
        if self._last.target is not None:
            self._done.add(self._last.target)
        self._window.clear()  # loads of before the switch
        if self.config.kind == "interactive":
            self._cool_down()

    def cancelled(self, iteration: int) -> None:
        """The switch last decided on was refused before `iteration`: no room, or not at rest."""
        if self.log:
            self.log[-1].outcome = "cancelled"
        self._not_before = iteration + self.config.cooldown_iterations
        if self.config.kind == "interactive":
            self._cool_down()

    def _cool_down(self) -> None:
        self._not_before = self._counted + self.config.cooldown_iterations
        self._not_before_s = self._seconds + self.config.cooldown_s

    def _take_in(self, seen: Observation) -> None:
        if self._start is None and self._counted < 0:
            self._start = StepStart(seen.live)
            self._begin_lengths(self._start)
        elif seen.iteration > 0 or seen.finished is not None:  # of a step that is open, samples may come before
            finished = None if seen.finished is None else [(f.prompt, f.tokens, f.ended) for f in seen.finished]
            self.lengths.advance(seen.live, seen.tokens, finished, seen.came)
        self._counted = seen.iteration
        self._seconds = self._seconds if seen.seconds is None else seen.seconds
        self._window.append(seen.live)

    def _decide(self, seen: Observation) -> Decision:
        config, inputs = self.config, self._inputs(seen)
        if seen.live == 0:
            return Decision(None, "nothing is live", inputs)
        if self._cools(seen):
            return Decision(None, "cooldown", inputs)
        target: Layout | None = None
        match config.kind:
            case "static_ep":
                target, reason = Layout.EP, "static EP"
            case "static_tp":
                target, reason = Layout.TP, "static TP"
            case "scheduled":
                inputs["at_iteration"] = config.at_iteration
                back = config.back_at_iteration is not None and seen.iteration >= config.back_at_iteration
                reason = "scheduled"
                if seen.iteration >= config.at_iteration:
                    target = Layout.EP if back else Layout.TP
            case "rollout":
                target, reason = self._at_threshold(seen, inputs)
            case "interactive":
                target, reason = self._interactive(seen, inputs)
            case "predictive":
                return self._predictive(seen, inputs)
        if target is seen.layout or target in self._done_once():
            return Decision(None, f"{reason}, done", inputs)
        return Decision(target, reason, inputs)

    def _done_once(self) -> set[Layout]:
        return set() if self.config.kind == "interactive" else self._done

    def _cools(self, seen: Observation) -> bool:
        if self.config.kind == "interactive" and seen.seconds is not None:
            return seen.seconds < self._not_before_s
        return seen.iteration < self._not_before

    def _at_threshold(self, seen: Observation, inputs: dict[str, Value]) -> tuple[Layout | None, str]:
        inputs["threshold"] = self.config.threshold
        below = seen.live <= self.config.threshold
        return (Layout.TP, "live <= threshold") if below else (None, "live > threshold")

    def _interactive(self, seen: Observation, inputs: dict[str, Value]) -> tuple[Layout | None, str]:
        inputs |= {"t_h": self.config.threshold, "t_l": self.config.low, "window_mean": fmean(self._window)}
        if seen.layout is Layout.TP:
            return (Layout.EP, "live > T_h") if seen.live > self.config.threshold else (None, "live <= T_h")
        if len(self._window) < self.config.window:
            return None, "window not full"
        low = fmean(self._window) < self.config.low
        return (Layout.TP, "mean of window < T_l") if low else (None, "mean of window >= T_l")

    def _predictive(self, seen: Observation, inputs: dict[str, Value]) -> Decision:
        if seen.layout is Layout.TP or self._done:
            return Decision(None, "predicted, done", inputs)
        assert self.costs is not None
        lengths = self.forecaster or self.lengths
        if lengths is self.lengths and not self.lengths.ready:
            target, reason = self._at_threshold(seen, inputs)
            return Decision(target, f"too few lengths known: {reason}", inputs)
        if not self._is_due(seen):
            return Decision(None, self._last.reason, inputs)
        self._forecast_at = (seen.iteration, seen.live)
        cap = (self._start.max_tokens if self._start else None) or _UNBOUNDED
        found = outlook(
            self.costs,
            lengths,
            context=float(inputs["context"]),
            horizon=max(1, cap - int(self.lengths.age)),
            balanced=False,
            tail_speed=self.tail_speed,
            staged=seen.staged,
        )
        if seen.staged:
            inputs["staged"] = seen.staged
        if self.tail_speed != 1.0:
            inputs["tail_speed"] = self.tail_speed
        inputs |= {
            "stay_ms": found.stay_ms,
            "now_ms": found.now_ms,
            "switch_ms": found.switch_ms,
            "saved_ms": found.saved_ms,
            "wait_ms": found.wait_ms,
            "wait_iterations": found.wait_iterations,
            "iterations_left": found.iterations,
        }
        if found.pays:
            return Decision(Layout.TP, "saves more than it costs, now rather than later", inputs)
        later = found.saved_ms > found.switch_ms or found.wait_ms < found.stay_ms
        return Decision(None, "better later" if later else "does not pay", inputs)

    def _is_due(self, seen: Observation) -> bool:
        if self._forecast_at is None or self._last.reason == "cooldown":
            return True
        iteration, live = self._forecast_at
        return seen.iteration - iteration >= self.config.every or abs(live - seen.live) >= max(1, _CHANGE * live)

    def _inputs(self, seen: Observation) -> dict[str, Value]:
        estimated = self._prompt_tokens + self.lengths.age
        return {
            "policy": self.config.kind,
            "iteration": seen.iteration,
            "live": seen.live,
            "layout": seen.layout.value,
            "context": estimated if seen.mean_context is None else seen.mean_context,
        } | ({} if seen.seconds is None else {"seconds": seen.seconds})
