"""How a group draws samples: whole steps, streams of rollouts, and steps that take prompts while they run."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from moebius.engine.types import SampleKey, SampleRequest, StepOutcome
from moebius.rollout.backlog import PromptGroup, groups_of, homeless_requests
from moebius.rollout.batch import Prompt, assign, build_requests, check_sampling, to_sample, to_token_ids
from moebius.rollout.budget import Budget
from moebius.rollout.errors import BadInput, GroupNotReady, MoebiusError, RankDied, validate
from moebius.rollout.failure_types import Loss
from moebius.rollout.interrupts import handed_over, held_back, uninterrupted
from moebius.rollout.open_step import ABORT_S, OpenStep
from moebius.rollout.ranks import RankError, Ranks
from moebius.rollout.recovery import GroupRecovery
from moebius.rollout.report import build_report
from moebius.rollout.stream import OnProgress, RolloutStream, drawn, sealed_stream
from moebius.rollout.types import LengthTrace, Rollout, Sample, Sampling

_log = logging.getLogger(__name__)


class GroupSteps(GroupRecovery):
    """The part of a `RolloutGroup` that draws samples."""

    _aborted: Sequence[SampleKey] = ()  # asked for in the running step
    _live_step: OpenStep | None = None  # the open one, while it runs
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
        """Draw `n` samples of each prompt; returns one Rollout per prompt, in order, with all its samples.

        A `budget` may end the step before all prompts are done: those that are come back. Prompts that earlier steps
        have left unfinished go on first, and come back behind the step's own, by `Rollout.step` and number.

        Args:
            prompts: token ids, texts, or chat messages (lists of {"role", "content"}); kinds may be mixed. None at all
                give an empty list.
            n: samples per prompt, at least 1.
            sampling: settings; a mapping changes single fields of the configured ones.
            step: number of the rollout step, which sample seeds depend on; None counts on from the last one.
            on_progress: called about twice a second with samples done, samples in all, output tokens so far,
                unfinished samples and the layout. An error in it ends the step.
            lengths: replay these output lengths exactly instead of stopping by content.
            budget: when the step may stop, and what becomes of what is unfinished then (see Budget).

        After `step_timeout_s` unfinished samples are ended; they carry the finish reason "abort", as after `abort()`.

        Raises:
            BadInput: found before anything is sent; the group goes on working.
            GroupNotReady: shut down, a rank died, or a weight update failed; the message says what to do.
            RankDied: a rank died during the step, and `failures` did not allow to go on or could not help; `restart()`
                the group and repeat the step.
            IncompleteStep: samples are missing or double.
            MoebiusError: another call is running, or a rank failed.

        When ranks are lost and started again, unfinished samples are drawn anew with the same seeds. Those of a prompt
        that brings ranks down again and again come back with the finish reason "failed" and the reason as
        `stop_reason`.
        """
        if budget is not None or self.backlog:
            return drawn(lambda: self.stream(prompts, n, sampling, step, on_progress, lengths, budget))
        with held_back():
            opened = self._open_whole(prompts, n, sampling, step, lengths)
            return [] if opened is None else opened.run(on_progress)

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
        """As `generate`, but each Rollout comes as soon as all its samples have ended, so that rewards can be computed
        meanwhile. The group serves nothing else until the stream has ended or is closed. Raises as `generate`.
        """
        budget = budget if budget is None or isinstance(budget, Budget) else validate(Budget, budget, "budget")
        with self._held_for("stream"):
            own = self._sampling(sampling)
            requests, ids, step = self._requests(prompts, n, own, step, lengths)
            ready = self.backlog.take_complete()
            try:
                opened = self._open(step, None, groups_of(requests, ids, step, 0))
            except BaseException:
                self.backlog.leave(ready)
                raise
        return sealed_stream(opened, ready, budget, self.config.step_timeout_s, on_progress)

    @handed_over(OpenStep.break_off)
    def open_step(
        self,
        step: int | None = None,
        expected: int | None = None,
        groups: Sequence[PromptGroup] = (),
        *,
        replay: bool | None = None,
    ) -> OpenStep:
        """Begin a step that takes prompts while it runs. The group serves nothing else until it is closed.

        `step` is as in `generate`. Few live samples mean the step's tail only when its burst has come in: when
        `expected` samples have been submitted, or, where that is not said, when the step is being closed. Until then
        the policies `rollout` and `predictive` stay in EP. It begins with `groups`, whose prompts have numbers of their
        own. `replay`: whether it goes on after the loss of ranks; None: as `failures.on_failure` says. Raises
        GroupNotReady, MoebiusError as `generate`.
        """
        with self._held_for("open_step"):
            return self._open(self._step_number(step), expected, list(groups), replay=replay)

    def _open_whole(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling | Mapping[str, Any] | None,
        step: int | None,
        lengths: LengthTrace | None,
    ) -> OpenStep | None:
        """A step that takes nothing but these prompts; None if there are none."""
        with self._held_for("generate"):
            self._ready()
            requests, ids, step = self._requests(prompts, n, self._sampling(sampling), step, lengths)
            if requests:
                return self._open(step, None, groups_of(requests, ids, step, 0), whole=True)
        self._one_call.release()
        self.last_report = None
        return None

    @contextmanager
    def _held_for(self, name: str) -> Iterator[None]:
        """The group serves one call, which goes on after the block unless that fails. Within `held_back`."""
        if not self._one_call.acquire(blocking=False):
            raise MoebiusError(f"{name}: another call is running on this group; a group serves one at a time")
        try:
            yield
        except BaseException:
            self._one_call.release()
            raise

    def _open(
        self,
        step: int,
        expected: int | None,
        own: list[PromptGroup],
        *,
        whole: bool = False,
        replay: bool | None = None,
    ) -> OpenStep:
        """An open step that begins with prompts of its `own`; if these are the `whole` of it, it takes no more.

        Within `held_back`: no Ctrl-C comes between the prompts that are taken, what ranks are sent, and the step.
        """
        ranks = self._ready()
        self.backlog.check_step(step)
        older = self.backlog.take()
        # Parked samples are where they are; what no rank has is sent along.
        parts = assign(homeless_requests([*older, *own]), self.config.ranks)
        ranks_of = {request.key: rank for rank, part in enumerate(parts) for request in part}
        self._serial += 1
        replays = self.config.failures.on_failure == "replay" if replay is None else replay
        try:
            refs = ranks.submit("run_step", [(self._serial, part, not whole, True) for part in parts])
            self._running, self._running_step, self._aborted = self._serial, step, []
            of_ranks = (self, ranks, self._serial, step, refs, [*older, *own], ranks_of)
            self._live_step = OpenStep(*of_ranks, expected=expected, whole=whole, replays=replays)
            return self._live_step
        except BaseException:
            self._running = self._live_step = None
            self.backlog.groups.update({(group.step, group.prompt): group for group in older})
            self._lose(ranks, f"step {step} broke off while it was sent")
            raise

    def abort(self, keys: Iterable[SampleKey | tuple[int, int]] | None = None) -> None:
        """End samples (prompt, sample) of the running step early, None: all of them. Any thread; does not wait.

        They come back from `generate` with the tokens they have and the finish reason "abort". Without a running step
        nothing happens. A key of three also names the step, for samples of an earlier one that the step goes on with.
        """
        if self._running is None:
            return
        asked = None if keys is None else [_full_key(key, self._running_step) for key in keys]
        if (opened := self._live_step) is not None:
            self._aborted = [*self._aborted, *(opened.keys() if asked is None else asked)]  # for new ranks
        ranks, serial = self._ranks, self._running  # only now: what begins anew meanwhile has seen the line before
        if ranks is not None and serial is not None:
            ranks.tell("abort", serial, asked)

    @property
    def parked(self) -> list[SampleKey]:
        """Unfinished samples of earlier steps, which the next one goes on with."""
        return self.backlog.keys

    @property
    def incomplete(self) -> list[Rollout]:
        """Prompts with parked samples, with those of their samples that have ended."""
        return [group.rollout() for group in self.backlog.groups.values() if not group.complete]

    def abort_parked(self, keys: Iterable[SampleKey] | None = None) -> list[tuple[SampleKey, Sample]]:
        """End these parked samples (None: all) with the tokens they have, and return them; between steps only.

        A prompt whose last parked sample this was is forgotten: `incomplete` has told what had ended of it. Keys that
        are not parked are passed over. What a call that Ctrl-C broke off has ended is returned by the next one. Raises
        GroupNotReady, MoebiusError as `generate`.
        """
        ended: list[tuple[SampleKey, Sample]] = []
        try:
            with self._exclusively("abort_parked"):
                wanted = set(self.parked) if keys is None else {SampleKey(*key) for key in keys} & set(self.parked)
                ended, self._ended = list(self._ended), ()
                if wanted:
                    ended += self._end_parked(wanted)
            return ended
        except BaseException:
            self._ended = ended or self._ended
            raise

    def _end_parked(self, wanted: set[SampleKey]) -> list[tuple[SampleKey, Sample]]:
        """End these on the ranks, and forget their prompts."""
        ended: list[tuple[SampleKey, Sample]] = []
        if self._ranks is not None:
            how: dict[str, Any] = {"what": "the abort of parked samples", "timeout_s": ABORT_S, "held": True}
            asked, ranks = sorted(wanted), self._ranks
            try:
                for part in ranks.call("abort_parked", [(asked,)] * self.config.ranks, **how):
                    ended += [(result.key, to_sample(result)) for result in part]
            except (RankDied, RankError) as error:
                _log.warning("%s", self.after_loss(ranks, error, "the abort of parked samples"))
            except BaseException:  # who insists does not wait: the ranks have been asked, and end them all the same
                self.backlog.end((key, _unheard(key, self.policy_version)) for key in wanted)
                raise
        # The rest is of ranks that are gone: nothing of it is left.
        for key in sorted(wanted - {key for key, _ in ended}):
            ended.append((key, _unheard(key, self.policy_version)))
        self.backlog.end(ended)
        return ended

    @property
    def captured_lengths(self) -> LengthTrace | None:
        """Output lengths of the last step, to replay with `generate(lengths=...)`; None before the first step."""
        return None if self.last_report is None else LengthTrace.from_report(self.last_report)

    # ---- for OpenStep -----------------------------------------------------------------------------------------------

    def send_again(self, ranks: Ranks, parts: list[list[SampleRequest]]) -> tuple[int, dict[Any, int]]:
        """Begin the running step anew on new ranks; returns its serial there, and what `Ranks.gather` takes."""
        self._serial += 1
        refs = ranks.submit("run_step", [(self._serial, part, True, True) for part in parts])
        self._running = self._serial
        if self._aborted:
            ranks.tell("abort", self._serial, list(self._aborted))
        return self._serial, refs

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
        return self._requests(prompts, n, self._sampling(sampling), step, lengths, first)[:2]

    def report_step(
        self, outcomes: list[StepOutcome], step: int, prompt_ids: list[list[int]], losses: Sequence[Loss] = ()
    ) -> None:
        """Make `last_report`."""
        self.last_report = build_report(
            outcomes,
            step=step,
            policy_version=self.policy_version,
            model=self.config.engine.model,
            device=self.device,
            prompt_tokens=[len(ids) for ids in prompt_ids],
            update_weights_s=self._update_s,
            update_ended_at=self._update_ended_at,
            startup=self._unreported_start,
            costs=self.costs,
            costs_from=self.costs_from,
            losses=losses,
        )
        self._update_s = self._update_ended_at = self._unreported_start = None
        self._next_step = step + 1
        self._restarts = 0

    def step_closed(self) -> None:
        """The open step is over, whole or lost; called once."""
        self._running = self._live_step = None
        self._one_call.release()

    def step_lost(self, ranks: Ranks, error: MoebiusError) -> None:
        """A rank failed in the open step, and it does not go on."""
        closed_by_user = self._ranks is not ranks
        self._lose(ranks, str(error))
        if closed_by_user:
            raise GroupNotReady(self._problem or "the group was shut down during the step") from error

    def refusal(self, error: MoebiusError, step: int) -> BadInput | None:
        """What to raise if the ranks have refused the step, so that none has started and all can go on."""
        refused = ("RequestRefused", "PolicyRefused")
        if isinstance(error, RankError) and error.by_all and str(error.cause).startswith(refused):
            return BadInput(f"step {step}: {error.cause}")
        return None

    # ---- parts of generate ----------------------------------------------------------------------------------------

    def _sampling(self, sampling: Sampling | Mapping[str, Any] | None) -> Sampling:
        if isinstance(sampling, Mapping):
            sampling = Sampling.parse(self.config.sampling.model_dump() | dict(sampling))
        own = self.config.sampling if sampling is None else Sampling.parse(sampling)
        check_sampling(own, self._limits)
        return own

    def _requests(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        step: int | None,
        lengths: LengthTrace | None,
        first: int = 0,
    ) -> tuple[list[SampleRequest], list[list[int]], int]:
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise BadInput(f"n: expected at least 1 sample per prompt, got {n!r}")
        step = self._step_number(step)
        if isinstance(prompts, str | Mapping) or not isinstance(prompts, Sequence):
            raise BadInput(f"prompts: expected a list of prompts, got {type(prompts).__name__}")
        ids = [to_token_ids(p, i, self._limits, lambda: self.tokenizer) for i, p in enumerate(prompts)]
        seed = self.config.engine.seed if sampling.seed is None else sampling.seed
        requests = build_requests(
            ids, n, sampling, seed=seed, step=step, limits=self._limits, lengths=lengths, first=first
        )
        return requests, ids, step

    def _step_number(self, step: int | None) -> int:
        if step is None:
            return self._next_step
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 1 << 63:
            raise BadInput(f"step: expected an int of at least 0, got {step!r}")
        return step

    @uninterrupted
    def interrupt(self, ranks: Ranks, refs: dict[Any, int], what: str, why: BaseException) -> list[StepOutcome]:
        """The caller broke off (Ctrl-C, an error in on_progress): end the step so that the group can go on.

        Returns what the ranks did; nothing if they are lost.
        """
        self.abort()
        try:
            return ranks.gather(refs, what=f"the abort of {what}", timeout_s=ABORT_S)
        except (RankDied, RankError) as error:
            if isinstance(why, KeyboardInterrupt):  # who wants to leave does not wait for a start
                self._lose(ranks, str(error))
            else:
                _log.warning("%s", self.after_loss(ranks, error, f"the abort of {what}"))
            return []
        except BaseException:  # Ctrl-C again: nobody knows what they have left, so they must not go on with it
            self._lose(ranks, f"{what} was broken off, and its end was not waited for")
            raise


def _unheard(key: SampleKey, version: int) -> Sample:
    """An aborted sample whose tokens no rank has sent."""
    return Sample(key.sample, [], None, None, None, "abort", None, version, 0)


def _full_key(key: Sequence[int], step: int) -> SampleKey:
    return SampleKey(*key) if len(key) == 3 else SampleKey(key[0], key[1], step)
