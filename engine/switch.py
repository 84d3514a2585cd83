"""The switch: live requests, their KV and the experts go from one runtime to the other, between two iterations.

Phases, in order: drain (the pass in flight, while the device still decodes: no part of the pause), quiesce, decide
(capacity, nothing in flight), reshard (experts: launched first, since their way over the link takes as long as all that
follows), export (snapshot), gather (to TP: every rank gets all requests), import (target pages), front (to EP: requests
that change their rank), kv (bytes into those pages), wait (for the device), activate. With a mover that works in stream
order, reshard and kv are only launches and their bytes move while the host does the rest.

Until `reshard` nothing has changed and a failure leaves the source running; from then on the source is gone and a
failure ends the step. To EP nothing is gathered: every rank of TP has all requests and knows whose they are.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from vllm.v1.request import Request

from moebius.engine import phases
from moebius.engine.front import RequestFront
from moebius.engine.layout import Layout, place
from moebius.engine.requests import (
    Placement,
    QuiesceError,
    RequestBatch,
    admission_order,
    check_at_rest,
    detach_requests,
    import_requests,
    kv_demand,
    reset_prefix_cache,
    snapshot_requests,
)
from moebius.engine.runtime import Runtime, RuntimePair
from moebius.engine.staging import Staging
from moebius.engine.tail_drafts import TailDrafts
from moebius.engine.types import SwitchRecord
from moebius.kernels.collective import Mover, PagePairs
from moebius.kernels.plan import kv_head_ranges


class SwitchError(RuntimeError):
    """The switch failed after the source was given up: the step cannot go on."""


class PhaseTimer:
    """Wall time of this host per phase in ms. Phases before the pause (`drain`) are listed, but are no part of it."""

    BEFORE = frozenset({"drain"})

    def __init__(self, to: str = "EP") -> None:
        self.ms: dict[str, float] = {}
        self._to = to  # the layout, for whoever watches

    @property
    def pause_ms(self) -> float:
        """All phases in which the device decodes nothing."""
        return sum(ms for name, ms in self.ms.items() if name not in self.BEFORE)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        phases.enter(phases.switch(self._to, name))
        started = time.perf_counter()
        try:
            with torch.profiler.record_function(f"switch: {name}"):
                yield
        finally:
            self.ms[name] = self.ms.get(name, 0.0) + 1e3 * (time.perf_counter() - started)


class DeviceClock:
    """How long the device took between marks, in ms; without CUDA the host does the moves, and its time counts."""

    def __init__(self) -> None:
        self._marks: dict[str, tuple[Any, Any]] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time what is enqueued in the current stream inside the block. One span per name."""
        begun = self._mark()
        try:
            yield
        finally:
            self._marks[name] = (begun, self._mark())

    def read(self) -> dict[str, float]:
        """Milliseconds by name, when the device has come to the last mark."""
        return {
            name: 1e3 * (end - begin) if isinstance(begin, float) else float(begin.elapsed_time(end))
            for name, (begin, end) in self._marks.items()
        }

    def _mark(self) -> Any:
        if not torch.cuda.is_available():
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Many objects are made at once; looking through the whole heap for cycles among them would take longer."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass
class Fit:
    """Outcome of the capacity check, the same on all ranks; pages and requests are those of the fullest target rank."""

    to: Layout
    pages: int  # asked for by the requests with KV
    pages_available: int
    requests: int  # with KV
    requests_available: int
    use: float  # the worst rank's share of source pages in use

    @property
    def refusal(self) -> str | None:
        """Why the switch cannot be, in words; None when it fits."""
        if self.pages > self.pages_available:
            return f"live requests need {self.pages} pages in {self.to.value}, there are {self.pages_available}"
        if self.requests > self.requests_available:
            runs = f"{self.to.value} runs {self.requests_available} at once (max_num_seqs)"
            return f"{self.requests} requests have KV, {runs}"
        return None


class Switcher:
    """Moves a step between the layouts with its live requests, and the experts alone between steps."""

    def __init__(self, pair: RuntimePair, mover: Mover, cpu_group: dist.ProcessGroup, staging: Staging) -> None:
        self.pair = pair
        self.staging = staging
        self.mover = mover
        self.cpu_group = cpu_group
        self.world_size, self.rank = dist.get_world_size(cpu_group), dist.get_rank(cpu_group)
        self.experts_in = Layout.EP  # where the expert bytes stand, whichever runtime is active
        self._left: tuple[Runtime, list[Request]] | None = None  # a runtime that was left, whose pages are still held
        self.drafts: TailDrafts | None = None  # set where TP has drafts
        self.owners: dict[str, int] = {}  # in TP: the rank whose front has the request; the same on every rank

    def clean_up(self) -> None:
        """Free the pages of the runtime that was left last, and forget what it had cached. No collective.

        Not needed before that runtime runs again, and as long as much of the hand-over: the step calls it while the
        device is busy with the first pass after a switch.
        """
        if self._left is None:
            return
        (runtime, requests), self._left = self._left, None
        for request in requests:
            runtime.scheduler.kv_cache_manager.free(request)
        if not reset_prefix_cache(runtime):
            raise SwitchError(f"pages of the {runtime.layout.value} runtime are in use after it was left")

    def drop_drafts(self) -> None:
        """TP's requests are about to leave it: without the drafts that were to be verified next."""
        if self.drafts is not None:
            self.drafts.end()

    # ---- EP -> TP ---------------------------------------------------------------------------------------------------

    def fits_tp(self) -> Fit:
        """Whether all live requests fit TP's pages: one collective, the answer is the same on every rank.

        Raises QuiesceError on all ranks if something is still in flight on one of them.
        """
        source, target = self.pair.ep, self.pair.tp
        used = 1.0 - (source.free_pages + self.staging.withdrawn) / source.usable_pages
        problem = _in_flight(source)
        demand = kv_demand(source, drafted=target.core.vllm_config.num_speculative_tokens)
        mine = torch.tensor([*demand, used, problem is not None], dtype=torch.float64)
        parts = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(parts, mine, group=self.cpu_group)
        by_rank = torch.stack(parts)
        pages, requests, _, problems = by_rank.sum(dim=0).tolist()
        if problems:
            self._raise_in_flight(problem)
        running = target.scheduler.max_num_running_reqs
        return Fit(Layout.TP, int(pages), target.usable_pages, int(requests), running, float(by_rank[:, 2].max()))

    def to_tp(self, fit: Fit, timer: PhaseTimer, *, iteration: int, t: float) -> SwitchRecord:
        """EP->TP with every live request, which `fits_tp` has found to fit. Raises SwitchError if the step is lost."""
        with timer.phase("quiesce"):
            self._synchronize()
        clock, staged, ahead = DeviceClock(), self.staging.layers, self.staging.sent
        with _all_or_nothing(Layout.TP):
            sent = self._launch_reshard(Layout.TP, timer, clock)
            with timer.phase("export"):
                mine = snapshot_requests(self.pair.ep)
            with timer.phase("gather"):
                batches: list[Any] = [None] * self.world_size
                dist.all_gather_object(batches, mine, group=self.cpu_group)
            order = admission_order(batches)
            self.owners = {batches[rank].ids[row]: rank for rank, row in order}
            placement, _ = self._migrate(Layout.TP, batches, order, timer)
            with timer.phase("kv"), clock.span("kv"):
                kv_bytes = self._kv_to_tp(placement)
            with timer.phase("wait"):
                self.mover.finish()
        if self.drafts is not None:
            with timer.phase("activate"):
                self.drafts.begin_with(batches)
        counts, tokens = [len(batch) for batch in batches], sum(int(batch.computed.sum()) for batch in batches)
        record = self._activate(fit, timer, clock, iteration, t, counts, tokens, (sent, kv_bytes))
        record.prepared, record.staged_layers, record.staged_bytes = staged > 0, staged, ahead
        return record

    def _raise_in_flight(self, problem: str | None) -> None:
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, problem, group=self.cpu_group)
        raise QuiesceError("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(gathered) if text))

    @torch.inference_mode()
    def _kv_to_tp(self, placement: Placement) -> int:
        pages = self._page_pairs(placement.owner, placement.source, placement.target)
        heads = kv_head_ranges(self.pair.shape.num_kv_heads, self.world_size)
        layers = zip(self.pair.ep.kv, self.pair.tp.kv, strict=True)
        return sum(self.mover.kv_ep_to_tp(source, target, pages, heads) for source, target in layers)

    # ---- TP -> EP ---------------------------------------------------------------------------------------------------

    def place(self) -> dict[str, int]:
        """The EP rank of every live request of TP; the same on every rank."""
        requests = self.pair.tp.scheduler.requests
        ranks = place([r.num_tokens for r in requests.values()], [self.owners[i] for i in requests], self.world_size)
        return dict(zip(requests, ranks, strict=True))

    def fits_ep(self, ranks: dict[str, int]) -> Fit:
        """Whether the requests fit the EP ranks that `ranks` gives them. No collective: every rank knows all of it."""
        source, target = self.pair.tp, self.pair.ep
        used = 1.0 - source.free_pages / source.usable_pages
        demands = [kv_demand(source, {i for i, r in ranks.items() if r == rank}) for rank in range(self.world_size)]
        pages, requests = max(demand[0] for demand in demands), max(demand[1] for demand in demands)
        return Fit(Layout.EP, pages, target.usable_pages, requests, target.scheduler.max_num_running_reqs, used)

    def to_ep(
        self, fit: Fit, ranks: dict[str, int], front: RequestFront, timer: PhaseTimer, *, iteration: int, t: float
    ) -> SwitchRecord:
        """TP->EP with every live request, each to the rank that `ranks` gives it.

        Raises QuiesceError with TP intact, SwitchError if the step is lost.
        """
        with timer.phase("quiesce"):
            self._synchronize()
            self.drop_drafts()
            check_at_rest(self.pair.tp)  # the schedulers of all ranks are alike
        clock = DeviceClock()
        with _all_or_nothing(Layout.EP):
            sent = self._launch_reshard(Layout.EP, timer, clock)
            with timer.phase("export"):
                everything = snapshot_requests(self.pair.tp, with_tokens=False)
            order = [(0, row) for row in np.argsort(everything.admission_class(), kind="stable").tolist()]
            mine = [(_, row) for _, row in order if ranks[everything.ids[row]] == self.rank]
            placement, requests = self._migrate(Layout.EP, [everything], mine, timer)
            with timer.phase("front"):
                self._move_fronts(ranks, front, requests)
            with timer.phase("kv"), clock.span("kv"):
                kv_bytes = self._kv_to_ep(placement)
            with timer.phase("wait"):
                self.mover.finish()
            self.owners = {}
        counts = np.bincount([ranks[request_id] for request_id in everything.ids], minlength=self.world_size).tolist()
        return self._activate(fit, timer, clock, iteration, t, counts, int(everything.computed.sum()), (sent, kv_bytes))

    def _move_fronts(self, ranks: dict[str, int], front: RequestFront, requests: dict[str, Request]) -> None:
        """Requests whose rank is not the one they were on get a front there; a collective if there are any."""
        moving = [request_id for request_id, rank in ranks.items() if rank != self.owners[request_id]]
        if not moving:
            return
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, front.release(moving), group=self.cpu_group)
        records = [record for part in gathered for record in part]
        front.adopt([record for record in records if ranks[record.request_id] == self.rank], requests)

    @torch.inference_mode()
    def _kv_to_ep(self, placement: Placement) -> int:
        """Only the owner knows its target pages: they are told to all, since a mover may write into a peer's memory."""
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, (placement.source, placement.target), group=self.cpu_group)
        owner = np.repeat(np.arange(self.world_size), [len(source) for source, _ in gathered])
        source, target = (np.concatenate([part[side] for part in gathered]) for side in (0, 1))
        pages = self._page_pairs(owner, source, target)
        heads = kv_head_ranges(self.pair.shape.num_kv_heads, self.world_size)
        layers = zip(reversed(self.pair.tp.kv), reversed(self.pair.ep.kv), strict=True)
        return sum(self.mover.kv_tp_to_ep(tp, ep, pages, heads) for tp, ep in layers)

    # ---- both -------------------------------------------------------------------------------------------------------

    def _migrate(
        self, to: Layout, batches: Sequence[RequestBatch], order: Sequence[tuple[int, int]], timer: PhaseTimer
    ) -> tuple[Placement, dict[str, Request]]:
        """The requests' hand-over within this process. Returns also the detached requests."""
        source, target = (self.pair.ep, self.pair.tp) if to is Layout.TP else (self.pair.tp, self.pair.ep)
        with timer.phase("export"):
            self.clean_up()
            requests = detach_requests(source, keep_pages=True)
            self._left = source, list(requests.values())
        with timer.phase("import"):
            # Its hashes describe pages long gone. Those of the source are forgotten before it runs again.
            if not reset_prefix_cache(target):
                raise SwitchError(f"pages of the {to.value} runtime are in use: its prefix cache cannot be reset")
            target.install_groups()
            placement = import_requests(target, batches, order, requests)
        return placement, requests

    def _activate(
        self,
        fit: Fit,
        timer: PhaseTimer,
        clock: DeviceClock,
        iteration: int,
        t: float,
        live_by_rank: list[int],
        kv_tokens: int,
        sent: tuple[int, int],
    ) -> SwitchRecord:
        with timer.phase("activate"):
            self.pair.activate(fit.to)
        target = self.pair.active
        return SwitchRecord(
            to=fit.to.value,
            iteration=iteration,
            t=t,
            live=sum(live_by_rank),
            live_by_rank=live_by_rank,
            kv_tokens=kv_tokens,
            phases_ms=dict(timer.ms),
            device_ms=clock.read(),
            pause_ms=timer.pause_ms,
            expert_bytes=sent[0],
            kv_bytes=sent[1],
            kv_use_before=fit.use,
            kv_use_after=1.0 - target.free_pages / target.usable_pages,
            expert_layers=len(target.expert_modules),
        )

    def reshard(self, to: Layout) -> int:
        """Move the experts of all layers into `to` and wait for them; bytes this rank sent. Nothing may be live."""
        sent = self._move_experts(to)
        self.mover.finish()
        return sent

    def _launch_reshard(self, to: Layout, timer: PhaseTimer, clock: DeviceClock) -> int:
        with timer.phase("reshard"), clock.span("experts"):
            if to is Layout.TP and self.staging.is_ready:
                self.experts_in = Layout.TP
                self.pair.shape_attention(to)
                return self.staging.commit()
            return self._move_experts(to)

    @torch.inference_mode()
    def _move_experts(self, to: Layout) -> int:
        """Start moving the experts of all layers; bytes this rank sends. The order keeps unread slots intact."""
        layers = list(zip(self.pair.ep.expert_modules, self.pair.tp.expert_modules, strict=True))
        sent = 0
        for ep, tp in layers if to is Layout.TP else reversed(layers):
            if to is Layout.TP:
                sent += self.mover.experts_ep_to_tp(ep.w13_weight, ep.w2_weight, tp.w13_weight, tp.w2_weight)
            else:
                sent += self.mover.experts_tp_to_ep(tp.w13_weight, tp.w2_weight, ep.w13_weight, ep.w2_weight)
        self.experts_in = to
        self.pair.shape_attention(to)
        return sent

    def _page_pairs(self, owner: np.ndarray, source: np.ndarray, target: np.ndarray) -> PagePairs:
        """By rank: the (source, target) page ids of its requests, where the mover wants them."""
        pairs = [
            (torch.from_numpy(source[owner == rank]), torch.from_numpy(target[owner == rank]))
            for rank in range(self.world_size)
        ]
        return self.mover.place_pages(pairs, self.pair.tp.kv[0].device)

    def _synchronize(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def _in_flight(runtime: Runtime) -> str | None:
    try:
        check_at_rest(runtime)
    except QuiesceError as error:
        return str(error)
    return None


@contextmanager
def _all_or_nothing(to: Layout) -> Iterator[None]:
    """The source is given up inside the block: whatever fails there ends the step."""
    try:
        with _no_garbage_collection():
            yield
    except Exception as error:
        raise SwitchError(f"switch to {to.value} failed after export: {error}") from error
