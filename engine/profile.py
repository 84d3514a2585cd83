"""Chrome traces (for Perfetto or chrome://tracing) of the iterations around a switch, one file per step and rank.

When a switch comes is not known beforehand, so recording begins when it is near and is thrown away and begun again
every `before` iterations. All ranks see the same live counts, so their traces span the same iterations.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from moebius.engine.config import PolicyConfig, ProfileConfig
from moebius.engine.layout import Layout

_log = logging.getLogger(__name__)


class SwitchProfiler:
    """Records what one rank does around a switch. Called from the engine's thread only."""

    def __init__(self, config: ProfileConfig, rank: int) -> None:
        self.config = config
        self.rank = rank
        self._step = -1  # counts the steps this engine has run, from 0
        self._profile: torch.profiler.profile | None = None
        self._range: Any = None  # the named range of the present iteration
        self._recorded = 0  # iterations since recording began
        self._left: int | None = None  # iterations still to record; None: the switch has not come
        self._done = False  # this step has its trace

    def before_iteration(self, iteration: int, live: int, layout: Layout, policy: PolicyConfig) -> None:
        """Called before each iteration of a step, and with `live` 0 at its end; begins, ends or goes on recording."""
        if self.config.folder is None:
            return
        if iteration == 0:
            self._begin_step()
        self._end_range()
        if live == 0 or self._left == 0:
            self._finish()
        if live == 0 or self._done or (self.config.steps is not None and self._step >= self.config.steps):
            return
        if self._profile is not None and self._left is None and self._recorded >= self.config.before:
            self._discard()
        if self._profile is None and self._is_near(iteration, live, layout, policy):
            self._start()
        if self._profile is not None:
            if self._left is not None:
                self._left -= 1
            self._recorded += 1
            self._range = torch.profiler.record_function(f"{layout.value} iteration {iteration}, {live} live")
            self._range.__enter__()

    def after_switch(self) -> None:
        """Called after a switch with live requests: `after` iterations from here on are recorded."""
        if self._profile is not None and self.config.at_iteration is None:
            self._left = self.config.after - 1  # the iteration that follows the switch has begun already

    def _is_near(self, iteration: int, live: int, layout: Layout, policy: PolicyConfig) -> bool:
        if self.config.at_iteration is not None:
            return iteration == self.config.at_iteration
        if layout is not Layout.EP or policy.kind == "static_ep":
            return False
        if policy.kind == "scheduled":
            return iteration + self.config.before > policy.at_iteration
        return policy.kind == "static_tp" or live <= (1 + self.config.margin) * policy.threshold

    def _begin_step(self) -> None:
        self._discard()  # of a step that broke off
        self._step += 1
        self._done = False

    def _start(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        # Shapes, memory and stacks would slow the iterations down and make the files large.
        self._profile = torch.profiler.profile(activities=activities, acc_events=True)  # without it torch warns
        self._profile.start()
        self._recorded = 0
        self._left = self.config.after if self.config.at_iteration is not None else None

    def _finish(self) -> None:
        """Write the trace if it holds what it should, else throw it away."""
        profile, complete = self._profile, self._left is not None
        self._discard()
        if profile is not None and complete:
            folder = Path(self.config.folder or ".")
            try:
                folder.mkdir(parents=True, exist_ok=True)
                profile.export_chrome_trace(str(folder / f"step_{self._step:04d}_rank_{self.rank}.json.gz"))
            except OSError as error:  # within the step: the other ranks would wait for this one, and the step be lost
                _log.warning("no trace was written to engine.profile.folder=%s: %s", folder, error)
            self._done = True

    def _discard(self) -> None:
        self._end_range()
        if self._profile is not None:
            self._profile.stop()
        self._profile, self._left, self._recorded = None, None, 0

    def _end_range(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
