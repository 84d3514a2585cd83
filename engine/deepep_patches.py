"""What is changed in vLLM 0.26.0 where EP runs with deepep_v2, and only there; `vllm_patches.apply` does it.

Three corrections are known upstream. Which of them 0.26.0 needs here:

* https://github.com/vllm-project/vllm/pull/54083, padding-aware sums in Triton's experts: needed, see below.
* https://github.com/vllm-project/vllm/pull/47785, slots marked -1 in `moe_align_block_size`: 0.26.0's compiled kernels
  have it (they skip negative ids and those from num_experts on), so -1 stays the mark. It must not be replaced by
  num_experts: the padding-aware sum would read behind the end of `expert_map`.
* https://github.com/vllm-project/vllm/pull/52632, no `expert_tokens_meta` where the dispatch counted nothing: not
  needed, since Triton's experts, the only ones this engine runs, never look at it. Others would.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Sequence
from typing import Any

import torch

from moebius.engine import vllm_patches
from moebius.engine.layout import Layout
from moebius.engine.vllm_patches import PatchError, Target

_log = logging.getLogger(__name__)


def targets() -> list[Target]:
    """Every place that is changed."""
    from vllm.distributed.device_communicators.all2all import DeepEPV2All2AllManager
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    return [
        (TritonExperts, "apply", _knows_its_slots),
        (TritonExperts, "moe_sum", _sums_what_was_written),
        (DeepEPV2All2AllManager, "_make_all2all_kwargs", _room_for_rounded_batches),
        (GPUModelRunner, "capture_model", _kernels_before_graphs),
    ]


def _knows_its_slots(original: Any) -> Any:
    """Where experts are spread over ranks, the sum below gets to know which slots are this rank's."""
    signature = inspect.signature(original)
    if not {"topk_ids", "expert_map"} <= set(signature.parameters):
        raise PatchError("TritonExperts.apply has no topk_ids and expert_map: is another vLLM version installed?")

    @functools.wraps(original)
    def apply(self: Any, *args: Any, **kwargs: Any) -> None:
        call = signature.bind(self, *args, **kwargs).arguments
        self._moebius_slots = (call["topk_ids"], call["expert_map"]) if call["expert_map"] is not None else None
        try:
            original(self, *args, **kwargs)
        finally:
            self._moebius_slots = None

    return apply


def _sums_what_was_written(original: Any) -> Any:
    """A token's sum leaves out slots of other ranks and of padding: nothing was written there.

    Upstream sums all top-k slots. With the all-gather, other ranks' slots are zeroed by the expert kernels; DeepEP
    marks them -1, so that alignment drops them, and what they hold is left over from the workspace's last use: the
    layer's own first product, or another layer's. See vLLM's pull request 54083.
    """

    @functools.wraps(original)
    def moe_sum(self: Any, input: torch.Tensor, output: torch.Tensor) -> None:
        slots = getattr(self, "_moebius_slots", None)
        if slots is None:
            return original(self, input, output)
        from vllm import _custom_ops as ops

        ops.moe_sum(input, output, *slots)
        return None

    return moe_sum


def rounded(tokens: int) -> int:
    """The smallest power of two that is at least `tokens`."""
    return 1 << max(tokens - 1, 0).bit_length()


def _room_for_rounded_batches(original: Any) -> Any:
    """Buffers hold what a dispatch may ask for, and a rank waits for its peers as long as in other collectives.

    Upstream, a dispatch rounds its batch up to a power of two, but buffers are made for max_num_batched_tokens, so that
    with other numbers the largest batches do not fit. And kernels give up after 100 s, less than compiling may take.
    """

    def _make_all2all_kwargs(self: Any, num_max_tokens_per_rank: int, **kwargs: Any) -> dict[str, Any]:
        from vllm.config import get_current_vllm_config

        seconds = get_current_vllm_config().parallel_config.distributed_timeout_seconds
        made: dict[str, Any] = original(self, num_max_tokens_per_rank=rounded(num_max_tokens_per_rank), **kwargs)
        return made | ({} if seconds is None else {"num_gpu_timeout_secs": seconds, "num_cpu_timeout_secs": seconds})

    return _make_all2all_kwargs


def _kernels_before_graphs(original: Any) -> Any:
    """deep_ep compiles a set of kernels per power of two when it first needs them: all of them before any capture."""

    @functools.wraps(original)
    def capture_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = vllm_patches._binding
        if bound is not None and bound.layout is Layout.EP:
            warm_up(bound.expert_modules)
        return original(self, *args, **kwargs)

    return capture_model


def warm_up(expert_modules: Sequence[Any]) -> list[int]:
    """Dispatch and combine once for every batch a rank may have; collective. Returns the tokens per rank.

    Raises PatchError if no layer dispatches with DeepEP.
    """
    found = dispatchers(expert_modules)
    if not found:
        raise PatchError("EP was to run with deepep_v2, but no layer dispatches with it: is its vLLM another one?")
    buffer, experts, topk, hidden = found[0]  # all layers have the same
    sizes = [1 << power for power in range(rounded(buffer.num_max_tokens_per_rank).bit_length())]
    for tokens in sizes:
        roundtrip(buffer, *example(tokens, experts, topk, hidden), experts=experts, most=tokens)
    torch.cuda.synchronize()
    _log.info("deep_ep: kernels for up to %d tokens per rank are there", sizes[-1])
    return sizes


def dispatchers(expert_modules: Sequence[Any]) -> list[tuple[Any, int, int, int]]:
    """Of every layer that dispatches with DeepEP v2: its buffer, experts in all, experts per token, hidden size."""
    found = []
    for module in expert_modules:
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        prepare: Any = getattr(kernel, "prepare_finalize", None)
        if type(prepare).__name__ == "DeepEPV2PrepareAndFinalize":
            found.append((prepare.buffer, prepare.num_experts, prepare.num_topk, module.w13_weight.shape[-1]))
    return found


def example(tokens: int, experts: int, topk: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows (tokens, hidden) in bf16, and expert ids and weights (tokens, topk), spread evenly over all experts."""
    rows = torch.ones((tokens, hidden), dtype=torch.bfloat16, device="cuda")
    slots = torch.arange(tokens * topk, device="cuda", dtype=torch.int64).view(tokens, topk)
    return rows, slots % experts, torch.full((tokens, topk), 1.0 / topk, device="cuda")


def roundtrip(
    buffer: Any, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, experts: int, most: int
) -> torch.Tensor:
    """Rows to the ranks of their experts and their sum back, as decoding does it; at most `most` tokens on any rank.

    (tokens, hidden) in bf16: each row times the number of ranks that it went to.
    """
    received, _, _, handle, _ = buffer.dispatch(
        x=rows,
        topk_idx=ids,
        topk_weights=weights,
        num_experts=experts,
        num_max_tokens_per_rank=most,
        do_expand=False,
        do_cpu_sync=False,
        async_with_compute_stream=False,
    )
    combined: torch.Tensor = buffer.combine(
        x=received, handle=handle, topk_weights=None, async_with_compute_stream=False
    )[0]
    return combined
