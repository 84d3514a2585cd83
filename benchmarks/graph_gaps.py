"""What makes captured kernels follow each other more slowly, and what makes them fast again. Takes 30 s.

    python -m benchmarks.graph_gaps --out docs/benchmarks/graph_gaps_x2.json
    python -m benchmarks.graph_gaps --ranks 1 --out docs/benchmarks/graph_gaps_x1.json    # without what needs a peer

One process per GPU times a graph of small kernels after each of a row of events: more graphs captured, memory taken,
memory mapped for the peer, new streams, a second context of this process, other processes on the GPU. Before what
might make it fast again, graphs are captured until it is slow. (`benchmarks.kernel_gaps` compares whole processes.)
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu_ranks import gpu_ranks, join_ranks
from moebius.kernels.cuda_calls import CudaError, checked, driver
from moebius.kernels.cuda_memory import MemoryCalls
from moebius.kernels.direct import DirectMover
from moebius.kernels.graph_times import capture_small_kernels, microseconds_per_call
from moebius.kernels.peers import gather_of
from moebius.kernels.virtual import VirtualMemory
from moebius.kernels.virtual_peers import VirtualPeers
from moebius.kernels.visitor import send_visitor
from moebius.rollout.bench.results import make_results

KERNELS, OTHERS = 1000, 100  # kernels of the graph that is timed; of each of the others
SLOW = 1.1  # times the first value
_CONTEXT = (
    "import torch, sys, time; torch.zeros(1, device=f'cuda:{sys.argv[1]}'); print('up', flush=True); time.sleep(60)"
)


class Walk:
    """One rank: its graphs, and what was measured, in order."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.numbers = torch.zeros(4096, device="cuda")
        self.first = self.capture(KERNELS)
        self.kept: list[Any] = []
        self.found: list[tuple[str, float]] = []

    def capture(self, kernels: int) -> torch.cuda.CUDAGraph:
        """A graph of so many small kernels, replayed once."""
        return capture_small_kernels(self.numbers, kernels)

    def measure(self, event: str) -> float:
        """Microseconds per kernel of the first graph, after `event`."""
        dist.barrier()
        us = statistics.median(microseconds_per_call(self.first, KERNELS, replays=10, rounds=5))
        self.found.append((event, us))
        dist.barrier()
        return us

    def slow_down(self, before: str) -> None:
        """Capture graphs until all ranks are slow, 800 at most."""
        for _ in range(8):
            self.kept += [self.capture(OTHERS) for _ in range(100)]
            slow = torch.tensor([int(self.measure(f"100 graphs, before {before}") > SLOW * self.found[0][1])])
            dist.all_reduce(slow, op=dist.ReduceOp.MIN)
            if slow.item():
                return

    def after(self, event: str, act: Callable[[], Any]) -> None:
        """Slow, then `act`, then measured."""
        self.slow_down(event)
        self.kept.append(act())
        torch.cuda.synchronize()
        self.measure(event)


def _shared(rank: int) -> Any:
    memory = VirtualMemory([512 << 20] * 8, torch.device("cuda", rank), MemoryCalls(rank))
    return memory, VirtualPeers.open(memory, rank, gather_of(dist.group.WORLD))


def _mover(rank: int) -> Any:
    memory = VirtualMemory([512 << 20] * 8, torch.device("cuda", rank), MemoryCalls(rank))
    return memory, DirectMover.connect(memory, dist.group.WORLD)


def _second_context(rank: int) -> None:
    """Make, use and destroy a context beside torch's, in this process."""
    cuda = driver()
    torch.cuda.synchronize()
    context = checked(cuda.cuCtxCreate(None, 0, rank), "making a context")
    memory = checked(cuda.cuMemAlloc(2 << 20), "taking memory")
    checked(cuda.cuMemsetD8(memory, 0, 2 << 20), "writing to it")
    checked(cuda.cuCtxSynchronize(), "waiting")
    checked(cuda.cuCtxDestroy(context), "destroying the context")
    torch.cuda.set_device(rank)


def _streams() -> list[torch.cuda.Stream]:
    streams = [torch.cuda.Stream(priority=priority) for priority in (0, -1) for _ in range(8)]
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.zeros(16, device="cuda")
    return streams


def _run(rank: int, ranks: int, port: int, queue: Any) -> None:
    join_ranks(rank, ranks, port)
    walk = Walk(rank)
    walk.measure("start")
    for count in (2, 4, 8, 16, 32, 64):
        while len(walk.kept) < count:
            walk.kept.append(walk.capture(OTHERS))
        walk.measure(f"{count} graphs")
    walk.after("two seconds of rest", lambda: time.sleep(2))
    walk.after("cudaMalloc", lambda: torch.empty(4 << 30, dtype=torch.uint8, device="cuda"))
    walk.after("streams", _streams)
    walk.after("visitor", lambda: print(send_visitor(rank) or "", end=""))
    if ranks > 1:
        walk.after("memory mapped for the peer", lambda: _shared(rank))
        walk.after("mover", lambda: _mover(rank))
    walk.slow_down("another process")
    other = subprocess.Popen([sys.executable, "-c", _CONTEXT, str(rank)], stdout=subprocess.PIPE)
    assert other.stdout is not None
    other.stdout.readline()
    walk.measure("another process")
    other.kill()
    other.wait()
    time.sleep(0.5)
    walk.measure("another process has gone")
    queue.put((rank, walk.found))  # before what has never been tried beside torch
    try:
        walk.after("second context", lambda: _second_context(rank))
        queue.put((rank, walk.found))
    except CudaError as error:
        print(f"second context, rank {rank}: {error}")
    queue.put((rank, None))
    queue.close()
    queue.join_thread()
    os._exit(0)


def measure(ranks: int, limit_s: float) -> dict[int, list[tuple[str, float]]]:
    """By rank: events and microseconds per kernel after each, as far as they came within `limit_s`."""
    found: dict[int, list[tuple[str, float]]] = {}
    with gpu_ranks(_run, ranks) as (queue, processes):
        ended, deadline = 0, time.monotonic() + limit_s
        while ended < ranks and time.monotonic() < deadline:
            try:
                rank, values = queue.get(timeout=1)
            except Empty:
                if not any(process.is_alive() for process in processes):
                    break
                continue
            ended += values is None
            found |= {} if values is None else {rank: values}
    return dict(sorted(found.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=90.0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found = measure(options.ranks, options.limit_s)
    numbers: dict[str, float] = {}
    for rank, values in found.items():
        for event, us in values:
            numbers.setdefault(f"{event.replace(' ', '_').replace(',', '')}_rank{rank}_us", us)
            print(f"rank {rank} {event:42s} {us:7.3f} us per kernel")
    make_results(
        options.out.stem,
        command=f"python -m benchmarks.graph_gaps --ranks {options.ranks} --out {options.out.name}",
        options={"ranks": options.ranks, "kernels": KERNELS, "others": OTHERS},
        results=numbers,
        series={f"rank {rank}": [{"event": event, "us": us} for event, us in values] for rank, values in found.items()},
    ).write(options.out.parent)


if __name__ == "__main__":
    main()
