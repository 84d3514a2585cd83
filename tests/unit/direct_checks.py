"""The direct mover's Triton kernels in Triton's interpreter, all ranks in one process (a program).

`TRITON_INTERPRET=1 python direct_checks.py`. The variable counts when Triton is first imported, hence the process of
its own. Raises AssertionError if something does not hold.
"""

from __future__ import annotations

import itertools
import threading
import time

import torch
from triton.runtime import interpreter

from benchmarks import kv_slots
from moebius.engine.memory import SlotSizes, UnifiedBuffer
from moebius.kernels import peer_triton
from moebius.kernels.direct import DirectMover
from moebius.kernels.experts import TritonCopy
from moebius.kernels.kv import PageMover, PageWay, run_of
from moebius.kernels.plan import kv_head_ranges
from moebius.kernels.rooms import commit_order
from moebius.kernels.signals import launch_signal
from tests.unit import direct_model as model
from tests.unit.direct_model import Shape, Slots


class Nothing:
    """All ranks run in turn, so there is nobody to wait for."""

    def barrier(self) -> None:
        """Returns at once."""


# Every choice of `PageWay` that changes what the kernel does, alone and together.
WAYS = (PageWay(runs=True), PageWay(programs_per_sm=3), PageWay(runs=True, programs_per_sm=2, streaming=True, warps=2))


def movers_of(storages: list[torch.Tensor], way: PageWay | None = None) -> list[DirectMover]:
    movers = []
    for rank in range(len(storages)):
        b = model.buffers_of(storages, rank)
        experts, pages = TritonCopy(b.bases, rank, b.device), PageMover(b.bases, rank, b.device, way)
        movers.append(DirectMover(b, experts, pages, Nothing()))
    return movers


def check_move(shape: Shape, to_tp: bool, seed: int, tokens_first: bool = False, way: PageWay | None = None) -> None:
    """A whole move, experts and KV, from poisoned targets; every byte of all buffers against the plan."""
    storages = [torch.empty(shape.numel, dtype=torch.int16) for _ in range(shape.ranks)]
    slots = [Slots(shape, storage, tokens_first) for storage in storages]
    for rank, own in enumerate(slots):
        model.fill(own, "EP" if to_tp else "TP", rank, seed)
    table = model.page_table(shape, seed, fresh=not to_tp)
    pages, ranges = model.page_pairs(table, to_tp), kv_head_ranges(shape.kv_heads, shape.ranks)
    movers = movers_of(storages, way)
    nothing = torch.empty(0, dtype=torch.int64)
    for mover, own in zip(movers, slots, strict=True):  # compiling moves nothing
        mover.prepare_kv(own.kv("EP", 0), own.kv("TP", 0), ranges)
        moves = mover._expert_moves(own.experts("EP", 0), own.experts("TP", 0), True)
        mover._experts.compile(*moves)  # type: ignore[attr-defined]
        assert mover.kv_ep_to_tp(own.kv("EP", 0), own.kv("TP", 0), [(nothing, nothing)] * shape.ranks, ranges) == 0

    sent = [0] * shape.ranks
    for layer in model.layers_of(shape, to_tp):
        for mover, own in zip(movers, slots, strict=True):
            assert model.move_experts(mover, own, to_tp, layer) == (shape.w13 + shape.w2) * 2 // shape.ranks * (
                shape.ranks - 1
            )
    for layer in model.layers_of(shape, to_tp):
        for rank, (mover, own) in enumerate(zip(movers, slots, strict=True)):
            ep, tp = own.kv("EP", layer), own.kv("TP", layer)
            sent[rank] += (
                mover.kv_ep_to_tp(ep, tp, pages, ranges) if to_tp else mover.kv_tp_to_ep(tp, ep, pages, ranges)
            )
    wanted = model.reference(shape, to_tp, seed, table, tokens_first)
    for rank in range(shape.ranks):
        assert torch.equal(storages[rank], wanted[rank]), f"{shape} {to_tp=} {seed=} {tokens_first=} {way}: {rank=}"

    page_bytes = shape.page[0] * shape.page[1] * 2
    for rank in range(shape.ranks):
        if to_tp:
            heads = table.ep_pages[rank].size * shape.heads * (shape.ranks - 1)
        else:
            copies = max(1, shape.ranks // shape.kv_heads)
            others = [ids[rank % copies :: copies] for owner, ids in enumerate(table.tp_pages) if owner != rank]
            heads = sum(ids.size for ids in others) * shape.heads
        assert sent[rank] == heads * page_bytes * shape.layers


def check_staged(shape: Shape, seed: int, pages: int) -> int:
    """PREPARE (pitched copies, emulated) and COMMIT (the kernel and plain copies) leave the plan's bytes in the slots.

    Staging rooms are the ends of the EP pools' slots: everything outside them must be as after a move at once. Returns
    how many layers were staged.
    """
    storages = [torch.empty(shape.numel, dtype=torch.int16) for _ in range(shape.ranks)]
    slots = [Slots(shape, storage) for storage in storages]
    for rank, own in enumerate(slots):
        model.fill(own, "EP", rank, seed)
    movers, memory = movers_of(storages), model.Memory(storages)
    spans = model.room_spans(shape, pages)
    rooms = [model.rooms_of(shape, storage, spans) for storage in storages]
    for mover, own, room in zip(movers, slots, rooms, strict=True):
        mover._staged.compile(mover._expert_moves(own.experts("EP", 0), own.experts("TP", 0), True))
        mover._staged.send = memory.copy_2d  # type: ignore[method-assign]
        mover.begin_staging()
        for layer, one in enumerate(room):
            sent = mover.stage_experts(*own.experts("EP", layer), *own.experts("TP", layer), one)
            assert sent == (shape.w13 + shape.w2) * 2 // shape.ranks * (shape.ranks - 1)
        mover.end_staging()
    for storage in storages:
        assert not (storage[: shape.expert_slot].view(torch.uint8) != model.POISON).any(), "a target was written"
    staged = len(rooms[0])
    for mover in movers:
        mover.begin_commit(moves_follow=staged < shape.layers)
    for layer in commit_order(staged, shape.layers):
        for mover, own, room in zip(movers, slots, rooms, strict=True):
            model.commit(mover, own, room, layer)
    for mover in movers:
        mover.end_commit()
    wanted = model.reference(shape, True, seed, None)
    for rank in range(shape.ranks):
        for found in (storages[rank], wanted[rank]):
            for start, end in spans:
                found.view(torch.uint8)[start:end] = 0
        assert torch.equal(storages[rank], wanted[rank]), f"{shape}, {staged} layers staged: rank {rank}"
    return staged


def check_variants() -> None:
    """The ways that benchmarks/kv_variants.py measures pass its own check, which finds a byte in the wrong place."""
    shape = kv_slots.Shape(layers=2, heads=4, page_tokens=4, page_width=8, pages=4, live=3)
    sizes = SlotSizes(1, 4096, shape.layers, shape.pages * shape.heads * shape.words * 4)
    everything = list(kv_slots.VARIANTS.values())
    for ranks, variants in ((1, everything), (2, everything), (4, everything[-3:-2])):
        buffers = [UnifiedBuffer(sizes, torch.device("cpu")) for _ in range(ranks)]
        bases = tuple(buffer.storage.data_ptr() for buffer in buffers)
        owns = [kv_slots.Ranks(shape, buffer, bases, rank) for rank, buffer in enumerate(buffers)]
        for variant, to_tp in itertools.product(variants, (True, False)):
            for own in owns:
                own.fill(to_tp)
            for layer, own in itertools.product(owns[0].layers(to_tp), owns):
                mover = PageMover(bases, own.rank, own.device, variant.way)
                kv_slots.launch(own, mover, [part.on(own.device) for part in own.listing(variant, to_tp)], layer, to_tp)
            for own in owns:
                own.check(variant, to_tp)
            owns[0].slot(1)[3] += 1
            try:
                owns[0].check(variant, to_tp)
            except AssertionError:
                continue
            raise RuntimeError("the check did not find a changed word")
    assert owns[0].sent(True) == shape.live * 3 * shape.words * 4 * shape.layers


def check_signal(ranks: int) -> None:
    """Every rank's flags are raised in the right places, and the wait ends when the last peer's flag is up."""
    # A launch changes triton.language for all threads, and changes it back at its end, under ranks that still wait.
    scope = interpreter._patch_lang(peer_triton.signal_kernel.fn)
    try:
        _check_signal(ranks)
    finally:
        scope.restore()


def _check_signal(ranks: int) -> None:
    stride = 32
    flags = [torch.zeros(ranks * stride, dtype=torch.int32) for _ in range(ranks)]
    table = torch.tensor([f.data_ptr() for f in flags])
    for base in (0, 7, (1 << 31) - 2):  # across the wrap of int32 too
        start = base if base < 1 << 31 else base - (1 << 32)
        for f in flags:
            f.zero_()
            f[::stride] = start
        errors: list[BaseException] = []

        def signal(rank: int, step: int = base + 3, errors: list[BaseException] = errors) -> None:
            try:
                launch_signal(table, flags[rank], rank, step)
            except BaseException as error:
                errors.append(error)
                raise

        threads = [threading.Thread(target=signal, args=(r,)) for r in range(ranks)]
        for thread in threads[1:]:
            thread.start()
        time.sleep(0.05)
        assert all(thread.is_alive() for thread in threads[1:]), "a rank did not wait for rank 0"
        assert all(int(f[0]) == start for f in flags)
        threads[0].start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive(), "a rank waits though all flags are up"
        assert not errors, errors
        value = (base + 3 + (1 << 31)) % (1 << 32) - (1 << 31)
        for f in flags:
            assert (f[::stride] == value).all()
            assert not f.view(ranks, stride)[:, 1:].any(), "something beside the flags was written"


def main() -> None:
    torch.set_num_threads(1)
    for ranks in (1, 2, 4, 8):
        shape = Shape(ranks, layers=2)
        for to_tp in (True, False):
            check_move(shape, to_tp, seed=ranks)
    for ranks in (2, 3, 4, 8):
        shape = Shape(ranks, layers=3, kv_heads=ranks, ep_pages=24)
        assert 0 < check_staged(shape, ranks, pages=5) < 3
    assert check_staged(shape, ranks, pages=24) == 3
    for to_tp in (True, False):
        for seed, heads in enumerate((1, 2, 8)):  # replicas, and several heads a rank
            check_move(Shape(4, layers=1, kv_heads=heads, ep_pages=8), to_tp, seed)
        # Odd sizes: units of 2 bytes, rows and pages that need masks; tokens before heads in memory.
        check_move(Shape(2, layers=1, experts_per_rank=1, hidden=5, columns_per_rank=3, page=(3, 5)), to_tp, 11)
        check_move(Shape(2, layers=1, experts_per_rank=1, hidden=6, columns_per_rank=6, page=(3, 6)), to_tp, 12, True)
        check_move(Shape(3, layers=1, kv_heads=3, ep_pages=5), to_tp, 13, True)
        # Rows and pages longer than a tile of 16 KiB.
        wide = Shape(2, 1, 1, hidden=4096, columns_per_rank=4, kv_heads=2, ep_pages=2, page=(48, 256))
        check_move(wide, to_tp, 14)
        for number, way in enumerate(WAYS):
            check_move(Shape(2, layers=2), to_tp, 20 + number, way=way)
            check_move(Shape(4, layers=1, kv_heads=2, ep_pages=8), to_tp, 30 + number, way=way)
            check_move(Shape(2, layers=1, kv_heads=8, page=(3, 6)), to_tp, 40 + number, number == 1, way)
        check_move(wide, to_tp, 50, way=WAYS[2])
    assert run_of(((1, 2, 0), (1, 3, 1), (0, 0, 0), (0, 1, 1))) == 2
    assert run_of(((1, 2, 0), (0, 3, 1))) == run_of(((0, 0, 1), (0, 2, 2))) == 1
    check_variants()
    for ranks in (2, 5):
        check_signal(ranks)
    print("all hold")


if __name__ == "__main__":
    main()
