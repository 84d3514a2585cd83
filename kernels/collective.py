"""Moves experts and KV with one all-to-all per tensor, over NCCL or gloo: the reference for faster movers.

Every call is collective: all ranks of the group make the same calls in the same order. One layer per call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from moebius.kernels.rooms import Parts, Room

PagePairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
HeadRanges = Sequence[tuple[int, int]]


class Mover(Protocol):
    """Moves one layer's bytes between the ranks of a switch group. Shapes: see `moebius.kernels.plan`."""

    def warm_up(self, nbytes: int, device: torch.device | str) -> None:
        """Do beforehand what a first move would take time for; `nbytes` is the largest expert tensor of a rank."""
        ...

    def experts_ep_to_tp(
        self, src_w13: torch.Tensor, src_w2: torch.Tensor, dst_w13: torch.Tensor, dst_w2: torch.Tensor
    ) -> int:
        """Reshard one layer's experts EP -> TP. Returns the bytes this rank sent to its peers."""
        ...

    def experts_tp_to_ep(
        self, src_w13: torch.Tensor, src_w2: torch.Tensor, dst_w13: torch.Tensor, dst_w2: torch.Tensor
    ) -> int:
        """Reshard one layer's experts TP -> EP. Returns the bytes this rank sent to its peers."""
        ...

    def kv_ep_to_tp(self, src_kv: torch.Tensor, dst_kv: torch.Tensor, pages: PagePairs, head_ranges: HeadRanges) -> int:
        """Bring one layer's live pages to every TP rank. Returns the bytes this rank sent to its peers.

        `pages[r]` are rank r's (source page ids in its EP pool, target page ids), int64 and of equal length, the same
        lists on every rank; `head_ranges[r]` are the KV heads [start, stop) that TP rank r holds.
        """
        ...

    def kv_tp_to_ep(self, src_kv: torch.Tensor, dst_kv: torch.Tensor, pages: PagePairs, head_ranges: HeadRanges) -> int:
        """Bring one layer's live pages from all TP ranks to their owners. Returns the bytes this rank sent to peers.

        `pages[r]` are (source page ids in the TP pool, target page ids in rank r's EP pool) of rank r's requests, the
        same lists on every rank. TP ranks that hold the same heads take turns at the pages.
        """
        ...

    @property
    def stages_in_background(self) -> bool:
        """Whether staging goes on while the device computes something else."""
        ...

    def begin_staging(self) -> None:
        """Before the first `stage_experts`: what is in the current stream by now must be done on all ranks first."""
        ...

    def stage_experts(
        self,
        src_w13: torch.Tensor,
        src_w2: torch.Tensor,
        dst_w13: torch.Tensor,
        dst_w2: torch.Tensor,
        room: Room,
    ) -> int:
        """Send one layer's experts to where TP needs them, into the peers' `room`; returns the bytes sent.

        The room's pieces are the same on every rank. The targets are not written to; their shapes count. Raises
        ValueError if the room does not fit the experts.
        """
        ...

    def end_staging(self) -> None:
        """After the last `stage_experts`."""
        ...

    def begin_commit(self, moves_follow: bool = False) -> None:
        """Before `commit_experts`, or in place of it: wait, in stream order, for all staging to end.

        `moves_follow`: layers that are not staged are moved by `experts_ep_to_tp` between this and `end_commit`, in any
        order with those that are, each kind upwards. See `moebius.kernels.rooms`.
        """
        ...

    def commit_experts(
        self,
        src_w13: torch.Tensor,
        src_w2: torch.Tensor,
        dst_w13: torch.Tensor,
        dst_w2: torch.Tensor,
        room: Room,
    ) -> None:
        """What `experts_ep_to_tp` does, by local copies: from `room`, and from the sources what is not in it."""
        ...

    def end_commit(self) -> None:
        """After the last layer: all are in order with the current stream, and peers may write here again."""
        ...

    def place_pages(self, pages: PagePairs, device: torch.device) -> PagePairs:
        """Page ids from the host, once for all layers, where `kv_ep_to_tp` and `kv_tp_to_ep` take them best."""
        ...

    def finish(self) -> None:
        """Block until all bytes of the calls so far, sent and received, are in place."""
        ...

    def before_release(self) -> None:
        """Let go of the memory it moves, and of its own, so that all ranks may release theirs; a collective.

        Nothing may be moved until `after_restore`.
        """
        ...

    def after_restore(self) -> None:
        """Be ready again, all memory being back at its old addresses; a collective."""
        ...

    def close(self) -> None:
        """Give back what the mover holds; a collective, before the memory it moves is freed."""
        ...


class CollectiveMover:
    """`Mover` by `all_to_all_single` over staging memory that grows to the largest call and is then kept.

    Source and target must not overlap (slots shifted by one see to that): overlap is a ValueError, as are tensors of
    unexpected shape. Such an error on one rank alone leaves its peers waiting, so treat it as fatal for the group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._ranks = dist.get_world_size(group)
        self._rank = dist.get_rank(group)
        if self._rank < 0:
            raise ValueError("this process is not a member of the mover's process group")
        self._staging: dict[str, torch.Tensor] = {}
        self._released: dict[str, tuple[int, torch.device]] = {}

    def warm_up(self, nbytes: int, device: torch.device | str) -> None:
        """Allocate staging memory for calls of up to `nbytes` per tensor, and exchange it once; a collective.

        Afterwards such a call allocates nothing, and NCCL has made its connections, which takes longer than a switch.
        """
        size = -(-nbytes // self._ranks) * self._ranks
        send, received = (self._stage(name, (size,), torch.uint8, torch.device(device)) for name in ("send", "receive"))
        self._exchange(received, send)

    def experts_ep_to_tp(
        self, src_w13: torch.Tensor, src_w2: torch.Tensor, dst_w13: torch.Tensor, dst_w2: torch.Tensor
    ) -> int:
        """See `Mover.experts_ep_to_tp`."""
        self._check_experts((src_w13, src_w2), (dst_w13, dst_w2))
        sent = 0
        for (ep, by_target), tp in zip(self._cuts(src_w13, src_w2), (dst_w13, dst_w2), strict=True):
            send = self._stage("send", by_target.shape, ep.dtype, ep.device)
            send.copy_(by_target)
            self._exchange(tp, send)  # what rank r sends is the r-th contiguous block of the TP tensor
            sent += self._to_peers(ep)
        return sent

    def experts_tp_to_ep(
        self, src_w13: torch.Tensor, src_w2: torch.Tensor, dst_w13: torch.Tensor, dst_w2: torch.Tensor
    ) -> int:
        """See `Mover.experts_tp_to_ep`."""
        self._check_experts((dst_w13, dst_w2), (src_w13, src_w2))
        sent = 0
        for (ep, by_source), tp in zip(self._cuts(dst_w13, dst_w2), (src_w13, src_w2), strict=True):
            received = self._stage("receive", by_source.shape, ep.dtype, ep.device)
            self._exchange(received, tp)
            by_source.copy_(received)
            sent += self._to_peers(tp)
        return sent

    def kv_ep_to_tp(self, src_kv: torch.Tensor, dst_kv: torch.Tensor, pages: PagePairs, head_ranges: HeadRanges) -> int:
        """See `Mover.kv_ep_to_tp`. Target page ids must differ from each other; shared source pages may repeat."""
        counts = [int(source.numel()) for source, _ in pages]
        widths = [stop - start for start, stop in head_ranges]
        self._check_kv(src_kv, dst_kv, pages, head_ranges)
        if not sum(counts):
            return 0  # the lists are the same everywhere, so every rank leaves the collective out
        page_shape = tuple(src_kv.shape[2:])
        per_head = page_shape[0] * page_shape[1]
        mine, heads = counts[self._rank], widths[self._rank]

        send = self._stage("send", (mine * sum(widths) * per_head,), src_kv.dtype, src_kv.device)
        own_pages = pages[self._rank][0].to(src_kv.device)
        blocks = send.split([mine * width * per_head for width in widths])
        for block, (start, stop) in zip(blocks if mine else (), head_ranges, strict=False):
            out = block.view(mine, stop - start, *page_shape)
            torch.index_select(src_kv[:, start:stop], 0, own_pages, out=out)

        received = self._stage("receive", (sum(counts) * heads * per_head,), dst_kv.dtype, dst_kv.device)
        receive_sizes = [count * heads * per_head for count in counts]
        self._exchange(received, send, receive_sizes, [block.numel() for block in blocks])
        for block, count, (_, target) in zip(received.split(receive_sizes), counts, pages, strict=True):
            if count:
                dst_kv.index_copy_(0, target.to(dst_kv.device), block.view(count, heads, *page_shape))
        return mine * (sum(widths) - heads) * per_head * src_kv.element_size()

    def kv_tp_to_ep(self, src_kv: torch.Tensor, dst_kv: torch.Tensor, pages: PagePairs, head_ranges: HeadRanges) -> int:
        """See `Mover.kv_tp_to_ep`."""
        counts = [int(source.numel()) for source, _ in pages]
        self._check_kv(dst_kv, src_kv, [(target, source) for source, target in pages], head_ranges)
        if not sum(counts):
            return 0
        copies = sum(heads == head_ranges[self._rank] for heads in head_ranges)  # ranks that hold the same heads
        widths = [stop - start for start, stop in head_ranges]
        page_shape = tuple(src_kv.shape[2:])
        per_head = page_shape[0] * page_shape[1]
        heads = widths[self._rank]

        parts = [source[self._rank % copies :: copies] for source, _ in pages]
        send_sizes = [int(part.numel()) * heads * per_head for part in parts]
        send = self._stage("send", (sum(send_sizes),), src_kv.dtype, src_kv.device)
        for block, part in zip(send.split(send_sizes), parts, strict=True):
            if part.numel():
                out = block.view(part.numel(), heads, *page_shape)
                torch.index_select(src_kv, 0, part.to(src_kv.device), out=out)

        target = pages[self._rank][1].to(dst_kv.device)
        targets = [target[rank % copies :: copies] for rank in range(self._ranks)]
        receive_sizes = [int(ids.numel()) * w * per_head for ids, w in zip(targets, widths, strict=True)]
        received = self._stage("receive", (sum(receive_sizes),), dst_kv.dtype, dst_kv.device)
        self._exchange(received, send, receive_sizes, send_sizes)
        for block, ids, (start, stop) in zip(received.split(receive_sizes), targets, head_ranges, strict=True):
            if ids.numel():
                dst_kv[:, start:stop].index_copy_(0, ids, block.view(ids.numel(), stop - start, *page_shape))
        return (sum(send_sizes) - send_sizes[self._rank]) * src_kv.element_size()

    @property
    def stages_in_background(self) -> bool:
        """See `Mover.stages_in_background`: it is a collective like those of the model itself."""
        return False

    def begin_staging(self) -> None:
        """See `Mover.begin_staging`: all is in order with the current stream."""

    def stage_experts(
        self,
        src_w13: torch.Tensor,
        src_w2: torch.Tensor,
        dst_w13: torch.Tensor,
        dst_w2: torch.Tensor,
        room: Room,
    ) -> int:
        """See `Mover.stage_experts`."""
        self._check_experts((src_w13, src_w2), (dst_w13, dst_w2))
        room.check(self._parts(src_w13, src_w2), self._ranks)
        sent = 0
        for part, (ep, by_target) in enumerate(self._cuts(src_w13, src_w2)):
            send = self._stage("send", by_target.shape, ep.dtype, ep.device)
            send.copy_(by_target)
            received = self._stage("receive", (self._ranks, ep.numel() // self._ranks), ep.dtype, ep.device)
            self._exchange(received, send)
            self._through_room(room, part, received.view(torch.uint8), into=True)
            sent += self._to_peers(ep)
        return sent

    def end_staging(self) -> None:
        """See `Mover.end_staging`."""

    def begin_commit(self, moves_follow: bool = False) -> None:
        """See `Mover.begin_commit`: all is in order with the current stream."""

    def commit_experts(
        self,
        src_w13: torch.Tensor,
        src_w2: torch.Tensor,
        dst_w13: torch.Tensor,
        dst_w2: torch.Tensor,
        room: Room,
    ) -> None:
        """See `Mover.commit_experts`."""
        self._check_experts((src_w13, src_w2), (dst_w13, dst_w2))
        room.check(self._parts(src_w13, src_w2), self._ranks)
        for part, ((_, by_target), tp) in enumerate(zip(self._cuts(src_w13, src_w2), (dst_w13, dst_w2), strict=True)):
            blocks = tp.view(self._ranks, -1)
            if not room.whole:
                blocks[self._rank].view(by_target.shape[1:]).copy_(by_target[self._rank])
            self._through_room(room, part, blocks.view(torch.uint8), into=False)

    def end_commit(self) -> None:
        """See `Mover.end_commit`: peers write by collectives only, in which this rank takes part."""

    def _parts(self, w13: torch.Tensor, w2: torch.Tensor) -> Parts:
        """Rows and bytes per row of one rank's blocks in TP."""
        (local, rows, hidden), inter, size = w13.shape, w2.shape[2] // self._ranks, w13.element_size()
        del rows
        return (2 * local, inter * hidden * size), (local * hidden, inter * size)

    def _through_room(self, room: Room, part: int, blocks: torch.Tensor, into: bool) -> None:
        """Copy blocks (ranks, bytes) of all peers into the room, or out of it."""
        for piece in room.pieces:
            if piece.part == part:
                begin, end = room.rows(piece)
                outside, inside = blocks[(self._rank + 1 + piece.block) % self._ranks, begin:end], room.place(piece)
                if into:
                    inside.copy_(outside)
                else:
                    outside.copy_(inside)

    def place_pages(self, pages: PagePairs, device: torch.device) -> PagePairs:
        """See `Mover.place_pages`: on the device, where pages are gathered and scattered."""
        return [(source.to(device), target.to(device)) for source, target in pages]

    def finish(self) -> None:
        """See `Mover.finish`."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def before_release(self) -> None:
        """See `Mover.before_release`: staging memory goes back to torch's allocator."""
        self.finish()
        self._released = {name: (kept.numel(), kept.device) for name, kept in self._staging.items()}
        self._staging.clear()

    def after_restore(self) -> None:
        """See `Mover.after_restore`: the same staging memory, so that a move allocates nothing."""
        for name, (nbytes, device) in self._released.items():
            self._stage(name, (nbytes,), torch.uint8, device)
        self._released.clear()

    def close(self) -> None:
        """See `Mover.close`: staging memory goes with this object."""
        self._staging.clear()

    def _cuts(self, ep_w13: torch.Tensor, ep_w2: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """EP tensors with views of them whose first axis is the TP rank and whose rest is that rank's block."""
        local, _, hidden = ep_w13.shape
        part = ep_w2.shape[2] // self._ranks
        w13 = ep_w13.view(local, 2, self._ranks, part, hidden).permute(2, 0, 1, 3, 4)
        w2 = ep_w2.view(local, hidden, self._ranks, part).permute(2, 0, 1, 3)
        return [(ep_w13, w13), (ep_w2, w2)]

    def _exchange(
        self,
        received: torch.Tensor,
        send: torch.Tensor,
        receive_sizes: Sequence[int] | None = None,
        send_sizes: Sequence[int] | None = None,
    ) -> None:
        """All-to-all of flat contiguous memory, as bytes so that every dtype passes unchanged on every backend."""
        size = send.element_size()
        dist.all_to_all_single(
            received.view(-1).view(torch.uint8),
            send.view(-1).view(torch.uint8),
            output_split_sizes=[n * size for n in receive_sizes] if receive_sizes is not None else None,
            input_split_sizes=[n * size for n in send_sizes] if send_sizes is not None else None,
            group=self._group,
        )

    def _stage(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A contiguous tensor in kept memory; its content is whatever the last call left."""
        size = int(torch.Size(shape).numel()) * dtype.itemsize
        kept = self._staging.get(name)
        if kept is None or kept.numel() < size or kept.device != device:
            kept = self._staging[name] = torch.empty(size, dtype=torch.uint8, device=device)
        return kept[:size].view(dtype).view(tuple(shape))

    def _to_peers(self, tensor: torch.Tensor) -> int:
        return tensor.numel() * tensor.element_size() // self._ranks * (self._ranks - 1)

    def _check_experts(self, ep: tuple[torch.Tensor, torch.Tensor], tp: tuple[torch.Tensor, torch.Tensor]) -> None:
        (local, rows, hidden), ranks = ep[0].shape, self._ranks
        inter = rows // 2
        wanted = [
            (ep[0], (local, 2 * inter, hidden)),
            (ep[1], (local, hidden, inter)),
            (tp[0], (local * ranks, 2 * (inter // ranks), hidden)),
            (tp[1], (local * ranks, hidden, inter // ranks)),
        ]
        if inter % ranks or any(tuple(t.shape) != shape or not t.is_contiguous() for t, shape in wanted):
            found = [tuple(t.shape) for t, _ in wanted]
            raise ValueError(f"experts must be contiguous with shapes {[s for _, s in wanted]}, found {found}")
        if len({t.dtype for t in ep + tp}) != 1:
            raise ValueError(f"experts of both layouts must share one dtype, found {[t.dtype for t in ep + tp]}")
        _check_apart(ep, tp)

    def _check_kv(self, src_kv: torch.Tensor, dst_kv: torch.Tensor, pages: PagePairs, head_ranges: HeadRanges) -> None:
        if len(pages) != self._ranks or len(head_ranges) != self._ranks:
            raise ValueError(
                f"need page lists and head ranges of {self._ranks} ranks, got {len(pages)}, {len(head_ranges)}"
            )
        for rank, (source, target) in enumerate(pages):
            if source.numel() != target.numel():
                raise ValueError(f"rank {rank} lists {source.numel()} source but {target.numel()} target pages")
        if any(not 0 <= start < stop <= src_kv.shape[1] for start, stop in head_ranges):
            raise ValueError(f"head ranges {list(head_ranges)} do not fit the {src_kv.shape[1]} KV heads of the source")
        start, stop = head_ranges[self._rank]
        if dst_kv.shape[1] != stop - start or dst_kv.shape[2:] != src_kv.shape[2:] or dst_kv.dtype != src_kv.dtype:
            raise ValueError(
                f"KV target {tuple(dst_kv.shape)} {dst_kv.dtype} does not match heads {start}..{stop} of the source "
                f"{tuple(src_kv.shape)} {src_kv.dtype}"
            )
        _check_apart((src_kv,), (dst_kv,))


def staging_index(source: int, target: int, ranks: int) -> int:
    """Which block of rank `target`'s staging room is rank `source`'s; its own is the last one, where there is one."""
    return (source - target - 1) % ranks


def _check_apart(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    for source in sources:
        for target in targets:
            (a, a_end), (b, b_end) = _address_range(source), _address_range(target)
            if source.device == target.device and a < b_end and b < a_end:
                raise ValueError(
                    f"source [{a:#x}, {a_end:#x}) and target [{b:#x}, {b_end:#x}) of a move overlap; the target layout "
                    "must use slots shifted by one against the source"
                )


def _address_range(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and end of the memory a (possibly strided) tensor reaches; empty for a tensor without elements."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
