"""A scheduler and a front without a device, and what may happen to them; for tests of `engine.steady`."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from moebius.engine import steady
from moebius.engine.front import RequestFront
from moebius.engine.parking import put_back, take_out
from moebius.engine.requests import release_stuck
from moebius.engine.tail_modes import AheadScheduler, DraftingScheduler, drop_drafts
from moebius.engine.types import SampleKey, SampleRequest

PAGE, LONGEST, VOCAB, EOS = 4, 40, 50, 7


@cache
def engine_config() -> Any:
    """As much of vLLM's configuration as its scheduler reads."""
    nothing = SimpleNamespace(
        kv_cache_metrics=False,
        kv_cache_metrics_sample=1.0,
        enable_mfu_metrics=False,
        enable_logging_iteration_details=False,
    )
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(
            max_num_seqs=6,
            max_num_scheduled_tokens=None,
            max_num_batched_tokens=24,
            policy="fcfs",
            watermark=0.0,
            scheduler_reserve_full_isl=False,
            long_prefill_token_threshold=0,
            enable_chunked_prefill=True,
            async_scheduling=True,
        ),
        cache_config=SimpleNamespace(
            num_gpu_blocks=1, enable_prefix_caching=True, mamba_cache_mode="none", block_size=PAGE
        ),
        lora_config=None,
        kv_events_config=None,
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_index=0,
        ),
        observability_config=nothing,
        model_config=SimpleNamespace(
            is_encoder_decoder=False, max_model_len=LONGEST, is_diffusion=False, enable_return_routed_experts=False
        ),
        kv_transfer_config=None,
        ec_transfer_config=None,
        speculative_config=None,
        num_speculative_tokens=0,
        max_in_flight_tokens=64,
        use_v2_model_runner=False,
        max_concurrent_batches=2,
    )


def make_scheduler(kind: type, pages: int) -> Any:
    init_none_hash(sha256)
    config = engine_config()
    spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=1, dtype=torch.float32)
    layers = KVCacheConfig(pages, [], [KVCacheGroupSpec(["layer"], spec)])
    grammar = SimpleNamespace(should_advance=lambda request: False)
    text_only: Any = SimpleNamespace(supports_multimodal_inputs=lambda model: False)
    return kind(config, layers, grammar, PAGE, mm_registry=text_only)


def drawn(name: str, position: int) -> int:
    """The token of a request at a position, whatever happens around it."""
    return (
        EOS if (value := random.Random(f"{name} {position}").randrange(2 * VOCAB)) >= 2 * VOCAB - 3 else value % VOCAB
    )


@dataclass
class Flight:
    """A batch on its way, and what it will give."""

    scheduled: Any
    output: ModelRunnerOutput


class World:
    """A scheduler, a front, and tokens that depend on request and position only."""

    def __init__(self, kind: type, pages: int, *, is_steady: bool) -> None:
        self.scheduler = make_scheduler(kind, pages)
        self.steady = steady.attach(self.scheduler) if is_steady else None
        assert (self.steady is not None) is is_steady
        self.hasher = get_request_block_hasher(PAGE, sha256)
        processor = OutputProcessor(None, log_stats=False)
        self.engine: Any = SimpleNamespace(output_processor=processor, tokenizer=None)
        self.flights: deque[Flight] = deque()
        self.runner: Any = SimpleNamespace(requests={}, num_prompt_logprobs={}, input_batch=_Batch())
        self.runtime: Any = SimpleNamespace(
            scheduler=self.scheduler, runner=self.runner, core=SimpleNamespace(batch_queue=self.flights), page_size=PAGE
        )
        self.results: list[Any] = []
        self.tokens = self.steps = self.freed = self.preempted = 0
        self.layouts: dict[str, list[str]] = {}  # of each token, noted when it came
        self.begin([])

    def begin(self, parked: list[Any]) -> None:
        """A step."""
        self.front = RequestFront(self.engine, 0, self.steps)
        self.steps += 1
        if self.steady is not None:
            self.steady.audience = self.front.audience
        self.front.resume(parked)
        put_back(self.runtime, [sample.request for sample in parked])

    def add(self, number: int, prompt: list[int], sampling: dict[str, Any], *, own: bool) -> None:
        params = SamplingParams(**sampling, output_kind=RequestOutputKind.FINAL_ONLY)
        params._eos_token_id = None if params.ignore_eos else EOS
        made = EngineCoreRequest(
            f"r{number}", prompt, None, params, None, 0.0, None, None, None, external_req_id=f"x{number}"
        )
        if own:
            self.front.register(SampleRequest(SampleKey(number, 0), prompt, sampling, 0), made)
        self.scheduler.add_request(Request.from_engine_core_request(made, self.hasher))

    def schedule(self) -> Any:
        """Launch a batch, with all that the device would give."""
        scheduled = self.scheduler.schedule()
        self.preempted += len(scheduled.preempted_req_ids or ())
        self.launch(scheduled)
        counts = scheduled.num_scheduled_tokens
        names = list(reversed(counts))
        requests = [self.scheduler.requests[name] for name in names]
        tokens: list[list[int]] = []
        for request in requests:
            drafts = scheduled.scheduled_spec_decode_tokens.get(request.request_id, [])
            first = request.num_computed_tokens - len(drafts)
            truth = [drawn(request.request_id, first + i) for i in range(len(drafts) + 1)]
            right = next((i for i, (a, b) in enumerate(zip(drafts, truth, strict=False)) if a != b), len(drafts))
            tokens.append([] if request.is_prefill_chunk else truth[: right + 1])
        wide = max((n for r in requests if (n := r.sampling_params.num_logprobs) is not None), default=None)
        logprobs = None
        if wide is not None:
            rows = [
                (token, -float(token) - request.num_computed_tokens / 64)
                for request, got in zip(requests, tokens, strict=True)
                for token in got or [0]
            ]
            starts = np.cumsum([0, *(len(got or [0]) for got in tokens)]).tolist()
            ids = np.array([[token, *range(100, 100 + wide)] for token, _ in rows])
            values = np.array([[value, *[-9.0] * wide] for _, value in rows], dtype=np.float32)
            several = max(map(len, tokens)) > 1
            logprobs = LogprobsLists(ids, values, np.zeros(len(rows)), starts if several else None)
        output = ModelRunnerOutput(names, {n: i for i, n in enumerate(names)}, tokens, logprobs)
        self.flights.appendleft(Flight(scheduled, output))
        return scheduled

    def launch(self, scheduled: Any) -> None:
        """What the runner notes of a batch."""
        for name in scheduled.finished_req_ids:
            self.runner.requests.pop(name, None)
        for new in scheduled.scheduled_new_reqs:
            self.runner.requests[new.req_id] = new

    def take(self, *, any_came: bool = True) -> int:
        """The oldest batch comes back, if `any_came`; tokens of own requests."""
        outputs = EngineCoreOutputs()
        if any_came:
            flight, live_before = self.flights.pop(), list(self.scheduler.requests.values())
            outputs = self.scheduler.update_from_output(flight.scheduled, flight.output).get(0) or outputs
            for request in live_before:
                noted = self.layouts.setdefault(request.request_id, [])
                noted += [self.front.layout] * (request.num_output_tokens - len(noted))
        if not outputs.outputs and not self.front.audience.tokens:
            self.freed += release_stuck(self.runtime)
        tokens, aborts = self.front.deliver(outputs)
        assert not aborts
        self.tokens += tokens
        return tokens

    def drain(self) -> None:
        while self.flights:
            self.take()

    def layouts_of(self, result: Any) -> list[tuple[str, int]]:
        """What a result should say, by what was noted token by token."""
        noted = self.layouts.get(f"r{result.key.prompt}", [])[: len(result.token_ids)]
        return [(layout, len(list(run))) for layout, run in groupby(noted)]

    def abort(self, names: list[str]) -> None:
        self.front.abort(SimpleNamespace(among=lambda keys: [n for n in names if n in keys]))  # type: ignore[arg-type]

    def drop(self, names: list[str]) -> None:
        for name in names:
            self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)

    def park(self, *, keep: bool) -> None:
        """All that is unfinished goes from this step to the next; others' requests end."""
        self.drain()
        self.drop([name for name in self.scheduler.requests if name not in self.front._keys])
        self.results += self.front.take_results()
        drop_drafts(self.scheduler)
        self.begin(self.front.park(take_out(self.runtime, keep_pages=keep)))

    def hand_over(self) -> None:
        """All goes on to another rank's front, as in a switch to EP."""
        self.drain()
        self.front.leave_layout(self.scheduler.requests)
        records = self.front.release(list(self.scheduler.requests))
        self.results += self.front.take_results()
        audience = self.front.audience
        assert not (audience.own or audience.behind or audience.quiet or audience.logprobs or audience.tokens)
        self.engine = SimpleNamespace(output_processor=OutputProcessor(None, log_stats=False), tokenizer=None)
        layout = {"EP": "TP", "TP": "EP"}[self.front.layout]
        self.front = RequestFront(self.engine, 1, self.steps - 1)
        self.front.layout = layout
        if self.steady is not None:
            self.steady.audience = self.front.audience
        self.front.adopt(records, self.scheduler.requests)

    def draft(self, *, on: bool) -> None:
        """Go from decoding ahead to drafting, or back, as `TailModes` does."""
        self.drain()
        drop_drafts(self.scheduler)
        self.scheduler.__class__ = DraftingScheduler if on else AheadScheduler
        self.scheduler.dynamic_sd_lookup = [3 if on else 0] * 20
        if self.steady is not None:
            (self.steady.step_aside if on else self.steady.take_over)()

    def propose(self) -> None:
        """Drafts of the requests that run, some of them wrong."""
        names, drafts = [], []
        for request in self.scheduler.running:
            n, name = request.num_tokens, request.request_id
            names.append(name)
            room = min(3, max(0, request.num_prompt_tokens + request.max_tokens - n - 1), max(0, LONGEST - n - 1))
            drafts.append([drawn(name, n + i) if (n + i) % 5 else 1 for i in range(room)])
        self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))


class _Batch:
    """The runner's batch, as far as requests are taken out of it."""

    num_reqs = 0
    prev_sampled_token_ids = prev_req_id_to_index = sampled_token_ids_cpu = async_copy_ready_event = None

    def remove_request(self, name: str) -> None:
        pass

    def condense(self) -> None:
        pass

    def refresh_metadata(self) -> None:
        pass


def told(scheduled: Any) -> dict[str, Any]:
    """What a batch tells the runner."""
    return {
        "tokens": list(scheduled.num_scheduled_tokens.items()),
        "total": scheduled.total_num_scheduled_tokens,
        "new": [(new.req_id, new.block_ids, new.num_computed_tokens) for new in scheduled.scheduled_new_reqs],
        "known": vars(scheduled.scheduled_cached_reqs),
        "drafts": scheduled.scheduled_spec_decode_tokens,
        "finished": scheduled.finished_req_ids,
        "preempted": scheduled.preempted_req_ids,
        "common": scheduled.num_common_prefix_blocks,
    }


_FIELDS = (
    "num_computed_tokens", "num_in_flight_tokens", "num_output_placeholders", "is_prefill_chunk", "status",
    "num_preemptions", "spec_token_ids", "_output_token_ids", "_all_token_ids",
)  # fmt: skip


def state(scheduler: Any) -> dict[str, Any]:
    """What later iterations depend on."""
    manager = scheduler.kv_cache_manager
    (pages,) = manager.coordinator.single_type_managers
    return {
        "requests": {n: {f: getattr(r, f) for f in _FIELDS} for n, r in scheduler.requests.items()},
        "hashes": {n: len(r.block_hashes) for n, r in scheduler.requests.items()},
        "running": [request.request_id for request in scheduler.running],
        "waiting": [request.request_id for request in scheduler.waiting],
        "pages": {n: [block.block_id for block in blocks] for n, blocks in pages.req_to_blocks.items()},
        "cached": dict(pages.num_cached_block),
        "free": [block.block_id for block in manager.block_pool.free_block_queue.get_all_free_blocks()],
        "by content": {block.block_id: block.block_hash for block in manager.block_pool.blocks},
        "before": set(scheduler.prev_step_scheduled_req_ids),
        "step": scheduler.current_step,
    }


def some_sampling(draw: random.Random) -> dict[str, Any]:
    most = draw.randint(1, 30)
    kinds: list[dict[str, Any]] = [
        {},
        {"logprobs": 0},
        {"logprobs": 2},
        {"stop_token_ids": [3, 4]},
        {"min_tokens": min(6, most)},
        {"logprob_token_ids": [5, 6]},
        {"repetition_penalty": 1.2},
    ]
    return {"max_tokens": most, "ignore_eos": draw.random() < 0.5, "temperature": 1.0} | draw.choice(kinds)


EVENTS = ["add", "add", "same", "abort", "late", "park", "keep", "hand over", "draft", "draft", "draft", "draft"]


def live(seed: int, kind: type, make: type[World]) -> tuple[World, World]:
    """Two worlds, with and without `engine.steady`, through the same events; compared in every iteration."""
    draw = random.Random(seed)
    pages = draw.choice([12, 16, 20, 30])
    worlds = make(kind, pages, is_steady=True), make(kind, pages, is_steady=False)
    fast, plain = worlds
    assert fast.steady is not None
    if kind is AheadScheduler:
        for world in worlds:
            world.draft(on=True)
            world.draft(on=False)
    number, drafting, late, prompts = 0, False, [], [[draw.randrange(10, VOCAB) for _ in range(9)]]
    for iteration in range(600):
        quiet = iteration > 150 and not fast.scheduler.requests
        if quiet and not fast.flights:
            break
        event = draw.choice(EVENTS) if draw.random() < 0.12 and iteration < 150 else None
        if number < 4:
            event = "add"
        if late:
            for world in worlds:
                world.drop(late)
            late = []
        if event in ("add", "same"):
            prompt = [draw.randrange(10, VOCAB) for _ in range(draw.choice([1, 2, 3, 4, 5, 8, 9, 30]))]
            prompts.append(prompt)
            prompt = draw.choice(prompts) if event == "same" else prompt
            sampling, own = some_sampling(draw), draw.random() < 0.7
            for world in worlds:
                world.add(number, list(prompt), dict(sampling), own=own)
            number += 1
        elif event in ("abort", "late") and fast.scheduler.requests:
            names = draw.sample(sorted(fast.scheduler.requests), 1)
            for world in worlds:
                world.abort(names)
                if event == "abort":
                    world.drop(names)
            late = names if event == "late" else []
        elif event == "hand over":
            for world in worlds:
                world.hand_over()
        elif event in ("park", "keep"):
            for world in worlds:
                world.park(keep=event == "keep")
        elif event == "draft" and kind is AheadScheduler:
            drafting = not drafting
            for world in worlds:
                world.draft(on=drafting)
        if fast.scheduler.has_requests():
            a, b = fast.schedule(), plain.schedule()
            assert told(a) == told(b), f"iteration {iteration}"
            assert state(fast.scheduler) == state(plain.scheduler), f"iteration {iteration}"
        came = bool(fast.flights) and (drafting or len(fast.flights) == 2 or not fast.scheduler.has_requests())
        assert fast.take(any_came=came) == plain.take(any_came=came)
        assert state(fast.scheduler) == state(plain.scheduler), f"iteration {iteration}"
        if drafting:
            for world in worlds:
                world.propose()
    for world in worlds:
        world.results += world.front.take_results()
        assert not world.scheduler.requests and not world.front.unfinished
    return fast, plain


def plain_data(result: Any) -> tuple[Any, ...]:
    kept = (
        "key",
        "token_ids",
        "logprobs",
        "finish_reason",
        "stop_reason",
        "policy_version",
        "top_logprobs",
        "versions",
        "layouts",
    )
    return tuple(getattr(result, name) for name in kept)
