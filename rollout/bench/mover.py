"""Speed of the movers alone, beside a contiguous peer copy in the same run: `torchrun -m moebius.rollout.bench.mover`.

    torchrun --nproc-per-node 2 -m moebius.rollout.bench.mover --layers 48 --out mover.json

Bytes counted are those that leave a rank for its peers; all ranks send at once, and the slowest rank's time counts.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from moebius.rollout.bench.mover_layers import Layers, Move, MoverShape, OwnLayers

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from moebius.kernels.collective import Mover
    from moebius.kernels.direct import DirectMover

_ROWS = 1 << 10  # of the ceiling's copy, which is contiguous all the same
DIRECTIONS = ("EP->TP", "TP->EP")
CEILING = "peer copy"
ALL_TO_ALL = "all to all"
OVERLAPPED = "all to all, overlapped"


@dataclass(frozen=True, slots=True)
class MoverSpeed:
    """One way of moving all layers: `gb_per_s` leave each rank, `share` is that over the contiguous copy's."""

    name: str
    what: str
    ms: float
    gb_per_s: float
    share: float


def measure(
    group: dist.ProcessGroup,
    device: torch.device,
    shape: MoverShape,
    *,
    device_group: dist.ProcessGroup | None = None,
    repeats: int = 5,
) -> list[MoverSpeed]:
    """Time every mover on this rank and its peers; a collective over the CPU group `group`, the same result everywhere.

    The collective mover takes part if `device_group` (NCCL) is given.
    """
    return measure_layers(OwnLayers(shape, group, device), group, device_group=device_group, repeats=repeats)


def measure_layers(
    layers: Layers, group: dist.ProcessGroup, *, device_group: dist.ProcessGroup | None, repeats: int
) -> list[MoverSpeed]:
    """As `measure`, with layers that are there. Each way there is followed by one back, so experts end as they began.

    Where ranks cannot map each other's memory, as on CPU, only the collective movers take part, and the ceiling is an
    exchange of contiguous memory in their process group (`group` if `device_group` is None).
    """
    import torch

    from moebius.kernels.collective import CollectiveMover
    from moebius.rollout.bench.overlap import OverlappedMover

    with torch.inference_mode():
        directs = _connected(layers, group)
        first = next(iter(directs.values()), None)
        clock = _Clock(group, repeats, first, layers.storage.is_cuda)
        if first is not None:
            first.prepare_kv(*layers.kv(0), layers.head_ranges)
            contiguous = _peer_copy(layers, first)
        else:
            contiguous = _exchange(layers, device_group or group)
        ceiling = clock.speed(CEILING, "contiguous", contiguous)
        results = [ceiling]
        for name, direct in directs.items():
            results += clock.there_and_back(name, layers, direct, with_kv=direct is first, ceiling=ceiling)
        if device_group is not None or first is None:
            collective = CollectiveMover(device_group or group)
            collective.warm_up(layers.largest_tensor, layers.storage.device)
            results += clock.there_and_back(ALL_TO_ALL, layers, collective, with_kv=True, ceiling=ceiling)
            collective.close()
            overlapped = OverlappedMover(device_group or group)
            results += clock.there_and_back(OVERLAPPED, layers, overlapped, with_kv=False, ceiling=ceiling)
            overlapped.close()
        for direct in directs.values():
            direct.close()
        return results


def _connected(layers: Layers, group: dist.ProcessGroup) -> dict[str, DirectMover]:
    """Direct movers by name; none where ranks cannot map each other's memory."""
    from moebius.kernels.direct import DirectMover, ExpertMoverName
    from moebius.kernels.peers import PeerError

    directs: dict[str, DirectMover] = {}
    ways: dict[str, ExpertMoverName] = {"direct, copy engine": "copy_engine", "direct, triton": "triton"}
    try:
        for name, way in ways.items():
            directs[name] = DirectMover.connect(layers.memory, group, experts=way)
            directs[name].warm_up(0, layers.storage.device)
    except PeerError:  # on every rank alike
        return {}
    return directs


class _Clock:
    def __init__(self, group: dist.ProcessGroup, repeats: int, direct: DirectMover | None, cuda: bool) -> None:
        self._group, self._repeats, self._direct, self._cuda = group, repeats, direct, cuda

    def speed(self, name: str, what: str, move: Move) -> MoverSpeed:
        """Median over the repeats, and the ceiling of itself."""
        sent = move()
        times = [self._time(move) for _ in range(self._repeats + 1)][1:]
        return self._result(name, what, sent, times, None)

    def there_and_back(
        self, name: str, layers: Layers, mover: Mover, *, with_kv: bool, ceiling: MoverSpeed
    ) -> list[MoverSpeed]:
        """Experts, and KV if wanted, in both directions in turn."""
        results = []
        for what, *moves in layers.moves(mover, with_kv):
            sent = [move() for move in moves]  # compiles and allocates what is left
            times = [[self._time(move) for move in moves] for _ in range(self._repeats)]
            for i, direction in enumerate(DIRECTIONS):
                results.append(self._result(name, f"{what} {direction}", sent[i], [t[i] for t in times], ceiling))
        return results

    def _time(self, move: Move) -> float:
        """Milliseconds on this rank's device."""
        import torch
        import torch.distributed as dist

        if not self._cuda:
            dist.barrier(self._group)
            started = time.perf_counter()
            move()
            return 1e3 * (time.perf_counter() - started)
        torch.cuda.synchronize()
        dist.barrier(self._group)
        if self._direct is not None:
            self._direct.warm_up(0, "cuda")  # the devices begin together
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        move()
        ended.record()
        torch.cuda.synchronize()
        return float(begun.elapsed_time(ended))

    def _result(
        self, name: str, what: str, sent: int, times: Sequence[float], ceiling: MoverSpeed | None
    ) -> MoverSpeed:
        """Median over the repeats of the slowest rank's time."""
        import torch.distributed as dist

        by_rank: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(by_rank, times, group=self._group)
        ms = median(map(max, zip(*by_rank, strict=True)))
        gb_per_s = sent / ms / 1e6
        share = gb_per_s / ceiling.gb_per_s if ceiling is not None and ceiling.gb_per_s else 1.0
        return MoverSpeed(name, what, ms, gb_per_s, share)


def _peer_copy(layers: Layers, direct: DirectMover) -> Move:
    """Contiguous copies into the memory of the next rank."""
    import torch

    from moebius.kernels.experts import Copy2d, copy_2d

    buffers = direct.buffers
    peer = (buffers.rank + 1) % buffers.ranks
    here, there = buffers.bases[buffers.rank], buffers.bases[peer]
    copies = [
        Copy2d(peer, there + target, nbytes // _ROWS, here + source, nbytes // _ROWS, nbytes // _ROWS, _ROWS)
        for source, target, nbytes in layers.scratch()
    ]

    def move() -> int:
        for copy in copies:
            copy_2d(copy, torch.cuda.current_stream())
        return sum(copy.width * copy.rows for copy in copies)

    return move


def _exchange(layers: Layers, group: dist.ProcessGroup) -> Move:
    """Every rank sends its contiguous bytes to all ranks in equal parts."""
    import torch.distributed as dist

    parts = []
    for source, target, nbytes in layers.scratch():
        size = nbytes // layers.ranks * layers.ranks
        parts.append((layers.storage[source : source + size], layers.storage[target : target + size]))

    def move() -> int:
        for send, received in parts:
            dist.all_to_all_single(received, send, group=group)
        return sum(send.numel() for send, _ in parts) // layers.ranks * (layers.ranks - 1)

    return move


def table(results: list[MoverSpeed]) -> str:
    """Lines to print."""
    lines = [f"{'mover':20s} {'what':16s} {'ms':>9s} {'GB/s':>7s} {'share':>6s}"]
    lines += [f"{r.name:20s} {r.what:16s} {r.ms:9.3f} {r.gb_per_s:7.1f} {r.share:6.1%}" for r in results]
    return "\n".join(lines)


def main() -> None:
    """One rank of a torchrun."""
    import torch
    import torch.distributed as dist

    parser = argparse.ArgumentParser(description="Speed of the movers beside a contiguous peer copy.")
    for name, value in asdict(MoverShape()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="results as JSON")
    arguments = vars(parser.parse_args())
    repeats, out = arguments.pop("repeats"), arguments.pop("out")

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    cpu_group = dist.new_group(backend="gloo")
    shape = MoverShape(**arguments)
    results = measure(cpu_group, device, shape, device_group=dist.group.WORLD, repeats=repeats)
    if dist.get_rank() == 0:
        print(table(results))
        if out is not None:
            found = {"gpus": torch.cuda.get_device_name(), "ranks": dist.get_world_size(), "shape": asdict(shape)}
            out.write_text(json.dumps(found | {"speeds": [asdict(r) for r in results]}, indent=1), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
