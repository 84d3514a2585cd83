"""Unfinished requests between two steps: out of a core, and back into the EP core of the rank that answers for them.

Without its pages a request is as one that vLLM has preempted: it computes its KV again from its tokens when it goes on.
With its pages it is as one that a switch has brought: it goes on where it was.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from moebius.engine.requests import check_at_rest, detach_requests
from moebius.engine.runtime import Runtime


def take_out(runtime: Runtime, *, keep_pages: bool) -> dict[str, Request]:
    """Take every unfinished request out of scheduler and runner. Without `keep_pages` their pages are freed.

    Raises:
        QuiesceError: something is still in flight.
    """
    check_at_rest(runtime)
    requests = detach_requests(runtime, keep_pages=keep_pages)
    for request in requests.values():
        if not keep_pages:
            drop_computed(request)
    return requests


def drop_computed(request: Request) -> None:
    """The request's KV is no more: it is computed again, as after a preemption by vLLM."""
    if request.num_computed_tokens:
        request.num_computed_tokens = 0
        request.num_preemptions += 1


@torch.inference_mode()  # the sampler's persistent tensors are inference tensors
def put_back(runtime: Runtime, requests: Iterable[Request]) -> None:
    """Give requests that were taken out to the core of `runtime`, behind what waits there already."""
    scheduler = runtime.scheduler
    for request in requests:
        request.is_prefill_chunk = False
        request.last_sched_seq = 0
        request.status = RequestStatus.WAITING
        scheduler.requests[request.request_id] = request
        if request.num_output_tokens or request.num_computed_tokens:
            # PREEMPTED, not WAITING: the scheduler then sends the outputs along with the full page list.
            request.status = RequestStatus.PREEMPTED
            runtime.runner.requests[request.request_id] = CachedRequestState(
                req_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                mm_features=[],
                sampling_params=request.sampling_params,
                generator=None,
                block_ids=scheduler.kv_cache_manager.get_block_ids(request.request_id),
                num_computed_tokens=request.num_computed_tokens,
                output_token_ids=list(request._output_token_ids),
            )
        scheduler.waiting.add_request(request)


def free_pages(runtime: Runtime, request: Request) -> None:
    """Give back the pages of a request that was taken out with them."""
    runtime.scheduler.kv_cache_manager.free(request)
    drop_computed(request)


def held_pages(runtime: Runtime, request_ids: Iterable[str]) -> int:
    """How many pages these requests hold; one that several share counts once."""
    manager = runtime.scheduler.kv_cache_manager
    return len({page for request_id in request_ids for page in manager.get_block_ids(request_id)[0]})


def forget_prefixes(runtime: Runtime) -> None:
    """No page can be found by its content any more, in use or not.

    vLLM's own reset refuses while pages are in use, as those of parked requests are.
    """
    pool = runtime.scheduler.kv_cache_manager.block_pool
    cached = [
        block
        for entry in pool.cached_block_hash_to_block._cache.values()
        for block in (entry.values() if isinstance(entry, dict) else (entry,))
    ]
    for block in cached:
        pool._maybe_evict_cached_block(block)


def keep_to_itself(request: Request, update: int) -> None:
    """From now on nobody else finds pages of this request by their content.

    Its pages were computed with other weights than the present ones, and so were those that it fills from now on, since
    they depend on the former. A salt of its own in its first page's hash goes into all hashes behind it.
    """
    request.cache_salt = f"{request.request_id} before update {update}"
    request.block_hashes.clear()
    request.update_block_hashes()
