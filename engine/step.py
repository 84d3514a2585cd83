"""One rollout step on one rank: the loop from the first prefill in EP to the last straggler in TP.

Ranks agree once per iteration by one small all-reduce (unfinished samples, tokens, aborts). It is started when an
iteration's tokens are known and waited for after the next forward pass has been launched, so that it costs no time;
decisions therefore rest on counts one iteration old. All ranks use the same counts, hence decide alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from vllm.v1.engine import EngineCoreRequest

from moebius.engine.front import RequestFront
from moebius.engine.inbox import AbortBox, Inbox
from moebius.engine.layout import Layout
from moebius.engine.policy import Observation, StepStart, SwitchPolicy
from moebius.engine.profile import SwitchProfiler
from moebius.engine.requests import QuiesceError, release_stuck
from moebius.engine.runtime import RuntimePair
from moebius.engine.switch import PhaseTimer, Switcher
from moebius.engine.types import CancelledSwitch, Iteration, PolicyDecision, SampleRequest, SampleResult, StepStats

OnIteration = Callable[[int, int, str, int], None]  # finished here, live everywhere, layout, tokens here
OnResults = Callable[[list[SampleResult]], None]  # results of this rank, as soon as they are there

_IDLE_S = 0.001  # between two looks for requests while an open step has none


class RequestRefused(ValueError):
    """vLLM refuses a request of the step, on this or another rank; no request of the step was started."""


class PolicyRefused(ValueError):
    """The policy lacks what it needs, and says what; no request of the step was started."""


class LostRequest(RuntimeError):
    """An unfinished request is in no scheduler: it would never end."""


@dataclass(slots=True)
class _Admission:
    """What a rank brings to a step."""

    problem: str | None
    prepared: list[EngineCoreRequest]  # in TP only: for all cores
    samples: int
    prompt_tokens: int
    max_tokens: int


@dataclass(slots=True)
class _Pass:
    """One iteration as this rank saw it; None of it is known to the others yet."""

    t: float  # when it was over, seconds since the step began
    ms: float
    layout: Layout
    tokens: int


@dataclass(slots=True)
class _News:
    """What a rank has to tell in TP, where all cores have all requests."""

    aborts: list[str]
    arrivals: list[EngineCoreRequest]


@dataclass(slots=True)
class _Counts:
    """What one exchange tells, the same on all ranks; sums but for `seconds`."""

    live: int  # unfinished samples
    tokens: int
    news: bool  # a rank has something to tell
    is_open: bool  # a rank may still get requests
    is_filling: bool  # of the burst
    seconds: float  # rank 0's clock, since the step began


class _Exchange:
    """One small all-reduce on its way. `known` is how many unfinished requests this rank's core has."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        layout: Layout,
        live: int,
        known: int,
        seconds: float,
        *,
        last: _Pass | None,
        news: _News,
        is_open: bool,
        is_filling: bool,
    ) -> None:
        self.last, self.news = last, news
        self._known = known if layout is Layout.TP else None  # TP cores have all ranks' requests
        has_news = bool(news.aborts or news.arrivals)
        tokens = last.tokens if last else 0
        clock = int(1e6 * seconds) if dist.get_rank(group) == 0 else 0
        self._sums = torch.tensor([live, tokens, has_news, is_open, is_filling, clock, known < live], dtype=torch.int64)
        self._work = dist.all_reduce(self._sums, group=group, async_op=True)

    def wait(self) -> _Counts:
        """The counts. Raises LostRequest, on all ranks alike."""
        self._work.wait()
        live, tokens, news, is_open, is_filling, clock, lost = self._sums.tolist()
        if lost or (self._known is not None and self._known < live):
            raise LostRequest("a core does not know all of its unfinished requests: they would never end")
        return _Counts(live, tokens, bool(news), bool(is_open), bool(is_filling), clock / 1e6)


class Step:
    """One step of one rank. Collective: all ranks make one and run it."""

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
        on_iteration: OnIteration | None = None,
        on_results: OnResults | None = None,
    ) -> None:
        self.pair, self.switcher, self.policy, self.profiler = pair, switcher, policy, profiler
        self.inbox, self.aborts, self.group = inbox, aborts, group
        self.stats, self.on_iteration, self.on_results = stats, on_iteration, on_results
        self.front = RequestFront(pair.front, stats.rank, policy_version)
        self._arriving: dict[str, SampleRequest] = {}  # in TP: on their way to all cores, by internal id
        self._unseen_tokens = 0  # sampled over all ranks since the policy's last decision
        self._seconds = 0.0  # since the step began, by rank 0's clock
        # By the last exchange: whether any rank may still get requests, and whether they belong to the burst.
        self._open = self._filling = False
        self._started = self._mark = time.perf_counter()

    def admit(self, requests: list[SampleRequest]) -> None:
        """Admit on all ranks or on none: a request vLLM refuses on one rank must not leave the others waiting.

        Raises:
            RequestRefused: a request is not valid; nothing was started.
            PolicyRefused: the policy cannot decide as it is set; nothing was started.
        """
        problem, prepared = None, []
        try:
            for request in requests:
                prepared.append(self.front.prepare(request))
                self.front.register(request, prepared[-1])
        except (ValueError, TypeError) as error:
            problem = f"prompt {request.key.prompt}, sample {request.key.sample}: {error}"
        in_tp = self.pair.layout is Layout.TP  # where every core has all requests
        mine = _Admission(
            problem,
            prepared if in_tp else [],
            len(requests),
            sum(len(request.prompt_token_ids) for request in requests),
            max((r.sampling_params.max_tokens or 0 for r in prepared if r.sampling_params), default=0),
        )
        gathered: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(gathered, mine, group=self.group)
        problems = [part.problem for part in gathered if part.problem]
        if problems:
            self.front.forget_all()
            raise RequestRefused(problems[0])
        samples = sum(part.samples for part in gathered)
        mean = sum(part.prompt_tokens for part in gathered) / max(1, samples)
        try:
            self.policy.begin_step(StepStart(samples, mean, max(part.max_tokens for part in gathered) or None))
        except ValueError as error:  # on all ranks alike
            self.front.forget_all()
            raise PolicyRefused(str(error)) from error
        self.switcher.owners = {
            request.request_id: rank for rank, part in enumerate(gathered) for request in part.prepared
        }
        for request in [r for part in gathered for r in part.prepared] if in_tp else prepared:
            self._give_to_core(request)

    def _admit(self, request: SampleRequest) -> None:
        prepared = self.front.prepare(request)
        self.front.register(request, prepared)
        self._give_to_core(prepared)

    def _give_to_core(self, prepared: EngineCoreRequest) -> None:
        core = self.pair.active.core
        core.add_request(*core.preprocess_add_request(prepared))

    def decisions(self) -> list[PolicyDecision]:
        """The policy's changes of mind and wishes to switch, with what they rest on."""
        return [
            PolicyDecision(
                logged.decision.target.value if logged.decision.target else None,
                logged.decision.reason,
                logged.outcome,
                dict(logged.decision.inputs),
            )
            for logged in self.policy.log
        ]

    # ---- the loop -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Decode all admitted requests to their end.

        Raises:
            LostRequest, SwitchError: the step cannot be finished.
        """
        iteration = 0
        live = self._settle(self._exchange(None, self.front.abort(self.aborts)))
        exchange: _Exchange | None = None
        self._mark = time.perf_counter()
        while True:
            self.profiler.before_iteration(iteration, live, self.pair.layout, self.policy.config)
            if live == 0:
                if exchange is not None:
                    live, exchange = self._settle(exchange), None
                    continue
                self._drain()  # a batch that was scheduled before its requests were known to be finished
                self._pass_results()
                if not self._open:
                    return
                live = self._idle()
                continue
            to = self._decide(iteration, live)
            if to is not None:
                live = self._try_switch(to, iteration, exchange)
                exchange = None
                self._mark = time.perf_counter()
                if live == 0:
                    continue
            tokens, found = self._iterate()
            last = self._end_pass(tokens)
            iteration += 1
            if exchange is not None:
                live = self._settle(exchange)
            exchange = self._exchange(last, found + self.front.abort(self.aborts))
            self._pass_results()

    def _idle(self) -> int:
        """Wait for requests, or for the step to be closed on all ranks."""
        time.sleep(_IDLE_S)
        live = self._settle(self._exchange(None, self.front.abort(self.aborts)))
        self._mark = time.perf_counter()
        return live

    def _pass_results(self) -> None:
        if self.on_results is not None and self.front.results:
            self.on_results(self.front.take_results())

    def _decide(self, iteration: int, live: int) -> Layout | None:
        seen = Observation(iteration, live, self.pair.layout, self._seconds, self._unseen_tokens)
        self._unseen_tokens = 0
        if self._filling and self.policy.waits_for_burst:
            return None
        return self.policy.decide(seen).target

    def _end_pass(self, tokens: int) -> _Pass:
        now = time.perf_counter()
        last = _Pass(now - self._started, 1e3 * (now - self._mark), self.pair.layout, tokens)
        self._mark = now
        return last

    def _exchange(self, last: _Pass | None, aborts: list[str]) -> _Exchange:
        taken = self.inbox.take()
        in_ep = self.pair.layout is Layout.EP
        if in_ep and aborts:
            self.pair.active.core.abort_requests(aborts)  # nobody else's core has them
        news = _News([] if in_ep else aborts, [])
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
        return _Exchange(
            self.group,
            self.pair.layout,
            live,
            known,
            time.perf_counter() - self._started,
            last=last,
            news=news,
            is_open=taken.is_open or bool(news.arrivals),
            is_filling=taken.is_filling,
        )

    def _settle(self, exchange: _Exchange) -> int:
        """Wait for the counts, apply aborts, write the iteration down; returns how many samples are unfinished."""
        live, tokens = self._agree(exchange)
        if (last := exchange.last) is not None:
            self.stats.iterations.append(Iteration(last.t, last.layout.value, live, tokens, last.ms))
            if last.layout is Layout.EP:
                self.stats.burst_s += last.ms / 1e3
            else:
                self.stats.tail_s += last.ms / 1e3
            if self.on_iteration:
                self.on_iteration(self.front.finished, live, last.layout.value, last.tokens)
        return live

    def _agree(self, exchange: _Exchange) -> tuple[int, int]:
        """Wait for the counts, apply what ranks have told; returns (live, tokens) over all ranks."""
        counts = exchange.wait()
        live, self._open, self._filling, self._seconds = counts.live, counts.is_open, counts.is_filling, counts.seconds
        self._unseen_tokens += counts.tokens
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

    def _iterate(self) -> tuple[int, list[str]]:
        """One forward pass; returns tokens sampled for this rank's requests and requests to take off the core.

        With asynchronous scheduling the tokens are those of the pass before: the one launched here is still running.
        """
        core = self.pair.active.core
        if self.pair.layout is Layout.EP and not core.scheduler.has_requests():
            # The peers' expert layers are collectives: a rank without requests takes part with a dummy batch.
            core.execute_dummy_batch()
        client: Any = self.pair.front.engine_core
        outputs = client.get_output()
        if not outputs.outputs:
            release_stuck(self.pair.active)
        return self.front.deliver(outputs)

    def _drain(self) -> tuple[int, list[str]]:
        """Take what is still in flight off the batch queue, without a forward pass; returns as `_iterate`.

        Not by stepping the core, which would launch the next pass: a collective.
        """
        core = self.pair.active.core
        tokens, aborts = 0, []
        while core.batch_queue:
            future, scheduled, _ = core.batch_queue.pop()
            outputs = core.scheduler.update_from_output(scheduled, future.result()).get(0)
            if outputs is not None:
                more, found = self.front.deliver(outputs)
                tokens += more
                aborts += found
        return tokens, aborts

    def _try_switch(self, to: Layout, iteration: int, exchange: _Exchange | None) -> int:
        """Switch if the requests fit; returns how many samples are unfinished."""
        timer = PhaseTimer()
        with timer.phase("quiesce"):
            live = self._quiesce(exchange)
        if live == 0:
            return live  # the next turn of the loop ends the step
        with timer.phase("decide"):
            ranks = self.switcher.place() if to is Layout.EP else {}
            fit = self.switcher.fits_ep(ranks) if to is Layout.EP else self.switcher.fits_tp()
        t = time.perf_counter() - self._started
        reason = fit.refusal
        if reason is None:
            try:
                if to is Layout.EP:
                    record = self.switcher.to_ep(fit, ranks, self.front, timer, iteration=iteration, t=t)
                else:
                    record = self.switcher.to_tp(fit, timer, iteration=iteration, t=t)
            except QuiesceError as error:
                reason = f"not at rest: {error}"
            else:
                self.policy.switched()
                self.profiler.after_switch()
                self.stats.switches.append(record)
                self.stats.switch_s += record.pause_ms / 1e3
                return live
        self.policy.cancelled(iteration)
        self.stats.cancelled.append(CancelledSwitch(iteration, t, live, reason))
        return live

    def _quiesce(self, exchange: _Exchange | None) -> int:
        """Take everything that is in flight and deliver it; returns how many samples are unfinished then."""
        if exchange is not None:
            self._settle(exchange)
        # Draining finishes requests, so they are counted anew before anything is decided.
        tokens, aborts = self._drain()
        drained = _Pass(0.0, 0.0, self.pair.layout, tokens)
        live, all_tokens = self._agree(self._exchange(drained, aborts + self.front.abort(self.aborts)))
        if self.stats.iterations:
            self.stats.iterations[-1].live = live
            self.stats.iterations[-1].tokens += all_tokens
        if self.on_iteration and tokens:
            self.on_iteration(self.front.finished, live, self.pair.layout.value, tokens)
        return live
