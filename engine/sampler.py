"""Sampling whose noise does not depend on the layout.

The Gumbel noise of a token is a function of (sample seed, absolute token position, vocabulary index) only: there is no
generator state to migrate, TP ranks agree by construction, EP ranks are uncorrelated, the composition of the batch does
not matter and a rerun repeats. Replaces vLLM's per-request torch generators, which are drawn from in a Python loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from moebius.kernels.gumbel import gumbel_argmax

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

SEED_FIELD = "moebius_seed"  # key in SamplingParams.extra_args


class CounterSampler(nn.Module):
    """Drop-in for vLLM's `TopKTopPSampler`: same filtering and logprobs, counter-based noise (Gumbel-max).

    Nothing here waits for the device, which asynchronous scheduling relies on, and an iteration with the batch of the
    one before does no work per row on the host.
    """

    runner: GPUModelRunner

    def __init__(self, runner: GPUModelRunner, logprobs_mode: str) -> None:
        super().__init__()
        # Not a submodule: the runner owns the sampler.
        object.__setattr__(self, "runner", runner)
        self.logprobs_mode = logprobs_mode
        self._rows_of: object = None  # the SamplingMetadata that `_seeds` were read for
        self._seeds = torch.empty(0, dtype=torch.int64)
        self._rows: tuple[torch.Tensor, torch.Tensor] | None = None  # requests and positions, where drafts are verified

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
        seeds = self._row_seeds(logits.device)
        if self._rows is None:
            # seq_lens counts the tokens up to and including this iteration: the position of the token drawn now.
            positions = self.runner.seq_lens[: logits.shape[0]]
        else:
            requests, positions = self._rows
            seeds = seeds[requests]
        return gumbel_argmax(logits, seeds, positions), kept

    @contextmanager
    def rows(self, requests: torch.Tensor, positions: torch.Tensor) -> Iterator[None]:
        """Inside the block, row i of the logits is of the batch's row requests[i], at token positions[i]."""
        self._rows = (requests, positions)
        try:
            yield
        finally:
            self._rows = None

    def forget_rows(self) -> None:
        """Request ids may come back in another step with other seeds."""
        self._rows_of = None

    def warm_up(self) -> None:
        """Compile the kernel for this runner's vocabulary now rather than in the first iteration."""
        device, vocab = self.runner.device, self.runner.model_config.get_vocab_size()
        seeds = torch.zeros(1, dtype=torch.int64, device=device)
        gumbel_argmax(torch.zeros((1, vocab), device=device), seeds, self.runner.seq_lens[:1])

    def _row_seeds(self, device: torch.device) -> torch.Tensor:
        """Seeds of the batch's rows, int64 [rows] on `device`; read again only when the batch has changed.

        Every row that vLLM adds, removes or moves is noted in the input batch's `batch_update_builder`, and
        `InputBatch.refresh_metadata`, run before each forward pass, makes a new SamplingMetadata if anything was noted.
        So the object stands for the rows; keeping it keeps its identity from being used again.
        """
        batch = self.runner.input_batch
        if batch.sampling_metadata is not self._rows_of:
            self._seeds = to_device([self._seed_of(request_id) for request_id in batch.req_ids], device)
            self._rows_of = batch.sampling_metadata
        return self._seeds

    def _seed_of(self, request_id: str) -> int:
        params: Any = self.runner.requests[request_id].sampling_params
        if params.temperature < 1e-5:
            return 0  # greedy rows never use their noise
        try:
            return params.extra_args[SEED_FIELD]
        except (TypeError, KeyError):
            raise ValueError(f"request {request_id} has no sample seed in extra_args[{SEED_FIELD!r}]") from None


def to_device(numbers: list[int] | np.ndarray, device: torch.device) -> torch.Tensor:
    """`numbers` on `device`, in their shape and dtype (int64 from a list), without waiting for it.

    From pinned memory, which torch keeps until the copy is done. It is taken as such and then filled: torch pins no
    tensor that is made from an array of numpy. The answer shares no memory with `numbers`.
    """
    values = np.ascontiguousarray(numbers, dtype=np.int64 if isinstance(numbers, list) else None)
    source = torch.from_numpy(values)
    on_host = torch.empty(source.shape, dtype=source.dtype, pin_memory=device.type == "cuda").copy_(source)
    return on_host.to(device, non_blocking=True)


def install(runner: GPUModelRunner) -> None:
    """Give `runner` the counter-based sampler; it keeps the runner's logprobs mode."""
    sampler: Any = runner.sampler
    sampler.topk_topp_sampler = counter = CounterSampler(runner, sampler.logprobs_mode)
    if runner.device.type == "cuda":
        counter.warm_up()
