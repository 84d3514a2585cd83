"""How several replicas draw samples together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moebius.engine.types import SampleKey, SampleRequest
from moebius.rollout.backlog import PromptGroup, groups_of
from moebius.rollout.batch import Prompt
from moebius.rollout.budget import Budget
from moebius.rollout.errors import BadInput, validate
from moebius.rollout.interrupts import handed_over
from moebius.rollout.replica_life import ReplicaLife
from moebius.rollout.report_lanes import LaneOutcome, merge
from moebius.rollout.shared_step import SharedStep
from moebius.rollout.stream import OnProgress, RolloutStream, drawn, sealed_stream
from moebius.rollout.types import LengthTrace, Rollout, Sample, Sampling


class ReplicaSteps(ReplicaLife):
    """The part of `RolloutReplicas` that draws samples."""

    _step: SharedStep | None = None  # that runs
    _ended: Sequence[tuple[SampleKey, Sample]] = ()  # by an `abort_parked` that could not return them

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling | Mapping[str, Any] | None = None,
        step: int | None = None,
        on_progress: OnProgress | None = None,
        lengths: LengthTrace | None = None,
        budget: Budget | Mapping[str, Any] | None = None,
    ) -> list[Rollout]:
        """As `RolloutGroup.generate`, with the same samples; raises RankDied only when all replicas are lost."""
        if isinstance(prompts, Sequence) and not len(prompts) and not self.backlog and not self.parked:
            self.last_report = None
            return []
        found = drawn(lambda: self.stream(prompts, n, sampling, step, on_progress, lengths, budget))
        if on_progress is not None and self.last_report is not None:
            samples = sum(len(rollout.samples) for rollout in found)
            tokens = sum(len(sample.token_ids) for rollout in found for sample in rollout.samples)
            timeline = self.last_report.timeline
            on_progress(samples, samples, tokens, 0, timeline[-1].layout if timeline else "EP")
        return found

    @handed_over(RolloutStream.withdraw)
    def stream(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling | Mapping[str, Any] | None = None,
        step: int | None = None,
        on_progress: OnProgress | None = None,
        lengths: LengthTrace | None = None,
        budget: Budget | Mapping[str, Any] | None = None,
    ) -> RolloutStream:
        """As `RolloutGroup.stream`."""
        budget = budget if budget is None or isinstance(budget, Budget) else validate(Budget, budget, "budget")
        with self._held_for("stream"):
            step = self._step_number(step)
            requests, ids = self.requests_of(prompts, n, sampling, step, 0, lengths)
            ready = self.backlog.take_complete()
            try:
                opened = self._open(step, None, groups_of(requests, ids, step, 0))
            except BaseException:
                self.backlog.leave(ready)
                raise
        return sealed_stream(opened, ready, budget, self.config.step_timeout_s, on_progress)

    @handed_over(SharedStep.break_off)
    def open_step(
        self, step: int | None = None, expected: int | None = None, *, replay: bool | None = None
    ) -> SharedStep:
        """As `RolloutGroup.open_step`; with `replay=False`, what a lost replica had fails instead of being drawn by
        others.
        """
        with self._held_for("open_step"):
            return self._open(self._step_number(step), expected, [], replay=replay is not False)

    def _open(self, step: int, expected: int | None, own: list[PromptGroup], *, replay: bool = True) -> SharedStep:
        members = self._serving()
        for backlog in (self.backlog, *(member.group.backlog for member in self._members)):
            backlog.check_step(step)
        older = self.backlog.take()
        try:
            self._step = SharedStep(self, members, step, own, older, expected, replay=replay)
        except BaseException:
            self.take_back(older)
            raise
        return self._step

    def take_back(self, older: Iterable[PromptGroup]) -> None:
        """Prompts of earlier steps that a refused one had begun with; some may be parked on a replica again."""
        there = {at for member in self._members for at in member.group.backlog.groups}
        self.backlog.keep((g for g in older if g.missing and (g.step, g.prompt) not in there), {})

    def _step_number(self, step: int | None) -> int:
        if step is None:
            return self._next_step
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 1 << 63:
            raise BadInput(f"step: expected an int of at least 0, got {step!r}")
        return step

    def requests_of(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling | Mapping[str, Any] | None,
        step: int,
        first: int,
        lengths: LengthTrace | None = None,
    ) -> tuple[list[SampleRequest], list[list[int]]]:
        """Requests and token ids of prompts that are numbered from `first`. Raises BadInput."""
        return self._members[0].group.requests_of(prompts, n, sampling, step, first, lengths)

    def abort(self, keys: Iterable[SampleKey | tuple[int, int]] | None = None) -> None:
        """As `RolloutGroup.abort`; any thread."""
        step = self._step
        if step is not None:
            step.ask_abort(None if keys is None else [_full_key(key, step.step) for key in keys])

    @property
    def parked(self) -> list[SampleKey]:
        """Unfinished samples of earlier steps, which the next one goes on with."""
        return [*self.backlog.keys, *(key for member in self._members for key in member.group.parked)]

    @property
    def incomplete(self) -> list[Rollout]:
        """Prompts with parked samples, with those of their samples that have ended."""
        own = [group.rollout() for group in self.backlog.groups.values() if not group.complete]
        return own + [rollout for member in self._members for rollout in member.group.incomplete]

    def abort_parked(self, keys: Iterable[SampleKey] | None = None) -> list[tuple[SampleKey, Sample]]:
        """As `RolloutGroup.abort_parked`."""
        ended: list[tuple[SampleKey, Sample]] = []
        try:
            with self._exclusively("abort_parked"):
                ended, self._ended = list(self._ended), ()
                wanted = set(self.parked) if keys is None else {SampleKey(*key) for key in keys}
                for member in self._members:
                    if own := wanted.intersection(member.group.parked):
                        for key, sample in member.group.abort_parked(own):
                            sample.rank += member.index * self.config.ranks
                            ended.append((key, sample))
                mine = [
                    (key, Sample(key.sample, [], None, None, None, "abort", None, self.policy_version, 0))
                    for key in sorted(wanted.intersection(self.backlog.keys))
                ]
                self.backlog.end(mine)
                ended += mine
            return ended
        except BaseException:
            self._ended = ended or self._ended
            raise

    @property
    def captured_lengths(self) -> LengthTrace | None:
        """As `RolloutGroup.captured_lengths`."""
        return None if self.last_report is None else LengthTrace.from_report(self.last_report)

    def step_closed(self, told: tuple[int, list[LaneOutcome], list[tuple[int, Sample, int]]] | None) -> None:
        """The running step is over, with what its replicas did, or lost; called by it, once."""
        self._step = None
        try:
            if told is not None:
                step, lanes, ended = told
                self.last_report = merge(
                    lanes,
                    ended,
                    step=step,
                    policy_version=self.policy_version,
                    model=self.config.engine.model,
                    device=self.device,
                    ranks=self.config.ranks,
                    replicas=self.config.replicas,
                    update_weights_s=self._update_s,
                    update_ended_at=self._update_ended_at,
                    startup=self._unreported_start,
                )
                self._update_s = self._update_ended_at = self._unreported_start = None
                self._next_step = step + 1
        finally:
            self._one_call.release()


def _full_key(key: Sequence[int], step: int) -> SampleKey:
    return SampleKey(*key) if len(key) == 3 else SampleKey(key[0], key[1], step)
