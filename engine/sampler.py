"""Sampling whose noise does not depend on the layout.

The Gumbel noise of a token is a function of (sample seed, absolute token position, vocabulary index) only: there is no
generator state to migrate, TP ranks agree by construction, EP ranks are uncorrelated, the composition of the batch does
not matter and a rerun repeats. Replaces vLLM's per-request torch generators, which are drawn from in a Python loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from moebius.kernels.noise import gumbel_noise

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

SEED_FIELD = "moebius_seed"  # key in SamplingParams.extra_args


class CounterSampler(nn.Module):
    """Drop-in for vLLM's `TopKTopPSampler`: same filtering and logprobs, counter-based noise (Gumbel-max)."""

    runner: GPUModelRunner

    def __init__(self, runner: GPUModelRunner, logprobs_mode: str) -> None:
        super().__init__()
        # Not a submodule: the runner owns the sampler.
        object.__setattr__(self, "runner", runner)
        self.logprobs_mode = logprobs_mode
        self._req_ids: list[str] = []
        self._seeds = torch.empty(0, dtype=torch.int64)

    def forward(
        self,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sample one token per row. `logits` is fp32 [rows, vocab]; returns (int64 [rows], logprobs or None)."""
        if generators:
            raise ValueError("per-request torch generators are not used here: pass the seed in extra_args instead")
        logits = apply_top_k_top_p(logits, k, p)
        kept = logits.log_softmax(dim=-1, dtype=torch.float32) if self.logprobs_mode == "processed_logprobs" else None
        rows, vocab = logits.shape
        # seq_lens counts the tokens up to and including this iteration: the position of the token drawn now.
        positions = self.runner.seq_lens[:rows].to(torch.int64)
        noise = gumbel_noise(self._row_seeds(rows).to(logits.device), positions, vocab)
        return (logits + noise).argmax(dim=-1), kept

    def _row_seeds(self, rows: int) -> torch.Tensor:
        req_ids = self.runner.input_batch.req_ids[:rows]
        if req_ids != self._req_ids:  # rebuilt only when the batch changes
            self._seeds = torch.tensor([self._seed_of(r) for r in req_ids], dtype=torch.int64)
            self._req_ids = list(req_ids)
        return self._seeds

    def forget_rows(self) -> None:
        """Request ids may come back in another step with other seeds."""
        self._req_ids = []

    def _seed_of(self, request_id: str) -> int:
        params: Any = self.runner.requests[request_id].sampling_params
        if params.temperature < 1e-5:
            return 0  # greedy rows never use their noise
        try:
            return params.extra_args[SEED_FIELD]
        except (TypeError, KeyError):
            raise ValueError(f"request {request_id} has no sample seed in extra_args[{SEED_FIELD!r}]") from None


def install(runner: GPUModelRunner) -> None:
    """Give `runner` the counter-based sampler; it keeps the runner's logprobs mode."""
    sampler: Any = runner.sampler
    sampler.topk_topp_sampler = CounterSampler(runner, sampler.logprobs_mode)
