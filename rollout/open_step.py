"""A step that takes prompts while it runs, for callers that learn of them one by one (agents, servers)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError

from moebius.engine.types import SampleKey, SampleRequest, SampleResult, StepOutcome
from moebius.rollout.batch import Prompt, to_sample
from moebius.rollout.errors import BadInput, GroupNotReady, MoebiusError
from moebius.rollout.types import Rollout, Sample, Sampling

if TYPE_CHECKING:
    from moebius.rollout.group import RolloutGroup
    from moebius.rollout.ranks import Ranks

POLL_S = 0.01


@dataclass(slots=True)
class _Submitted:
    """A prompt and its samples so far, by sample index."""

    ids: list[int]
    n: int
    samples: dict[int, Sample] = field(default_factory=dict)


class OpenStep:
    """Made by `RolloutGroup.open_step`; use it as a context manager, or call `close()`.

    Prompts get numbers in the order they are submitted, from 0. Sample seeds depend on the step, that number and the
    sample's index, as in `generate`. A sample that vLLM refuses comes back empty, with the finish reason "abort" and
    the reason as `stop_reason`. Not for several threads at once.
    """

    def __init__(
        self, group: RolloutGroup, ranks: Ranks, serial: int, step: int, refs: dict[Any, int], expected: int | None
    ) -> None:
        self.step = step
        self._expected = expected  # samples of the burst, until they are all submitted
        self._group, self._ranks, self._serial, self._refs = group, ranks, serial, refs
        self._prompts: list[_Submitted] = []
        self._load = [0] * len(ranks.handles)  # unfinished samples by rank that they were given to
        self._sent = [0] * len(ranks.handles)  # samples given to each rank
        self._given: dict[SampleKey, int] = {}
        self._results: list[list[SampleResult]] = [[] for _ in ranks.handles]
        self._outcomes: list[StepOutcome] | None = None
        self._closed = self._released = False

    def submit(
        self, prompts: Sequence[Prompt], n: int = 1, sampling: Sampling | Mapping[str, Any] | None = None
    ) -> list[int]:
        """Add prompts with `n` samples each; returns their numbers. Arguments are those of `generate`.

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
        for prompt in ids:
            self._prompts.append(_Submitted(prompt, n))
        for request in requests:
            rank = self._load.index(min(self._load))
            self._load[rank] += 1
            self._given[request.key] = rank
            parts[rank].append(request)
        for handle, part in zip(self._ranks.handles, parts, strict=True):
            if part:
                handle.submit.remote(self._serial, part)
        self._sent = [sent + len(part) for sent, part in zip(self._sent, parts, strict=True)]
        if self._expected is not None and len(self._given) >= self._expected:
            self._ranks.tell("filled", self._serial)
            self._expected = None
        return list(range(first, len(self._prompts)))

    def completed(self) -> list[tuple[int, Sample]]:
        """(prompt number, sample) of all samples that ended since the last call; does not wait for any."""
        return [(result.key[0], to_sample(result)) for result in self._collect()]

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
        while len(self._prompts[prompt].samples) < self._prompts[prompt].n:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"prompt {prompt} has unfinished samples after {timeout_s} s")
            if not self._collect():
                time.sleep(POLL_S)
        return self._rollout(prompt)

    def abort(self, prompts: Sequence[int] | None = None) -> None:
        """End all samples of these prompts (None: of all) with the tokens they have; does not wait."""
        keys = None if prompts is None else [key for key in self._given if key.prompt in set(prompts)]
        self._ranks.tell("abort", self._serial, keys)

    def close(self) -> list[Rollout]:
        """Wait for all samples, end the step and return all rollouts, in order. The group's `last_report` is then its.

        Raises RankDied or MoebiusError when the step is lost.
        """
        if not self._closed:
            self._closed = True
            try:
                for handle, sent in zip(self._ranks.handles, self._sent, strict=True):
                    handle.close_step.remote(self._serial, sent)
                self._end()
            finally:
                self._release()
        return [self._rollout(prompt) for prompt in range(len(self._prompts))]

    def __enter__(self) -> OpenStep:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is not None and not self._closed:
            self.abort()
        self.close()

    def _end(self) -> None:
        outcomes = self._lost_if_failed(
            lambda: self._ranks.gather(self._refs, what=f"step {self.step}", on_poll=lambda progress: None)
        )
        self._collect(running=False)
        for outcome, results in zip(outcomes, self._results, strict=True):
            outcome.results = results
        missing = [key for key in self._given if key.sample not in self._prompts[key.prompt].samples]
        if missing:
            raise MoebiusError(f"step {self.step}: samples {[tuple(key) for key in missing[:10]]} did not come back")
        self._group.report_step(outcomes, self.step, [prompt.ids for prompt in self._prompts])

    def _collect(self, running: bool = True) -> list[SampleResult]:
        """Take what has ended from all ranks."""
        if running and ray.wait(list(self._refs), timeout=0)[0]:  # a rank ends before the step is closed if it fails
            self._lost_if_failed(lambda: self._ranks.gather(self._refs, what=f"step {self.step}"))
        taken = self._lost_if_failed(
            lambda: self._ranks.call("take_results", [(self._serial,)] * len(self._load), what="taking results")
        )
        found = []
        for rank, results in enumerate(taken):
            self._results[rank] += results
            for result in results:
                if result.finish_reason == "error":  # refused by vLLM, though it passed our checks
                    result.finish_reason = "abort"
                self._load[self._given[result.key]] -= 1
                self._prompts[result.key.prompt].samples[result.key.sample] = to_sample(result)
                found.append(result)
        return found

    def _lost_if_failed(self, call: Callable[[], list[Any]]) -> list[Any]:
        try:
            return call()
        except (MoebiusError, RayActorError) as error:
            self._closed = True
            self._release()
            lost = error if isinstance(error, MoebiusError) else MoebiusError(str(error))
            self._group.step_lost(self._ranks, lost)
            raise lost from error

    def _release(self) -> None:
        """Let the group serve other calls."""
        if not self._released:
            self._released = True
            self._group.step_closed()

    def _rollout(self, prompt: int) -> Rollout:
        submitted = self._prompts[prompt]
        return Rollout(prompt, submitted.ids, [submitted.samples[index] for index in range(submitted.n)])
