"""What vLLM's CPU backend lacks: variable-size collectives, experts that honour `expert_map`, asynchronous scheduling.

Correctness on a machine without GPUs is the purpose; none of this runs on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F


def all_gatherv(
    self: Any, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
) -> torch.Tensor | list[torch.Tensor]:
    """Concatenate every rank's rows (dim 0); `sizes[r]` is rank r's row count, None if all are equal."""
    if dim != 0:
        raise ValueError(f"only dim 0 is supported, got {dim}")
    if isinstance(input_, list):
        return [all_gatherv(self, x, dim, sizes) for x in input_]  # type: ignore[misc]
    rows = sizes or [input_.shape[0]] * self.world_size
    padded = input_.new_zeros((max(rows), *input_.shape[1:]))
    padded[: input_.shape[0]] = input_
    parts = [torch.empty_like(padded) for _ in rows]
    dist.all_gather(parts, padded, group=self.device_group)
    return torch.cat([part[:n] for part, n in zip(parts, rows, strict=True)])


def reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
    """Sum over ranks, then keep this rank's rows (dim 0); `sizes` as in `all_gatherv`."""
    if dim != 0:
        raise ValueError(f"only dim 0 is supported, got {dim}")
    rows = sizes or [input_.shape[0] // self.world_size] * self.world_size
    total = input_.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=self.device_group)
    start = sum(rows[: self.rank_in_group])
    return total[start : start + rows[self.rank_in_group]].contiguous()


class LiveWeightExperts:
    """SwiGLU experts that read the layer's parameters at every call and skip experts of other ranks."""

    __moebius_patch__ = True

    def __init__(self, layer: torch.nn.Module) -> None:
        del layer  # weights are looked up at call time: they move between slots' contents

    def __call__(
        self,
        layer: Any,
        x: torch.Tensor,
        use_grouped_topk: bool,
        top_k: int,
        router_logits: torch.Tensor,
        renormalize: bool,
        topk_group: int | None = None,
        num_expert_group: int | None = None,
        global_num_experts: int = -1,
        expert_map: torch.Tensor | None = None,
        custom_routing_function: Callable[..., Any] | None = None,
        scoring_func: str = "softmax",
        routed_scaling_factor: float = 1.0,
        e_score_correction_bias: torch.Tensor | None = None,
        apply_router_weight_on_input: bool = False,
        activation: Any = None,
    ) -> torch.Tensor:
        """Weighted sum over the top-k experts this rank holds; x is [tokens, hidden]."""
        from vllm.model_executor.layers.fused_moe.cpu_fused_moe import select_experts

        if activation is not None and getattr(activation, "value", activation) != "silu":
            raise ValueError(f"activation {activation} is not supported on CPU, only silu")
        if apply_router_weight_on_input:
            raise ValueError("apply_router_weight_on_input is not supported on CPU")
        weights, ids = select_experts(
            hidden_states=x,
            router_logits=router_logits,
            use_grouped_topk=use_grouped_topk,
            top_k=top_k,
            renormalize=renormalize,
            topk_group=topk_group,
            num_expert_group=num_expert_group,
            custom_routing_function=custom_routing_function,
            scoring_func=scoring_func,
            routed_scaling_factor=routed_scaling_factor,
            e_score_correction_bias=e_score_correction_bias,
        )
        if (note := getattr(layer, "note_routes", None)) is not None:
            note(ids)
        ids = ids.long() if expert_map is None else expert_map[ids.long()].long()
        out = torch.zeros_like(x)
        for expert in torch.unique(ids).tolist():
            if expert < 0:  # held by another rank
                continue
            token, choice = torch.where(ids == expert)
            gate, up = F.linear(x[token], layer.w13_weight[expert]).chunk(2, dim=-1)
            hidden = F.linear(F.silu(gate) * up, layer.w2_weight[expert])
            out.index_add_(0, token, hidden * weights[token, choice, None].to(x.dtype))
        return out


def note_routes(model: torch.nn.Module) -> None:
    """Have `LiveWeightExperts` tell of their choice as vLLM's routers do, which its CPU experts go past."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    for module in model.modules():
        if isinstance(module, MoERunner):
            module.routed_experts.note_routes = module.router.capture_fn


class _Done:
    """An event of work that is over when it is recorded."""

    def synchronize(self) -> None:
        pass


def host_async_output(
    self: Any,
    model_runner_output: Any,
    sampled_token_ids: torch.Tensor,
    logprobs_tensors: Any,
    invalid_req_indices: list[int],
    async_output_copy_stream: Any,
    vocab_size: int,
    routed_experts: Any = None,
    check_ep_fault: bool = False,
) -> None:
    """`AsyncGPUModelRunnerOutput.__init__` without streams: the tokens are there, but handed over an iteration later.

    With it the CPU runs the same asynchronous scheduling as GPUs do (placeholders, two batches in the queue), so that
    draining and hand-over are tested where there is no GPU.
    """
    if check_ep_fault:
        raise ValueError("fault checks are not supported on CPU")
    self._model_runner_output = model_runner_output
    self._invalid_req_indices = invalid_req_indices
    self.async_copy_ready_event = _Done()
    self._sampled_token_ids = sampled_token_ids
    self.vocab_size = vocab_size
    self._logprobs_tensors = logprobs_tensors
    self._routed_experts = self._routed_experts_cpu = routed_experts  # copies already
    self._has_fault = None
    # The next batch is sampled into memory of its own, as copies on a GPU would be.
    self.sampled_token_ids_cpu = sampled_token_ids.clone()
    self._logprobs_tensors_cpu = logprobs_tensors
