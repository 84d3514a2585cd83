"""The last act of a start: see to it that captured kernels follow each other as fast as they can."""

from __future__ import annotations

import logging
import statistics

import torch

from moebius.kernels.graph_times import capture_small_kernels, microseconds_per_call
from moebius.kernels.visitor import send_visitor

_KERNELS, _REPLAYS, _ROUNDS = 500, 10, 3
logger = logging.getLogger(__name__)


def settle(device: torch.device) -> list[float]:
    """Let another process use this GPU for a moment, after all graphs are captured; moebius.kernels.visitor says why.

    Returns microseconds per small kernel of a graph before and after; empty where there is no GPU. A visitor that
    cannot come costs speed, not the start: it is logged.
    """
    if device.type != "cuda":
        return []
    graph = capture_small_kernels(torch.zeros(4096, device=device), _KERNELS)
    before = _microseconds(graph)
    problem = send_visitor(torch.cuda.current_device() if device.index is None else device.index)
    if problem is not None:
        logger.warning("kernels may follow each other more slowly than they could (by 0.2 to 0.3 us): %s", problem)
    return [before, _microseconds(graph)]


def _microseconds(graph: torch.cuda.CUDAGraph) -> float:
    return statistics.median(microseconds_per_call(graph, _KERNELS, replays=_REPLAYS, rounds=_ROUNDS))
