"""What drawing one token per row costs: vLLM's sampler without and with seeds, ours, and ours in plain torch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Draw = Callable[[], object]
_WARM_UP = 5
_MIN_REPEATS = 50  # on a GPU, where single calls are short and vary
_BUSY_CYCLES = 1_000_000  # of the GPU's clock


def measure(rows: list[int], vocab: int, repeats: int) -> list[dict[str, float]]:
    """Median milliseconds of a draw over fp32 logits [rows, vocab], for each number of rows, on a GPU if there is one.

    Returns for each of them "rows" and the times of four ways: "stock_ms" and "stock_seeded_ms", vLLM's softmax and
    `random_sample` with one generator for all rows and with one per row (what `SamplingParams.seed` leads to);
    "ours_ms", `gumbel_argmax`; "torch_ms", the same draw with its noise made by torch as a [rows, vocab] tensor. None
    has a top-k or top-p filter, which all would share.

    A GPU is timed by events around at least 50 calls, each launched while the GPU is busy for about half a millisecond,
    as it is during a forward pass: what the host needs to launch a draw shows where it is longer than that. A CPU is
    timed by its clock, `repeats` calls. Raises ValueError for numbers below 1.
    """
    import torch

    if min([vocab, repeats, *rows], default=0) < 1:
        raise ValueError(f"rows, vocab and repeats must be 1 or more, got {rows}, {vocab}, {repeats}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results: list[dict[str, float]] = []
    with torch.inference_mode():  # as the engine draws
        for count in rows:
            draws = _draws(count, vocab, device)
            medians = {name: statistics.median(_times(draw, repeats, device)) for name, draw in draws.items()}
            results.append({"rows": count, **medians})
    return results


def _draws(rows: int, vocab: int, device: torch.device) -> dict[str, Draw]:
    """The four ways to draw, each from the same logits, which none of them changes."""
    import torch
    from vllm.v1.sample.ops.topk_topp_sampler import random_sample

    from moebius.kernels.gumbel import gumbel_argmax
    from moebius.kernels.noise import gumbel_noise

    logits = torch.randn((rows, vocab), device=device) * 3
    seeds = torch.arange(rows, device=device) * 1_000_003
    positions = torch.full((rows,), 100, dtype=torch.int32, device=device)
    generators = {row: torch.Generator(device=device).manual_seed(row) for row in range(rows)}
    return {
        "stock_ms": lambda: random_sample(logits.softmax(dim=-1, dtype=torch.float32), {}),
        "stock_seeded_ms": lambda: random_sample(logits.softmax(dim=-1, dtype=torch.float32), generators),
        "ours_ms": lambda: gumbel_argmax(logits, seeds, positions),
        "torch_ms": lambda: (logits + gumbel_noise(seeds, positions, vocab)).argmax(dim=-1),
    }


def _times(draw: Draw, repeats: int, device: torch.device) -> list[float]:
    """Milliseconds of each call, after a few that are not counted."""
    import torch

    for _ in range(_WARM_UP):
        draw()
    if device.type == "cpu":
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            draw()
            times.append(1e3 * (time.perf_counter() - started))
        return times
    spans = []
    for _ in range(max(repeats, _MIN_REPEATS)):
        torch.cuda.synchronize(device)
        torch.cuda._sleep(_BUSY_CYCLES)
        span = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        span[0].record()
        draw()
        span[1].record()
        spans.append(span)
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in spans]
