"""The switch: live requests, their KV and the experts go from one runtime to the other, between two iterations.

Phases, in order: decide (capacity), quiesce, export (snapshot), gather, reshard (experts), import (target pages),
kv (bytes into those pages), activate. Until `gather` nothing has changed and a failure leaves EP running; after it the
source is gone and a failure ends the step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moebius.engine.layout import Layout
from moebius.engine.requests import (
    LiveRequest,
    QuiesceError,
    admission_order,
    detach_requests,
    import_requests,
    kv_demand,
    snapshot_requests,
)
from moebius.engine.runtime import Runtime, RuntimePair
from moebius.engine.types import SwitchRecord
from moebius.kernels.collective import Mover
from moebius.kernels.plan import kv_head_ranges


class SwitchError(RuntimeError):
    """The switch failed after the source was given up: the step cannot go on."""


class PhaseTimer:
    """Wall time per phase in ms."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.ms[name] = self.ms.get(name, 0.0) + 1e3 * (time.perf_counter() - started)


@dataclass
class Fit:
    """Outcome of the capacity check, the same on all ranks. `use` is the worst rank's share of source pages in use."""

    pages: int  # asked for by the requests with KV
    pages_available: int
    requests: int  # with KV
    requests_available: int
    use: float

    @property
    def refusal(self) -> str | None:
        """Why the switch cannot be, in words; None when it fits."""
        if self.pages > self.pages_available:
            return f"live requests need {self.pages} pages in TP, there are {self.pages_available}"
        if self.requests > self.requests_available:
            return f"{self.requests} requests have KV, TP runs {self.requests_available} at once (max_num_seqs)"
        return None


class Switcher:
    """Moves a step from EP to TP with live requests, and the experts back when none are live."""

    def __init__(self, pair: RuntimePair, mover: Mover, cpu_group: dist.ProcessGroup) -> None:
        self.pair = pair
        self.mover = mover
        self.cpu_group = cpu_group
        self.world_size = dist.get_world_size(cpu_group)

    def check_fit(self) -> Fit:
        """Whether all live requests fit TP's pages: one collective, the answer is the same on every rank."""
        source, target = self.pair.ep, self.pair.tp
        used = 1.0 - source.free_pages / source.usable_pages
        demand = torch.tensor(kv_demand(source), dtype=torch.int64)
        dist.all_reduce(demand, group=self.cpu_group)
        pages, requests = demand.tolist()
        worst = torch.tensor([used], dtype=torch.float64)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=self.cpu_group)
        return Fit(pages, target.usable_pages, requests, target.scheduler.max_num_running_reqs, float(worst[0]))

    def to_tp(self, fit: Fit, timer: PhaseTimer, *, iteration: int, t: float) -> SwitchRecord:
        """EP->TP with every live request. Raises QuiesceError with EP intact, SwitchError if the step is lost."""
        source, target = self.pair.ep, self.pair.tp
        with timer.phase("quiesce"):
            self._synchronize()
        with timer.phase("export"):
            records, problem = self._snapshot(source)
        with timer.phase("gather"):
            by_rank = self._gather(records, problem)
        try:
            return self._commit(source, target, by_rank, fit, timer, iteration=iteration, t=t)
        except Exception as error:
            raise SwitchError(f"switch to TP failed after export: {error}") from error

    def _snapshot(self, source: Runtime) -> tuple[list[LiveRequest], str | None]:
        try:
            return snapshot_requests(source), None
        except QuiesceError as error:
            return [], str(error)  # told to all ranks by _gather, which then raises on each of them

    def _gather(self, records: list[LiveRequest], problem: str | None) -> list[list[LiveRequest]]:
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, (problem, records), group=self.cpu_group)
        problems = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(gathered) if text]
        if problems:
            raise QuiesceError("; ".join(problems))
        return [records for _, records in gathered]

    def _commit(
        self,
        source: Runtime,
        target: Runtime,
        by_rank: list[list[LiveRequest]],
        fit: Fit,
        timer: PhaseTimer,
        *,
        iteration: int,
        t: float,
    ) -> SwitchRecord:
        with timer.phase("export"):
            detach_requests(source)
        with timer.phase("reshard"):
            expert_bytes = self.reshard(Layout.TP)
        with timer.phase("import"):
            # Hashes of the source describe pages about to be overwritten, those of the target pages long gone.
            _reset_prefix_cache(source)
            _reset_prefix_cache(target)
            target.install_groups()
            owners = [(rank, record) for rank, records in enumerate(by_rank) for record in records]
            owners.sort(key=lambda owned: admission_order(owned[1]))  # stable
            target_pages = import_requests(target, [record for _, record in owners])
        with timer.phase("kv"):
            kv_bytes = self._move_kv(owners, target_pages)
        with timer.phase("activate"):
            self.pair.activate(Layout.TP)
        return SwitchRecord(
            iteration=iteration,
            t=t,
            live=len(owners),
            live_by_rank=[len(records) for records in by_rank],
            kv_tokens=sum(record.num_computed_tokens for _, record in owners),
            phases_ms=dict(timer.ms),
            pause_ms=sum(timer.ms.values()),
            expert_bytes=expert_bytes,
            kv_bytes=kv_bytes,
            kv_use_before=fit.use,
            kv_use_after=1.0 - target.free_pages / target.usable_pages,
        )

    @torch.inference_mode()
    def reshard(self, to: Layout) -> int:
        """Move the experts of all layers into `to`; bytes this rank sent. Order keeps unread slots intact."""
        layers = list(zip(self.pair.ep.expert_modules, self.pair.tp.expert_modules, strict=True))
        sent = 0
        for ep, tp in layers if to is Layout.TP else reversed(layers):
            if to is Layout.TP:
                sent += self.mover.experts_ep_to_tp(ep.w13_weight, ep.w2_weight, tp.w13_weight, tp.w2_weight)
            else:
                sent += self.mover.experts_tp_to_ep(tp.w13_weight, tp.w2_weight, ep.w13_weight, ep.w2_weight)
        self._synchronize()  # so that the time of the move is not counted elsewhere
        return sent

    @torch.inference_mode()
    def _move_kv(self, owners: list[tuple[int, LiveRequest]], target_pages: list[np.ndarray]) -> int:
        device = self.pair.tp.kv[0].device
        pages = []
        for rank in range(self.world_size):
            mine = [(r.page_ids, dst) for (owner, r), dst in zip(owners, target_pages, strict=True) if owner == rank]
            from_ids, to_ids = (
                torch.from_numpy(np.concatenate([np.empty(0, np.int64), *(pair[side] for pair in mine)])).to(device)
                for side in (0, 1)
            )
            pages.append((from_ids, to_ids))
        head_ranges = kv_head_ranges(self.pair.shape.num_kv_heads, self.world_size)
        sent = 0
        for source, target in zip(self.pair.ep.kv, self.pair.tp.kv, strict=True):
            sent += self.mover.kv_ep_to_tp(source, target, pages, head_ranges)
        self._synchronize()
        return sent

    def _synchronize(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def _reset_prefix_cache(runtime: Runtime) -> None:
    # vLLM only warns and returns False when pages are still in use.
    if not runtime.scheduler.reset_prefix_cache():
        raise SwitchError(f"the {runtime.layout.value} prefix cache could not be reset: pages are still in use")
