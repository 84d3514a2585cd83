"""Drafted tokens are accepted exactly while they are what would have been sampled anyway.

A sampled token is a function of the logits, the sample's seed and the position (`moebius.engine.sampler`). So every
position of a draft gets its own token, drawn from the target's logits with that position's noise as without drafts, and
the draft is kept as far as it equals these tokens; the first that differs is replaced by the drawn one. Outputs are
token for token those of a run without drafts, greedy or sampled, whatever was drafted; rejection sampling would only
keep their distribution. Drafted tokens that follow a wrong one were computed for nothing.

All rows (one per position) go through vLLM's ordinary sampler, with its metadata repeated per position: penalties, bad
words and min_tokens then see the tokens before that position, drafted ones included.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from moebius.engine.sampler import to_device

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

REJECTED = -1  # what vLLM takes for "no token"


class UnknownProcessor(RuntimeError):
    """vLLM has a logits processor that drafts are not verified with."""


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where the tokens of a pass with drafts are: B requests, n rows of logits, `width` columns of sampled tokens.

    A request has a row for each of its drafted tokens and one behind them. What the device needs goes there in one
    copy: while drafts are verified nothing is scheduled ahead, and each copy costs the host as much as a kernel.
    """

    counts: npt.NDArray[np.int64]  # [B]: drafted tokens
    rows: npt.NDArray[np.int64]  # [n]: the request of each row
    step: npt.NDArray[np.int64]  # [n]: tokens of the draft before this row's
    first: npt.NDArray[np.int64]  # [B]: first row of each request
    width: int  # of the longest draft, and one
    requests: torch.Tensor  # int64 [n], as `rows`
    ahead: torch.Tensor  # int32 [n]: tokens of the pass behind this row's
    of_row: torch.Tensor  # int64 [B, width]: rows, and where a request has no more of them its last one
    at: torch.Tensor  # int64 [drafted]: of [B, width], flat, where a drafted token is compared
    logits: torch.Tensor  # int64 [n]: of the tokens of the pass, those whose logits are needed; empty without `ends`
    inputs: torch.Tensor  # int64 [drafted]: of the tokens of the pass, the drafted ones; empty without `ends`

    @classmethod
    def of(cls, drafted: npt.ArrayLike, device: torch.device, ends: npt.NDArray[Any] | None = None) -> Places:
        """For requests with so many drafted tokens; `ends[r]` is the end of request r in the tokens of the pass."""
        counts = np.asarray(drafted, dtype=np.int64)
        rows = np.repeat(np.arange(len(counts)), counts + 1)
        last = np.cumsum(counts + 1)
        first = last - (counts + 1)
        step = np.arange(len(rows)) - first[rows]
        behind = counts[rows] - step
        width = int(counts.max(initial=0)) + 1
        steps = np.arange(width)
        of_row = first[:, None] + np.minimum(steps, counts[:, None])
        logits = np.empty(0, dtype=np.int64) if ends is None else ends[rows] - 1 - behind
        parts = [
            rows,
            of_row.ravel(),
            np.flatnonzero(steps < counts[:, None]),
            logits,
            logits[step > 0] if len(logits) else logits,
            # Two in each number: positions are int32 elsewhere, and kernels are compiled for that.
            np.append(behind, np.zeros(len(rows) % 2, dtype=np.int64)).astype(np.int32).view(np.int64),
        ]
        sent = to_device(np.concatenate(parts), device).split([len(part) for part in parts])
        return cls(
            counts, rows, step, first, width,
            sent[0], sent[5].view(torch.int32)[: len(rows)], sent[1].view(len(counts), width), *sent[2:5],
        )  # fmt: skip


@dataclass
class KeyedMetadata(SpecDecodeMetadata):
    """vLLM's, of which only what is used here is filled in."""

    places: Places | None = None


class KeyedVerifier(nn.Module):
    """Drop-in for vLLM's `RejectionSampler` on a runner that has the counter-based sampler."""

    runner: GPUModelRunner

    def __init__(self, runner: GPUModelRunner) -> None:
        super().__init__()
        object.__setattr__(self, "runner", runner)  # not a submodule: the runner owns this
        self._drafted: list[int] | None = None  # by row of the batch, if it had drafts; for whoever takes it
        self._steps = torch.empty(0, dtype=torch.int64)  # 0, 1, ... on the device

    def metadata(self, drafted: npt.NDArray[np.int32], ends: npt.NDArray[np.int32]) -> KeyedMetadata:
        """As the runner's `_calc_spec_decode_metadata`, which gets the same arguments, with one copy to the device."""
        places = Places.of(drafted, self.runner.device, ends)
        nothing = places.at[:0]  # for vLLM's own rejection sampling, which is not done
        tokens = self.runner.input_ids.gpu[places.inputs]
        return KeyedMetadata(
            tokens, drafted.tolist(), nothing, nothing, nothing, nothing, places.logits, places=places
        )  # fmt: skip

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Tokens int32 [B, longest draft + 1], REJECTED behind the last one, and logprobs in the same order.

        `logits` is [drafted tokens + B, vocab]: per request one row for each drafted token and one behind them. Raises
        ValueError if the batch has something that is not repeated per position; such batches must get no drafts.
        """
        if draft_probs is not None:
            raise ValueError("drafts are verified by equality: they have no probabilities here")
        self._drafted = list(metadata.num_draft_tokens)
        places = getattr(metadata, "places", None) or Places.of(metadata.num_draft_tokens, logits.device)
        # seq_lens counts the whole draft as if it were accepted.
        positions = self.runner.seq_lens[: len(places.counts)][places.requests] - places.ahead
        sampler: Any = self.runner.sampler
        with sampler.topk_topp_sampler.rows(places.requests, positions):
            drawn = sampler(
                logits=logits,
                sampling_metadata=repeated(sampling_metadata, places.rows, places.step, places.first, places.requests),
            )
        sampled = drawn.sampled_token_ids.view(-1)[places.of_row]
        drafts = torch.full_like(sampled, REJECTED)
        drafts.view(-1)[places.at] = metadata.draft_token_ids.to(sampled.dtype)
        if len(self._steps) < places.width or self._steps.device != logits.device:
            self._steps = torch.arange(places.width + 8, device=logits.device)
        kept = self._steps[: places.width] <= self.accepted(sampled, drafts)[:, None]
        tokens = torch.where(kept, sampled, REJECTED)
        return SamplerOutput(
            sampled_token_ids=tokens, logprobs_tensors=_reordered(drawn.logprobs_tensors, places.of_row)
        )

    def take_drafted(self) -> list[int] | None:
        """Verified tokens by row of the batch sampled last; None if it had no drafts. Once."""
        taken, self._drafted = self._drafted, None
        return taken

    def accepted(self, sampled: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
        """How many drafted tokens are kept, int64 [B]; both arguments are [B, width], REJECTED behind a draft's end."""
        return (sampled == drafts).cumprod(dim=1).sum(dim=1)


def reserve_memory(runner: Any, rows: int) -> int:
    """Take the device memory that verifying `rows` tokens at once needs; bytes, 0 on CPU. It stays with torch.

    Drafts begin long after the start, when the memory they need would be missed in the middle of a step. A pass of so
    many rows has their logits as the model gives them (gathered from all ranks), in fp32, and their log-probabilities.

    Raises RuntimeError if there is less.
    """
    if runner.device.type != "cuda":
        return 0
    vocab, dtype = runner.model_config.get_vocab_size(), runner.model_config.dtype
    try:
        logits = torch.empty((2, rows, vocab), dtype=dtype, device=runner.device)
        whole = torch.empty((2, rows, vocab), dtype=torch.float32, device=runner.device)
    except torch.cuda.OutOfMemoryError as error:
        raise RuntimeError(
            f"no memory to verify {rows} tokens of {vocab} logits at once: lower engine.tail.max_rows (now {rows} at "
            "most), engine.tail.max_samples or engine.kv_cache_bytes"
        ) from error
    return logits.nbytes + whole.nbytes


def check_processors(processors: LogitsProcessors) -> None:
    """Raise UnknownProcessor if the sampler has a logits processor that `repeated` does not know."""
    known = (MinPLogitsProcessor, LogitBiasLogitsProcessor, MinTokensLogitsProcessor)
    for processor in [*processors.argmax_invariant, *processors.non_argmax_invariant]:
        if type(processor) not in known:
            raise UnknownProcessor(
                f"vLLM has the logits processor {type(processor).__name__}, which drafts are not verified with: "
                "set engine.tail.speculation=off, or take the processor away"
            )


def repeated(
    metadata: SamplingMetadata, rows: np.ndarray, step: np.ndarray, first: np.ndarray, requests: torch.Tensor
) -> SamplingMetadata:
    """The metadata of a batch's requests, once per row of its logits.

    Row i is of request rows[i] (the same as `requests`, on the device), behind step[i] tokens of its draft; request r's
    first row is first[r].
    """
    holder = metadata.thinking_budget_state_holder
    if metadata.generators or (holder is not None and holder.has_tracked_requests()):
        raise ValueError("requests with torch generators or a thinking budget are not verified with drafts")

    def each(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor[requests]

    by_request = {
        name: each(getattr(metadata, name))
        for name in ("temperature", "top_p", "top_k", "allowed_token_ids_mask")
    }  # fmt: skip
    if not metadata.no_penalties:
        names = ("prompt_token_ids", "frequency_penalties", "presence_penalties", "repetition_penalties")
        by_request |= {name: each(getattr(metadata, name)) for name in names}
    outputs = metadata.output_token_ids
    drafts = metadata.spec_token_ids
    if outputs and drafts is not None:
        outputs = [[*outputs[r], *drafts[r][:n]] if n else outputs[r] for r, n in zip(rows, step, strict=True)]
    ends = np.append(first[1:], len(rows))

    def spread(of: dict[int, Any]) -> dict[int, Any]:
        return {row: value for r, value in of.items() for row in range(first[r], ends[r])}

    processors = LogitsProcessors()
    processors.argmax_invariant = [_repeated(p, first, ends, requests) for p in metadata.logitsprocs.argmax_invariant]
    processors.non_argmax_invariant = [
        _repeated(p, first, ends, requests) for p in metadata.logitsprocs.non_argmax_invariant
    ]
    return replace(
        metadata,
        **by_request,
        output_token_ids=outputs,
        spec_token_ids=None,
        bad_words_token_ids=spread(metadata.bad_words_token_ids),
        logprob_token_ids=spread(metadata.logprob_token_ids) if metadata.logprob_token_ids else None,
        logitsprocs=processors,
        thinking_budget_state_holder=None,
    )


def _repeated(processor: Any, first: np.ndarray, ends: np.ndarray, requests: torch.Tensor) -> Any:
    """A logits processor as `processor`, for one row per position. Its state belongs to vLLM and stays as it is."""
    state = {
        MinPLogitsProcessor: "min_p_count",
        LogitBiasLogitsProcessor: "biases",
        MinTokensLogitsProcessor: "min_toks",
    }
    if (name := state.get(type(processor))) is not None and not getattr(processor, name):
        return processor  # no request has a use for it, so it does nothing whatever the rows are
    copied = copy.copy(processor)
    pairs: list[tuple[int, int]] = []
    if isinstance(processor, MinPLogitsProcessor):
        copied.min_p = processor.min_p[requests]
    elif isinstance(processor, LogitBiasLogitsProcessor):
        biases: list[float] = []
        for request, bias in processor.biases.items():
            for row in range(first[request], ends[request]):
                pairs += [(row, token) for token in bias]
                biases += bias.values()
        copied.bias_tensor = processor._device_tensor(biases, torch.float32)
        copied.logits_slice = _slice(processor, pairs)
    elif isinstance(processor, MinTokensLogitsProcessor):
        for request, (wanted, outputs, stops) in processor.min_toks.items():
            for row in range(first[request], min(ends[request], first[request] + wanted - len(outputs))):
                pairs += [(row, token) for token in stops]
        copied.logits_slice = _slice(processor, pairs)
        copied.min_toks = processor.min_toks if pairs else {}
    else:
        raise UnknownProcessor(f"the logits processor {type(processor).__name__} is not verified with drafts")
    return copied


def _slice(processor: Any, pairs: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    rows, tokens = zip(*pairs, strict=True) if pairs else ((), ())
    return processor._device_tensor(list(rows), torch.int32), processor._device_tensor(list(tokens), torch.int32)


def _reordered(logprobs: LogprobsTensors | None, rows: torch.Tensor) -> LogprobsTensors | None:
    """By request and position, as vLLM expects them beside the tokens."""
    if logprobs is None:
        return None
    flat = rows.reshape(-1)
    return LogprobsTensors(*(tensor[flat] for tensor in logprobs[:3]))
