"""Speed of the movers alone, beside a contiguous peer copy in the same run: `torchrun -m moebius.rollout.bench.mover`.

    torchrun --nproc-per-node 2 -m moebius.rollout.bench.mover --layers 48 --out mover.json

Bytes counted are those that leave a rank for its peers; all ranks send at once, and the slowest rank's time counts.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from moebius.engine.layout import Layout

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from moebius.engine.runtime import RuntimePair
    from moebius.kernels.collective import Mover
    from moebius.kernels.direct import DirectMover
    from moebius.kernels.virtual import VirtualMemory

    Pair = tuple[torch.Tensor, torch.Tensor]

CEILING_BYTES = 1 << 29
ALIGNMENT = 4096  # bytes; keeps elements whole, and copies at full speed
_ROWS = 1 << 10  # of the ceiling's copy, which is contiguous all the same
DIRECTIONS = ("EP->TP", "TP->EP")
CEILING = "peer copy"
ALL_TO_ALL = "all to all"
OVERLAPPED = "all to all, overlapped"


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


Move = Callable[[], int]  # moves all layers; returns the bytes sent to peers


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


class Layers:
    """Slots of all layers in both layouts, and page tables of requests spread evenly over the ranks.

    `ep_pages` and `tp_pages` are (first page, pages) that may be written to; `live` pages of each rank are moved.
    """

    def __init__(
        self,
        storage: torch.Tensor,
        ranks: int,
        kv_heads: int,
        count: int,
        largest_tensor: int,
        *,
        ep_pages: tuple[int, int],
        tp_pages: tuple[int, int],
        live: int,
    ) -> None:
        import torch

        from moebius.kernels.plan import kv_head_ranges

        self.storage, self.ranks, self.count, self.largest_tensor = storage, ranks, count, largest_tensor
        self.head_ranges = kv_head_ranges(kv_heads, ranks)
        # TP has room for fewer live pages than EP if heads are replicated.
        self.live = min(live, ep_pages[1], tp_pages[1] // ranks)
        generator = torch.Generator().manual_seed(1)
        tp = tp_pages[0] + torch.randperm(tp_pages[1], generator=generator)
        ep = [ep_pages[0] + torch.randperm(ep_pages[1], generator=generator)[: self.live] for _ in range(ranks)]
        self._to_tp = [(ep[rank], tp[rank * self.live :][: self.live]) for rank in range(ranks)]
        self._to_ep = [(there, here) for here, there in self._to_tp]

    def experts(self, layer: int) -> tuple[Pair, Pair]:
        """w13 and w2 of a layer, in EP and in TP."""
        raise NotImplementedError

    def kv(self, layer: int) -> Pair:
        """The pools of a layer in EP and in TP."""
        raise NotImplementedError

    def scratch(self) -> list[tuple[int, int, int]]:
        """Copies of the ceiling: where each begins here, where in the peer's storage, and how many bytes it has."""
        raise NotImplementedError

    @property
    def memory(self) -> torch.Tensor | VirtualMemory:
        """What peers map."""
        return self.storage

    def moves(self, mover: Mover, with_kv: bool) -> list[tuple[str, Move, Move]]:
        """What to time: a name, the move of all layers to TP, and the one back."""
        device = self.storage.device
        up = range(self.count)
        down = tuple(reversed(up))
        experts, kv = [self.experts(layer) for layer in up], [self.kv(layer) for layer in up]
        flush: Callable[[], None] = getattr(mover, "flush", lambda: None)

        def flushed(sent: int) -> int:
            flush()
            return sent

        moves: list[tuple[str, Move, Move]] = [
            (
                "experts",
                lambda: flushed(sum(mover.experts_ep_to_tp(*experts[i][0], *experts[i][1]) for i in up)),
                lambda: flushed(sum(mover.experts_tp_to_ep(*experts[i][1], *experts[i][0]) for i in down)),
            )
        ]
        if with_kv:
            to_tp, to_ep = (mover.place_pages(pages, device) for pages in (self._to_tp, self._to_ep))
            moves.append(
                (
                    "KV",
                    lambda: sum(mover.kv_ep_to_tp(*kv[i], to_tp, self.head_ranges) for i in up),
                    lambda: sum(mover.kv_tp_to_ep(*kv[i][::-1], to_ep, self.head_ranges) for i in down),
                )
            )
        return moves


class OwnLayers(Layers):
    """Layers of the given shape in a buffer of their own."""

    def __init__(self, shape: MoverShape, group: dist.ProcessGroup, device: torch.device) -> None:
        import torch.distributed as dist

        from moebius.engine.memory import SlotSizes, UnifiedBuffer
        from moebius.kernels.plan import kv_head_ranges

        self.shape, ranks = shape, dist.get_world_size(group)
        local = shape.experts // ranks
        self._w13 = local * 2 * shape.intermediate * shape.hidden
        page = shape.kv_heads * shape.page_tokens * shape.page_width
        sizes = SlotSizes(shape.layers, self._w13 * 3, shape.layers, shape.pages * page * 2)
        self._buffer = UnifiedBuffer(sizes, device)
        self._buffer.storage.random_(0, 256)
        start, stop = kv_head_ranges(shape.kv_heads, ranks)[0]
        self._heads = stop - start
        self._tp_pages = shape.pages * shape.kv_heads // self._heads
        super().__init__(
            self._buffer.storage,
            ranks,
            shape.kv_heads,
            shape.layers,
            self._w13 * 2,
            ep_pages=(0, shape.pages),
            tp_pages=(0, self._tp_pages),
            live=shape.pages,
        )

    def experts(self, layer: int) -> tuple[Pair, Pair]:
        """See `Layers.experts`."""
        import torch

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

    def kv(self, layer: int) -> Pair:
        """See `Layers.kv`."""
        import torch

        s = self.shape
        ep, tp = (self._buffer.kv_slot(layout, layer).view(torch.bfloat16) for layout in (Layout.EP, Layout.TP))
        page = (s.page_tokens, s.page_width)
        return ep.view(s.pages, s.kv_heads, *page), tp.view(self._tp_pages, self._heads, *page)

    def scratch(self) -> list[tuple[int, int, int]]:
        """See `Layers.scratch`: from the beginning to the end. Raises ValueError if there is too little to tell."""
        nbytes = self.storage.numel()
        if self.storage.is_cuda and nbytes < 2 * CEILING_BYTES:
            raise ValueError(f"the buffer has {nbytes} bytes, needed are {2 * CEILING_BYTES}: measure more layers")
        size = min(CEILING_BYTES, nbytes // 2 // ALIGNMENT * ALIGNMENT)
        return [(0, (nbytes - size) // ALIGNMENT * ALIGNMENT, size)]


class EngineLayers(Layers):
    """The slots of an engine's two runtimes, between two steps. `tokens` of KV over all ranks, as many as fit.

    KV pages are overwritten by other pages' bytes: forget the prefix caches afterwards.
    """

    def __init__(self, pair: RuntimePair, ranks: int, tokens: int) -> None:
        self._pair = pair
        largest = max(p.numel() * p.element_size() for m in pair.ep.expert_modules for p in (m.w13_weight, m.w2_weight))
        pages = max(1, tokens // (ranks * pair.ep.page_size))
        super().__init__(
            pair.buffer.storage,
            ranks,
            pair.shape.num_kv_heads,
            len(pair.ep.expert_modules),
            largest,
            ep_pages=(1, pair.ep.usable_pages),  # page 0 is vLLM's null block
            tp_pages=(1, pair.tp.usable_pages),
            live=pages,
        )

    @property
    def tokens(self) -> int:
        """Tokens of KV that are moved, over all ranks."""
        return self.live * self.ranks * self._pair.ep.page_size

    def experts(self, layer: int) -> tuple[Pair, Pair]:
        """See `Layers.experts`."""
        ep, tp = (runtime.expert_modules[layer] for runtime in (self._pair.ep, self._pair.tp))
        return (ep.w13_weight.data, ep.w2_weight.data), (tp.w13_weight.data, tp.w2_weight.data)

    def kv(self, layer: int) -> Pair:
        """See `Layers.kv`."""
        return self._pair.ep.kv[layer], self._pair.tp.kv[layer]

    def scratch(self) -> list[tuple[int, int, int]]:
        """See `Layers.scratch`: between KV slots, whose pages no request holds between steps.

        One copy never leaves a slot, since memory may end between two of them. Elements stay whole.
        """
        slot, layers, left = self._pair.buffer.kv_slot, len(self._pair.ep.kv), CEILING_BYTES
        copies = []
        for layer in range((layers + 1) // 2):
            source, target = slot(Layout.TP, layer), slot(Layout.EP, layers - 1 - layer)
            nbytes = min(left, source.numel() // ALIGNMENT * ALIGNMENT)
            if nbytes:
                begin = self.storage.data_ptr()
                copies.append((source.data_ptr() - begin, target.data_ptr() - begin, nbytes))
            left -= nbytes
        return copies

    @property
    def memory(self) -> torch.Tensor | VirtualMemory:
        """See `Layers.memory`."""
        from moebius.kernels.virtual import VirtualMemory

        backing = self._pair.buffer.backing
        return backing if isinstance(backing, VirtualMemory) else self.storage


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
