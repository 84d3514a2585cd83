"""What `moebius bench serving` runs inside a rank process of our engine. Called through `Fleet`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from moebius.engine.config import PolicyConfig
from moebius.engine.inbox import Inbox, Taken
from moebius.engine.types import SampleKey, SampleRequest
from moebius.kernels.noise import derive_seed
from moebius.rollout.bench.rank import Ours, forget_prefixes
from moebius.rollout.bench.traces import Workload

_LEAD_S = 0.5  # from the agreement on a start to the first arrival: in it, static TP gets where it stays
_FIRST = 2  # prompt and output tokens of the requests that come before the trace


class TimedInbox(Inbox):
    """Requests that come by themselves, each at its time by `time.perf_counter`; open until the last one is taken."""

    def __init__(self, requests: list[tuple[float, SampleRequest]]) -> None:
        super().__init__()
        self._waiting = sorted(requests, key=lambda pair: pair[0], reverse=True)
        self.open()

    def take(self) -> Taken:
        """See `Inbox.take`."""
        now = time.perf_counter()
        due: list[SampleRequest] = []
        while self._waiting and self._waiting[-1][0] <= now:
            due.append(self._waiting.pop()[1])
        if due:
            self.submit(due)
        if not self._waiting:
            self.close()
        return super().take()


@dataclass(slots=True)
class Answered:
    """One request, as the rank that answered it saw it. Seconds since the trace began."""

    index: int
    admitted: float  # when its rank took it out of the queue
    first: float  # when its first token was there
    end: float
    tokens: int
    reason: str  # "length", or what else ended it


@dataclass(slots=True)
class ServingRun:
    """One replay on one rank."""

    answered: list[Answered]
    layout: str  # in which the first request of the trace was met
    switches: list[dict[str, Any]]  # t, to, live, pause_ms, kv_tokens
    cancelled: list[tuple[float, str]]
    iterations: list[tuple[float, str, int, int, float]]  # t at its end, layout, live, tokens over all ranks, ms


def own_policy(engine: Ours) -> dict[str, Any]:
    """Settings of the engine's policy, with a threshold that was calibrated filled in."""
    settings: dict[str, Any] = engine.engine.config.policy.model_dump()
    return settings


def replay(engine: Ours, workload: Workload, at: tuple[float, ...], policy: PolicyConfig) -> ServingRun:
    """Send each request at its time, whatever the engine does; a collective, until the last one is answered.

    Requests go to ranks in turn. All ranks of one host share the clock.
    """
    import torch.distributed as dist

    ours, rank, ranks = engine.engine, engine.engine.rank, engine.engine.world_size
    requests = {i: _request(workload, i, workload.lengths[i]) for i in workload.indices(rank, ranks)}
    # Of other tokens than the trace's prompts, so that none finds its pages.
    before = Workload((_FIRST,) * ranks, (_FIRST,) * ranks, workload.seed + 1, workload.vocab)
    first = SampleRequest(SampleKey(len(at) + rank, 0), before.prompt(rank), _sampling(_FIRST), rank)
    for runtime in (ours.pair.ep, ours.pair.tp):
        forget_prefixes(runtime.scheduler)
    moments: list[float] = [0.0] * ranks
    dist.all_gather_object(moments, time.perf_counter(), group=ours.switcher.cpu_group)
    begin = max(moments) + _LEAD_S
    inbox, kept = ours.inbox, ours.policy.config
    ours.policy.config = policy
    ours.inbox = TimedInbox([(0.0, first), *((begin + at[i], request) for i, request in requests.items())])
    try:
        outcome = ours.run_step([])
    finally:
        ours.inbox, ours.policy.config = inbox, kept
    stats = outcome.stats
    shift = stats.began - begin
    return ServingRun(
        answered=[
            Answered(
                r.key.prompt, r.arrived_s + shift, r.first_s + shift, r.ended_s + shift, len(r.token_ids),
                r.finish_reason if r.finish_reason != "error" else f"error: {r.stop_reason}",
            )
            for r in outcome.results
            if r.key.prompt < len(at)
        ],
        layout=next((i.layout for i in stats.iterations if i.t + shift >= 0), "EP"),
        switches=[
            {"t": s.t + shift, "to": s.to, "live": s.live, "pause_ms": s.pause_ms, "kv_tokens": s.kv_tokens}
            for s in stats.switches
        ],
        cancelled=[(c.t + shift, c.reason) for c in stats.cancelled],
        iterations=[(i.t + shift, i.layout, i.live, i.tokens, i.ms) for i in stats.iterations],
    )  # fmt: skip


def _request(workload: Workload, index: int, tokens: int) -> SampleRequest:
    key = SampleKey(index, 0)
    return SampleRequest(key, workload.prompt(index), _sampling(tokens), derive_seed(workload.seed, 0, index, 0))


def _sampling(tokens: int) -> dict[str, Any]:
    return {"temperature": 1.0, "max_tokens": tokens, "ignore_eos": True}
