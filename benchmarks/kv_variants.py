"""Ways of launching the page kernel, side by side, beside a contiguous peer copy of the same run. Needs GPUs.

    python -m benchmarks.kv_variants --out docs/benchmarks/kv_variants_x2.json

Pools and page tables are those of Qwen3-30B-A3B with 512k live tokens, pages in random places. Every way is checked
first: after a move in each direction, every byte of all slots must be as plain torch has it. Then the ways take turns.
Times of ways are the device's alone: page lists are there, and the host is ahead. `mover` is what a switch does: the
direct mover with its page lists made on the way, the device waiting for them. `--ranks` GPUs take part; one sends
nothing, and shows what copies within a GPU cost.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu_ranks import gpu_ranks, join_ranks
from benchmarks.kv_slots import VARIANTS, Ranks, Shape, Variant, launch
from moebius.engine.memory import SlotSizes, UnifiedBuffer
from moebius.kernels.direct import DirectMover
from moebius.kernels.experts import Copy2d, copy_2d
from moebius.kernels.kv import PageList, PageMover, PageWay, pages_to_ep, pages_to_tp
from moebius.kernels.signals import Signals
from moebius.kernels.virtual import VirtualMemory
from moebius.rollout.bench.results import make_results

CEILING_BYTES = 512 << 20
_GATE_CYCLES = 40_000_000  # about 20 ms, in which the host enqueues a whole move
_BARRIERS = 200


class Bench:
    """One rank's measurements; all methods are collectives."""

    def __init__(self, shape: Shape, rank: int, ranks: int, rounds: int) -> None:
        self.device, self.rounds = torch.device("cuda", rank), rounds
        group = dist.group.WORLD
        assert group is not None
        self.group = group
        sizes = SlotSizes(1, 4096, shape.layers, shape.pages * shape.heads * shape.words * 4)
        memory = VirtualMemory(sizes.chunks(), self.device)
        self.mover = DirectMover.connect(memory, group)
        self.own = Ranks(shape, UnifiedBuffer(sizes, self.device, memory), self.mover.buffers.bases, rank)
        self.mover.prepare_kv(*self.own.pools(0), self.own.head_ranges)
        self.signals = Signals.connect(group, self.device)
        self.side = torch.cuda.Stream(self.device)
        self.tables = {to_tp: self.own.tables(False, "given", to_tp) for to_tp in (True, False)}
        self.movers: dict[PageWay, PageMover] = {}
        self.lists: dict[tuple[str, bool], list[PageList]] = {}

    def move(self, name: str, to_tp: bool) -> None:
        """Enqueue all layers in a variant's way."""
        variant = VARIANTS[name]
        way = self.movers.setdefault(variant.way, PageMover(self.own.bases, self.own.rank, self.device, variant.way))
        if (name, to_tp) not in self.lists:
            self.lists[name, to_tp] = parts = [part.on(self.device) for part in self.own.listing(variant, to_tp)]
            source, target = self.own.pools(0)[:: 1 if to_tp else -1]
            for part in parts:  # compiles and loads what is left, while nobody waits for anybody
                way.move(source, target, target.data_ptr() - self.own.bases[self.own.rank], part, limit=0)
            torch.cuda.synchronize()
            dist.barrier(self.group)
        for layer in self.own.layers(to_tp):
            launch(self.own, way, self.lists[name, to_tp], layer, to_tp, self.side if variant.apart else None)
            self.signals.barrier()

    def product(self, to_tp: bool) -> None:
        """Enqueue all layers as a switch does, page lists included."""
        pages = list(self.tables[to_tp])
        call = self.mover.kv_ep_to_tp if to_tp else self.mover.kv_tp_to_ep
        for layer in self.own.layers(to_tp):
            ep, tp = self.own.pools(layer)
            call(*((ep, tp) if to_tp else (tp, ep)), pages, self.own.head_ranges)

    def fresh_tables(self) -> None:
        """Page tables of a switch not seen before, so that lists are made anew."""
        self.tables = {to_tp: [(a.clone(), b.clone()) for a, b in pages] for to_tp, pages in self.tables.items()}

    def check(self, name: str, to_tp: bool) -> None:
        """Fill, move, compare; raises AssertionError."""
        self.own.fill(to_tp)
        torch.cuda.synchronize()
        dist.barrier(self.group)
        if name == "mover":
            self.product(to_tp)
        else:
            self.move(name, to_tp)
        torch.cuda.synchronize()
        dist.barrier(self.group)
        self.own.check(VARIANTS.get(name, Variant()), to_tp)

    def ms(self, work: Callable[[], None], gate: bool) -> float:
        """Milliseconds on the slowest rank's device; with `gate` the host has enqueued all before the device begins."""
        torch.cuda.synchronize()
        dist.barrier(self.group)
        if gate:
            torch.cuda._sleep(_GATE_CYCLES)
        self.signals.barrier()  # the devices begin together
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if not gate:
            torch.cuda.synchronize()
        begun.record()
        work()
        ended.record()
        torch.cuda.synchronize()
        times: list[Any] = [None] * self.own.ranks
        dist.all_gather_object(times, begun.elapsed_time(ended), group=self.group)
        return max(times)

    def peer_copy(self) -> None:
        """The ceiling: contiguous, by copy engine, into the next rank's slot 1 from slot 0 here."""
        peer, rows = (self.own.rank + 1) % self.own.ranks, 1 << 10
        source, target = (self.own.slot(number).data_ptr() for number in (0, 1))
        width = self.ceiling_bytes // rows
        there = target - self.own.bases[self.own.rank] + self.own.bases[peer]
        copy_2d(Copy2d(peer, there, width, source, width, width, rows), torch.cuda.current_stream())

    @property
    def ceiling_bytes(self) -> int:
        """Bytes of the ceiling's copy."""
        return min(CEILING_BYTES, self.own.slot(0).numel() * 4 // 4096 * 4096)

    def barriers_us(self, signals: Signals) -> float:
        """Microseconds of one barrier between idle devices."""
        self.ms(signals.barrier, True)  # compiles and loads what is left

        def many() -> None:
            for _ in range(_BARRIERS):
                signals.barrier()

        return 1e3 * self.ms(many, True) / _BARRIERS

    def listing_ms(self, to_tp: bool) -> float:
        """Milliseconds of the host for the lists of one move, the slowest of all ranks."""
        self.fresh_tables()
        begun = time.perf_counter()
        listed = (pages_to_tp if to_tp else pages_to_ep)(self.tables[to_tp], self.own.head_ranges, self.own.rank)
        spent = 1e3 * (time.perf_counter() - begun)
        del listed
        times: list[Any] = [None] * self.own.ranks
        dist.all_gather_object(times, spent, group=self.group)
        return max(times)


def measure(bench: Bench, names: list[str], say: Callable[[str], None]) -> tuple[dict[str, float], list[str]]:
    """Numbers by name, and lines of the table."""
    begun = time.perf_counter()
    for name, to_tp in itertools.product(["mover", *names], (True, False)):
        bench.check(name, to_tp)
    say(f"{len(names) + 1} ways checked in both directions after {time.perf_counter() - begun:.1f} s")
    numbers: dict[str, float] = {"barrier_us": bench.barriers_us(bench.signals)}
    by_kernel = Signals.connect(bench.group, bench.device, "kernel")
    numbers["barrier_kernel_us"] = bench.barriers_us(by_kernel)
    times: dict[tuple[str, bool], list[float]] = {}
    ceilings: list[float] = []
    listings: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(bench.rounds + 1):
        copied = bench.ms(bench.peer_copy, True)
        if turn:
            ceilings.append(bench.ceiling_bytes / copied / 1e6)
        for name, to_tp in itertools.product(["mover", *names], (True, False)):
            if name == "mover":
                listings[to_tp].append(bench.listing_ms(to_tp))
                bench.fresh_tables()
                ms = bench.ms(partial(bench.product, to_tp), False)
            else:
                ms = bench.ms(partial(bench.move, name, to_tp), True)
            if turn:
                times.setdefault((name, to_tp), []).append(ms)
    numbers["ceiling_gbps"] = ceiling = median(ceilings)
    lines = [f"{'':26s}{'EP->TP':>10s}{'':>9s}{'TP->EP':>12s}", f"{'':26s}" + f"{'ms/layer':>10s}{'ceiling':>9s}  " * 2]
    for name in ["mover", *names]:
        line, short = f"{name:26s}", "".join(c if c.isalnum() else "_" for c in name).strip("_").replace("__", "_")
        for to_tp, direction in ((True, "ep_tp"), (False, "tp_ep")):
            ms = median(times[name, to_tp])
            share = 100 * bench.own.sent(to_tp) / ms / 1e6 / ceiling
            layer = ms / bench.own.shape.layers
            numbers |= {f"{short}_{direction}_ms_per_layer": layer, f"{short}_{direction}_pct": share}
            line += f"{layer:10.4f}{share:8.1f}%  "
        lines.append(line)
    for to_tp, direction in ((True, "ep_tp"), (False, "tp_ep")):
        numbers[f"listing_{direction}_ms"] = median(listings[to_tp])
    lines.append(
        f"ceiling {ceiling:.1f} GB/s; a barrier {numbers['barrier_us']:.1f} us by {bench.signals.how}, "
        f"{numbers['barrier_kernel_us']:.1f} by kernel; lists of a move {numbers['listing_ep_tp_ms']:.2f} and "
        f"{numbers['listing_tp_ep_ms']:.2f} ms of the host"
    )
    return numbers, lines


def _run(rank: int, ranks: int, port: int, shape: Shape, rounds: int, names: list[str], queue: Any) -> None:
    try:
        join_ranks(rank, ranks, port)
        begun = time.perf_counter()

        def say(line: str) -> None:
            if rank == 0:
                print(line, flush=True)

        with torch.inference_mode():
            bench = Bench(shape, rank, ranks, rounds)
            say(f"memory mapped after {time.perf_counter() - begun:.1f} s")
            found = measure(bench, names, say)
        say(f"measured after {time.perf_counter() - begun:.1f} s")
        queue.put((rank, found, None))
        dist.barrier()
    except BaseException as error:
        queue.put((rank, None, f"{type(error).__name__}: {error}"))
        raise
    finally:
        queue.close()
        queue.join_thread()
        os._exit(0)  # the process takes its memory along


def run(ranks: int, shape: Shape, rounds: int, names: list[str], limit_s: float) -> tuple[dict[str, float], list[str]]:
    """Numbers and table of all ranks' run. Raises RuntimeError with the first rank's problem."""
    with gpu_ranks(_run, ranks, shape, rounds, names) as (queue, processes):
        found = {}
        for _ in processes:
            rank, result, problem = queue.get(timeout=limit_s)
            if problem is not None:
                raise RuntimeError(f"rank {rank}: {problem}")
            found[rank] = result
        return found[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in asdict(Shape()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--variants", default="", help="numbers of ways, from 0, comma-separated; all without")
    parser.add_argument("--limit-s", type=float, default=100.0, help="seconds until the run is given up")
    parser.add_argument("--out", type=Path, required=True)
    options = vars(parser.parse_args())
    out, ranks, rounds, limit_s = (options.pop(name) for name in ("out", "ranks", "rounds", "limit_s"))
    chosen = options.pop("variants")
    names = [list(VARIANTS)[int(number)] for number in chosen.split(",")] if chosen else list(VARIANTS)
    shape = Shape(**options)
    numbers, lines = run(ranks, shape, rounds, names, limit_s)
    settings = {"ranks": ranks, "rounds": rounds} | asdict(shape)
    results = make_results(
        out.stem,
        command=f"python -m benchmarks.kv_variants --out {out.name}" + (f" --variants {chosen}" if chosen else ""),
        options=settings | {"variants": {name: asdict(VARIANTS[name]) for name in names}},
        results=numbers,
    )
    print("\n".join(lines), flush=True)
    results.write(out.parent)


if __name__ == "__main__":
    main()
