"""Time of a captured CUDA graph."""

from __future__ import annotations

from typing import Any


def microseconds_per_call(graph: Any, calls: int, *, replays: int, rounds: int) -> list[float]:
    """Microseconds per call in `graph`, which holds `calls` of them; one value per round, the mean of its replays.

    Replayed in the current stream.
    """
    import torch

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
