"""Live requests between two iterations: recorded as arrays, taken out of one engine core, put into the other.

A rank keeps the `Request` objects of its own requests; only what its peers need to build theirs is sent, as a few flat
arrays, so that a hand-over costs microseconds per request and nothing per token in Python.
"""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from moebius.engine.runtime import Runtime
from moebius.engine.sampler import SEED_FIELD
from moebius.engine.tail_modes import forget_last_batch

_NO_SEED = -1


class QuiesceError(RuntimeError):
    """A request was not at rest when it should have been taken out."""


@dataclass(slots=True)
class RequestBatch:
    """The unfinished requests of one rank, one row each; plain data that can be sent.

    Sampling noise needs no state: it is a function of position. Started requests (the runner has seen them) come first,
    each group in queue order. Flat arrays hold the rows one after the other.
    """

    ids: list[str]
    params: list[Any]  # distinct SamplingParams without the sample's seed
    params_of: np.ndarray  # int64 [n], index into `params`
    seeds: np.ndarray  # int64 [n], -1 where there is none
    cache_salts: list[str | None]
    arrival_times: np.ndarray  # float64 [n]
    priorities: np.ndarray  # int64 [n]
    preemptions: np.ndarray  # int64 [n]
    prompt_lengths: np.ndarray  # int64 [n]
    lengths: np.ndarray  # int64 [n], prompt and output
    computed: np.ndarray  # int64 [n], tokens whose KV stands in the pages
    started: np.ndarray  # bool [n]
    prefill_stats_taken: np.ndarray  # bool [n]
    tokens: np.ndarray  # int32 [sum of lengths]
    page_counts: np.ndarray  # int64 [n]
    pages: np.ndarray  # int64 [sum of page_counts], ids in the source pool
    hash_counts: np.ndarray  # int64 [n]
    hashes: bytes  # block hashes for prefix caching, all of one length
    # Of prompts that are computed in part: the experts their tokens went to, which vLLM keeps by page until the first
    # output token. [computed, layers, experts per token]
    routes: dict[str, np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)

    def admission_class(self) -> np.ndarray:
        """int64 [n]: 0 for requests whose KV is whole, 1 for partial prefills, 2 for those without KV.

        vLLM stops admitting at the first request that does not fit: none that holds pages may stand behind one that
        needs many more.
        """
        return np.where(self.computed == 0, 2, np.where(self.computed >= self.prompt_lengths, 0, 1))


@dataclass(slots=True)
class Placement:
    """Where the KV of imported requests goes: entry i is one page. All int64, the same on every rank."""

    owner: np.ndarray  # rank whose EP pool holds the source page
    source: np.ndarray  # page id in that pool
    target: np.ndarray  # page id in this core's pool


def pages_of(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // page_size)


def kv_demand(runtime: Runtime, among: set[str] | None = None, *, drafted: int = 0) -> tuple[int, int]:
    """What the requests of `runtime` (or those in `among`) that have KV ask of a target: (pages, requests).

    Pages for all their present tokens, the next one and `drafted` more, since vLLM schedules a waiting request only if
    all of it fits; nothing shared, since prefix sharing does not survive the move.
    """
    size = runtime.page_size
    requests = runtime.scheduler.requests
    holders = [r for i, r in requests.items() if r.num_computed_tokens and (among is None or i in among)]
    return sum(pages_of(r.num_tokens + 1 + drafted, size) for r in holders), len(holders)


def release_stuck(runtime: Runtime) -> bool:
    """If nothing runs and the waiting requests hold the pages, free those of the last holder; whether one was found.

    vLLM preempts only running requests, so imported ones that wait could block each other for good. The freed request
    computes its KV again. All TP ranks decide alike, because their schedulers are alike. Nothing of a request that
    waits with pages is in flight: those that were preempted with a pass in flight hold none.
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


def snapshot_requests(runtime: Runtime, *, with_tokens: bool = True) -> RequestBatch:
    """Record every unfinished request and change nothing. Without tokens, only this process can import the batch.

    Raises:
        QuiesceError: something is still in flight.
    """
    check_at_rest(runtime)
    scheduler, seen = runtime.scheduler, runtime.runner.requests
    queue = [*scheduler.running, *scheduler.skipped_waiting, *scheduler.waiting]
    requests = [r for r in queue if r.request_id in seen] + [r for r in queue if r.request_id not in seen]
    params, params_of, seeds = _distinct_params(requests)
    pages = [_page_ids(runtime, request) for request in requests]
    lengths = _array(len(r._all_token_ids) for r in requests)
    hashes = [r.block_hashes if with_tokens else [] for r in requests]
    tokens = _chain(r._all_token_ids for r in requests) if with_tokens else []
    return RequestBatch(
        ids=[r.request_id for r in requests],
        params=params,
        params_of=params_of,
        seeds=seeds,
        cache_salts=[r.cache_salt for r in requests],
        arrival_times=np.array([r.arrival_time for r in requests], dtype=np.float64),
        priorities=_array(r.priority for r in requests),
        preemptions=_array(r.num_preemptions for r in requests),
        prompt_lengths=_array(r.num_prompt_tokens for r in requests),
        lengths=lengths,
        computed=_array(r.num_computed_tokens for r in requests),
        started=np.array([r.request_id in seen for r in requests], dtype=np.bool_),
        prefill_stats_taken=np.array([r.prefill_stats is None for r in requests], dtype=np.bool_),
        tokens=np.fromiter(tokens, dtype=np.int32),
        page_counts=_array(len(ids) for ids in pages),
        pages=_array(_chain(pages)),
        hash_counts=_array(len(h) for h in hashes),
        hashes=b"".join(_chain(hashes)),
        routes=_routes_of_partial_prompts(runtime, requests),
    )


def _routes_of_partial_prompts(runtime: Runtime, requests: Sequence[Request]) -> dict[str, np.ndarray]:
    if not runtime.scheduler.enable_return_routed_experts:
        return {}
    manager = runtime.scheduler.routed_experts_mgr
    partial = [r for r in requests if r.num_computed_tokens and not r.num_output_tokens]
    return {r.request_id: manager.get(_page_ids(runtime, r), r.num_computed_tokens) for r in partial}


def check_at_rest(runtime: Runtime) -> None:
    """Raise QuiesceError if a batch, or tokens of a request, are still in flight."""
    if runtime.core.batch_queue:
        raise QuiesceError("a batch is still in flight: drain the batch queue before exporting")
    for request in runtime.scheduler.requests.values():
        if request.num_in_flight_tokens or request.num_output_placeholders or request.spec_token_ids:
            raise QuiesceError(f"request {request.request_id} has tokens in flight")


def _array(values: Any) -> np.ndarray:
    return np.fromiter(values, dtype=np.int64)


def _chain(parts: Any) -> Any:
    return itertools.chain.from_iterable(parts)


def _distinct_params(requests: Sequence[Request]) -> tuple[list[Any], np.ndarray, np.ndarray]:
    """Sampling parameters without seeds, each once; which of them a request has; its seed.

    The samples of a step mostly differ in their seed only: sending parameters per request would be most of the work.
    """
    params: list[Any] = []
    known: dict[bytes, int] = {}
    indices, seeds = [], []
    for request in requests:
        plain = copy.copy(request.sampling_params)
        extra: dict[str, Any] = dict(plain.extra_args or {})
        seeds.append(extra.pop(SEED_FIELD, _NO_SEED))
        plain.extra_args = extra or None
        index = known.setdefault(pickle.dumps(plain), len(params))
        if index == len(params):
            params.append(plain)
        indices.append(index)
    return params, _array(indices), _array(seeds)


def _page_ids(runtime: Runtime, request: Request) -> list[int]:
    """Ids of the pages that hold the request's computed tokens."""
    if not request.num_computed_tokens:
        return []
    (ids,) = runtime.scheduler.kv_cache_manager.get_block_ids(request.request_id)
    return ids[: pages_of(request.num_computed_tokens, runtime.page_size)]


@torch.inference_mode()  # the sampler's persistent tensors are inference tensors
def detach_requests(runtime: Runtime, *, keep_pages: bool = False) -> dict[str, Request]:
    """Take every unfinished request out of scheduler and runner and free its pages; their bytes stay as they are.

    In the order in which the scheduler would go on with them. With `keep_pages` requests hold theirs.
    """
    scheduler = runtime.scheduler
    queue = [*scheduler.running, *scheduler.skipped_waiting, *scheduler.waiting]
    requests: dict[str, Request] = {request.request_id: request for request in queue}
    for request in requests.values():
        scheduler._inflight_prefills.discard(request)
        if not keep_pages:
            scheduler.kv_cache_manager.free(request)
    scheduler.requests.clear()
    scheduler.running.clear()
    for waiting in (scheduler.waiting, scheduler.skipped_waiting):
        while waiting:
            waiting.pop_request()
    forget_finished(runtime, list(requests))
    return requests


def admission_order(batches: Sequence[RequestBatch]) -> list[tuple[int, int]]:
    """(rank, row) of all requests in the order in which every rank imports them."""
    classes = np.concatenate([batch.admission_class() for batch in batches])
    rows = [(rank, row) for rank, batch in enumerate(batches) for row in range(len(batch))]
    return [rows[i] for i in np.argsort(classes, kind="stable")]


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
    forget_last_batch(runner)
    runner.input_batch.condense()
    runner.input_batch.refresh_metadata()
    if runner.requests or runner.input_batch.num_reqs or scheduler.has_requests():
        raise QuiesceError(
            f"{len(runner.requests)} requests left in the runner, {len(scheduler.requests)} in the scheduler"
        )


@torch.inference_mode()
def import_requests(
    runtime: Runtime,
    batches: Sequence[RequestBatch],
    order: Sequence[tuple[int, int]],
    own: dict[str, Request],
) -> Placement:
    """Put the requests `order` names into scheduler and runner, and choose their pages.

    `own` are the detached requests of this process, which are used again. The pages' bytes must be in place before the
    next iteration. Call with the target's groups installed.

    Raises:
        QuiesceError: the pages do not suffice; the capacity check should have refused.
    """
    manager = runtime.scheduler.kv_cache_manager
    page_counts = [int(batches[rank].page_counts[row]) for rank, row in order]
    total = sum(page_counts)
    if total > manager.block_pool.get_num_free_blocks():
        raise QuiesceError(f"live requests need {total} pages: the capacity check should have refused")
    # All pages at once: vLLM's own way, request by request, costs more than all the rest.
    blocks = manager.block_pool.get_new_blocks(total)
    readers = [_Reader(batch) for batch in batches]
    start = 0
    for (rank, row), count in zip(order, page_counts, strict=True):
        _import(runtime, readers[rank], row, own, blocks[start : start + count])
        start += count
    sources = [readers[rank].pages(row) for rank, row in order]
    return Placement(
        owner=np.repeat(_array(rank for rank, _ in order), page_counts),
        source=np.concatenate([np.empty(0, np.int64), *sources]),
        target=_array(block.block_id for block in blocks),
    )


class _Reader:
    """Row access to a batch."""

    def __init__(self, batch: RequestBatch) -> None:
        self.batch = batch
        self._token_ends = np.cumsum(batch.lengths).tolist()
        self._page_ends = np.cumsum(batch.page_counts).tolist()
        self._hash_ends = np.cumsum(batch.hash_counts).tolist()
        self._hash_size = len(batch.hashes) // max(1, int(batch.hash_counts.sum()))

    def pages(self, row: int) -> np.ndarray:
        end = self._page_ends[row]
        return self.batch.pages[end - int(self.batch.page_counts[row]) : end]

    def build(self, row: int, block_hasher: Any) -> Request:
        """The request as its own rank has it, as if it had just been preempted."""
        batch = self.batch
        params = copy.copy(batch.params[batch.params_of[row]])
        if (seed := int(batch.seeds[row])) != _NO_SEED:
            params.extra_args = {**(params.extra_args or {}), SEED_FIELD: seed}
        end, prompt = self._token_ends[row], int(batch.prompt_lengths[row])
        tokens = batch.tokens[end - int(batch.lengths[row]) : end].tolist()
        request = Request(
            request_id=batch.ids[row],
            prompt_token_ids=tokens[:prompt],
            sampling_params=params,
            pooling_params=None,
            arrival_time=float(batch.arrival_times[row]),
            cache_salt=batch.cache_salts[row],
            priority=int(batch.priorities[row]),
        )
        # Behind the views' back, without hashing what has been hashed.
        request._output_token_ids.extend(tokens[prompt:])
        request._all_token_ids.extend(tokens[prompt:])
        size, end = self._hash_size, self._hash_ends[row]
        first = end - int(batch.hash_counts[row])
        request.block_hashes = [batch.hashes[i * size : (i + 1) * size] for i in range(first, end)]
        request._block_hasher = block_hasher
        request.num_preemptions = int(batch.preemptions[row])
        if batch.prefill_stats_taken[row]:
            request.prefill_stats = None
        return request


def _import(runtime: Runtime, reader: _Reader, row: int, own: dict[str, Request], blocks: list[Any]) -> None:
    scheduler, manager, batch = runtime.scheduler, runtime.scheduler.kv_cache_manager, reader.batch
    request_id = batch.ids[row]
    request = own.get(request_id) or reader.build(row, runtime.core.request_block_hasher)
    computed = int(batch.computed[row])
    request.num_computed_tokens = computed
    request.is_prefill_chunk = False
    request.last_sched_seq = 0
    request.status = RequestStatus.WAITING
    scheduler.requests[request_id] = request
    if batch.started[row]:
        # PREEMPTED, not WAITING: the scheduler then sends the outputs along with the full page list.
        request.status = RequestStatus.PREEMPTED
        if computed:
            (pages,) = manager.coordinator.single_type_managers
            pages.req_to_blocks[request_id] = blocks
            # Full pages count as cached but are not entered into the prefix cache: thousands of entries, for the rare
            # request that is preempted in TP and finds its pages again.
            pages.num_cached_block[request_id] = computed // runtime.page_size
            if (routes := batch.routes.get(request_id)) is not None:
                slots = np.array([b.block_id for b in blocks])[:, None] * runtime.page_size + np.arange(
                    runtime.page_size
                )
                scheduler.routed_experts_mgr.store_batch(routes, slots.ravel()[:computed])
        runtime.runner.requests[request_id] = CachedRequestState(
            req_id=request_id,
            prompt_token_ids=request.prompt_token_ids,
            mm_features=[],
            sampling_params=request.sampling_params,
            generator=None,
            block_ids=([block.block_id for block in blocks],),
            num_computed_tokens=computed,
            output_token_ids=list(request._output_token_ids),
        )
    scheduler.waiting.add_request(request)


def reset_prefix_cache(runtime: Runtime) -> bool:
    """Forget all cached pages; False if pages are in use. vLLM's own reset visits every page, this only cached ones."""
    pool = runtime.scheduler.kv_cache_manager.block_pool
    blocks = pool.blocks
    pool.blocks = [
        block
        for entry in pool.cached_block_hash_to_block._cache.values()
        for block in (entry.values() if isinstance(entry, dict) else (entry,))
    ]
    try:
        return runtime.scheduler.reset_prefix_cache()
    finally:
        pool.blocks = blocks
