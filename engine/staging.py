"""PREPARE and COMMIT: the experts' bytes go to their new ranks while EP still decodes, and local copies remain.

PREPARE sends what each rank will need from the others into pages withdrawn from its KV pool (moebius.engine.reserve).
The senders only read their experts, so decoding goes on. COMMIT, in the pause, copies from there, and what a rank keeps
for itself, into the slots. Before PREPARE and after COMMIT the pages are ordinary KV pages.

As many of the lowest layers are staged as the free pages of the fullest rank hold (moebius.kernels.rooms says why
those); COMMIT moves the others over the link, beside the copies of those that were staged.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from moebius.engine.config import EngineConfig
from moebius.engine.layout import Layout
from moebius.engine.requests import pages_of
from moebius.engine.reserve import Reserve
from moebius.engine.runtime import RuntimePair
from moebius.kernels.collective import Mover
from moebius.kernels.rooms import Parts, Room, commit_order, pack_rooms

_SPARE_PAGES = 4  # per request, and at least
_GROWTH = 4  # one page for so many that are in use
_USEFUL = 4  # with prepare: auto, fewer than one layer in so many is not worth it


class Staging:
    """Where a switch to TP is prepared. All methods are called on all ranks alike."""

    def __init__(self, pair: RuntimePair, mover: Mover, config: EngineConfig, group: dist.ProcessGroup) -> None:
        self._pair, self._mover, self._group = pair, mover, group
        self.count = len(pair.ep.expert_modules)  # MoE layers
        self.most = min(self.count, config.prepare_layers or self.count)  # to stage; may change between steps
        self.layers = 0  # the lowest ones, whose bytes are staged, or on their way
        self.sent = 0  # bytes this rank has sent for the present preparation
        self._reserve: Reserve | None = None
        self._is_auto = config.prepare == "auto"
        self.why_not = self._obstacle(config)
        if self.why_not is None:
            most = self._most_pages()
            fewest, _ = self._fewest(most, self._rooms(most))
            self._reserve = Reserve(pair.ep.scheduler.kv_cache_manager.block_pool, fewest)
        elif config.prepare == "on":
            raise ValueError(f"engine.prepare is on, but a switch cannot be prepared: {self.why_not}")

    @property
    def is_ready(self) -> bool:
        """Whether experts are staged, or on their way."""
        return self.layers > 0

    @property
    def share(self) -> float:
        """The part of all MoE layers that is staged."""
        return self.layers / self.count

    @property
    def is_short(self) -> bool:
        """Whether a request of this rank waits for more pages than staging has left to EP; ranks differ in it.

        vLLM preempts a request that finds no page, and asks for all of its pages at once when it is to go on: more than
        are left it would wait for until the switch, which may never come.
        """
        scheduler = self._pair.ep.scheduler
        if not self.is_ready or not scheduler.waiting:
            return False
        wanted = pages_of(scheduler.waiting.peek_request().num_tokens + 1, self._pair.ep.page_size)
        return wanted > self._pair.ep.free_pages

    @property
    def withdrawn(self) -> int:
        """KV pages that are out of the pool at present."""
        return 0 if self._reserve is None else self._reserve.withdrawn

    @torch.inference_mode()
    def prepare(self) -> bool:
        """Start sending, if enough pages are free on all ranks; a collective with one answer for all.

        The rank with the fewest decides how many layers. EP must be active.
        """
        if self._reserve is None or self.is_ready:
            return self.is_ready
        ep = self._pair.ep
        # What remains must do for the requests until the switch.
        used = ep.usable_pages - ep.free_pages
        left = ep.free_pages - max(_SPARE_PAGES * ep.scheduler.get_num_unfinished_requests(), used // _GROWTH)
        pages = torch.tensor([max(0, min(self._reserve.free_run(), left))])
        dist.all_reduce(pages, op=dist.ReduceOp.MIN, group=self._group)
        found = self._rooms(int(pages.item()))
        if len(found) < self._least():
            return False
        fewest, rooms = self._fewest(int(pages.item()), found)
        self._reserve.withdraw(fewest)
        self._staged, self.layers = rooms, len(rooms)
        self._mover.begin_staging()
        self.sent = sum(
            self._mover.stage_experts(*self._tensors(layer), room) for layer, room in enumerate(self._staged)
        )
        self._mover.end_staging()
        return True

    @torch.inference_mode()
    def commit(self) -> int:
        """Bring all experts into TP's slots, in order with the current stream; bytes sent, with those ahead."""
        assert self._reserve is not None and self.is_ready
        sent = self.sent
        self._mover.begin_commit(moves_follow=self.layers < self.count)
        for layer in commit_order(self.layers, self.count):
            if layer < self.layers:
                self._mover.commit_experts(*self._tensors(layer), self._staged[layer])
            else:
                sent += self._mover.experts_ep_to_tp(*self._tensors(layer))
        self._mover.end_commit()
        self._end()
        return sent

    def drop(self) -> None:
        """Forget what was staged, if anything was: the weights change, or there is no switch."""
        if self.is_ready:
            self._mover.begin_commit()  # nobody writes to the pages any more
            self._end()

    def _end(self) -> None:
        assert self._reserve is not None
        # In stream order behind the copies: whatever is written to these pages next comes later.
        self._reserve.give_back()
        self.layers = self.sent = 0

    def _obstacle(self, config: EngineConfig) -> str | None:
        pair, ranks = self._pair, self._ranks
        if config.prepare == "off":
            return "engine.prepare is off"
        if ranks == 1:
            return "one rank sends nothing"
        if config.prepare == "auto" and not self._mover.stages_in_background:
            return "the mover cannot send while the model decodes"
        kv, weight = pair.ep.kv[0], pair.ep.expert_modules[0].w13_weight
        if kv.dtype != weight.dtype:
            # Left in a page, weights read as another type could be NaN, which masked attention does not mask.
            return f"KV is {kv.dtype} and the experts are {weight.dtype}"
        slot = pair.buffer.kv_slot(Layout.EP, 0).numel()
        for kv in pair.ep.kv:
            page = kv.stride(0) * kv.element_size()
            if page != self._page_bytes() or page * kv.shape[0] > slot or kv.stride(0) != kv[0].numel():
                return "a KV page is not one run of memory, as large in every layer"
        fitting = len(self._rooms(self._most_pages()))
        if fitting < self._least():
            return (
                f"{fitting} of {self.count} layers of experts fit into {self._most_pages()} of {pair.ep.usable_pages} "
                f"KV pages per rank, {self._least()} are wanted: raise engine.kv_cache_bytes"
            )
        return None

    def _least(self) -> int:
        """Layers that must fit for a preparation to be worth it."""
        return max(1, -(-self.most // _USEFUL)) if self._is_auto else 1

    def _most_pages(self) -> int:
        """Pages that may be withdrawn at all."""
        usable = self._pair.ep.usable_pages
        return usable // 2 if self._is_auto else usable - 1

    def _fewest(self, pages: int, rooms: list[Room]) -> tuple[int, list[Room]]:
        """About the fewest pages that hold as many layers as `pages` do, and the rooms in them; `rooms` are theirs."""
        slots, fewest = len(self._pair.ep.kv) * self._page_bytes(), 0
        held = sum(room.nbytes for room in rooms)
        while (fewest := max(-(-held // slots), fewest + fewest // 64 + 1)) < pages:  # rows leave gaps
            found = self._rooms(fewest)
            if len(found) >= len(rooms):
                return fewest, found
        return pages, rooms

    def _rooms(self, pages: int) -> list[Room]:
        """Rooms in the KV slots of all layers, in so many pages of highest ids. The same on every rank."""
        pair, page = self._pair, self._page_bytes()
        total = pair.ep.kv[0].shape[0]
        spans = []
        for layer in range(len(pair.ep.kv) if pages > 0 else 0):
            slot = pair.buffer.kv_slot(Layout.EP, layer)
            start = slot.data_ptr() - pair.buffer.storage.data_ptr()
            spans.append((start + (total - pages) * page, start + total * page))
        parts = self._parts()
        packed = pack_rooms(spans, parts, self._ranks, self.count, self.most)
        last = self.count - 1
        return [
            Room(pair.buffer.storage, parts, layer + 1 == len(packed) and layer != last, pieces)
            for layer, pieces in enumerate(packed)
        ]

    def _tensors(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        ep, tp = self._pair.ep.expert_modules[layer], self._pair.tp.expert_modules[layer]
        return ep.w13_weight, ep.w2_weight, tp.w13_weight, tp.w2_weight

    def _page_bytes(self) -> int:
        kv = self._pair.ep.kv[0]
        return kv.stride(0) * kv.element_size()

    def _parts(self) -> Parts:
        """Rows and bytes per row of what one rank sends another of a layer."""
        w13, w2 = (self._pair.ep.expert_modules[0].w13_weight, self._pair.ep.expert_modules[0].w2_weight)
        (local, _, hidden), inter, size = w13.shape, w2.shape[2] // self._ranks, w13.element_size()
        return (2 * local, inter * hidden * size), (local * hidden, inter * size)

    @property
    def _ranks(self) -> int:
        return dist.get_world_size(self._group)
