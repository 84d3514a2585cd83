"""The host's part of an iteration in which every running request gets one token and nothing else happens.

vLLM's scheduler goes through its general case for every request of every iteration: 30 to 40 us of Python per request
on a GPU host, which at 1,024 requests is twice what the device needs for the pass. Almost all iterations of a rollout
are of the kind above. For those, the scheduler's and the runner's state is changed here exactly as vLLM would change
it, with a few operations per request; anything else (prompts, stops, preemption, no free page) goes to vLLM's code.

Outputs of requests that nobody looks at before they end are not made at all: a front catches up from the request's own
list of tokens (`Audience`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

from moebius.engine.steady_pages import SteadyPages
from moebius.engine.tail_modes import AheadScheduler


@dataclass(slots=True)
class Audience:
    """Whose outputs a front wants to see. `quiet` requests are only looked at when they end."""

    own: Mapping[str, Any]  # by internal request id
    quiet: set[str] = field(default_factory=set)
    behind: dict[str, Request] = field(default_factory=dict)  # requests with tokens that the front has not seen
    logprobs: dict[str, list[float]] = field(default_factory=dict)  # of quiet requests' tokens, where asked for
    tokens: int = 0  # sampled for quiet requests since they were taken

    def take_tokens(self) -> int:
        """Tokens of quiet requests since the last call."""
        taken, self.tokens = self.tokens, 0
        return taken

    def forget(self, request_id: str) -> None:
        """A request that the front answers for no more."""
        self.quiet.discard(request_id)
        self.behind.pop(request_id, None)
        self.logprobs.pop(request_id, None)


class SteadyScheduling:
    """Takes the place of `schedule` and `update_from_output` of one scheduler."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.audience: Audience | None = None  # None: every output is made
        self.last: SchedulerOutput | None = None  # made here, in the latest iteration
        self.ids: list[str] = []  # of `last`; the same object as long as they are the same, empty after vLLM's own turn
        self.taken = 0  # iterations that were scheduled here
        self._schedule, self._update = scheduler.schedule, scheduler.update_from_output
        manager = scheduler.kv_cache_manager
        self._manager, self._coordinator = manager, manager.coordinator
        (self._pages,) = manager.coordinator.single_type_managers
        self._page = self._pages.block_size
        SteadyPages(manager)
        self.take_over()

    def take_over(self) -> None:
        """Schedule steady iterations from the next one on; nothing may be in flight."""
        self.last, self.ids = None, []
        self.scheduler.schedule, self.scheduler.update_from_output = self.schedule, self.update_from_output

    def step_aside(self) -> None:
        """Leave all iterations to vLLM's code, which may then be of a kind that is not written for here."""
        self.last, self.ids = None, []
        self.scheduler.schedule, self.scheduler.update_from_output = self._schedule, self._update

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """As `Scheduler.schedule`."""
        self.last = None
        output = self._steady()
        if output is None:
            self.ids = []
            output = self._schedule(throttle_prefills)
        return output

    def _steady(self) -> SchedulerOutput | None:
        """One token for every running request; None, and nothing changed, where that is not the whole of it."""
        scheduler = self.scheduler
        if (
            scheduler.waiting
            or scheduler.skipped_waiting
            or scheduler._pause_state is not PauseState.UNPAUSED
            or scheduler.reset_preempted_req_ids
        ):
            return None
        longest, page, cached = scheduler.max_model_len, self._page, self._pages.num_cached_block
        # Several tokens at once, as drafts give them, may have filled a page and gone on behind it.
        caches, after_vllm = self._manager.enable_caching, not self.ids
        scheduled: list[Request] = []
        ids: list[str] = []
        computed: list[int] = []
        sampled: list[int] = []
        new_pages: list[int] = []  # indices of requests whose token begins a page
        full: list[Request] = []  # requests with a page that can be cached now
        for request in scheduler.running:
            done, ahead = request.num_computed_tokens, request.num_output_placeholders
            # Its last token is on its way, by max_tokens or by the longest sequence: vLLM does not schedule it again.
            if ahead and done + 2 - ahead >= request.num_prompt_tokens + request.max_tokens:
                continue
            if done + 1 >= longest:
                if done + 1 > longest:
                    return None
                continue
            known = len(request._all_token_ids)
            if known + ahead - done != 1 or request.is_prefill_chunk or request.spec_token_ids:
                return None
            if done % page == 0:
                new_pages.append(len(ids))
            elif caches and (known % page == 0 or after_vllm) and known // page > cached.get(request.request_id, 0):
                full.append(request)
            scheduled.append(request)
            ids.append(request.request_id)
            computed.append(done)
            sampled.append(len(request._output_token_ids) + ahead)
        if (
            not ids
            or len(ids) > scheduler.max_num_scheduled_tokens
            or len(new_pages) > self._manager.block_pool.get_num_free_blocks()
        ):
            return None
        if ids == self.ids:
            ids = self.ids
        elif not scheduler.prev_step_scheduled_req_ids.issuperset(ids):
            return None  # the runner would have to be told the tokens of one that was left out before
        return self._emit(scheduled, ids, computed, sampled, new_pages, full)

    def _emit(
        self,
        scheduled: list[Request],
        ids: list[str],
        computed: list[int],
        sampled: list[int],
        new_pages: list[int],
        full: list[Request],
    ) -> SchedulerOutput:
        """Change the state as `Scheduler.schedule` and `AsyncScheduler._update_after_schedule` do."""
        scheduler, manager = self.scheduler, self._manager
        scheduler.current_step += 1
        manager.new_step_starts()
        blocks: list[tuple[list[int], ...] | None] = [None] * len(ids)
        for i in new_pages:
            allocated = manager.allocate_slots(scheduled[i], 1, num_lookahead_tokens=0)
            assert allocated is not None, "there were free pages a moment ago"
            blocks[i] = allocated.get_block_ids(allow_none=True)
        for request in full:
            self._coordinator.cache_blocks(request, len(request._all_token_ids))
        scheduler.prefill_capacity_bound = False
        counts = dict.fromkeys(ids, 1)
        if ids is not self.ids:
            scheduler.prev_step_scheduled_req_ids.clear()
            scheduler.prev_step_scheduled_req_ids.update(ids)
            self.ids = ids
        output = SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=CachedRequestData(ids, set(), [], {}, blocks, computed, sampled),
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=len(ids),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            num_common_prefix_blocks=manager.get_num_common_prefix_blocks(scheduler.running[0].request_id),
            finished_req_ids=scheduler.finished_req_ids,
            free_encoder_mm_hashes=[],
            preempted_req_ids=scheduler.reset_preempted_req_ids,
            new_block_ids_to_zero=scheduler._get_new_block_ids_to_zero(),
        )
        fenced = scheduler.defer_block_free
        if fenced:
            scheduler.sched_step_seq += 1
        for request in scheduled:
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
            request.num_output_placeholders += 1
            if fenced:
                request.last_sched_seq = scheduler.sched_step_seq
        scheduler.finished_req_ids, scheduler.reset_preempted_req_ids = set(), set()
        self.last = output
        self.taken += 1
        return output

    def update_from_output(self, scheduled: SchedulerOutput, output: Any) -> dict[int, EngineCoreOutputs]:
        """As `Scheduler.update_from_output`; requests that get a token and go on are dealt with here."""
        if scheduled.scheduled_spec_decode_tokens or output.prompt_logprobs_dict or output.routed_experts is not None:
            return self._update(scheduled, output)
        scheduler, page, caches = self.scheduler, self._page, self._manager.enable_caching
        longest, requests, rows = scheduler.max_model_len, scheduler.requests, output.req_id_to_index
        tokens, logprobs, running = output.sampled_token_ids, output.logprobs, RequestStatus.RUNNING
        audience = self.audience
        own: Mapping[str, Any] = audience.own if audience is not None else requests
        quiet: set[str] = audience.quiet if audience is not None else set()
        behind: dict[str, Request] = audience.behind if audience is not None else {}
        wanted: dict[str, list[float]] = audience.logprobs if audience is not None else {}
        drawn_logprobs: list[float] = logprobs.logprobs[:, 0].tolist() if wanted and logprobs else []
        unseen = 0
        rest: dict[str, int] = {}
        made: list[EngineCoreOutput] = []
        for name, count in scheduled.num_scheduled_tokens.items():
            request = requests.get(name)
            if request is None:
                continue
            new: list[int] = tokens[rows[name]] if tokens else []
            params = request.sampling_params
            if (
                count != 1
                or len(new) != 1
                or request.status is not running
                or request.async_tokens_to_discard
                or request.prefill_stats is not None  # of the first token
            ):
                rest[name] = count
                continue
            token, drawn, known = new[0], len(request._output_token_ids) + 1, len(request._all_token_ids) + 1
            if drawn >= params.min_tokens and (
                token == params.eos_token_id
                or (params.stop_token_ids and token in params.stop_token_ids)
                or known >= longest
                or drawn >= request.max_tokens
                or params.repetition_detection is not None
            ):
                rest[name] = count  # it may end
                continue
            request.num_in_flight_tokens -= 1
            request._output_token_ids.append(token)
            request._all_token_ids.append(token)
            request.num_output_placeholders -= 1
            if known % page == 0:
                request.update_block_hashes()
            done = request.num_computed_tokens - request.num_output_placeholders
            if caches and done % page == 0:
                self._manager.cache_blocks(request, done)
            if name in quiet:
                behind[name] = request
                unseen += 1
                if drawn_logprobs and (values := wanted.get(name)) is not None:
                    values.append(drawn_logprobs[rows[name]])
            elif name in own:
                slices = logprobs.slice_request(rows[name], 1) if logprobs and params.num_logprobs is not None else None
                made.append(EngineCoreOutput(name, new, slices))
        if audience is not None:
            audience.tokens += unseen
        outputs = self._update(replace(scheduled, num_scheduled_tokens=rest), output)
        if made or unseen:
            if (found := outputs.get(0)) is None:
                outputs[0] = found = EngineCoreOutputs(outputs=[])
            found.outputs = made + found.outputs
        return outputs


def attach(scheduler: Any) -> SteadyScheduling | None:
    """Take over the steady iterations of `scheduler`; None where it is not of the kind this is written for."""
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    # One of these has no drafts as long as it is one (`tail_modes`); it is also made where nothing is asynchronous.
    ahead = type(scheduler) is AheadScheduler and scheduler.scheduler_config.async_scheduling
    plain = (
        (type(scheduler) is AsyncScheduler or ahead)
        and not scheduler.use_v2_model_runner
        and not scheduler.use_pp
        and scheduler.connector is None
        and scheduler.ec_connector is None
        and not scheduler.lora_config
        and not scheduler.enable_return_routed_experts
        and not scheduler.log_stats
        and (scheduler.num_spec_tokens == 0 or ahead)
        and scheduler.num_lookahead_tokens == 0
        and scheduler.num_sampled_tokens_per_step == 1
        and scheduler.dynamic_sd_lookup is None
        and not scheduler.need_mamba_block_aligned_split
        and len(managers) == 1
        and type(managers[0]) is FullAttentionManager
        and managers[0].block_size == scheduler.hash_block_size
    )
    return SteadyScheduling(scheduler) if plain else None
