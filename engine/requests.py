"""Live requests as portable records: taken out of one engine core, put into the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from moebius.engine.runtime import Runtime


@dataclass
class LiveRequest:
    """One unfinished request between two iterations. Sampling noise needs no state: it is a function of position."""

    request_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    sampling_params: Any
    arrival_time: float
    priority: int
    cache_salt: str | None
    num_preemptions: int
    num_computed_tokens: int
    started: bool  # the runner has seen it
    prefill_stats_taken: bool
    page_ids: np.ndarray  # int64, pages holding the computed tokens in the source pool


class QuiesceError(RuntimeError):
    """A request was not at rest when it should have been taken out."""


def pages_of(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // page_size)


def kv_demand(runtime: Runtime) -> tuple[int, int]:
    """What the requests of `runtime` that have KV ask of a target: (pages, requests).

    Pages for all their present tokens and the next one, since vLLM schedules a waiting request only if all of it fits;
    nothing shared, since prefix sharing does not survive the move.
    """
    size = runtime.core.vllm_config.cache_config.block_size
    holders = [r for r in runtime.scheduler.requests.values() if r.num_computed_tokens]
    return sum(pages_of(r.num_tokens + 1, size) for r in holders), len(holders)


def admission_order(record: LiveRequest) -> int:
    """Sort key: requests whose KV is whole first, then partial prefills, then those without KV.

    vLLM stops admitting at the first request that does not fit: none that holds pages may stand behind one that needs
    many more.
    """
    if not record.num_computed_tokens:
        return 2
    return 0 if record.num_computed_tokens >= len(record.prompt_token_ids) else 1


def release_stuck(runtime: Runtime) -> bool:
    """If nothing runs and the waiting requests hold the pages, free those of the last holder; whether one was found.

    vLLM preempts only running requests, so imported ones that wait could block each other for good. The freed request
    computes its KV again. All TP ranks decide alike, because their schedulers are alike.
    """
    scheduler = runtime.scheduler
    if scheduler.running:
        return False
    for request in reversed(list(scheduler.waiting)):
        if request.num_computed_tokens:
            scheduler.kv_cache_manager.free(request)
            request.num_computed_tokens = 0
            request.num_preemptions += 1
            return True
    return False


def snapshot_requests(runtime: Runtime) -> list[LiveRequest]:
    """Record every unfinished request and change nothing; started ones first, each group in queue order.

    Raises:
        QuiesceError: something is still in flight.
    """
    scheduler = runtime.scheduler
    if runtime.core.batch_queue:
        raise QuiesceError("a batch is still in flight: drain the batch queue before exporting")
    queue = [*scheduler.running, *scheduler.skipped_waiting, *scheduler.waiting]
    records = [_record(runtime, request) for request in queue]
    records.sort(key=lambda record: not record.started)  # stable
    return records


@torch.inference_mode()  # the sampler's persistent tensors are inference tensors
def detach_requests(runtime: Runtime) -> None:
    """Take every unfinished request out of scheduler and runner and free its pages; their bytes stay as they are."""
    scheduler = runtime.scheduler
    request_ids = list(scheduler.requests)
    for request_id in request_ids:
        request = scheduler.requests.pop(request_id)
        scheduler._inflight_prefills.discard(request)
        scheduler.kv_cache_manager.free(request)
    scheduler.running.clear()
    for waiting in (scheduler.waiting, scheduler.skipped_waiting):
        while waiting:
            waiting.pop_request()
    forget_finished(runtime, request_ids)


def _record(runtime: Runtime, request: Request) -> LiveRequest:
    if request.num_in_flight_tokens or request.num_output_placeholders or request.spec_token_ids:
        raise QuiesceError(f"request {request.request_id} has tokens in flight")
    state = runtime.runner.requests.get(request.request_id)
    computed = request.num_computed_tokens
    pages: np.ndarray = np.empty(0, dtype=np.int64)
    if computed:
        (ids,) = runtime.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        size = runtime.core.vllm_config.cache_config.block_size
        pages = np.asarray(ids[: pages_of(computed, size)], dtype=np.int64)
    return LiveRequest(
        request_id=request.request_id,
        prompt_token_ids=list(request.prompt_token_ids or ()),
        output_token_ids=list(request._output_token_ids),
        sampling_params=request.sampling_params,
        arrival_time=request.arrival_time,
        priority=request.priority,
        cache_salt=request.cache_salt,
        num_preemptions=request.num_preemptions,
        num_computed_tokens=computed,
        started=state is not None,
        prefill_stats_taken=request.prefill_stats is None,
        page_ids=pages,
    )


@torch.inference_mode()
def forget_finished(runtime: Runtime, request_ids: list[str] | None = None) -> None:
    """Remove `request_ids` and every finished request not yet flushed from the runner.

    vLLM flushes finished requests with the next step; a step without work would be a collective of its own.
    """
    scheduler, runner = runtime.scheduler, runtime.runner
    for request_id in [*scheduler.finished_req_ids, *(request_ids or ())]:
        runner.requests.pop(request_id, None)
        runner.num_prompt_logprobs.pop(request_id, None)
        runner.input_batch.remove_request(request_id)
    scheduler.finished_req_ids = set()
    scheduler.prev_step_scheduled_req_ids.clear()
    runner.input_batch.condense()
    runner.input_batch.refresh_metadata()
    if runner.requests or runner.input_batch.num_reqs or scheduler.has_requests():
        raise QuiesceError(
            f"{len(runner.requests)} requests left in the runner, {len(scheduler.requests)} in the scheduler"
        )


@torch.inference_mode()
def import_requests(runtime: Runtime, records: list[LiveRequest]) -> list[np.ndarray]:
    """Put `records` into scheduler and runner; returns each record's target pages (int64, may be empty).

    The pages' bytes must be in place before the next iteration. Call with the target's groups installed.
    """
    return [_import(runtime, record) for record in records]


def _import(runtime: Runtime, record: LiveRequest) -> np.ndarray:
    scheduler, runner, manager = runtime.scheduler, runtime.runner, runtime.scheduler.kv_cache_manager
    request = Request(
        request_id=record.request_id,
        prompt_token_ids=list(record.prompt_token_ids),
        sampling_params=record.sampling_params,
        pooling_params=None,
        arrival_time=record.arrival_time,
        cache_salt=record.cache_salt,
        priority=record.priority,
        block_hasher=runtime.core.request_block_hasher,
    )
    if record.output_token_ids:
        request.append_output_token_ids(list(record.output_token_ids))
    request.num_preemptions = record.num_preemptions
    scheduler.requests[request.request_id] = request
    pages: np.ndarray = np.empty(0, dtype=np.int64)
    if record.started:
        if record.prefill_stats_taken:
            request.prefill_stats = None
        # PREEMPTED, not WAITING: the scheduler then sends the outputs along with the full page list.
        request.status = RequestStatus.PREEMPTED
        ids: list[int] = []
        computed = record.num_computed_tokens
        if computed:
            blocks = manager.allocate_slots(request, 0, num_external_computed_tokens=computed, delay_cache_blocks=True)
            if blocks is None:
                raise QuiesceError(f"no pages left for {request.request_id}: the capacity check should have refused")
            request.num_computed_tokens = computed
            if manager.enable_caching:
                manager.cache_blocks(request, computed)
            (ids,) = manager.get_block_ids(request.request_id)
            manager.take_new_block_ids()  # the CPU runner would zero them with the next step
        runner.requests[request.request_id] = CachedRequestState(
            req_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            mm_features=[],
            sampling_params=record.sampling_params,
            generator=None,
            block_ids=(list(ids),),
            num_computed_tokens=computed,
            output_token_ids=list(record.output_token_ids),
        )
        size = runtime.core.vllm_config.cache_config.block_size
        pages = np.asarray(ids[: pages_of(computed, size)], dtype=np.int64)
    scheduler.waiting.add_request(request)
    return pages
