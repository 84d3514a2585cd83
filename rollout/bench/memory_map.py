"""What it takes to map, share and give back device memory, by chunk size, beside one cudaMalloc and CUDA IPC.

    torchrun --nproc-per-node 2 -m moebius.rollout.bench.memory_map --gb 31 --out memory_map.json

Times are milliseconds of the host, each rank for itself, the slowest rank's; all but zeroing end when the call returns.
"""

from __future__ import annotations

import argparse
import gc
import os
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from moebius.kernels.cuda_memory import MemoryCalls
    from moebius.kernels.peers import Gather
    from moebius.rollout.bench.results import Results

CHUNKS_MIB = (2, 16, 64, 256, 512, 1024)
OWN = ("create", "map", "allow", "zero")
SHARE = ("export", "take", "map", "allow")


class Stopwatch:
    """Milliseconds by name, added up."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = defaultdict(float)

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Add the time of a block."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.ms[name] += 1e3 * (time.perf_counter() - begun)

    def take(self) -> dict[str, float]:
        """What has been added since the last time."""
        found, self.ms = dict(self.ms), defaultdict(float)
        return found


def timed(calls: MemoryCalls, watch: Stopwatch) -> MemoryCalls:
    """`calls` with its driver calls timed by their names."""

    def wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            with watch.time(name):
                return call(*arguments)

        return run

    for name in ("reserve", *OWN, "unmap", "drop", "export", "take"):
        setattr(calls, name, wrapped(name, getattr(calls, name)))
    return calls


def row(device: torch.device, rank: int, gather: Gather, chunk: int, nbytes: int) -> dict[str, float]:
    """One line of the table: `nbytes` in chunks of `chunk` bytes, taken, shared, given back and taken again."""
    import torch

    from moebius.kernels.cuda_memory import MemoryCalls
    from moebius.kernels.virtual import VirtualMemory
    from moebius.kernels.virtual_peers import VirtualPeers

    watch, total = Stopwatch(), Stopwatch()
    count = max(1, nbytes // chunk)
    found: dict[str, float] = {"chunk_mib": chunk >> 20, "chunks": count, "gib": count * chunk / 2**30}

    def note(prefix: str, names: tuple[str, ...]) -> None:
        times = watch.take()
        found.update({f"{prefix}{name}_ms": times.get(name, 0.0) for name in names})

    def free() -> int:
        torch.cuda.synchronize()
        gather(None)
        nbytes = int(torch.cuda.mem_get_info(device)[0])
        gather(None)  # a rank on the same GPU may not go on before it was read
        return nbytes

    memory = VirtualMemory([chunk] * count, device, timed(MemoryCalls(device.index), watch))
    note("", ("reserve", *OWN))
    peers = VirtualPeers.open(memory, rank, gather)
    watch.take()  # the first time is not like the others, as ranks wait for each other's start
    for turn in ("", "again_"):  # a sleep
        with total.time("peers_unmap"):
            peers.unmap()
        note(f"{turn}peers_", ("unmap", "drop"))
        peers.barrier()
        before = free()
        with total.time("release"):
            memory.release(0, memory.nbytes)
        note(turn, ("unmap", "drop"))
        found[f"{turn}freed_gib"] = (free() - before) / 2**30
        with total.time("restore"):
            memory.restore(0, memory.nbytes)
        note(turn, OWN)
        peers.barrier()
        with total.time("peers_map"):
            peers.map()
        note(f"{turn}peers_", SHARE)
        found.update({f"{turn}{name}_total_ms": ms for name, ms in total.take().items()})
    peers.close()
    memory.close()
    gather(None)
    return found


def plain(device: torch.device, group: Any, nbytes: int) -> dict[str, float]:
    """The same bytes by cudaMalloc and CUDA IPC."""
    import torch
    import torch.distributed as dist

    from moebius.kernels.peers import PeerMap

    watch = Stopwatch()
    torch.cuda.empty_cache()
    with watch.time("malloc_ms"):
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
    tensor.zero_()
    torch.cuda.synchronize()
    dist.barrier(group)
    with watch.time("ipc_open_ms"):
        peers = PeerMap.open(tensor, group)
    with watch.time("ipc_close_ms"):
        peers.close(group)
    del tensor, peers
    gc.collect()
    with watch.time("free_ms"):
        torch.cuda.empty_cache()
    return {"gib": nbytes / 2**30, **watch.take()}


def slowest(of_ranks: list[dict[str, float]]) -> dict[str, float]:
    """The largest times, but the smallest amount that came free."""
    return {
        name: round((min if name.endswith("freed_gib") else max)(of_rank[name] for of_rank in of_ranks), 2)
        for name in of_ranks[0]
    }


def summarise(
    rows: list[dict[str, float]], plain_row: dict[str, float], options: dict[str, Any], command: str
) -> Results:
    """The table as results of a benchmark: totals by chunk size, and every call's time in `series`."""
    from moebius.rollout.bench.results import Curve, Picture, make_results

    totals = ("peers_unmap_total_ms", "release_total_ms", "restore_total_ms", "peers_map_total_ms")
    numbers = {f"again_{name}_{line['chunk_mib']:.0f}_mib": line[f"again_{name}"] for line in rows for name in totals}
    return make_results(
        "memory_map",
        command=command,
        options=options,
        results=numbers | {f"plain_{name}": value for name, value in plain_row.items()},
        curves=[
            Curve(
                name=name.removesuffix("_total_ms").replace("_", " "),
                x=[line["chunk_mib"] for line in rows],
                y=[line[f"again_{name}"] for line in rows],
            )
            for name in totals
        ],
        picture=Picture(
            kind="lines",
            title=f"A sleep of {rows[0]['gib']:.0f} GiB per rank",
            x_label="MiB per chunk",
            y_label="ms",
            log_y=True,
        ),
        series={"by_chunk_size": {f"{line['chunk_mib']:.0f} MiB": line for line in rows}, "plain": plain_row},
        notes=["again_: the second sleep; peers_map waits for the slowest rank, and its total holds the meeting"],
    )


def table(rows: list[dict[str, float]]) -> str:
    """Lines to print: the second sleep, by chunk size."""
    names = [name for name in rows[0] if name.startswith("again_")]
    lines = ["MiB per chunk".ljust(30) + "".join(f"{line['chunk_mib']:>10.0f}" for line in rows)]
    return "\n".join(
        [
            *lines,
            *(name.removeprefix("again_").ljust(30) + "".join(f"{r[name]:>10.1f}" for r in rows) for name in names),
        ]
    )


def main() -> None:
    """One rank of a torchrun."""
    import torch
    import torch.distributed as dist

    from moebius.kernels.peers import gather_of

    parser = argparse.ArgumentParser(description="Times of mapping, sharing and giving back device memory.")
    parser.add_argument("--gb", type=float, default=31.0, help="GiB per rank")
    parser.add_argument("--chunks-mib", default=",".join(map(str, CHUNKS_MIB)), help="sizes of chunks in MiB")
    parser.add_argument("--out", type=Path, help="results as JSON")
    arguments = parser.parse_args()
    chunks = [int(part) << 20 for part in arguments.chunks_mib.split(",")]
    nbytes = int(arguments.gb * 2**30)

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    gather, rank = gather_of(group), dist.get_rank()
    rows = [slowest(gather(row(device, rank, gather, chunk, nbytes))) for chunk in chunks]
    plain_row = slowest(gather(plain(device, group, nbytes)))
    if rank == 0:
        print(table(rows))
        print("plain: " + ", ".join(f"{name} {value:.1f}" for name, value in plain_row.items()))
        if arguments.out is not None:
            options = {"ranks": dist.get_world_size(), "gb": arguments.gb, "chunks_mib": [c >> 20 for c in chunks]}
            command = shlex.join(["python", "-m", "moebius.rollout.bench.memory_map", *sys.argv[1:]])
            results = summarise(rows, plain_row, options, command)
            arguments.out.write_text(results.model_dump_json(indent=1) + "\n", encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
