"""Moves experts and KV by writing straight into the peers' slots over NVLink: no staging memory, no host in the loop.

All ranks have one buffer of the same size and layout, mapped into each other's address space: by file descriptors of
its chunks if it is virtual memory, which can be released and restored, else by CUDA IPC. A tensor of the buffer lies at
the same offset on every rank, so an offset and a rank name a target. Each call is one step: the copies of this rank,
then the barrier of `moebius.kernels.signals`, all in order with the current stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from moebius.kernels.collective import HeadRanges, PagePairs
from moebius.kernels.cuda_calls import CudaError
from moebius.kernels.experts import CopyEngine, ExpertMover, TensorMove, TritonCopy, expert_moves
from moebius.kernels.kv import PageList, PageMover, pages_to_ep, pages_to_tp, span_of
from moebius.kernels.peers import PeerError, PeerMap, gather_of
from moebius.kernels.rooms import Room
from moebius.kernels.signals import Barrier, How, Signals
from moebius.kernels.staged import CommitPlan, StagedExperts, staged_parts
from moebius.kernels.virtual import VirtualMemory
from moebius.kernels.virtual_peers import VirtualPeers

ExpertMoverName = Literal["copy_engine", "triton"]
Experts = tuple[torch.Tensor, torch.Tensor]  # w13, w2
_MEASURED_MOVES = 5
_START_TIMEOUT_S = 120.0  # a peer may be compiling


@dataclass(frozen=True, slots=True)
class Buffers:
    """This rank's buffer and the addresses of all ranks' buffers, each of `nbytes`."""

    rank: int
    bases: tuple[int, ...]
    nbytes: int
    device: torch.device

    @property
    def ranks(self) -> int:
        """Ranks of the group."""
        return len(self.bases)

    def span(self, tensor: torch.Tensor) -> tuple[int, int]:
        """First byte and end of `tensor`, counted from the buffer's start. Raises ValueError if it lies outside."""
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.data_ptr() - self.bases[self.rank]
        end = start + (last + 1) * tensor.element_size()
        if not tensor.numel() or tensor.device != self.device or start < 0 or end > self.nbytes:
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} on {tensor.device} lies at [{start}, {end}) of the buffer on "
                f"{self.device}, which has {self.nbytes} bytes: only tensors inside it can be written by peers"
            )
        return start, end


class DirectMover:
    """`moebius.kernels.collective.Mover` over mapped peer memory. Make it with `DirectMover.connect`.

    Layers must be moved in the order that shifted slots ask for: EP -> TP upwards, TP -> EP downwards, and no earlier
    than all other work of this rank on the buffer is done or in the current stream.

    Every call is collective. When it returns, the copies are in the current stream, behind which all peers' bytes of
    the call have arrived too. Wrong arguments raise ValueError before anything is enqueued; on one rank alone that
    leaves its peers waiting, so treat it as fatal for the group.
    """

    def __init__(self, buffers: Buffers, experts: ExpertMover, pages: PageMover, signals: Barrier) -> None:
        self.buffers = buffers
        self._experts = experts
        self._pages = pages
        self._signals = signals
        self._staged = StagedExperts(buffers.bases, buffers.rank, buffers.device, signals)
        self._peers: PeerMap | VirtualPeers | None = None
        self._group: dist.ProcessGroup | None = None
        self._page_lists: tuple[tuple[object, ...], PageList] | None = None
        self._plans: dict[tuple[object, ...], tuple[TensorMove, TensorMove]] = {}  # of layers seen: their places stay
        self._commits: dict[tuple[int, ...], CommitPlan] = {}  # of layers that were staged, with their last rooms
        self._staging = torch.empty(0, dtype=torch.int64)  # pinned, for the page ids of one move

    @classmethod
    def connect(
        cls,
        storage: torch.Tensor | VirtualMemory,
        group: dist.ProcessGroup,
        *,
        experts: ExpertMoverName = "copy_engine",
        signals: How | None = None,
    ) -> DirectMover:
        """Map all ranks' `storage` (CUDA memory of one size, tensors contiguous); a collective over a CPU group (gloo).

        `experts` is used until `prepare_experts` has measured; `signals` None takes stream operations if they work.
        Raises PeerError on every rank alike if the ranks cannot map each other: use another mover then.
        """
        rank = dist.get_rank(group)
        peers: PeerMap | VirtualPeers
        if isinstance(storage, VirtualMemory):
            peers, nbytes = VirtualPeers.open(storage, rank, gather_of(group)), storage.nbytes
        else:
            peers, nbytes = PeerMap.open(storage, group), storage.numel() * storage.element_size()
        buffers = Buffers(rank, peers.addresses, nbytes, storage.device)
        try:
            flags = Signals.connect(group, storage.device, signals)
        except (CudaError, PeerError):  # on every rank alike
            peers.close(group)
            raise
        mover = cls(
            buffers,
            _make_experts(experts, buffers),
            PageMover(peers.addresses, rank, storage.device),
            flags,
        )
        mover._peers, mover._group = peers, group
        return mover

    @property
    def ways(self) -> dict[str, str]:
        """How experts are moved, how ranks signal each other, and what memory they map, for reports."""
        experts = "triton" if isinstance(self._experts, TritonCopy) else "copy_engine"
        memory = "virtual" if isinstance(self._peers, VirtualPeers) else "plain"
        return {"experts": experts, "signals": getattr(self._signals, "how", "none"), "memory": memory}

    # ---- moves -----------------------------------------------------------------------------------------------------

    def experts_ep_to_tp(
        self, src_w13: torch.Tensor, src_w2: torch.Tensor, dst_w13: torch.Tensor, dst_w2: torch.Tensor
    ) -> int:
        """See `Mover.experts_ep_to_tp`."""
        return self._move_experts((src_w13, src_w2), (dst_w13, dst_w2), to_tp=True)

    def experts_tp_to_ep(
        self, src_w13: torch.Tensor, src_w2: torch.Tensor, dst_w13: torch.Tensor, dst_w2: torch.Tensor
    ) -> int:
        """See `Mover.experts_tp_to_ep`."""
        return self._move_experts((src_w13, src_w2), (dst_w13, dst_w2), to_tp=False)

    def kv_ep_to_tp(self, src_kv: torch.Tensor, dst_kv: torch.Tensor, pages: PagePairs, head_ranges: HeadRanges) -> int:
        """See `Mover.kv_ep_to_tp`. Page tensors must not be written to once they were given."""
        self._check_kv(src_kv, dst_kv, pages, head_ranges)
        return self._move_kv(src_kv, dst_kv, pages, head_ranges, pages_to_tp)

    def kv_tp_to_ep(self, src_kv: torch.Tensor, dst_kv: torch.Tensor, pages: PagePairs, head_ranges: HeadRanges) -> int:
        """See `Mover.kv_tp_to_ep`. Page tensors must not be written to once they were given."""
        self._check_kv(dst_kv, src_kv, pages, head_ranges)
        return self._move_kv(src_kv, dst_kv, pages, head_ranges, pages_to_ep)

    @property
    def stages_in_background(self) -> bool:
        """See `Mover.stages_in_background`: copy engines and peer memory serve beside the model."""
        return True

    def begin_staging(self) -> None:
        """See `Mover.begin_staging`."""
        self._staged.begin()

    def stage_experts(
        self,
        src_w13: torch.Tensor,
        src_w2: torch.Tensor,
        dst_w13: torch.Tensor,
        dst_w2: torch.Tensor,
        room: Room,
    ) -> int:
        """See `Mover.stage_experts`."""
        self._commit_plan((src_w13, src_w2), (dst_w13, dst_w2), room)  # worked out now, not in the pause
        moves = self._expert_moves((src_w13, src_w2), (dst_w13, dst_w2), to_tp=True)
        return self._staged.stage(moves, room)

    def end_staging(self) -> None:
        """See `Mover.end_staging`."""
        self._staged.end()

    def begin_commit(self, moves_follow: bool = False) -> None:
        """See `Mover.begin_commit`."""
        self._staged.begin_commit(moves_follow)

    def commit_experts(
        self,
        src_w13: torch.Tensor,
        src_w2: torch.Tensor,
        dst_w13: torch.Tensor,
        dst_w2: torch.Tensor,
        room: Room,
    ) -> None:
        """See `Mover.commit_experts`: beside what goes over the link between `begin_commit` and `end_commit`."""
        self._staged.commit(self._commit_plan((src_w13, src_w2), (dst_w13, dst_w2), room))

    def end_commit(self) -> None:
        """See `Mover.end_commit`."""
        self._staged.end_commit()

    def place_pages(self, pages: PagePairs, device: torch.device) -> PagePairs:
        """See `Mover.place_pages`: on the host, where ids are checked without waiting for the device."""
        del device
        return pages

    def finish(self, timeout_s: float = 60.0) -> None:
        """Block until the current stream is done. Raises PeerTimeout after `timeout_s`; the mover is then unusable."""
        if isinstance(self._signals, Signals):
            self._signals.wait_on_host(timeout_s)

    # ---- at start --------------------------------------------------------------------------------------------------

    def warm_up(self, nbytes: int, device: torch.device | str) -> None:
        """Signal once, which compiles and loads what that needs; a collective. The rest is `prepare_experts`, `_kv`."""
        del nbytes, device  # there is no staging memory to size
        self._signals.barrier()
        self.finish(_START_TIMEOUT_S)

    def prepare_experts(self, ep: Experts, tp: Experts) -> dict[str, float]:
        """Choose the faster expert mover by moving a layer EP -> TP; a collective. Returns ms by mover.

        `ep` is only read. `tp` must be a slot that nobody uses, and gets the layer's TP bytes: with EP active, give
        layer 0 of both layouts. Compiles the kernel of both directions.
        """
        engine, triton = (_make_experts(name, self.buffers) for name in ("copy_engine", "triton"))
        assert isinstance(triton, TritonCopy)
        for to_tp, source, target in ((True, ep, tp), (False, tp, ep)):
            triton.compile(*self._expert_moves(source, target, to_tp))
        moves = self._expert_moves(ep, tp, to_tp=True)
        self._staged.compile(moves)
        times = {"copy_engine": self._time(engine, moves), "triton": self._time(triton, moves)}
        times = {name: self._slowest(ms) for name, ms in times.items()}
        # Of two that are equally fast, the copy engine leaves the SMs alone.
        self._experts = triton if times["triton"] < 0.97 * times["copy_engine"] else engine
        return times

    def prepare_kv(self, ep_kv: torch.Tensor, tp_kv: torch.Tensor, head_ranges: HeadRanges) -> None:
        """Compile and load the page kernel of both directions for pools like these, without moving anything.

        Also makes room for the page ids of a full pool: pinning memory during a move would take long.
        """
        device = self.buffers.device
        none = torch.empty(0, dtype=torch.int64)
        pages = [(none, none)] * self.buffers.ranks
        for source, target, listed in ((ep_kv, tp_kv, pages_to_tp), (tp_kv, ep_kv, pages_to_ep)):
            listing = listed(pages, head_ranges, self.buffers.rank).on(device)
            self._pages.move(source, target, self.buffers.span(target)[0], listing, limit=0)
        self.finish(_START_TIMEOUT_S)
        most = 3 * max(ep_kv.shape[0] * self.buffers.ranks, tp_kv.shape[0])
        self._staging = torch.empty(most, dtype=torch.int64, pin_memory=device.type == "cuda")

    # ---- sleep -----------------------------------------------------------------------------------------------------

    def before_release(self) -> None:
        """See `Mover.before_release`. Flags stay mapped."""
        if isinstance(self._peers, VirtualPeers):
            self._peers.unmap()
            self._peers.barrier()

    def after_restore(self) -> None:
        """See `Mover.after_restore`. Raises PeerError on every rank alike if the peers cannot be mapped again."""
        if isinstance(self._peers, VirtualPeers):
            self._peers.map()

    def close(self) -> None:
        """Unmap all peers; a collective, after which every rank may free its buffer."""
        if self._peers is not None and self._group is not None and isinstance(self._signals, Signals):
            self._signals.close(self._group)
            self._peers.close(self._group)
            self._peers = None

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _move_experts(self, source: Experts, target: Experts, to_tp: bool) -> int:
        moves = self._expert_moves(source, target, to_tp)
        self._experts.move(*moves)
        self._signals.barrier()
        return sum(move.rows * move.width for move in moves) * (self.buffers.ranks - 1)

    def _expert_moves(
        self, source: Experts, target: Experts, to_tp: bool, rank: int | None = None
    ) -> tuple[TensorMove, TensorMove]:
        """The part of `rank` (None: this one) in the plan between checked tensors."""
        rank = self.buffers.rank if rank is None else rank
        key = (to_tp, rank, *((t.data_ptr(), t.shape, t.stride(), t.dtype) for t in (*source, *target)))
        if key not in self._plans:
            self._plans[key] = self._checked_moves(source, target, to_tp, rank)
        return self._plans[key]

    def _commit_plan(self, source: Experts, target: Experts, room: Room) -> CommitPlan:
        key = tuple(tensor.data_ptr() for tensor in (*source, *target))
        kept = self._commits.get(key)
        if kept is None or kept.room is not room:
            if self.buffers.span(room.memory)[0] != 0:
                raise ValueError("rooms for staging must be given with all of the buffer as their memory")
            of_ranks = [self._expert_moves(source, target, True, rank) for rank in range(self.buffers.ranks)]
            room.check(staged_parts(of_ranks[self.buffers.rank]), self.buffers.ranks)
            starts = [self.buffers.span(tensor)[0] for tensor in target]
            kept = self._commits[key] = self._staged.plan_commit(of_ranks, target, starts, room)
        return kept

    def _checked_moves(self, source: Experts, target: Experts, to_tp: bool, rank: int) -> tuple[TensorMove, TensorMove]:
        (w13, w2), tp, ranks = (source, target, self.buffers.ranks) if to_tp else (target, source, self.buffers.ranks)
        local, rows, hidden = w13.shape
        inter = rows // 2
        shapes = [
            (local, 2 * inter, hidden),
            (local, hidden, inter),
            (local * ranks, 2 * (inter // ranks), hidden),
            (local * ranks, hidden, inter // ranks),
        ]
        tensors = [w13, w2, *tp]
        if inter % ranks or any(
            tuple(t.shape) != shape or not t.is_contiguous() for t, shape in zip(tensors, shapes, strict=True)
        ):
            found = [tuple(t.shape) for t in tensors]
            raise ValueError(f"experts must be contiguous with shapes {shapes}, found {found}")
        if len({t.dtype for t in tensors}) != 1:
            raise ValueError(f"experts of both layouts must share one dtype, found {[t.dtype for t in tensors]}")
        spans = self._apart(source, target)
        moves = expert_moves(local * ranks, hidden, inter, ranks, rank, w13.element_size(), to_tp)
        return moves[0].placed(spans[0], spans[2]), moves[1].placed(spans[1], spans[3])

    def _apart(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> list[int]:
        """Offsets of all tensors in the buffer. Raises ValueError if a target overlaps a source."""
        spans = [self.buffers.span(tensor) for tensor in (*sources, *targets)]
        for start, end in spans[: len(sources)]:
            for other, other_end in spans[len(sources) :]:
                if start < other_end and other < end:
                    raise ValueError(
                        f"source [{start}, {end}) and target [{other}, {other_end}) of a move overlap in the buffer; "
                        "the target layout must use slots shifted by one against the source"
                    )
        return [start for start, _ in spans]

    def _move_kv(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        pages: PagePairs,
        head_ranges: HeadRanges,
        listed: Callable[[PagePairs, HeadRanges, int], PageList],
    ) -> int:
        _, target_offset = self._apart((source,), (target,))
        if not any(ids.numel() for ids, _ in pages):
            return 0  # the lists are the same everywhere, so every rank leaves the step out
        key = (listed, tuple(map(tuple, head_ranges)), source.shape, target.shape, *(id(t) for p in pages for t in p))
        if self._page_lists is None or self._page_lists[0][:-1] != key:
            on_host = listed(pages, head_ranges, self.buffers.rank)
            _check_ids(on_host, source, target)
            staging = self._staging if 3 * on_host.pages <= self._staging.numel() else None
            listing = on_host.on(self.buffers.device, staging)
            self._page_lists = ((*key, list(pages)), listing)  # the tensors are kept, so that their ids stay theirs
        listing = self._page_lists[1]
        self._pages.move(source, target, target_offset, listing)
        self._signals.barrier()
        return listing.peer_heads * source.shape[2] * source.shape[3] * source.element_size()

    def _check_kv(self, ep: torch.Tensor, tp: torch.Tensor, pages: PagePairs, head_ranges: HeadRanges) -> None:
        ranks = self.buffers.ranks
        if len(pages) != ranks or len(head_ranges) != ranks:
            raise ValueError(f"need page lists and head ranges of {ranks} ranks, got {len(pages)}, {len(head_ranges)}")
        for rank, (source, target) in enumerate(pages):
            if source.numel() != target.numel():
                raise ValueError(f"rank {rank} lists {source.numel()} source but {target.numel()} target pages")
        widths = {stop - start for start, stop in head_ranges}
        if len(widths) != 1 or any(not 0 <= start < stop <= ep.shape[1] for start, stop in head_ranges):
            raise ValueError(f"head ranges {list(head_ranges)} do not fit {ep.shape[1]} KV heads in equal parts")
        if tp.shape[1] not in widths or tp.shape[2:] != ep.shape[2:] or tp.dtype != ep.dtype:
            raise ValueError(
                f"TP pool {tuple(tp.shape)} {tp.dtype} does not match EP pool {tuple(ep.shape)} {ep.dtype} "
                f"with {widths.pop()} heads per rank"
            )

    def _time(self, experts: ExpertMover, moves: tuple[TensorMove, TensorMove]) -> float:
        """Median ms of one step on this rank's device, the first not counted."""
        times = []
        for _ in range(_MEASURED_MOVES + 1):
            self._signals.barrier()  # all ranks begin together
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record()
            experts.move(*moves)
            self._signals.barrier()
            ended.record()
            self.finish(_START_TIMEOUT_S)
            times.append(begun.elapsed_time(ended))
        return sorted(times[1:])[_MEASURED_MOVES // 2]

    def _slowest(self, ms: float) -> float:
        if self._group is None:
            return ms
        found: list[float] = [0.0] * self.buffers.ranks
        dist.all_gather_object(found, ms, group=self._group)
        return max(found)


def _make_experts(name: str, buffers: Buffers) -> ExpertMover:
    kind = CopyEngine if name == "copy_engine" else TritonCopy
    return kind(buffers.bases, buffers.rank, buffers.device)


def _check_ids(listing: PageList, source: torch.Tensor, target: torch.Tensor) -> None:
    """A page id outside its pool would write anywhere in a peer's memory: look at them once per switch."""
    if not listing.pages:
        return
    for name, ids, pool in (("source", listing.src_pages, source), ("target", listing.dst_pages, target)):
        low, high = span_of(ids)
        if low < 0 or high >= pool.shape[0]:
            raise ValueError(f"{name} page ids reach from {low} to {high}, the pool has pages 0 to {pool.shape[0] - 1}")
