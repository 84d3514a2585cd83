"""What runs inside a rank process of a benchmark: our engine and vLLM's own, driven with the same requests.

Everything here is called by `Fleet`; torch and vLLM are imported when an engine is made.
"""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from moebius.engine.config import EngineConfig, PolicyConfig
from moebius.engine.garbage import imports_kept, nothing_collected
from moebius.engine.types import SampleKey, SampleRequest, StepOutcome
from moebius.rollout.bench.traces import Workload

Layout = Literal["EP", "TP"]
MoeBackend = Literal["auto", "triton"]
_BUCKET = 512  # tensors per call of a weight update


@dataclass(frozen=True, slots=True)
class StockSettings:
    """How vLLM's own engine is set up; what is not named here is as in the EngineConfig beside it."""

    layout: Layout  # of attention and requests: "EP" is data-parallel
    expert_parallel: bool = False  # whole experts spread over ranks, else every expert split over them
    multiprocess: bool = False  # as `vllm serve` runs it: engine core and workers in processes of their own
    moe_backend: MoeBackend = "auto"
    capture_sizes: tuple[int, ...] = ()  # of CUDA graphs; empty: vLLM's default
    seeded: bool = False  # a torch generator per request
    patched: bool = False  # with this project's changes for CPU, where vLLM has no EP of its own


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one rank can hold."""

    pages: dict[str, int]  # layout -> pages
    page_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab: int


@dataclass(slots=True)
class Series:
    """Iterations of one run as one rank saw them; `tokens` and `live` of all its scheduler's requests.

    Our engine counts over all ranks, a stock EP rank counts its own requests; `full` says which number of tokens
    means that every request decoded. `live[i]` is the number of unfinished requests when iteration i began.
    """

    ends: list[float] = field(default_factory=list)  # seconds since the run began
    tokens: list[int] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    layouts: list[str] = field(default_factory=list)
    full: int = 0
    total_s: float = 0.0
    return_reshard_ms: float = 0.0
    switches: list[dict[str, Any]] = field(default_factory=list)  # live, pause_ms, phases_ms, device_ms, iteration
    cancelled: list[str] = field(default_factory=list)

    def ms(self) -> list[float]:
        """Milliseconds of each iteration; the first one from the start of the run, so with admission."""
        return [1e3 * (end - begin) for begin, end in zip([0.0, *self.ends], self.ends, strict=False)]


class Ours:
    """A MoebiusEngine of one rank."""

    def __init__(self, config: EngineConfig) -> None:
        with imports_kept():
            from moebius.engine.engine import MoebiusEngine

        self.engine: Any = MoebiusEngine(config)

    def capacity(self) -> Capacity:
        """Limits of both layouts."""
        pair = self.engine.pair
        core = pair.ep.core.vllm_config
        return Capacity(
            pages={"EP": pair.ep.usable_pages, "TP": pair.tp.usable_pages},
            page_tokens=core.cache_config.block_size,
            max_num_seqs=core.scheduler_config.max_num_seqs,
            max_num_batched_tokens=core.scheduler_config.max_num_batched_tokens,
            max_model_len=self.engine.max_model_len,
            vocab=self.engine.vocab_size,
        )

    def run(self, workload: Workload, policy: PolicyConfig) -> Series:
        """One step under `policy` with this rank's share of the requests; a collective."""
        self.engine.policy.config = policy
        return _series(self.step(workload), len(workload.lengths))

    def step(self, workload: Workload) -> StepOutcome:
        """One step under the engine's policy as it is; prefix caches are emptied before. A collective."""
        from moebius.kernels.noise import derive_seed

        rank, ranks = self.engine.rank, self.engine.world_size
        requests = [
            SampleRequest(
                SampleKey(i, 0),
                workload.prompt(i),
                {"temperature": 1.0, "max_tokens": workload.lengths[i], "ignore_eos": True},
                derive_seed(workload.seed, 0, i, 0),
            )
            for i in workload.indices(rank, ranks)
        ]
        for runtime in (self.engine.pair.ep, self.engine.pair.tp):
            forget_prefixes(runtime.scheduler)
        outcome: StepOutcome = self.engine.run_step(requests)
        return outcome

    def runners(self) -> list[Any]:
        """vLLM's model runners in this process."""
        return [self.engine.pair.ep.runner, self.engine.pair.tp.runner]

    def load_all(self, tensors: Any) -> None:
        """A full weight update."""
        self.engine.begin_update(self.engine.policy_version + 1)
        parts = iter(tensors)
        while bucket := list(itertools.islice(parts, _BUCKET)):
            self.engine.update_tensors(bucket)
        self.engine.commit_update()

    def shutdown(self) -> None:
        """Close the engine."""
        self.engine.shutdown()


def _series(outcome: StepOutcome, requests: int) -> Series:
    stats = outcome.stats
    after = [iteration.live for iteration in stats.iterations]
    return Series(
        ends=[iteration.t for iteration in stats.iterations],
        tokens=[iteration.tokens for iteration in stats.iterations],
        live=[requests, *after][: len(after)],
        layouts=[iteration.layout for iteration in stats.iterations],
        full=requests,
        total_s=stats.total_s,
        return_reshard_ms=stats.return_reshard_ms,
        switches=[
            {
                "live": s.live,
                "pause_ms": s.pause_ms,
                "phases_ms": dict(s.phases_ms),
                "device_ms": dict(s.device_ms),
                "iteration": s.iteration,
            }
            for s in stats.switches
        ],
        cancelled=[cancelled.reason for cancelled in stats.cancelled],
    )


class Stock:
    """vLLM's own LLMEngine of one rank, unchanged, stepped as LLMEngine.step and its callers do."""

    def __init__(self, config: EngineConfig, settings: StockSettings, ranks: int) -> None:
        with imports_kept():
            from vllm.v1.engine.llm_engine import LLMEngine
            from vllm.v1.executor import Executor

        if settings.patched:
            from moebius.engine import vllm_patches

            vllm_patches.apply()
        self.settings, self.ranks = settings, ranks
        self.rank = int(os.environ["RANK"])
        vllm_config = stock_vllm_config(config, settings, ranks)
        self.front: Any = LLMEngine(
            vllm_config=vllm_config,
            executor_class=Executor.get_class(vllm_config),
            log_stats=False,
            multiprocess_mode=settings.multiprocess,
        )
        self._step_tokens = 0
        self._count_tokens()
        self._runs = 0
        # vLLM seeds all ranks alike. With random weights, ranks of EP would then draw the same tokens for different
        # requests, which therefore share experts: less work than any real step has.
        if settings.layout == "EP":
            import torch

            torch.manual_seed(config.seed + self.rank)

    def _count_tokens(self) -> None:
        """Note how many tokens each engine output brings; LLMEngine.step returns finished requests only."""
        client = self.front.engine_core
        get_output = client.get_output

        def counted() -> Any:
            outputs = get_output()
            self._step_tokens = sum(len(output.new_token_ids) for output in outputs.outputs)
            return outputs

        client.get_output = counted

    def capacity(self) -> Capacity:
        """Limits of this engine's layout."""
        config = self.front.vllm_config
        return Capacity(
            pages={self.settings.layout: config.cache_config.num_gpu_blocks - 1},  # vLLM keeps one null block
            page_tokens=config.cache_config.block_size,
            max_num_seqs=config.scheduler_config.max_num_seqs,
            max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
            max_model_len=config.model_config.max_model_len,
            vocab=config.model_config.get_vocab_size(),
        )

    def run(self, workload: Workload, policy: PolicyConfig) -> Series:
        """The same requests; `policy` is ignored, this engine has one layout. A collective."""
        del policy
        if self.settings.layout == "EP":
            indices = workload.indices(self.rank, self.ranks)
        else:  # every TP rank admits every request, in one order
            indices = range(len(workload.lengths))
        # Prompts are made before the clock starts, as for the other engine.
        prompts = [{"prompt_token_ids": workload.prompt(i)} for i in indices]
        self._runs += 1
        forget_prefixes(self.front)
        series = Series(full=len(indices))
        front, started = self.front, time.perf_counter()
        for i, prompt in zip(indices, prompts, strict=True):
            front.add_request(f"{self._runs}:{i}", prompt, self._params(workload, i))
        # In EP this is a collective, and tells ranks without requests to take part with dummy batches.
        while front.has_unfinished_requests():
            live = front.get_num_unfinished_requests()
            self._step_tokens = 0
            front.step()
            series.ends.append(time.perf_counter() - started)
            series.tokens.append(self._step_tokens)
            series.live.append(live)
        series.layouts = [self.settings.layout] * len(series.ends)
        series.total_s = time.perf_counter() - started
        return series

    def _params(self, workload: Workload, index: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        from moebius.kernels.noise import derive_seed

        return SamplingParams(
            temperature=1.0,
            max_tokens=workload.lengths[index],
            ignore_eos=True,
            seed=derive_seed(workload.seed, 0, index, 0) if self.settings.seeded else None,
            detokenize=self.front.tokenizer is not None,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def runners(self) -> list[Any]:
        """vLLM's model runner in this process; none where the workers are processes of their own."""
        if self.settings.multiprocess:
            return []
        return [self.front.engine_core.engine_core.model_executor.driver_worker.worker.model_runner]

    def load_all(self, tensors: Any) -> None:
        """vLLM's own reload of all weights."""
        from vllm.config import set_current_vllm_config

        (runner,) = self.runners()
        with set_current_vllm_config(runner.vllm_config):
            runner.reload_weights(weights_iterator=iter(tensors))

    def shutdown(self) -> None:
        """Close the engine and its workers."""
        with nothing_collected():
            self.front.engine_core.shutdown()


def stock_vllm_config(config: EngineConfig, settings: StockSettings, ranks: int) -> Any:
    """vLLM's configuration with the same model, limits and memory as ours, and vLLM's defaults for all else."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    cuda = current_platform.is_cuda()
    arguments: dict[str, Any] = {
        "model": config.model,
        "dtype": config.dtype,
        "load_format": config.load_format,
        "hf_overrides": config.hf_overrides,
        "skip_tokenizer_init": not os.path.exists(os.path.join(config.model, "tokenizer.json")),
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "block_size": config.block_size,
        "kv_cache_memory_bytes": config.kv_cache_bytes,
        "enable_prefix_caching": config.enable_prefix_caching,
        "enforce_eager": config.enforce_eager or not cuda,
        "attention_backend": config.attention_backend,
        "seed": config.seed,
        "disable_log_stats": True,
        "disable_custom_all_reduce": not config.custom_all_reduce,
        "distributed_executor_backend": "mp" if settings.multiprocess else "external_launcher",
    }
    if settings.layout == "EP":
        arguments["data_parallel_size"] = ranks
    else:
        arguments["tensor_parallel_size"] = ranks
    arguments["enable_expert_parallel"] = settings.expert_parallel
    if cuda:
        # Only a check at start: kv_cache_memory_bytes decides, and other engines hold memory of the same GPU.
        arguments["gpu_memory_utilization"] = 0.05
        if settings.moe_backend != "auto":
            arguments["moe_backend"] = settings.moe_backend
        if settings.capture_sizes and not arguments["enforce_eager"]:
            arguments["cudagraph_capture_sizes"] = list(settings.capture_sizes)
    return EngineArgs(**arguments).create_engine_config()


# ---- called through Fleet ------------------------------------------------------------------------------------------


def capacity(engine: Ours | Stock) -> Capacity:
    """What the rank can hold."""
    return engine.capacity()


def kernel_us(engine: Ours | Stock) -> list[float]:
    """Microseconds per small kernel of a graph before and after `engine.settle`; empty for stock and without graphs."""
    return engine.engine.startup.kernel_us if isinstance(engine, Ours) else []


def run(engine: Ours | Stock, workload: Workload, policy: PolicyConfig) -> Series:
    """Run `workload` once."""
    return engine.run(workload, policy)


def forget_prefixes(cache: Any) -> None:
    """Runs repeat prompts: none may find the pages of an earlier one. `cache` is a scheduler or vLLM's engine."""
    if not cache.reset_prefix_cache():
        raise RuntimeError("the prefix cache could not be emptied: pages are in use between runs")
