"""A step that takes prompts while it runs, for callers that learn of them one by one (agents, servers)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError

from moebius.engine.types import SampleKey, SamplePiece, SampleRequest, SampleResult, StepOutcome
from moebius.rollout.backlog import PromptGroup, groups_of
from moebius.rollout.batch import Prompt, to_sample
from moebius.rollout.errors import BadInput, GroupNotReady, MoebiusError
from moebius.rollout.ranks import ProgressWatch
from moebius.rollout.types import Rollout, Sample, Sampling
from moebius.rollout.worker import Progress

if TYPE_CHECKING:
    from moebius.rollout.group_steps import GroupSteps
    from moebius.rollout.ranks import Ranks

POLL_S = 0.01


class OpenStep:
    """Made by `RolloutGroup.open_step`; use it as a context manager, or call `close()`.

    Prompts get numbers in the order they are submitted, from 0. Sample seeds depend on the step, that number and the
    sample's index, as in `generate`. A sample that vLLM refuses comes back empty, with the finish reason "abort" and
    the reason as `stop_reason`. Samples that earlier steps have parked go on first. Not for several threads at once.
    """

    def __init__(
        self,
        group: GroupSteps,
        ranks: Ranks,
        serial: int,
        step: int,
        refs: dict[Any, int],
        expected: int | None,
        groups: Sequence[PromptGroup],
        ranks_of: Mapping[SampleKey, int],
    ) -> None:
        self.step = step
        self._expected = expected  # samples of the burst, until they are all submitted
        self._group, self._ranks, self._serial, self._refs = group, ranks, serial, refs
        # `groups` are those that it begins with: of earlier steps, or its own. `ranks_of`: where those of their samples
        # that no rank has parked were sent.
        self._prompts: list[PromptGroup] = [g for g in groups if g.step == step]
        self._groups = {(g.step, g.prompt): g for g in groups}
        self._load = [0] * len(ranks.handles)  # unfinished samples by rank that they were given to
        self._sent = [0] * len(ranks.handles)  # samples submitted to each rank since it began
        self._given: dict[SampleKey, int] = {}  # all samples of the step, and the ranks they were given to
        self._resumed: dict[SampleKey, int] = {}  # those that were parked there
        self._submitted = 0  # samples
        self._results: list[list[SampleResult]] = [[] for _ in ranks.handles]
        self._closed = self._released = False
        self._pieces: list[SamplePiece] = []
        self._fresh: list[tuple[SampleKey, Sample]] = []  # that `finished` has not told of
        self._watch = ProgressWatch(ranks)
        for prompts in groups:
            parked = {key: prompts.ranks[key.sample] for key in prompts.missing if key.sample in prompts.ranks}
            self._resumed |= parked
            for key in prompts.missing:
                self._give(key, parked[key] if key in parked else ranks_of[key])

    def _give(self, key: SampleKey, rank: int) -> None:
        self._given[key] = rank
        self._load[rank] += 1

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
        parts: list[list[SampleRequest]] = [[] for _ in self._load]
        if seeds is not None or stream:
            requests = [
                replace(r, stream=stream, seed=r.seed if seeds is None else seeds[r.key.prompt - first][r.key.sample])
                for r in requests
            ]
        for group in groups_of(requests, ids, self.step, first):
            self._prompts.append(group)
            self._groups[(group.step, group.prompt)] = group
        for request in requests:
            rank = self._load.index(min(self._load))
            self._give(request.key, rank)
            parts[rank].append(request)
        self._submitted += len(requests)
        for handle, part in zip(self._ranks.handles, parts, strict=True):
            if part:
                handle.submit.remote(self._serial, part)
        self._sent = [sent + len(part) for sent, part in zip(self._sent, parts, strict=True)]
        if self._expected is not None and self._submitted >= self._expected:
            self.filled()
        return list(range(first, len(self._prompts)))

    def finished(self) -> list[tuple[SampleKey, Sample]]:
        """Samples that ended since the last call, with their keys; does not wait for any.

        Samples of earlier steps, which had parked them, are among them: their keys tell the step. Works on after the
        step was parked or closed.
        """
        self._collect()
        fresh, self._fresh = self._fresh, []
        return fresh

    def completed(self) -> list[tuple[int, Sample]]:
        """(prompt number, sample) of this step's samples that ended since the last call; does not wait for any.

        Those of earlier steps are left for `finished`.
        """
        self._collect()
        own = [(key.prompt, sample) for key, sample in self._fresh if key.step == self.step]
        self._fresh = [(key, sample) for key, sample in self._fresh if key.step != self.step]
        return own

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

    def filled(self) -> None:
        """The burst is in: few live samples mean the step's tail from now on."""
        self._ranks.tell("filled", self._serial)
        self._expected = None

    def seal(self) -> None:
        """No more prompts will come: the step may end by itself. It must be closed or parked all the same."""
        self.filled()
        for handle, sent in zip(self._ranks.handles, self._sent, strict=True):
            handle.close_step.remote(self._serial, sent)

    def progress(self) -> list[Progress]:
        """How far each rank is, by its last answer; does not wait for any."""
        # An answer may be of the step before, given just before this one began.
        return [p if p.serial == self._serial else Progress(serial=self._serial) for p in self._watch.look()]

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
                time.sleep(POLL_S)
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
        keys = None if own is None else [k for k in self._given if k.step == self.step and k.prompt in own]
        self._ranks.tell("abort", self._serial, keys)

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

    def __enter__(self) -> OpenStep:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is not None and not self._closed:
            self.abort()
        self.close()

    def _end(self, how: str) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            for handle, sent in zip(self._ranks.handles, self._sent, strict=True):
                getattr(handle, how).remote(self._serial, sent)
            self._account()
        finally:
            self._release()

    def _account(self) -> None:
        """Wait for the ranks, and see that every sample has either ended or is parked."""
        outcomes: list[StepOutcome] = self._lost_if_failed(
            lambda: self._ranks.gather(self._refs, what=f"step {self.step}", on_poll=lambda progress: None)
        )
        self._collect(running=False)
        parked = {key: rank for rank, outcome in enumerate(outcomes) for key in outcome.parked}
        missing = [k for group in self._groups.values() for k in group.missing if k not in parked]
        if missing:
            raise MoebiusError(f"step {self.step}: {', '.join(map(str, missing[:10]))} did not come back")
        self._group.backlog.keep((g for g in self._groups.values() if g.missing), parked)
        for outcome, results in zip(outcomes, self._results, strict=True):
            outcome.results = results
        self._group.report_step(*self._for_report(outcomes))

    def _for_report(self, outcomes: list[StepOutcome]) -> tuple[list[StepOutcome], int, list[list[int]]]:
        """Arguments of `report_step`. Prompts of earlier steps get numbers behind this step's own."""
        older = [group for group in self._groups.values() if group.step != self.step]
        numbers = {(g.step, g.prompt): len(self._prompts) + i for i, g in enumerate(older)}
        for outcome in outcomes:
            outcome.results = [
                replace(r, key=r.key._replace(prompt=numbers.get((r.key.step, r.key.prompt), r.key.prompt)))
                for r in outcome.results
            ]
        return outcomes, self.step, [group.ids for group in [*self._prompts, *older]]

    def _collect(self, running: bool = True) -> list[SampleResult]:
        """Take what has ended from all ranks."""
        if self._released:
            return []
        if running and ray.wait(list(self._refs), timeout=0)[0]:  # a rank ends before the step is closed if it fails
            self._lost_if_failed(lambda: self._ranks.gather(self._refs, what=f"step {self.step}"))
        taken = self._lost_if_failed(
            lambda: self._ranks.call("take_results", [(self._serial,)] * len(self._load), what="taking results")
        )
        found = []
        for rank, arrived in enumerate(taken):
            self._pieces += [piece for piece in arrived if isinstance(piece, SamplePiece)]
            results = [result for result in arrived if isinstance(result, SampleResult)]
            self._results[rank] += results
            for result in results:
                if result.finish_reason == "error":  # refused by vLLM, though it passed our checks
                    result.finish_reason = "abort"
                self._load[self._given[result.key]] -= 1
                sample = to_sample(result)
                self._groups[(result.key.step, result.key.prompt)].samples[result.key.sample] = sample
                self._fresh.append((result.key, sample))
                found.append(result)
        return found

    def _lost_if_failed(self, call: Callable[[], list[Any]]) -> list[Any]:
        try:
            return call()
        except (MoebiusError, RayActorError) as error:
            self._closed = True
            self._release()
            lost = error if isinstance(error, MoebiusError) else MoebiusError(str(error))
            harmless = self._group.refusal(lost, self.step)
            # What earlier steps have left is still with the ranks if nothing was started, and else drawn anew.
            older = [group for group in self._groups.values() if group.step != self.step]
            self._group.backlog.keep(older, self._resumed)
            if harmless is not None:
                raise harmless from error
            self._group.step_lost(self._ranks, lost)
            raise lost from error

    def _release(self) -> None:
        """Let the group serve other calls."""
        if not self._released:
            self._released = True
            self._group.step_closed()
