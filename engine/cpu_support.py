"""What vLLM's CPU backend lacks for EP: variable-size collectives and experts that honour `expert_map`.

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
