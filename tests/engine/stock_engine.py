"""Stock vLLM in one process, for the samples that ours are compared with."""

from __future__ import annotations

from typing import Any

from moebius.engine.config import EngineConfig
from moebius.engine.types import SampleKey, SampleRequest


class PlainEngine:
    """A stock vLLM engine with one process: the reference.

    Changed in two ways only: the sampler, and vLLM's fault that lets a request inherit another's allowed_token_ids.
    """

    def __init__(self, settings: EngineConfig) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from moebius.engine import sampler, vllm_patches

        vllm_patches.fix_upstream()
        self.front: Any = LLMEngine.from_engine_args(
            EngineArgs(
                model=settings.model,
                dtype="float32",
                max_model_len=settings.max_model_len,
                max_num_seqs=settings.max_num_seqs,
                max_num_batched_tokens=settings.max_num_batched_tokens,
                block_size=settings.block_size,
                kv_cache_memory_bytes=settings.kv_cache_bytes,
                enable_prefix_caching=False,
                enforce_eager=True,
                disable_log_stats=True,
                async_scheduling=False,
                logprobs_mode=settings.logprobs_mode,
            )
        )
        sampler.install(self.front.engine_core.engine_core.model_executor.driver_worker.worker.model_runner)


def plain_run(engine: PlainEngine, requests: list[SampleRequest]) -> dict[SampleKey, tuple[Any, ...]]:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from moebius.engine.sampler import SEED_FIELD

    keys = {}
    for r in requests:
        params = SamplingParams(**r.sampling, extra_args={SEED_FIELD: r.seed}, output_kind=RequestOutputKind.FINAL_ONLY)
        name = f"{r.key.prompt}:{r.key.sample}"
        keys[name] = r.key
        engine.front.add_request(name, {"prompt_token_ids": r.prompt_token_ids}, params)
    done = {}
    while engine.front.has_unfinished_requests():
        for output in engine.front.step():
            c = output.outputs[0]
            lps = [entry[t].logprob for t, entry in zip(c.token_ids, c.logprobs, strict=True)] if c.logprobs else None
            done[keys[output.request_id]] = (list(c.token_ids), str(c.finish_reason), c.stop_reason, c.text, lps)
    return done
