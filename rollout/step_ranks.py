"""A running open step and its ranks: what each was given, what has come back, and going on after a loss of ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError

from moebius.engine import phases
from moebius.engine.types import SampleKey, SamplePiece, SampleRequest, SampleResult, StepOutcome
from moebius.rollout.backlog import PromptGroup
from moebius.rollout.batch import assign, check_complete, to_sample
from moebius.rollout.errors import MoebiusError, RankDied
from moebius.rollout.failure_types import FAILED, Loss
from moebius.rollout.ranks import PROGRESS_S, ProgressWatch
from moebius.rollout.suspicion import Place, Suspicion
from moebius.rollout.types import Sample
from moebius.rollout.worker import Progress

if TYPE_CHECKING:
    from moebius.rollout.group_steps import GroupSteps
    from moebius.rollout.ranks import Ranks

Look = Callable[[Sequence[Progress]], None]


class StepOnRanks:
    """The part of an `OpenStep` that deals with ranks."""

    def __init__(
        self,
        group: GroupSteps,
        ranks: Ranks,
        serial: int,
        step: int,
        refs: dict[Any, int],
        groups: Sequence[PromptGroup],
        ranks_of: Mapping[SampleKey, int],
        *,
        whole: bool = False,
        replays: bool = False,
    ) -> None:
        """`groups` are those that it begins with: of earlier steps, or its own; `whole`: it gets no others.

        `ranks_of`: where those of their samples that no rank has parked were sent. `replays`: it goes on after a loss.
        """
        self.step = step
        self._group, self._ranks, self._serial, self._refs = group, ranks, serial, refs
        self._whole, self._replays = whole, replays
        self._prompts: list[PromptGroup] = [g for g in groups if g.step == step]
        self._groups = {(g.step, g.prompt): g for g in groups}
        self._results: list[list[SampleResult]] = [[] for _ in ranks.handles]
        self._closed = self._released = False
        self._pieces: list[SamplePiece] = []
        self._fresh: list[tuple[SampleKey, Sample]] = []  # that `finished` has not told of
        self._is_filled = whole  # the burst is in
        self._ends = "close_step" if whole else None  # how the step is to end, once that is known
        self._suspicion = Suspicion()
        self.losses: list[Loss] = []
        self.report_numbers: Mapping[Place, int] | None = None  # of prompts of earlier steps, where others count them
        self._layout = "EP"  # of the last iteration, once the step has ended
        self._begin(ranks)
        self._resumed: dict[SampleKey, int] = {}  # samples that were parked on a rank
        self._asked: set[SampleKey] = set()  # all samples that the step is to end or park
        for prompts in groups:
            self._asked.update(prompts.missing)
            parked = {key: prompts.ranks[key.sample] for key in prompts.missing if key.sample in prompts.ranks}
            self._resumed |= parked
            for key in prompts.missing:
                self._give(key, parked[key] if key in parked else ranks_of[key])

    def _begin(self, ranks: Ranks) -> None:
        """On these ranks nothing is running yet."""
        self._watch = ProgressWatch(ranks)
        self._taking: dict[Any, int] = {}  # a look at the ranks that has no answer yet
        self._load = [0] * len(ranks.handles)  # unfinished samples by rank that they were given to
        self._sent = [0] * len(ranks.handles)  # samples submitted to each rank since it began
        self._given: dict[SampleKey, int] = {}  # samples, and the ranks they were given to
        self._touched = time.monotonic()  # when something was last submitted or, while more may come, has ended

    def _give(self, key: SampleKey, rank: int) -> None:
        self._given[key] = rank
        self._load[rank] += 1

    def _submit(self, requests: Iterable[SampleRequest]) -> None:
        """Hand requests to the ranks that have least to do, but for those that are held back at present."""
        parts: list[list[SampleRequest]] = [[] for _ in self._load]
        for request in (r for r in requests if self._suspicion.may_run((r.key.step, r.key.prompt))):
            rank = self._load.index(min(self._load))
            self._give(request.key, rank)
            parts[rank].append(request)
        self._hand_over(parts)

    def _hand_over(self, parts: Sequence[list[SampleRequest]]) -> None:
        for handle, part in zip(self._ranks.handles, parts, strict=True):
            if part:
                handle.submit.remote(self._serial, part)
        self._sent = [sent + len(part) for sent, part in zip(self._sent, parts, strict=True)]
        self._touched = time.monotonic()

    def keys(self) -> list[SampleKey]:
        """Samples that have not ended. For any thread."""
        return [key for group in list(self._groups.values()) for key in group.missing]

    def _tell_end(self) -> None:
        """Tell the ranks how the step ends, unless prompts are still held back that must be drawn before."""
        if self._ends is None or (self._suspicion.trying and self._ends == "close_step"):
            return
        for handle, sent in zip(self._ranks.handles, self._sent, strict=True):
            getattr(handle, self._ends).remote(self._serial, sent)

    # ---- results --------------------------------------------------------------------------------------------------

    def _collect(self) -> list[SampleResult]:
        """Take what has ended from all ranks, or find them lost."""
        if self._released:
            return []
        try:
            self._check_deadline()
            if ray.wait(list(self._refs), timeout=0)[0]:  # a rank ends before the step is closed if it fails
                self._ranks.gather(self._refs, what=f"step {self.step}", timeout_s=self._ranks.silent_s)
            found = self._take()
        except (MoebiusError, RayActorError) as error:
            self._lost(error)
            return []
        self._let_go()
        return found

    def _take(self) -> list[SampleResult]:
        found: list[SampleResult] = []
        if self._taking:  # what ranks have handed over they forget: Ctrl-C came in the wait for it
            found = self._taken(self._taking)
        self._taking = self._ranks.submit("take_results", [(self._serial,)] * len(self._load))
        return found + self._taken(self._taking)

    def _taken(self, refs: dict[Any, int]) -> list[SampleResult]:
        how: dict[str, Any] = {"timeout_s": self._ranks.silent_s, "quick": True}
        taken = self._ranks.gather(refs, what=f"step {self.step}", **how)
        self._taking = {}
        found = []
        for rank, arrived in enumerate(taken):
            self._pieces += [piece for piece in arrived if isinstance(piece, SamplePiece)]
            results = [result for result in arrived if isinstance(result, SampleResult)]
            self._results[rank] += results
            for result in results:
                if result.finish_reason == "error":  # refused by vLLM, though it passed our checks
                    result.finish_reason = "abort"
                if (rank_given := self._given.get(result.key)) is None:
                    continue  # nobody asked for it: `_account` says so
                self._load[rank_given] -= 1
                self._end_sample(result)
                found.append(result)
        if found and not self._whole:
            self._touched = time.monotonic()
        return found

    def _end_sample(self, result: SampleResult) -> None:
        sample = to_sample(result)
        self._groups[(result.key.step, result.key.prompt)].samples[result.key.sample] = sample
        self._fresh.append((result.key, sample))

    def _check_deadline(self) -> None:
        limit = self._group.config.failures.step_deadline_s
        if limit is not None and time.monotonic() - self._touched > limit and self.keys():
            raise RankDied(
                f"step {self.step} did not end within {limit:g} s (failures.step_deadline_s), and counts as hung",
                step=self.step,
            )

    def _account(self, look: Look | None) -> None:
        """Wait for the ranks, and see that every sample has either ended or is parked."""
        next_look = 0.0

        def on_poll(progress: Sequence[Progress]) -> None:
            nonlocal next_look
            self._check_deadline()
            if (self._replays or look) and time.monotonic() >= next_look:
                next_look = time.monotonic() + PROGRESS_S
                self._take()  # what has ended need not be drawn again if ranks are lost
                self._let_go()
                if look:
                    look(progress)

        while True:
            try:
                what = f"step {self.step}"
                outcomes: list[StepOutcome] = self._ranks.gather(self._refs, what=what, on_poll=on_poll)
                self._take()
                break
            except (MoebiusError, RayActorError) as error:
                self._lost(error)
        parked = parked_on(outcomes)
        held = {key for key in self.keys() if not self._suspicion.may_run((key.step, key.prompt))}
        came = [result.key for results in self._results for result in results]
        allowed = parked.keys() if self._ends == "park_step" else set()
        check_complete(came, self._asked - allowed - held, self.step)
        self._group.backlog.keep((g for g in self._groups.values() if g.missing), parked)
        for outcome, results in zip(outcomes, self._results, strict=True):
            outcome.results = results
        if iterations := outcomes[0].stats.iterations:
            self._layout = iterations[-1].layout
        self._group.report_step(*self._for_report(outcomes), losses=self.losses)

    def _for_report(self, outcomes: list[StepOutcome]) -> tuple[list[StepOutcome], int, list[list[int]]]:
        """Arguments of `report_step`. Prompts of earlier steps get `report_numbers`, or ones behind its own."""
        older = [group for group in self._groups.values() if group.step != self.step]
        numbers = self.report_numbers
        if numbers is None:
            numbers = {(g.step, g.prompt): len(self._prompts) + i for i, g in enumerate(older)}
        for outcome in outcomes:
            outcome.results = [
                replace(r, key=r.key._replace(prompt=numbers.get((r.key.step, r.key.prompt), r.key.prompt)))
                for r in outcome.results
            ]
        ids = {group.prompt: group.ids for group in self._prompts}
        ids |= {numbers[(group.step, group.prompt)]: group.ids for group in older}
        # Prompts with numbers of their own (`submit_groups`) leave gaps.
        return outcomes, self.step, [ids.get(number, []) for number in range(1 + max(ids, default=-1))]

    # ---- losses ---------------------------------------------------------------------------------------------------

    def _lost(self, error: MoebiusError | RayActorError) -> None:
        """The ranks are lost: go on with others, or end the step and raise."""
        lost = error if isinstance(error, MoebiusError) else MoebiusError(str(error))
        if isinstance(lost, RankDied):
            lost.step = self.step
        resumed: Mapping[SampleKey, int] = {}
        try:
            if (harmless := self._group.refusal(lost, self.step)) is not None:
                resumed = self._resumed  # nothing was started
                raise harmless from error
            if not self._replays:
                self._group.step_lost(self._ranks, lost)
                raise lost from error
            blamed = self._blamed(lost)
            ranks = self._group.recover(self._ranks, lost, f"step {self.step}")
            try:
                self._send_again(ranks, blamed)
            except BaseException:  # they may have begun with it
                self._group.step_lost(ranks, MoebiusError(f"step {self.step} broke off while it was sent again"))
                raise
        except BaseException:
            self._closed = True
            # What earlier steps have left is still with the ranks if nothing was started, and else drawn anew. What is
            # complete has been told of, or will be.
            older = (g for g in self._groups.values() if g.step != self.step and g.missing)
            self._group.backlog.keep(older, resumed)
            self._release()
            raise

    def _blamed(self, error: MoebiusError) -> list[Place]:
        """The prompts that were, or may have been, in the batch when the ranks were lost."""
        rank, phase = getattr(error, "rank", None), getattr(error, "phase", None)
        if phase in (phases.IDLE, phases.START):
            return []
        policy = self._group.config.engine.policy
        # After a switch back to EP, requests need not be with the rank that they were given to.
        stays = policy.kind != "interactive" and policy.back_at_iteration is None
        if rank is not None and phase is not None and phases.own_requests_only(phase) and stays:
            return [(key.step, key.prompt) for key in self.keys() if self._given.get(key) == rank]
        return [(key.step, key.prompt) for key in self.keys() if key in self._given]

    def _send_again(self, ranks: Ranks, blamed: Iterable[Place]) -> None:
        """Begin anew on other ranks with all that has not ended, but for what is held back or given up."""
        loss, found = self._group.losses[-1], self._suspicion.lost(blamed)
        if found is not None:
            self._give_up(found, loss)
        for result in (result for results in self._results for result in results):
            result.ended_iteration = -1  # of another run's clock: the report has no times
        self._ranks, self._resumed = ranks, {}
        self._begin(ranks)
        suspects = set(self._suspicion.suspects)
        drawn = [g for at, g in self._groups.items() if self._suspicion.may_run(at)]
        requests = [
            (at in suspects, g.requests[k.sample]) for g in drawn for at in [(g.step, g.prompt)] for k in g.missing
        ]
        # Suspects are spread evenly, too: in EP, the rank that is lost next narrows them down.
        parts: list[list[SampleRequest]] = [[] for _ in self._load]
        for kind in (True, False):
            dealt = assign([request for suspect, request in requests if suspect == kind], len(parts))
            parts = [part + more for part, more in zip(parts, dealt, strict=True)]
        for rank, part in enumerate(parts):
            for request in part:
                self._give(request.key, rank)
        # What was submitted one by one may yet be refused one by one.
        at_once = parts if self._whole else [[] for _ in parts]
        self._serial, self._refs = self._group.send_again(ranks, at_once)
        if not self._whole:
            self._hand_over(parts)
        if self._is_filled:
            ranks.tell("filled", self._serial)
        self._tell_end()
        loss = replace(loss, replayed=len(requests), given_up=() if found is None else (found,))
        self._group.losses[-1] = loss
        self.losses.append(loss)

    def _let_go(self) -> None:
        """Draw prompts that were held back, if those that were tried before them have ended in peace."""
        suspects = self._suspicion.suspects
        if not suspects or not self._suspicion.ended(at for at in suspects if self._groups[at].complete):
            return
        keys = [key for key in self.keys() if key not in self._given]
        self._submit(self._groups[(key.step, key.prompt)].requests[key.sample] for key in keys)
        self._tell_end()

    def _give_up(self, place: Place, loss: Loss) -> None:
        """End the samples of a prompt that brings ranks down."""
        group = self._groups[place]
        why = f"given up, since ranks were lost again and again while they worked on this prompt, at last: {loss.why}"
        for key in group.missing:
            asked = group.requests[key.sample].sampling
            logprobs: list[float] | None = None if asked.get("logprobs") is None else []
            text = "" if self._group.has_tokenizer else None
            result = SampleResult(
                key, [], logprobs, text, FAILED, why, self._group.policy_version, loss.rank or 0
            )  # fmt: skip
            self._results[0].append(result)
            self._end_sample(result)

    def _release(self) -> None:
        """Let the group serve other calls."""
        if not self._released:
            self._released = True
            self._group.step_closed()


def parked_on(outcomes: Sequence[StepOutcome]) -> dict[SampleKey, int]:
    """The rank of each sample that a step has left parked; `outcomes` in rank order."""
    return {key: rank for rank, outcome in enumerate(outcomes) for key in outcome.parked}
