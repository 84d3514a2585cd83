"""PREPARE and COMMIT: the experts' bytes go to their new ranks while EP still decodes, and only local copies remain.

PREPARE sends what each rank will need from the others into pages withdrawn from its KV pool (moebius.engine.reserve).
The senders only read their experts, so decoding goes on. COMMIT, in the pause, copies from there, and what a rank keeps
for itself, into the slots. Before PREPARE and after COMMIT the pages are ordinary KV pages.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from moebius.engine.config import EngineConfig
from moebius.engine.layout import Layout
from moebius.engine.reserve import Reserve
from moebius.engine.runtime import RuntimePair
from moebius.kernels.collective import Mover

_SPARE_PAGES = 4  # per request


class Staging:
    """Where a switch to TP is prepared. All methods are called on all ranks alike."""

    def __init__(self, pair: RuntimePair, mover: Mover, config: EngineConfig, group: dist.ProcessGroup) -> None:
        self._pair, self._mover, self._group = pair, mover, group
        self.is_ready = False  # the experts' bytes are staged, or on their way
        self.sent = 0  # bytes this rank has sent for the present preparation
        self._reserve: Reserve | None = None
        self.why_not = self._obstacle(config)
        if self.why_not is None:
            self._reserve = Reserve(pair.ep.scheduler.kv_cache_manager.block_pool, self._pages())
            self._room = [self._room_of(layer) for layer in range(len(pair.ep.expert_modules))]
        elif config.prepare == "on":
            raise ValueError(f"engine.prepare is on, but a switch cannot be prepared: {self.why_not}")

    @property
    def withdrawn(self) -> int:
        """KV pages that are out of the pool at present."""
        return 0 if self._reserve is None else self._reserve.withdrawn

    @torch.inference_mode()
    def prepare(self) -> bool:
        """Start sending, if all ranks have the pages free; a collective with one answer for all. EP must be active."""
        if self._reserve is None or self.is_ready:
            return self.is_ready
        ep = self._pair.ep
        # What remains must do for the requests until the switch.
        left = ep.free_pages - self._reserve.pages
        enough = self._reserve.is_free and left >= _SPARE_PAGES * ep.scheduler.get_num_unfinished_requests()
        free = torch.tensor([int(enough)])
        dist.all_reduce(free, op=dist.ReduceOp.MIN, group=self._group)
        if not free.item():
            return False
        self._reserve.withdraw()
        self.is_ready = True
        self._mover.begin_staging()
        layers = zip(self._pair.ep.expert_modules, self._pair.tp.expert_modules, self._room, strict=True)
        self.sent = sum(
            self._mover.stage_experts(ep.w13_weight, ep.w2_weight, tp.w13_weight, tp.w2_weight, room)
            for ep, tp, room in layers
        )
        self._mover.end_staging()
        return True

    @torch.inference_mode()
    def commit(self) -> int:
        """Bring the staged experts into TP's slots, in order with the current stream; bytes that had been sent."""
        assert self._reserve is not None and self.is_ready
        self._mover.begin_commit()
        layers = zip(self._pair.ep.expert_modules, self._pair.tp.expert_modules, self._room, strict=True)
        for ep, tp, room in layers:  # upwards, as ever: a layer's slot is its predecessor's source
            self._mover.commit_experts(ep.w13_weight, ep.w2_weight, tp.w13_weight, tp.w2_weight, room)
        self._mover.end_commit()
        self._end()
        return self.sent

    def drop(self) -> None:
        """Forget what was staged, if anything was: the weights change, or there is no switch."""
        if self.is_ready:
            self._mover.begin_commit()  # nobody writes to the pages any more
            self._end()

    def _end(self) -> None:
        assert self._reserve is not None
        # In stream order behind the copies: whatever is written to these pages next comes later.
        self._reserve.give_back()
        self.is_ready = False

    def _obstacle(self, config: EngineConfig) -> str | None:
        pair, ranks = self._pair, dist.get_world_size(self._group)
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
        if len(pair.ep.expert_modules) > len(pair.ep.kv):
            return "there are more MoE layers than attention layers"
        if kv.stride(0) * kv.element_size() * kv.shape[0] > self._kv_slot(0).numel() or kv.stride(0) != kv[0].numel():
            return "a KV page is not one run of memory"
        usable = pair.ep.usable_pages
        if (self._pages() > usable // 2 and config.prepare == "auto") or self._pages() >= usable:
            return f"it needs {self._pages()} of {usable} KV pages per rank: raise engine.kv_cache_bytes"
        return None

    def _kv_slot(self, layer: int) -> torch.Tensor:
        return self._pair.buffer.kv_slot(Layout.EP, layer)

    def _page_bytes(self) -> int:
        kv = self._pair.ep.kv[0]
        return kv.stride(0) * kv.element_size()

    def _layer_bytes(self) -> int:
        """What one layer receives from all peers."""
        ranks = dist.get_world_size(self._group)
        module = self._pair.ep.expert_modules[0]
        whole = sum(p.numel() * p.element_size() for p in (module.w13_weight, module.w2_weight))
        return whole // ranks * (ranks - 1)

    def _pages(self) -> int:
        return -(-self._layer_bytes() // self._page_bytes())

    def _room_of(self, layer: int) -> torch.Tensor:
        assert self._reserve is not None
        start = self._reserve.first * self._page_bytes()
        return self._kv_slot(layer)[start : start + self._layer_bytes()]
