"""Time from kernel to kernel in a CUDA graph, by what kind of memory the process has mapped. Needs GPUs.

    python -m benchmarks.kernel_gaps --gib 30 --out docs/benchmarks/kernel_gaps_x2.json

Every case runs in processes of its own, one per GPU (`--ranks` of them): it maps its memory, captures a graph of small
kernels that use other memory (torch's), and times the graph. The kernels are the same; what differs is what the driver
does between them. What is mapped by other processes is not, with one rank.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu_ranks import gpu_ranks, join_ranks
from moebius.kernels.cuda_calls import driver
from moebius.kernels.cuda_memory import MemoryCalls
from moebius.kernels.direct import DirectMover
from moebius.kernels.experts import Copy2d, copy_2d
from moebius.kernels.graph_times import capture_small_kernels, microseconds_per_call
from moebius.kernels.peers import PeerMap, gather_of
from moebius.kernels.signals import Signals
from moebius.kernels.virtual import VirtualMemory
from moebius.kernels.virtual_peers import VirtualPeers
from moebius.rollout.bench.results import make_results

KERNELS, REPLAYS, ROUNDS = 1000, 20, 5
OTHERS = 600  # graphs of the cases with many
CASES = {
    "nothing": "no memory beside torch's",
    "plain": "cudaMalloc",
    "plain_ipc": "cudaMalloc, mapped by the other processes through CUDA IPC",
    "virtual_private": "virtual memory that cannot be exported",
    "virtual": "virtual memory that could be exported as file descriptors",
    "virtual_shared": "the same, mapped by the other processes",
    "virtual_unshared": "the same, after the other processes have unmapped it",
    "virtual_imports_only": "rank 0: maps memory of the others, which map none of anyone's",
    "nccl": "an all-reduce of NCCL beforehand",
    "flags_kernel": "flags in peers' memory, raised and waited for by a kernel",
    "flags_stream": "the same by operations of the stream",
    "mover_kernel": "the direct mover over shared virtual memory, flags by a kernel",
    "mover_stream": "the same, flags by operations of the stream",
    "peer_copy": "shared virtual memory, and a pitched copy to the next rank by a copy engine",
    "used_plain": "cudaMalloc, in which the kernels work",
    "used_virtual": "virtual memory that could be exported, in which the kernels work",
    "used_shared": "the same, mapped by the other processes",
    "used_ipc": "cudaMalloc, mapped by the other processes through CUDA IPC, in which the kernels work",
}
# The same where a process has many graphs, and where it maps memory after they were captured, as an engine does.
CASES |= {
    "many": "no memory beside torch's, 600 graphs of 100 kernels before the one that is timed",
    "many_mover_stream": "600 graphs before, all captured after the mover was there",
    "late_mover_stream": "no others; the one that is timed was captured before the mover was there",
    "late_many_mover_stream": "600 graphs, and the one that is timed, captured before the mover was there",
    "late_many_virtual_shared": "the same, and memory mapped by the other processes afterwards, without a mover",
}
SIZES = {"": 4096, "_large": 4 << 20}  # float32 per kernel; of the large ones every SM has some


class _Private(MemoryCalls):
    """Virtual memory without handles for other processes."""

    def _properties(self) -> Any:
        properties = super()._properties()
        properties.requestedHandleTypes = driver().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE
        return properties


def _map(case: str, rank: int, nbytes: int) -> list[Any]:
    """Map what the case asks for; what is returned keeps it."""
    device = torch.device("cuda", rank)
    if case == "nothing":
        return []
    if case.startswith("used"):
        where = {"used_plain": "plain", "used_ipc": "plain_ipc", "used_shared": "virtual_shared"}.get(case, "virtual")
        return _map(where, rank, nbytes)
    if case == "nccl":
        group = dist.new_group(backend="nccl")
        dist.all_reduce(torch.ones(1, device=device), group=group)
        torch.cuda.synchronize()
        return [group]
    if case.startswith("flags"):
        flags = Signals.connect(dist.group.WORLD, device, "kernel" if case.endswith("kernel") else "stream")
        flags.barrier()
        flags.wait_on_host(30)
        return [flags]
    if case.startswith("plain"):
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return [tensor, PeerMap.open(tensor, dist.group.WORLD)] if case == "plain_ipc" else [tensor]
    chunks = [512 << 20] * (nbytes // (512 << 20))
    calls = _Private(rank) if case == "virtual_private" else MemoryCalls(rank)
    memory = VirtualMemory(chunks, device, calls)
    kept: list[Any] = [memory, memory.as_tensor()]
    if case.startswith("mover"):
        how: Any = case.removeprefix("mover_")
        kept.append(DirectMover.connect(memory, dist.group.WORLD, signals=how))
        return kept
    if case == "peer_copy":
        peers = VirtualPeers.open(memory, rank, gather_of(dist.group.WORLD))
        peer = (rank + 1) % dist.get_world_size()
        there, here = peers.addresses[peer], memory.address + (1 << 30)
        copy_2d(Copy2d(peer, there, 2048, here, 4096, 2048, 1024), torch.cuda.current_stream())
        torch.cuda.synchronize()
        dist.barrier()
        return [*kept, peers]
    if case in ("virtual_shared", "virtual_unshared", "virtual_imports_only"):
        peers = VirtualPeers.open(memory, rank, gather_of(dist.group.WORLD))
        kept.append(peers)
        if case == "virtual_unshared" or (case == "virtual_imports_only" and rank != 0):
            peers.unmap()
        dist.barrier()
    return kept


def _run(rank: int, ranks: int, port: int, case: str, nbytes: int, queue: Any) -> None:
    join_ranks(rank, ranks, port)
    late = case.startswith("late_")
    where = case.removeprefix("late_").removeprefix("many_").removeprefix("many") or "nothing"
    kept: list[Any] = [] if late else _map(where, rank, nbytes)
    memory = next((part for part in kept if isinstance(part, torch.Tensor)), None)
    if "many" in case:
        kept += [capture_small_kernels(torch.zeros(4096, device="cuda"), 100) for _ in range(OTHERS)]
    graphs = {}
    for size, elements in SIZES.items():
        used = memory.view(torch.uint8).flatten()[: 4 * elements].view(torch.float32) if memory is not None else None
        if not case.startswith("used") or used is None:
            used = torch.empty(elements, device="cuda")
        graphs[size] = capture_small_kernels(used.zero_(), KERNELS)
        kept.append(used)
    if late:
        kept.append(_map(where, rank, nbytes))
    dist.barrier()
    found = {
        size: statistics.median(microseconds_per_call(graph, KERNELS, replays=REPLAYS, rounds=ROUNDS))
        for size, graph in graphs.items()
    }
    queue.put((rank, found))
    dist.barrier()
    del kept
    os._exit(0)  # the process takes its memory along


def measure(case: str, ranks: int, nbytes: int) -> dict[int, dict[str, float]]:
    """Microseconds per kernel by rank and by name of `SIZES`."""
    with gpu_ranks(_run, ranks, case, nbytes) as (queue, processes):
        return dict(sorted(queue.get(timeout=90) for _ in processes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=int, default=30, help="memory per rank")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    numbers: dict[str, float] = {}
    for case in options.cases.split(","):
        for rank, by_size in measure(case, options.ranks, options.gib << 30).items():
            for size, microseconds in by_size.items():
                numbers[f"{case}{size}_rank{rank}_us"] = microseconds
                print(f"{case + size:24s} rank {rank} {microseconds:7.3f} us per kernel", flush=True)
    results = make_results(
        options.out.stem,
        command=f"python -m benchmarks.kernel_gaps --gib {options.gib} --out {options.out.name}",
        options={"gib": options.gib, "ranks": options.ranks, "kernels": KERNELS, "cases": CASES},
        results=numbers,
    )
    results.write(options.out.parent)


if __name__ == "__main__":
    main()
