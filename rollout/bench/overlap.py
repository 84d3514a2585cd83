"""The collective mover at its best, to be compared with: packing of one tensor goes on beside the exchange of another.

Imports torch: import it in rank processes only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from moebius.kernels.collective import CollectiveMover


class OverlappedMover(CollectiveMover):
    """Experts by `all_to_all_single` from two staging buffers in turn. What a call moves is there after `flush`.

    Layers in the order that shifted slots ask for: a tensor is packed, or unpacked, only when what its slot held before
    has been exchanged.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._turn = 0
        self._pending: dict[int, tuple[Any, Callable[[], object]]] = {}  # by buffer

    def experts_ep_to_tp(
        self, src_w13: torch.Tensor, src_w2: torch.Tensor, dst_w13: torch.Tensor, dst_w2: torch.Tensor
    ) -> int:
        """See `Mover.experts_ep_to_tp`."""
        self._check_experts((src_w13, src_w2), (dst_w13, dst_w2))
        sent = 0
        for (ep, by_target), tp in zip(self._cuts(src_w13, src_w2), (dst_w13, dst_w2), strict=True):
            buffer = self._next_buffer()
            send = self._stage(f"overlap {buffer}", by_target.shape, ep.dtype, ep.device)
            send.copy_(by_target)
            self._pending[buffer] = (self._launch(tp, send), lambda: None)
            sent += self._to_peers(ep)
        return sent

    def experts_tp_to_ep(
        self, src_w13: torch.Tensor, src_w2: torch.Tensor, dst_w13: torch.Tensor, dst_w2: torch.Tensor
    ) -> int:
        """See `Mover.experts_tp_to_ep`."""
        self._check_experts((dst_w13, dst_w2), (src_w13, src_w2))
        sent = 0
        for (ep, by_source), tp in zip(self._cuts(dst_w13, dst_w2), (src_w13, src_w2), strict=True):
            buffer = self._next_buffer()
            received = self._stage(f"overlap {buffer}", by_source.shape, ep.dtype, ep.device)
            work = self._launch(received, tp)
            self._finish_buffer(1 - buffer)  # unpacked beside this exchange
            self._pending[buffer] = (work, partial(by_source.copy_, received))
            sent += self._to_peers(tp)
        return sent

    def flush(self) -> None:
        """Put what the calls so far have moved in order with the current stream."""
        for buffer in list(self._pending):
            self._finish_buffer(buffer)

    def _next_buffer(self) -> int:
        self._turn = 1 - self._turn
        self._finish_buffer(self._turn)
        return self._turn

    def _finish_buffer(self, buffer: int) -> None:
        work, unpack = self._pending.pop(buffer, (None, lambda: None))
        if work is not None:
            work.wait()  # on CUDA only the stream waits
        unpack()

    def _launch(self, received: torch.Tensor, send: torch.Tensor) -> Any:
        return dist.all_to_all_single(
            received.view(-1).view(torch.uint8), send.view(-1).view(torch.uint8), group=self._group, async_op=True
        )
