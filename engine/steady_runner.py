"""The model runner's part of an iteration in which every request of the batch gets one token; see `steady`.

vLLM keeps the state of the batch per request, in Python. Here the same state is written as arrays. Each method takes
the place of one of the runner's and hands over to it where the iteration is of another kind.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import vllm.envs as envs

from moebius.engine.sampler import to_device
from moebius.engine.steady import SteadyScheduling

_METHODS = ("_update_states", "_compute_prev_positions", "_prepare_input_ids", "_bookkeeping_sync")


class SteadyRunner:
    """Takes the place of methods of one runner; `scheduling` is its scheduler's."""

    def __init__(self, runner: Any, scheduling: SteadyScheduling) -> None:
        self.runner, self._scheduling = runner, scheduling
        self._original = {name: getattr(runner, name) for name in _METHODS}
        for name in _METHODS:
            setattr(runner, name, getattr(self, name))
        # Rows of the batch by place in the schedule, and what they were made for.
        self._rows_of: tuple[object, object] = (None, None)
        self._rows = np.empty(0, dtype=np.int64)
        self._states: list[Any] = []
        self._arange = np.arange(runner.max_num_reqs, dtype=np.int64)
        self._previous: tuple[dict[str, int], list[str]] | None = None  # map of the batch before, and its order

    def _update_states(self, scheduled: Any) -> Any:
        """As the runner's; also what `InputBatch` notes of each request."""
        runner = self.runner
        if (
            scheduled is not self._scheduling.last
            or scheduled is None
            or scheduled.finished_req_ids
            or scheduled.new_block_ids_to_zero
            or not self._find_rows(scheduled.scheduled_cached_reqs.req_ids)
        ):
            return self._original["_update_states"](scheduled)
        batch, told = runner.input_batch, scheduled.scheduled_cached_reqs
        for state, computed in zip(self._states, told.num_computed_tokens, strict=True):
            state.num_computed_tokens = computed
        batch.num_computed_tokens_cpu[self._rows] = told.num_computed_tokens
        for place, pages in enumerate(told.new_block_ids):
            if pages is not None:
                for known, new in zip(self._states[place].block_ids, pages, strict=True):
                    known.extend(new)
                batch.block_table.append_row(pages, int(self._rows[place]))
        # All requests have one token: there is nothing to put in order for the attention backend.
        batch.refresh_metadata()
        return None

    def _find_rows(self, ids: list[str]) -> bool:
        """Whether the batch is made of exactly these requests; if so, `_rows` and `_states` are theirs.

        Every row that vLLM adds, removes or moves gives the batch a new SamplingMetadata (see `CounterSampler`).
        """
        batch = self.runner.input_batch
        of = (ids, batch.sampling_metadata)
        if self._rows_of[0] is ids and self._rows_of[1] is batch.sampling_metadata:
            return True
        self._rows_of = (None, None)
        row_of = batch.req_id_to_index
        if len(row_of) != len(ids) or batch.batch_update_builder.removed or not row_of.keys() >= set(ids):
            return False
        self._rows = np.fromiter((row_of[name] for name in ids), dtype=np.int64, count=len(ids))
        self._states = [self.runner.requests[name] for name in ids]
        self._rows_of = of
        return True

    def _compute_prev_positions(self, num_reqs: int) -> None:
        """As the runner's: the row that each row had in the batch before, -1 for new ones."""
        batch, previous = self.runner.input_batch, self._previous
        same = previous is not None and batch.prev_req_id_to_index is previous[0] and batch.req_ids == previous[1]
        # vLLM takes a request out of the map that leaves the batch, also one that comes back to its old row.
        if same and len(batch.prev_req_id_to_index) == num_reqs:
            self.runner.prev_positions.np[:num_reqs] = self._arange[:num_reqs]
        else:
            self._original["_compute_prev_positions"](num_reqs)

    def _prepare_input_ids(self, scheduled: Any, num_reqs: int, total: int, ends: np.ndarray) -> None:
        """As the runner's: tokens that the batch before has sampled go to their places without leaving the device."""
        runner, batch = self.runner, self.runner.input_batch
        sampled = batch.prev_sampled_token_ids
        if sampled is None or scheduled.scheduled_spec_decode_tokens or runner.enable_prompt_embeds:
            self._original["_prepare_input_ids"](scheduled, num_reqs, total, ends)
            return
        before = runner.prev_positions.np[:num_reqs]
        known = before >= 0
        rows, places = before[known], ends[:num_reqs][known] - 1
        if len(rows) < total:  # the others' tokens are on the host
            runner.input_ids.copy_to_gpu(total)
        if not len(rows):
            return
        if places[-1] == len(rows) - 1 and np.array_equal(rows, places):
            runner.input_ids.gpu[: len(rows)].copy_(sampled[: len(rows), 0], non_blocking=True)
            return
        index, source = (to_device(numbers.astype(np.int64), runner.device) for numbers in (places, rows))
        runner.input_ids.gpu.scatter_(dim=0, index=index, src=sampled[source, 0])

    def _bookkeeping_sync(
        self, scheduled: Any, sampler_output: Any, logits: Any, hidden_states: Any, num_scheduled_tokens: int
    ) -> Any:
        """As the runner's where sampled tokens stay on the device: notes a placeholder for each."""
        runner, batch = self.runner, self.runner.input_batch
        sampled, rows = sampler_output.sampled_token_ids, batch.num_reqs
        if (
            not runner.use_async_scheduling
            or tuple(sampled.shape) != (rows, 1)
            or runner.num_prompt_logprobs
            or envs.VLLM_COMPUTE_NANS_IN_LOGITS
            or runner.discard_request_mask.np[:rows].any()
        ):
            self._previous = None
            return self._original["_bookkeeping_sync"](
                scheduled, sampler_output, logits, hidden_states, num_scheduled_tokens
            )
        names, row_of = batch.req_ids.copy(), batch.req_id_to_index.copy()
        if batch.prev_sampled_token_ids is None:
            batch.prev_sampled_token_ids = sampled
        batch.prev_req_id_to_index = batch.req_id_to_index.copy()
        self._previous = (batch.prev_req_id_to_index, names)
        places = batch.num_tokens_no_spec[:rows].copy()
        longest = int(places.max()) + 1
        assert longest <= runner.max_model_len, f"{longest} tokens of a request, at most {runner.max_model_len} fit"
        batch.token_ids_cpu[self._arange[:rows], places] = -1
        batch.is_token_ids[self._arange[:rows], places] = True
        batch.num_tokens_no_spec[:rows] = places + 1
        requests = runner.requests
        for name in names:
            requests[name].output_token_ids.append(-1)
        return {}, None, [], {}, names, row_of, []
