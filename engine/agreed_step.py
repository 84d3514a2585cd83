"""What the ranks of a step agree on: its requests, told and counted once per iteration, and how it is to end.

Ranks agree by one small all-reduce (unfinished samples, tokens, aborts). It is started when an iteration's tokens are
known and waited for after the next forward pass has been launched, so that it costs no time; decisions therefore rest
on counts one iteration old. All ranks use the same counts, hence decide alike.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from vllm.v1.engine import EngineCoreRequest

from moebius.engine import phases
from moebius.engine.admission import admit
from moebius.engine.exchange import Exchange, News, Pass
from moebius.engine.front import RequestFront
from moebius.engine.front_requests import ParkedSample
from moebius.engine.inbox import AbortBox, Inbox
from moebius.engine.layout import Layout
from moebius.engine.length_news import LengthNews, Lengths, read
from moebius.engine.parking import put_back
from moebius.engine.policy import SwitchPolicy
from moebius.engine.profile import SwitchProfiler
from moebius.engine.runtime import RuntimePair
from moebius.engine.switch import Switcher
from moebius.engine.types import Iteration, SamplePiece, SampleRequest, SampleResult, StepStats

OnIteration = Callable[[int, int, str, int], None]  # finished here, live everywhere, layout, tokens here
OnResults = Callable[[list[SampleResult | SamplePiece]], None]  # of this rank, as soon as they are there

_log = logging.getLogger(__name__)


class AgreedStep:
    """The part of a `Step` that admits requests and agrees with the other ranks."""

    def __init__(
        self,
        pair: RuntimePair,
        switcher: Switcher,
        policy: SwitchPolicy,
        profiler: SwitchProfiler,
        inbox: Inbox,
        aborts: AbortBox,
        group: dist.ProcessGroup,
        *,
        stats: StepStats,
        policy_version: int,
        parked: list[ParkedSample] | None = None,
        keep_pages: bool = False,
        on_iteration: OnIteration | None = None,
        on_results: OnResults | None = None,
    ) -> None:
        self.pair, self.switcher, self.policy, self.profiler = pair, switcher, policy, profiler
        self.inbox, self.aborts, self.group = inbox, aborts, group
        self.stats, self.on_iteration, self.on_results = stats, on_iteration, on_results
        self.drafts = switcher.drafts  # None: TP has none
        self.front = RequestFront(pair.front, stats.rank, policy_version, self.drafts)
        self.front.layout = pair.layout.value
        for runtime in (pair.ep, pair.tp):
            if runtime.steady is not None:
                runtime.steady.audience = self.front.audience
        self.parked = parked or []  # on this rank: of earlier steps, and after `run` those of this one
        self._keep_pages = keep_pages  # of what is parked
        self._parking = False  # by the last exchange
        self.failure: str | None = None  # of a function given to the step, here or on another rank
        self._arriving: dict[str, SampleRequest] = {}  # in TP: on their way to all cores, by internal id
        self._told = Lengths()  # since the policy's last decision, by all ranks; empty if it does not learn lengths
        self._unseen_tokens = 0  # sampled over all ranks since the policy's last decision
        self._seconds = 0.0  # since the step began, by rank 0's clock
        self._expects_tp = self._prefilling = False
        self._prepare_from = 0
        self._short = False  # a rank lacks pages that a prepared switch has taken
        # By the last exchange: whether any rank may still get requests, and whether they belong to the burst.
        self._open = self._filling = False
        stats.began = self._started = self._mark = time.perf_counter()

    def admit(self, requests: list[SampleRequest]) -> None:
        """Admit on all ranks or on none: a request vLLM refuses on one rank must not leave the others waiting.

        Raises:
            RequestRefused: a request is not valid; nothing was started.
            PolicyRefused: the policy cannot decide as it is set; nothing was started.
        """
        phases.enter(phases.ADMISSION)
        admitted = admit(
            self.front,
            self.group,
            self.policy,
            requests,
            self.parked,
            self.pair.layout,
            self.pair.front.model_config.max_model_len,
        )
        self.switcher.owners = admitted.owners
        # What earlier steps have parked here goes on before anything new.
        self.stats.resumed = len(self.parked)
        self.front.resume(self.parked)
        put_back(self.pair.ep, [sample.request for sample in self.parked])
        self.parked = []
        for request in admitted.prepared:
            self._give_to_core(request)
        self.front.is_running = True
        if self.drafts is not None and self.pair.layout is Layout.TP:
            self.drafts.begin_in(self.pair.tp)
        if self.policy.learns_lengths:
            self.front.news = LengthNews(self.stats.rank, dist.get_world_size(self.group))

    def _admit(self, request: SampleRequest) -> None:
        prepared = self.front.prepare(request)
        self.front.register(request, prepared)
        self._give_to_core(prepared)

    def _give_to_core(self, prepared: EngineCoreRequest) -> None:
        core = self.pair.active.core
        core.add_request(*core.preprocess_add_request(prepared))

    def _exchange(self, last: Pass | None, aborts: list[str]) -> Exchange:
        taken = self.inbox.take()
        in_ep = self.pair.layout is Layout.EP
        if in_ep and aborts:
            self.pair.active.core.abort_requests(aborts)  # nobody else's core has them
        news = News([] if in_ep else aborts, [])
        for request in taken.requests:
            try:
                if in_ep:
                    self._admit(request)
                    self.stats.admitted += 1
                else:
                    news.arrivals.append(self.front.prepare(request))
                    self._arriving[news.arrivals[-1].request_id] = request
            except (ValueError, TypeError) as error:
                self.front.refuse(request, str(error))
        known = self.pair.active.scheduler.get_num_unfinished_requests()
        live = self.front.unfinished
        return Exchange(
            self.group,
            self.pair.layout,
            live,
            known,
            time.perf_counter() - self._started,
            last=last,
            news=news,
            taken=taken,
            failed=self.failure is not None,
            lengths=self.front.news.numbers() if self.front.news else [],
            ready=self.drafts.ready if self.drafts is not None else None,
            short=self.switcher.staging.is_short,
        )

    def _settle(self, exchange: Exchange) -> int:
        """Wait for the counts, apply aborts, write the iteration down; returns how many samples are unfinished."""
        live, tokens = self._agree(exchange)
        if (last := exchange.last) is not None:
            self.stats.iterations.append(Iteration(last.t, last.layout.value, live, tokens, last.ms))
            if last.layout is Layout.EP:
                self.stats.burst_s += last.ms / 1e3
            else:
                self.stats.tail_s += last.ms / 1e3
            if self.on_iteration:
                self._call(self.on_iteration, self.front.finished, live, last.layout.value, last.tokens)
        return live

    def _agree(self, exchange: Exchange) -> tuple[int, int]:
        """Wait for the counts, apply what ranks have told; returns (live, tokens) over all ranks."""
        counts = exchange.wait()
        live, self._open, self._filling, self._seconds = counts.live, counts.is_open, counts.is_filling, counts.seconds
        self._unseen_tokens += counts.tokens
        self._parking, self._short = counts.is_parking, counts.is_short
        if self.drafts is not None:
            self.drafts.told(counts.ready)
            if (last := exchange.last) is not None and last.layout is Layout.TP is self.pair.layout:
                running = self.pair.tp.scheduler.running
                self.drafts.timed(counts.seconds, counts.tokens, last.drafted, running, last.whole)
        if counts.lengths:
            self._told.add(read(counts.lengths))
        if counts.failed and self.failure is None:
            self._fail("a function given to the step raised an error on another rank")
        if counts.news:
            # In TP all ranks change their cores in one order: their schedulers must stay identical.
            gathered: list[Any] = [None] * dist.get_world_size(self.group)
            dist.all_gather_object(gathered, exchange.news, group=self.group)
            for request_id in (request_id for told in gathered for request_id in told.aborts):
                # One by one: vLLM goes through several in the order of a set, which is another in each process, and
                # frees their pages so. A switch to EP relies on pages having the same ids on all TP ranks.
                self.pair.active.core.abort_requests([request_id])
            for rank, told in enumerate(gathered):
                for prepared in told.arrivals:
                    if rank == self.stats.rank:
                        self.front.register(self._arriving.pop(prepared.request_id), prepared)
                        self.stats.admitted += 1
                    self.switcher.owners[prepared.request_id] = rank
                    self._give_to_core(prepared)
                live += len(told.arrivals)
        return live, counts.tokens

    def _pass_results(self) -> None:
        if self.on_results is not None and (self.front.results or self.front.pieces):
            self._call(self.on_results, [*self.front.take_pieces(), *self.front.take_results()])

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function given to the step. Its error must not leave the other ranks waiting: all end the step."""
        if self.failure is not None:
            return
        try:
            function(*arguments)
        except Exception as error:  # noqa: BLE001  (told to all ranks, and raised when the step is over)
            _log.exception("rank %d: a function given to the step failed", self.stats.rank)
            self._fail(f"rank {self.stats.rank}: {type(error).__name__}: {error}")

    def _fail(self, why: str) -> None:
        self.failure = why
        self.inbox.close()
        self.aborts.add(None)
