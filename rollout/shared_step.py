"""A step that several replicas draw together: OpenStep's surface over one open step per replica and a shared queue."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moebius.engine.types import SampleKey, SamplePiece
from moebius.rollout.backlog import PromptGroup, groups_of
from moebius.rollout.batch import Prompt
from moebius.rollout.errors import BadInput, GroupNotReady, MoebiusError
from moebius.rollout.failure_types import Loss
from moebius.rollout.interrupts import pause
from moebius.rollout.shared_lanes import SharedLanes
from moebius.rollout.step_block import StepBlock
from moebius.rollout.types import Rollout, Sample, Sampling
from moebius.rollout.worker import Progress

if TYPE_CHECKING:
    from moebius.rollout.replica_member import Member
    from moebius.rollout.replica_steps import ReplicaSteps

POLL_S = 0.01


class SharedStep(SharedLanes, StepBlock):
    """Made by `RolloutReplicas.open_step`; used as an OpenStep, with the same numbers, seeds and samples.

    A replica gets as many prompts as it can decode; the others wait in a queue and go to whoever has room first. While
    there are any, a replica's switch policy takes its burst to be still coming in; when there are none left, it is told
    that nothing more will come. The unfinished prompts of a replica that is lost go back to the queue's front. Ranks
    are numbered through: rank k of replica r is r * ranks + k.
    """

    def __init__(
        self, replicas: ReplicaSteps, members: Sequence[Member], step: int, own: Sequence[PromptGroup],
        older: Sequence[PromptGroup], expected: int | None, *, replay: bool = True,
    ) -> None:  # fmt: skip
        """`older` are prompts of earlier steps that no rank has; without `replay`, samples of a lost replica fail.

        Raises as `RolloutGroup.open_step`.
        """
        self._expected = expected  # samples of the burst that are still to be submitted; None: unknown
        self._submitted = 0
        self.losses: list[Loss] = []  # of the whole step: there are none, single replicas are replaced by others
        super().__init__(replicas, members, step, own, older, replay=replay)

    # ---- prompts --------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompts: Sequence[Prompt],
        n: int = 1,
        sampling: Sampling | Mapping[str, Any] | None = None,
        *,
        seeds: Sequence[Sequence[int]] | None = None,
        stream: bool = False,
    ) -> list[int]:
        """Add prompts; see OpenStep.submit."""
        if self._closed:
            raise GroupNotReady("this step is closed; open another one")
        first = len(self._prompts)
        requests, ids = self._replicas.requests_of(prompts, n, sampling, self.step, first)
        if seeds is not None or stream:
            requests = [
                replace(r, stream=stream, seed=r.seed if seeds is None else seeds[r.key.prompt - first][r.key.sample])
                for r in requests
            ]
        groups = groups_of(requests, ids, self.step, first)
        self._prompts += groups
        self._groups |= {(g.step, g.prompt): g for g in groups}
        self._queue.extend(groups)
        self._submitted += len(requests)
        if self._expected is not None:
            self._expected -= len(requests)
        if self._expected is not None and self._expected <= 0:
            self.filled()
        self._look()
        return list(range(first, len(self._prompts)))

    def expect(self, more: int | None) -> None:
        """See OpenStep.expect."""
        self._expected = more

    def filled(self) -> None:
        """See OpenStep.filled. A replica is told so when the queue is empty, too."""
        self._filled, self._expected = True, None

    def seal(self) -> None:
        """No more prompts will come. It must be closed or parked all the same.

        Replicas stay open until then: they may have to go on with the prompts of one that is lost.
        """
        self.filled()
        self._deal()

    @property
    def prompts(self) -> int:
        """How many prompts have been submitted."""
        return len(self._prompts)

    @property
    def submitted(self) -> int:
        """How many samples have been submitted."""
        return self._submitted

    @property
    def queued(self) -> int:
        """How many prompts wait for a replica with room."""
        return len(self._queue)

    def groups(self) -> list[PromptGroup]:
        """All prompts of the step, also those of earlier steps that it goes on with."""
        return list(self._groups.values())

    def leave(self, groups: Sequence[PromptGroup]) -> None:
        """See OpenStep.leave."""
        self._replicas.backlog.leave(groups)

    # ---- results --------------------------------------------------------------------------------------------------

    def finished(self) -> list[tuple[SampleKey, Sample]]:
        """See OpenStep.finished."""
        self._look()
        fresh, self._fresh = self._fresh, []
        return fresh

    def completed(self) -> list[tuple[int, Sample]]:
        """See OpenStep.completed."""
        self._look()
        own = [(key.prompt, sample) for key, sample in self._fresh if key.step == self.step]
        self._fresh = [(key, sample) for key, sample in self._fresh if key.step != self.step]
        return own

    def pieces(self) -> list[SamplePiece]:
        """See OpenStep.pieces."""
        taken, self._pieces = self._pieces, []
        return taken

    def wait(self, prompt: int, timeout_s: float | None = None) -> Rollout:
        """See OpenStep.wait."""
        if not 0 <= prompt < len(self._prompts):
            raise BadInput(f"prompt {prompt} was not submitted to this step; it has {len(self._prompts)}")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._prompts[prompt].complete:
            if self._closed:
                raise GroupNotReady(f"prompt {prompt} has parked samples: they go on in the group's next step")
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"prompt {prompt} has unfinished samples after {timeout_s} s")
            self._look()
            if not self._prompts[prompt].complete:
                pause(POLL_S)
        return self._prompts[prompt].rollout()

    def progress(self) -> list[Progress]:
        """How far each rank is, all replicas' in order. `live` counts all of them, and what waits in the queue; the
        layout is EP as long as a replica with live samples is in EP.
        """
        found = [(part, part.step.progress()) for part in self._open()]
        live = sum(part.live for part, _ in found) + sum(len(group.missing) for group in self._queue)
        in_ep = any(part.live and ranks[0].layout == "EP" for part, ranks in found)
        idle = not any(part.live for part, _ in found)
        layout = "EP" if in_ep or (idle and all(ranks[0].layout == "EP" for _, ranks in found)) else "TP"
        return [replace(p, live=live, layout=layout) for _, ranks in found for p in ranks] or [Progress()]

    # ---- ends -----------------------------------------------------------------------------------------------------

    def abort(self, prompts: Sequence[int] | None = None) -> None:
        """See OpenStep.abort."""
        own = None if prompts is None else set(prompts)
        chosen = [g for g in self._groups.values() if own is None or (g.step == self.step and g.prompt in own)]
        self.ask_abort([key for group in chosen for key in group.missing])
        self._apply_aborts()

    def ask_abort(self, keys: list[SampleKey] | None) -> None:
        """End samples (None: all that it has) at the next look at the ranks; any thread."""
        with self._lock:
            self._asked.append(keys)

    def close(self) -> list[Rollout]:
        """See OpenStep.close."""
        try:
            while not self._closed and any(group.missing for group in self._groups.values()):
                self._look()
                pause(POLL_S)
        except MoebiusError:
            raise
        except BaseException:  # Ctrl-C: the replicas serve other calls, and what earlier steps have left is kept
            self.break_off()
            raise
        self._end(lambda step: step.close())
        return [group.rollout() for group in self._prompts if group.complete]

    def park(self) -> None:
        """See OpenStep.park. Prompts that no replica had begun wait for the next step, too."""
        self._end(lambda step: step.park())
