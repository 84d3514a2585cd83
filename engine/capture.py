"""Which batch sizes to capture CUDA graphs for, by layout. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from moebius.engine.config import EngineConfig
from moebius.engine.layout import Layout

_NEVER_RUN = 8  # tokens: graphs of a layout that the policy never enters are only a precaution


def capture_sizes(layout: Layout, config: EngineConfig) -> list[int]:
    """Token counts per rank to capture, ascending, for decode batches of `layout`: one token per request.

    EP: up to `max_num_seqs`, which is per rank. TP: every rank runs all live samples, so with the rollout policy no
    more than its threshold, else `max_num_seqs`. The steps are vLLM's (`VllmConfig._set_cudagraph_sizes`): 1, 2, 4,
    multiples of 8 below 256, of 16 from there. The largest size is the limit itself if that lies between two steps and
    no request beyond it can run (vLLM drops decode sizes above max_num_seqs), else the step above it.
    """
    if config.capture_sizes is not None:
        return sorted(set(config.capture_sizes))
    cap = min(config.max_num_batched_tokens or config.max_num_seqs, config.max_capture_size or config.max_num_seqs)
    top = min(_round_up(_limit(layout, config)), config.max_num_seqs, cap)
    return [*(size for size in _steps(top) if size < top), top]


def draft_sizes(config: EngineConfig) -> list[int]:
    """Token counts of TP's graphs for requests of any lengths, ascending, up to `draft_rows`; empty without drafts.

    Eight tokens apart, then four sizes per power of two: a token of padding costs little where weights are read anyway,
    and a graph costs memory and time at the start.
    """
    top = draft_rows(config)
    if not top:
        return []
    sizes, size = [], 8
    while size < top:
        sizes.append(size)
        size += max(8, 1 << (size.bit_length() - 3))
    return [*sizes, top]


def draft_rows(config: EngineConfig) -> int:
    """Most tokens of an iteration in TP with drafts, those of the requests themselves included; 0 without drafts."""
    if not config.tail.on:
        return 0
    samples = min(config.tail.max_samples, config.max_num_seqs)
    # vLLM captures graphs for any lengths as if one request had all tokens.
    longest = config.max_model_len or config.tail.max_rows
    return min(config.tail.max_rows, (1 + config.tail.drafted) * samples, longest)


def tp_batched_tokens(config: EngineConfig) -> int | None:
    """Tokens of one iteration in TP: never fewer than an iteration with drafts may have. None: vLLM's choice."""
    if not config.tail.on or config.max_num_batched_tokens is None:
        return config.max_num_batched_tokens
    return max(config.max_num_batched_tokens, draft_rows(config))


def _limit(layout: Layout, config: EngineConfig) -> int:
    if layout is Layout.TP:
        # A threshold that is yet to be measured may be any.
        if config.policy.kind == "rollout" and config.policy.threshold_source == "given":
            return config.policy.threshold
        if config.policy.kind == "static_ep":
            return _NEVER_RUN
    return config.max_num_seqs


def _round_up(limit: int) -> int:
    return next(size for size in _steps(limit + 16) if size >= limit)


def _steps(top: int) -> Iterator[int]:
    yield from (1, 2, 4)
    yield from range(8, 256, 8)
    yield from range(256, top + 1, 16)
