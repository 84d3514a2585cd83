"""What the movers' benchmark moves: slots of all layers in both layouts, of its own or of a running engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moebius.engine.layout import Layout

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from moebius.engine.runtime import RuntimePair
    from moebius.kernels.collective import Mover
    from moebius.kernels.virtual import VirtualMemory

    Pair = tuple[torch.Tensor, torch.Tensor]

CEILING_BYTES = 1 << 29
ALIGNMENT = 4096  # bytes; keeps elements whole, and copies at full speed
Move = Callable[[], int]  # moves all layers; returns the bytes sent to peers


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
