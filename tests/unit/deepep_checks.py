"""Triton's experts of vLLM on rows as DeepEP v2 hands them over: some slots are other ranks', some rows are padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


class Untouchable:
    """Triton's experts look at no token counts, so that vLLM's empty ones (pull request 52632) do no harm here."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"expert_tokens_meta.{name} was looked at")


@dataclass
class Case:
    """Three received rows and one of padding; this rank has the experts from `local` on."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    experts: int = 8
    local: int = 4
    topk: int = 2
    hidden: int = 16
    width: int = 8

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(self.device, self.dtype)

        self.rows = random(4, self.hidden) * self.hidden**0.5
        self.w13 = random(self.local, 2 * self.width, self.hidden)
        self.w2 = random(self.local, self.hidden, self.width)
        # As vLLM's receiver leaves them: -1 for slots of others, and for all of a row that nobody sent.
        self.ids = torch.tensor([[4, -1], [5, 7], [-1, 6], [-1, -1]], device=self.device)
        self.weights = torch.rand(4, self.topk, generator=generator).to(self.device)
        owned = list(range(self.experts - self.local))
        self.expert_map = torch.tensor([-1] * self.local + owned, dtype=torch.int32, device=self.device)

    def right(self) -> torch.Tensor:
        """What must come out, slot by slot in plain torch; padding gives zeros."""
        out = torch.zeros(4, self.hidden, device=self.device)
        for token, slot in (self.ids >= 0).nonzero().tolist():
            expert = self.ids[token, slot] - self.local
            up = self.rows[token].float() @ self.w13[expert].float().T
            inner = torch.nn.functional.silu(up[: self.width]) * up[self.width :]
            out[token] += self.weights[token, slot] * (inner @ self.w2[expert].float().T)
        return out

    def run(self, experts: Any, apply: Any) -> torch.Tensor:
        """What `apply` of TritonExperts makes of it, in workspaces that other layers have used."""
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation

        out = torch.empty(4, self.hidden, device=self.device, dtype=self.dtype)
        room = 4 * self.topk * max(2 * self.width, self.hidden)
        left = [torch.full((room,), value, device=self.device, dtype=self.dtype) for value in (3.0, 7.0)]
        apply(
            experts, output=out, hidden_states=self.rows, w1=self.w13, w2=self.w2, topk_weights=self.weights,
            topk_ids=self.ids, activation=MoEActivation.SILU, global_num_experts=self.experts,
            expert_map=self.expert_map, a1q_scale=None, a2_scale=None, workspace13=left[0], workspace2=left[1],
            expert_tokens_meta=Untouchable(), apply_router_weight_on_input=False,
        )  # fmt: skip
        return out.float()


def stock_experts() -> Any:
    """A TritonExperts as vLLM makes it for bf16 weights, without the layer around it."""
    from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

    made: Any = TritonExperts.__new__(TritonExperts)
    made.quant_config, made.quantization_emulation = FUSED_MOE_UNQUANTIZED_CONFIG, False
    made.gemm1_clamp_limit, made.gemm1_alpha, made.gemm1_beta = None, 1.0, 0.0
    return made
