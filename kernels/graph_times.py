"""Captured CUDA graphs of small kernels, and the time of a captured graph."""

from __future__ import annotations

import torch


def capture_small_kernels(numbers: torch.Tensor, kernels: int) -> torch.cuda.CUDAGraph:
    """A graph of so many kernels, each of which adds one to all of `numbers` (CUDA), replayed once."""
    numbers.add_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(kernels):
            numbers.add_(1)
    graph.replay()
    return graph


def microseconds_per_call(graph: torch.cuda.CUDAGraph, calls: int, *, replays: int, rounds: int) -> list[float]:
    """Microseconds per call in `graph`, which holds `calls` of them; one value per round, the mean of its replays.

    Replayed in the current stream.
    """
    values = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        values.append(1e3 * begin.elapsed_time(end) / (replays * calls))
    return values
