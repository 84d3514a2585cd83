"""Speed of the movers alone, beside a contiguous peer copy in the same run: `torchrun -m moebius.rollout.bench.mover`.

    torchrun --nproc-per-node 2 -m moebius.rollout.bench.mover --layers 48 --out mover.json

Bytes counted are those that leave a rank for its peers; all ranks send at once, and the slowest rank's time counts.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from moebius.kernels.collective import Mover

CEILING_BYTES = 1 << 29


@dataclass(frozen=True, slots=True)
class MoverShape:
    """Layers of bf16 experts and KV, by default as in Qwen3-30B-A3B; `pages` are those of a rank in EP, all live."""

    layers: int = 8
    experts: int = 128
    hidden: int = 2048
    intermediate: int = 768
    kv_heads: int = 4
    page_tokens: int = 16
    page_width: int = 256  # 2 * head dim
    pages: int = 4096


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

    The collective mover takes part if `device_group` (NCCL) is given. Raises PeerError if the ranks cannot map each
    other's memory.
    """
    import torch

    from moebius.kernels.collective import CollectiveMover
    from moebius.kernels.direct import DirectMover

    with torch.cuda.device(device), torch.inference_mode():
        layers = _Layers(shape, group, device)
        direct = DirectMover.connect(layers.storage, group)
        direct.warm_up(0, device)
        direct.prepare_kv(*layers.kv(0), layers.head_ranges)
        clock = _Clock(group, repeats, direct)
        results = [clock.speed("peer copy", "contiguous", CEILING_BYTES, _peer_copy(layers, direct), 0.0)]
        ceiling = results[0].gb_per_s
        movers: list[tuple[str, Mover, bool]] = [("direct, copy engine", direct, True)]
        triton = DirectMover.connect(layers.storage, group, experts="triton")
        movers.append(("direct, triton", triton, False))
        if device_group is not None:
            collective = CollectiveMover(device_group)
            collective.warm_up(layers.largest_tensor, device)
            movers.append(("all to all", collective, True))
        for name, mover, with_kv in movers:
            for what, move in layers.moves(mover, with_kv).items():
                sent = move()  # compiles and allocates what is left
                results.append(clock.speed(name, what, sent, move, ceiling))
        triton.close()
        direct.close()
        return results


class _Clock:
    def __init__(self, group: dist.ProcessGroup, repeats: int, direct: Any) -> None:
        self._group, self._repeats, self._direct = group, repeats, direct

    def speed(self, name: str, what: str, sent: int, move: Callable[[], Any], ceiling: float) -> MoverSpeed:
        """Median over the repeats of the slowest rank's time on its device."""
        import torch
        import torch.distributed as dist

        times = []
        for _ in range(self._repeats + 1):
            torch.cuda.synchronize()
            dist.barrier(self._group)
            self._direct.warm_up(0, "cuda")  # the devices begin together
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record()
            move()
            ended.record()
            torch.cuda.synchronize()
            times.append(begun.elapsed_time(ended))
        by_rank: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(by_rank, times[1:], group=self._group)
        ms = median(map(max, zip(*by_rank, strict=True)))
        gb_per_s = sent / ms / 1e6
        return MoverSpeed(name, what, ms, gb_per_s, gb_per_s / ceiling if ceiling else 1.0)


class _Layers:
    """Slots of all layers in both layouts, and page tables of requests spread evenly over the ranks."""

    def __init__(self, shape: MoverShape, group: dist.ProcessGroup, device: torch.device) -> None:
        import torch
        import torch.distributed as dist

        from moebius.engine.memory import SlotSizes, UnifiedBuffer
        from moebius.kernels.plan import kv_head_ranges

        self.shape, self.ranks = shape, dist.get_world_size(group)
        local = shape.experts // self.ranks
        self._w13 = local * 2 * shape.intermediate * shape.hidden
        self.largest_tensor = self._w13 * 2
        page = shape.kv_heads * shape.page_tokens * shape.page_width
        sizes = SlotSizes(shape.layers, self._w13 * 3, shape.layers, shape.pages * page * 2)
        self._buffer = UnifiedBuffer(sizes, device)
        self.storage = self._buffer.storage
        self.storage.random_(0, 256)
        self.head_ranges = kv_head_ranges(shape.kv_heads, self.ranks)
        self._heads = self.head_ranges[0][1] - self.head_ranges[0][0]
        # TP has room for fewer live pages than EP if heads are replicated.
        self._tp_pages = shape.pages * shape.kv_heads // self._heads
        live = min(shape.pages, self._tp_pages // self.ranks)
        generator = torch.Generator().manual_seed(1)
        tp = torch.randperm(self._tp_pages, generator=generator)
        self._to_tp = [
            (torch.randperm(shape.pages, generator=generator)[:live].to(device), tp[r * live :][:live].to(device))
            for r in range(self.ranks)
        ]
        self._to_ep = [(there, here) for here, there in self._to_tp]

    def experts(self, layer: int) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        """w13 and w2 of a layer, in EP and in TP."""
        import torch

        from moebius.engine.layout import Layout

        s, ranks = self.shape, self.ranks
        local, part = s.experts // ranks, s.intermediate // ranks
        ep, tp = (
            self._buffer.expert_slot(layout, layer).view(torch.bfloat16).split([self._w13, self._w13 // 2])
            for layout in (Layout.EP, Layout.TP)
        )
        return (
            (ep[0].view(local, 2 * s.intermediate, s.hidden), ep[1].view(local, s.hidden, s.intermediate)),
            (tp[0].view(s.experts, 2 * part, s.hidden), tp[1].view(s.experts, s.hidden, part)),
        )

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The pools of a layer in EP and in TP."""
        import torch

        from moebius.engine.layout import Layout

        s = self.shape
        ep, tp = (self._buffer.kv_slot(layout, layer).view(torch.bfloat16) for layout in (Layout.EP, Layout.TP))
        page = (s.page_tokens, s.page_width)
        return ep.view(s.pages, s.kv_heads, *page), tp.view(self._tp_pages, self._heads, *page)

    def moves(self, mover: Mover, with_kv: bool) -> dict[str, Callable[[], int]]:
        """What to time: each moves all layers and returns the bytes sent to peers."""
        up = range(self.shape.layers)
        down = tuple(reversed(up))
        experts, kv = [self.experts(layer) for layer in up], [self.kv(layer) for layer in up]
        moves: dict[str, Callable[[], int]] = {
            "experts EP->TP": lambda: sum(mover.experts_ep_to_tp(*experts[i][0], *experts[i][1]) for i in up),
            "experts TP->EP": lambda: sum(mover.experts_tp_to_ep(*experts[i][1], *experts[i][0]) for i in down),
        }
        if with_kv:
            moves["KV EP->TP"] = lambda: sum(mover.kv_ep_to_tp(*kv[i], self._to_tp, self.head_ranges) for i in up)
            moves["KV TP->EP"] = lambda: sum(
                mover.kv_tp_to_ep(*kv[i][::-1], self._to_ep, self.head_ranges) for i in down
            )
        return moves


def _peer_copy(layers: _Layers, direct: Any) -> Callable[[], None]:
    """One contiguous copy to the next rank: from the first half of the buffer into the second half of that rank's."""
    import torch

    from moebius.kernels.experts import Copy2d, copy_2d

    buffers = direct.buffers
    if buffers.nbytes < 2 * CEILING_BYTES:
        raise ValueError(f"the buffer has {buffers.nbytes} bytes, needed are {2 * CEILING_BYTES}: measure more layers")
    peer = (buffers.rank + 1) % buffers.ranks
    source, target = buffers.bases[buffers.rank], buffers.bases[peer] + buffers.nbytes - CEILING_BYTES
    copy = Copy2d(peer, target, CEILING_BYTES >> 10, source, CEILING_BYTES >> 10, CEILING_BYTES >> 10, 1 << 10)
    return lambda: copy_2d(copy, torch.cuda.current_stream())


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
