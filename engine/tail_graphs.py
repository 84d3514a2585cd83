"""CUDA graphs of a TP runtime with drafts: those of an engine without, and some for requests of any lengths.

vLLM has one list of sizes for all graphs and one length of a decode request, 1 + drafted tokens, to whose multiples it
rounds all sizes: batches without drafts would be padded to that. Here decode graphs are for one token per request, with
the sizes that TP has without drafts, and iterations with drafts, whose requests have any lengths, have full graphs of
their own at fewer sizes. Those replace vLLM's piecewise graphs up to their largest size: a piecewise graph launches
every layer's attention apart, and while drafts are verified the host's time counts in full.
"""

from __future__ import annotations

import bisect
from dataclasses import replace
from typing import Any

from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import BatchDescriptor
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

CONFIG_KEY = "moebius_tail_graphs"  # in VllmConfig.additional_config: {"decode": [...], "drafts": [...]}


class TailDispatcher(CudagraphDispatcher):
    """vLLM's dispatcher with a list of sizes for decode batches and one for any others."""

    def __init__(self, vllm_config: VllmConfig, decode: list[int], drafts: list[int]) -> None:
        super().__init__(vllm_config)
        self.uniform_decode_query_len = 1
        self._decode, self._wanted = sorted(decode), sorted(drafts)
        self._drafts: list[int] = []  # in use: from `initialize_cudagraph_keys` on, where the backend can

    def initialize_cudagraph_keys(self, cudagraph_mode: CUDAGraphMode, uniform_decode_query_len: int = 1) -> None:
        """As vLLM's, whose keys for other sizes are taken out."""
        self._drafts = []
        super().initialize_cudagraph_keys(cudagraph_mode, 1)
        if cudagraph_mode.decode_mode() != CUDAGraphMode.FULL or not cudagraph_mode.separate_routine():
            return
        full, piecewise = self.cudagraph_keys[CUDAGraphMode.FULL], self.cudagraph_keys[CUDAGraphMode.PIECEWISE]
        for key in [key for key in full if key.num_tokens not in self._decode]:
            full.discard(key)
        if not self._wanted:
            return
        self._drafts = self._wanted
        for key in [key for key in piecewise if key.num_tokens <= self._drafts[-1]]:
            piecewise.discard(key)
        for size in self._drafts:
            self.add_cudagraph_key(CUDAGraphMode.FULL, self._create_padded_batch_descriptor(size, False, False))

    def dispatch(self, num_tokens: int, uniform_decode: bool = False, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's; a decode batch beyond the decode sizes may use another graph."""
        fits = bool(self._decode) and num_tokens <= self._decode[-1]
        return super().dispatch(num_tokens, uniform_decode and (fits or not self._drafts), *args, **kwargs)

    def _create_padded_batch_descriptor(
        self, num_tokens: int, uniform_decode: bool, has_lora: bool, num_active_loras: int = 0
    ) -> BatchDescriptor:
        sizes = self._decode if uniform_decode else self._drafts
        found = super()._create_padded_batch_descriptor(num_tokens, uniform_decode, has_lora, num_active_loras)
        if not sizes or num_tokens > sizes[-1]:
            return found
        size = sizes[bisect.bisect_left(sizes, num_tokens)]
        most = self.vllm_config.scheduler_config.max_num_seqs
        return replace(found, num_tokens=size, num_reqs=min(size, most))


def prepare(runner: Any, backends: list[set[Any]], groups: list[Any]) -> None:
    """Give a runner that is to have these graphs its dispatcher; before vLLM chooses sizes. Else nothing."""
    extra = runner.vllm_config.additional_config
    wanted = extra.get(CONFIG_KEY) if isinstance(extra, dict) else None
    if wanted is None:
        return
    support = [
        backend.get_builder_cls().get_cudagraph_support(runner.vllm_config, group.kv_cache_spec)
        for found, group in zip(backends, groups, strict=False)
        for backend in found
    ]
    # Backends that cannot capture mixed lengths as a whole keep vLLM's piecewise graphs for them.
    mixed = all(one == AttentionCGSupport.ALWAYS for one in support)
    runner.uniform_decode_query_len = 1
    runner.use_async_spec_decode = False  # there are no drafts on the device; see `tail_modes`
    sizes = wanted["drafts"] if mixed else []
    runner.cudagraph_dispatcher = TailDispatcher(runner.vllm_config, wanted["decode"], sizes)
