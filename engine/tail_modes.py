"""Two ways to run a TP runtime that has drafts: ahead, as one without drafts would, and drafting.

vLLM schedules ahead (the next iteration while the last one runs) only with drafters that run on the device. One that
looks in texts needs an iteration's tokens before the next can be scheduled, and waiting for them costs 1.3 to 1.4 times
the iteration at small batches. So the runtime decodes ahead while drafts do not pay: same scheduler, same graphs, same
calls as without speculation. To draft, it comes to rest and goes on synchronously; and back. Requests, pages and tokens
stay where they are.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request


class _TellsEnds:
    """What both schedulers have besides vLLM's."""

    ended: list[tuple[str, int]]  # requests that are over, and how many tokens they got

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self.ended.append((request.request_id, request.num_output_tokens))
        parent: Any = super()
        return parent._free_request(request, *args, **kwargs)


class AheadScheduler(_TellsEnds, AsyncScheduler):
    """vLLM's scheduler of a runtime without drafts, if it is asynchronous."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ended = []


class DraftingScheduler(_TellsEnds, Scheduler):
    """vLLM's synchronous scheduler. Never made: an `AheadScheduler` becomes one, and has all that it needs."""


class TailModes:
    """Which of the two a TP runtime is in; `core` must be as it was built. It begins ahead."""

    def __init__(self, core: Any, runner: Any, width: int, steady: Any = None) -> None:
        """`steady`: the `SteadyScheduling` of this runtime, which works ahead only; None: there is none."""
        self._core, self._runner, self._width, self._steady = core, runner, width, steady
        self._queue: deque[Any] | None = core.batch_queue
        self._speculation = runner.speculative_config
        self._asynchronous = bool(runner.use_async_scheduling)
        self._starts: dict[str, int] = {}  # tokens that requests had when they came into TP
        self._lengths: list[int] = []  # tokens that requests got in TP, of those that have ended or left
        # What vLLM prepares for drafters on the device, or for layers with a state per request: neither is here.
        runner.use_async_spec_decode = False
        runner.num_accepted_tokens_event = None
        self.drafting = True
        self.ahead()

    def begin(self, starts: dict[str, int]) -> None:
        """Requests have come into TP with so many output tokens; those that join later have none."""
        self._starts = starts

    def end(self) -> None:
        """The requests that are left leave TP, or its step is over; nothing is in flight."""
        self.ahead()
        scheduler = self._core.scheduler
        left = [(name, request.num_output_tokens) for name, request in scheduler.requests.items()]
        for name, count in [*scheduler.ended, *left]:
            self._lengths.append(count - self._starts.get(name, 0))
        scheduler.ended.clear()
        self._starts = {}

    def take_lengths(self) -> list[int]:
        """How many tokens requests got in TP since the last call, the same on all ranks."""
        taken, self._lengths = self._lengths, []
        return taken

    def ahead(self) -> None:
        """Decode without drafts from the next iteration on; nothing may be in flight."""
        if not self.drafting:
            return
        core, runner = self._core, self._runner
        drop_drafts(core.scheduler)
        core.batch_queue, core.async_scheduling = self._queue, self._asynchronous
        core.step_fn = core.step if self._queue is None else core.step_with_batch_queue
        core.scheduler.__class__ = AheadScheduler if self._asynchronous else DraftingScheduler
        if self._steady is not None:
            self._steady.take_over()
        runner.use_async_scheduling = self._asynchronous
        core.scheduler.dynamic_sd_lookup = [0] * (core.scheduler.max_num_running_reqs + 1)
        runner.speculative_config = None
        for state in runner.requests.values():
            state.prev_num_draft_len = 0  # else drafts of long ago would be taken for ones in flight
        forget_last_batch(runner)
        self.drafting = False

    def draft(self) -> None:
        """Draft from the next iteration on; nothing may be in flight."""
        if self.drafting:
            return
        core, runner = self._core, self._runner
        if self._queue:
            raise RuntimeError("a batch is still in flight: drain the batch queue before drafting")
        core.batch_queue, core.async_scheduling, core.step_fn = None, False, core.step
        core.scheduler.__class__ = DraftingScheduler
        if self._steady is not None:
            self._steady.step_aside()
        runner.use_async_scheduling = False
        # vLLM fills up the first pass of a request that joins others with tokens of no meaning, so that all have one
        # length, and would let it wait where they have no room; told of a schedule of lengths it does not.
        core.scheduler.dynamic_sd_lookup = [self._width] * (core.scheduler.max_num_running_reqs + 1)
        runner.speculative_config = self._speculation
        forget_last_batch(runner)
        _fill_in_tokens(core.scheduler, runner)
        self.drafting = True


def forget_last_batch(runner: Any) -> None:
    """Drop what asynchronous scheduling keeps of the last batch; left over, it would be taken for the next one's."""
    batch = runner.input_batch
    batch.prev_sampled_token_ids = batch.prev_req_id_to_index = None
    batch.sampled_token_ids_cpu = batch.async_copy_ready_event = None


def drop_drafts(scheduler: Any) -> None:
    """Forget drafts that have not been verified: a request that leaves takes none along."""
    for request in scheduler.requests.values():
        request.spec_token_ids = []


def _fill_in_tokens(scheduler: Any, runner: Any) -> None:
    """Give the runner the tokens that it knows as placeholders only, since they were sampled ahead."""
    batch = runner.input_batch
    for name, state in runner.requests.items():
        request = scheduler.requests.get(name)
        if request is None:
            continue  # it has ended, and leaves the runner with the next pass
        tokens = request._output_token_ids
        state.output_token_ids[:] = tokens  # in place: the batch refers to this very list
        row = batch.req_id_to_index.get(name)
        if row is None:
            continue
        start = int(batch.num_prompt_tokens[row])
        line = batch.token_ids_cpu[row, start : start + len(tokens)]
        unknown = np.flatnonzero(line < 0)
        if len(unknown):
            line[unknown[0] :] = tokens[unknown[0] :]
        batch.num_tokens_no_spec[row] = start + len(tokens)
