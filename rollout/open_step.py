"""A step that takes prompts while it runs, for callers that learn of them one by one (agents, servers)."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from moebius.engine.types import SampleKey, SamplePiece, StepOutcome
from moebius.rollout.backlog import PromptGroup, groups_of
from moebius.rollout.batch import Prompt
from moebius.rollout.errors import BadInput, GroupNotReady, MoebiusError, RankDied, as_the_caller_raised, callers
from moebius.rollout.interrupts import held_back, pause, uninterrupted, waiting
from moebius.rollout.step_block import StepBlock
from moebius.rollout.step_ranks import Look, StepOnRanks, parked_on
from moebius.rollout.stream import OnProgress
from moebius.rollout.suspicion import Suspicion
from moebius.rollout.types import Rollout, Sample, Sampling
from moebius.rollout.worker import Progress

POLL_S = 0.01
ABORT_S = 60.0  # for ranks to end a step after an abort
_log = logging.getLogger(__name__)


class OpenStep(StepOnRanks, StepBlock):
    """Made by `RolloutGroup.open_step`; use it as a context manager, or call `close()`.

    Prompts get numbers in the order they are submitted, from 0. Sample seeds depend on the step, that number and the
    sample's index, as in `generate`. A sample that vLLM refuses comes back empty, with the finish reason "abort" and
    the reason as `stop_reason`. Samples that earlier steps have parked go on first. Not for several threads at once.

    When ranks are lost, any of these calls may take as long as a start, and the step goes on where it was (see
    `failures` in the configuration); `losses` tells of it. Pieces of streamed samples then begin at the first token.
    """

    def __init__(self, *of_ranks: Any, expected: int | None = None, **more: Any) -> None:
        """`expected`: samples of the burst; everything else is for `StepOnRanks`."""
        super().__init__(*of_ranks, **more)
        self._expected = expected  # until they are all submitted
        self._submitted = 0  # samples

    @uninterrupted
    def submit(
        self,
        prompts: Sequence[Prompt],
        n: int = 1,
        sampling: Sampling | Mapping[str, Any] | None = None,
        *,
        seeds: Sequence[Sequence[int]] | None = None,
        stream: bool = False,
    ) -> list[int]:
        """Add prompts with `n` samples each; returns their numbers. Arguments are those of `generate`.

        `seeds[p][s]` is the seed of sample s of prompts[p] (63 bits), instead of the derived one. With `stream`,
        `pieces` tells of the samples while they run.

        Raises:
            BadInput: found before anything is sent.
            GroupNotReady, RankDied, MoebiusError: the step is closed or lost.
        """
        if self._closed:
            raise GroupNotReady("this step is closed; open another one")
        self._collect()
        first = len(self._prompts)
        requests, ids = self._group.requests_of(prompts, n, sampling, self.step, first)
        if seeds is not None or stream:
            requests = [
                replace(r, stream=stream, seed=r.seed if seeds is None else seeds[r.key.prompt - first][r.key.sample])
                for r in requests
            ]
        self._add(groups_of(requests, ids, self.step, first))
        return list(range(first, len(self._prompts)))

    @uninterrupted
    def submit_groups(self, groups: Sequence[PromptGroup]) -> None:
        """Add prompts that have requests, and numbers of their own, already; those of other steps, too."""
        if self._closed:
            raise GroupNotReady("this step is closed; open another one")
        self._collect()
        self._add(groups)

    def _add(self, groups: Sequence[PromptGroup]) -> None:
        self._prompts += [group for group in groups if group.step == self.step]
        self._groups.update({(group.step, group.prompt): group for group in groups})
        requests = [group.requests[key.sample] for group in groups for key in group.missing]
        self._asked.update(request.key for request in requests)
        self._submitted += len(requests)
        self._submit(requests)
        if self._expected is not None and self._submitted >= self._expected:
            self.filled()

    def finished(self) -> list[tuple[SampleKey, Sample]]:
        """Samples that ended since the last call, with their keys; does not wait for any.

        Samples of earlier steps, which had parked them, are among them: their keys tell the step. Works on after the
        step was parked or closed.
        """
        fresh: list[tuple[SampleKey, Sample]] = []
        try:
            with held_back():
                self._collect()
                fresh, self._fresh = self._fresh, []
            return fresh
        except BaseException:
            self._fresh = [*fresh, *self._fresh]  # nobody was told
            raise

    def completed(self) -> list[tuple[int, Sample]]:
        """(prompt number, sample) of this step's samples that ended since the last call; does not wait for any.

        Those of earlier steps are left for `finished`.
        """
        told = self.finished()
        self._fresh = [(key, sample) for key, sample in told if key.step != self.step]
        return [(key.prompt, sample) for key, sample in told if key.step == self.step]

    def pieces(self) -> list[SamplePiece]:
        """Pieces of streamed samples that came with the last look at the ranks, as `completed` takes one."""
        taken, self._pieces = self._pieces, []
        return taken

    @property
    def prompts(self) -> int:
        """How many prompts have been submitted."""
        return len(self._prompts)

    @property
    def submitted(self) -> int:
        """How many samples have been submitted."""
        return self._submitted

    def expect(self, more: int | None) -> None:
        """So many samples are still to come of the burst, instead of what was expected before; None: unknown."""
        self._expected = None if more is None else self._submitted + more

    @uninterrupted
    def filled(self) -> None:
        """The burst is in: few live samples mean the step's tail from now on."""
        self._ranks.tell("filled", self._serial)
        self._expected, self._is_filled = None, True

    @uninterrupted
    def seal(self) -> None:
        """No more prompts will come: the step may end by itself. It must be closed or parked all the same."""
        self.filled()
        self._ends = "close_step"
        self._tell_end()

    @uninterrupted
    def progress(self) -> list[Progress]:
        """How far each rank is, by its last answer; does not wait for any."""
        # An answer may be of the step before, given just before this one began.
        return [p if p.serial == self._serial else Progress(serial=self._serial) for p in self._watch.look()]

    @uninterrupted
    def wait(self, prompt: int, timeout_s: float | None = None) -> Rollout:
        """The rollout of one prompt, when all its samples have ended.

        Raises:
            BadInput: no such prompt.
            TimeoutError: `timeout_s` ran out; the samples go on.
            RankDied, MoebiusError: the step is lost.
        """
        if not 0 <= prompt < len(self._prompts):
            raise BadInput(f"prompt {prompt} was not submitted to this step; it has {len(self._prompts)}")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._prompts[prompt].complete:
            if self._closed:
                raise GroupNotReady(f"prompt {prompt} has parked samples: they go on in the group's next step")
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"prompt {prompt} has unfinished samples after {timeout_s} s")
            if not self._collect():
                pause(POLL_S)
        return self._prompts[prompt].rollout()

    def groups(self) -> list[PromptGroup]:
        """All prompts of the step, also those of earlier steps that it goes on with; looks at no rank."""
        return list(self._groups.values())

    def leave(self, groups: Sequence[PromptGroup]) -> None:
        """Complete groups that nobody was given: `RolloutGroup.generate` and `stream` give them out next time."""
        self._group.backlog.leave(groups)

    def abort(self, prompts: Sequence[int] | None = None) -> None:
        """End all samples of these prompts (None: of all) with the tokens they have; does not wait."""
        own = None if prompts is None else set(prompts)
        self._group.abort(None if own is None else [k for k in self.keys() if k.step == self.step and k.prompt in own])

    def close(self) -> list[Rollout]:
        """Wait for all samples, end the step and return all rollouts, in order. The group's `last_report` is then its.

        After `park`, the rollouts of prompts whose samples have all ended. Raises RankDied or MoebiusError when the
        step is lost.
        """
        self._end("close_step")
        return [group.rollout() for group in self._prompts if group.complete]

    def park(self) -> None:
        """End the step soon, whatever it does, and keep unfinished samples for the group's next step.

        They stay with the rank that answers for them: `RolloutGroup.parked` tells which. `finished` tells of those that
        have ended. Raises as `close`.
        """
        self._end("park_step")

    @uninterrupted
    def break_off(self) -> None:
        """End the step if it still runs, without its results: its samples are dropped, those of earlier steps kept."""
        if not self._closed:
            self._closed, self._ends = True, "close_step"
            try:
                self._broken_off(KeyboardInterrupt())
            finally:
                self._release()

    @uninterrupted
    def run(self, on_progress: OnProgress | None) -> list[Rollout]:
        """As `close`, for a step that takes no more prompts; `on_progress` and time limit are those of `generate`."""
        limit = self._group.config.step_timeout_s
        started, aborted, tokens = time.monotonic(), False, 0
        samples = sum(len(group.requests) for group in self._prompts)

        def look(progress: Sequence[Progress]) -> None:
            nonlocal aborted, tokens
            seconds = time.monotonic() - started
            if limit is not None and not aborted and seconds > limit:
                _log.warning("step %d has run for step_timeout_s=%g: unfinished samples are ended", self.step, limit)
                self.abort()
                aborted = True
            elif limit is not None and seconds > limit + ABORT_S:
                raise RankDied(f"step {self.step} did not end {ABORT_S:.0f} s after its samples were aborted")
            if on_progress:
                mine = [p for p in progress if p.serial == self._serial]
                tokens = max(tokens, sum(p.tokens for p in mine))
                live = mine[0] if mine else Progress()
                with callers(), waiting():
                    on_progress(samples - len(self.keys()), samples, tokens, live.live, live.layout)

        with as_the_caller_raised():
            self._end("close_step", look)
        if on_progress:
            tokens = sum(len(sample.token_ids) for group in self._prompts for sample in group.samples.values())
            with waiting():
                on_progress(samples, samples, tokens, 0, self._layout)
        return [group.rollout() for group in self._prompts]

    @uninterrupted
    def _end(self, how: str, look: Look | None = None) -> None:
        if self._closed:
            return
        self._closed = True
        self._ends = how
        try:
            self._tell_end()
            self._account(look)
        except MoebiusError:
            raise
        except BaseException as error:
            if not self._released:
                self._broken_off(error)
            raise
        finally:
            self._release()

    def _broken_off(self, why: BaseException) -> None:
        """The caller broke off: end the step on the ranks so that the group can go on."""
        self._suspicion = Suspicion()  # nothing is held back any more
        outcomes: list[StepOutcome] = []
        try:
            self._tell_end()
            outcomes = self._group.interrupt(self._ranks, self._refs, f"step {self.step}", why)
        finally:
            # What is to be kept, or was parked by earlier steps, is the next step's: where it is still parked, or
            # drawn anew.
            park = self._ends == "park_step"
            left = [g for g in self._groups.values() if g.missing and (park or g.step != self.step)]
            self._group.backlog.keep(left, parked_on(outcomes))
