"""One rollout step on one rank: the loop from the first prefill in EP to the last straggler in TP.

Ranks agree once per iteration by one small all-reduce (unfinished samples, tokens, aborts). It is started when an
iteration's tokens are known and waited for after the next forward pass has been launched, so that it costs no time;
decisions therefore rest on counts one iteration old. All ranks use the same counts, hence decide alike.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from vllm.v1.engine import EngineCoreRequest

from moebius.engine import phases
from moebius.engine.admission import admit
from moebius.engine.exchange import Exchange, News, Pass
from moebius.engine.front import ParkedSample, RequestFront
from moebius.engine.inbox import AbortBox, Inbox
from moebius.engine.layout import Layout
from moebius.engine.length_news import LengthNews, Lengths, read
from moebius.engine.parking import put_back, take_out
from moebius.engine.policy import Observation, SwitchPolicy
from moebius.engine.profile import SwitchProfiler
from moebius.engine.requests import QuiesceError, release_stuck
from moebius.engine.runtime import RuntimePair
from moebius.engine.switch import PhaseTimer, Switcher
from moebius.engine.tail_drafts import TailDrafts
from moebius.engine.types import (
    CancelledSwitch,
    Iteration,
    PolicyDecision,
    SamplePiece,
    SampleRequest,
    SampleResult,
    StepStats,
)  # fmt: skip

OnIteration = Callable[[int, int, str, int], None]  # finished here, live everywhere, layout, tokens here
OnResults = Callable[[list[SampleResult | SamplePiece]], None]  # of this rank, as soon as they are there

_log = logging.getLogger(__name__)
_PREPARE_AGAIN = 16  # iterations between two attempts to prepare a switch
_IDLE_S = 0.001  # between two looks for requests while an open step has none


class CallbackFailed(RuntimeError):
    """A function given to the step raised an error, on this or another rank; all samples of the step were ended."""


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
        """Decode all admitted requests to their end, or until a rank is asked to park.

        After an error of a function given to the step, `failure` says so, and all samples have been ended.

        Raises:
            LostRequest, SwitchError: the step cannot be finished.
        """
        iteration = 0
        live = self._settle(self._exchange(None, self.front.abort(self.aborts)))
        exchange: Exchange | None = None
        self._mark = time.perf_counter()
        while True:
            self.profiler.before_iteration(iteration, live, self.pair.layout, self.policy.config)
            if self._parking:
                self._park(iteration, exchange)
                self._end_policy()
                return
            if live == 0:
                if exchange is not None:
                    live, exchange = self._settle(exchange), None
                    continue
                self._drain()  # a batch that was scheduled before its requests were known to be finished
                self._pass_results()
                if not self._open:
                    self._end_policy()
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
            elif (drafts := self._changing()) is not None:
                live, exchange = self._quiesce(exchange), None
                drafts.change()
                if live == 0:
                    continue
            elif self._short and self.switcher.staging.is_ready:  # known to all ranks at the same iteration
                self._unprepare(iteration)
            elif self._expects_tp and iteration >= self._prepare_from:
                self._prepare(iteration)
            tokens, found = self._iterate()
            self.switcher.clean_up()
            last = self._end_pass(tokens)
            iteration += 1
            self.front.iteration = iteration
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

    def _park(self, iteration: int, exchange: Exchange | None) -> None:
        """End the step on all ranks with what is unfinished kept by the rank whose front has it."""
        self.switcher.clean_up()
        self._quiesce(exchange, PhaseTimer())
        self.switcher.drop_drafts()
        keep = self._keep_pages
        if keep and self.pair.layout is Layout.TP:
            keep = self._bring_back(iteration)  # only the EP pools hold pages between steps
        for request in self.inbox.take().requests:  # came too late for this step
            try:
                self.front.register(request, prepared := self.front.prepare(request))
            except (ValueError, TypeError) as error:
                self.front.refuse(request, str(error))
            else:
                self._give_to_core(prepared)
        self.parked = self.front.park(take_out(self.pair.active, keep_pages=keep))
        for sample in self.parked:
            sample.holds_pages = keep
        self.stats.parked = len(self.parked)
        self.switcher.owners = {}
        self._pass_results()

    def _bring_back(self, iteration: int) -> bool:
        """Switch to EP in order to park with KV; False if it does not fit, so that KV is computed again."""
        timer = PhaseTimer()
        with timer.phase("decide"):
            ranks = self.switcher.place()
            fit = self.switcher.fits_ep(ranks)
            self.front.leave_layout(self.pair.active.scheduler.requests)
        if not ranks or fit.refusal is not None:
            return False
        t = time.perf_counter() - self._started
        record = self.switcher.to_ep(fit, ranks, self.front, timer, iteration=iteration, t=t)
        self.front.layout = Layout.EP.value
        self.stats.switches.append(record)
        self.stats.switch_s += record.pause_ms / 1e3
        return True

    def _decide(self, iteration: int, live: int) -> Layout | None:
        staged = self.switcher.staging.share
        seen = Observation(iteration, live, self.pair.layout, self._seconds, self._unseen_tokens, staged=staged)
        if self.policy.learns_lengths:
            seen = replace(seen, finished=self._told.finished, came=self._told.came)
            self._told = Lengths()
        self._unseen_tokens = 0
        self._expects_tp = False
        if self._filling and self.policy.waits_for_burst:
            self.policy.observe(seen)
            return None
        target = self.policy.decide(seen).target
        self._expects_tp = target is None and self.policy.expects_tp(seen)
        return target

    def _prepare(self, iteration: int) -> None:
        """Send expert bytes ahead, if there is room now; else look again some iterations later."""
        staging = self.switcher.staging
        if staging.why_not is None and not staging.is_ready and staging.prepare():
            self.stats.prepared_at.append(iteration)
        else:
            self._prepare_from = iteration + _PREPARE_AGAIN

    def _unprepare(self, iteration: int) -> None:
        """Forget what was sent ahead, and leave its pages to the requests for a while."""
        self.switcher.staging.drop()
        self._prepare_from = iteration + self.policy.config.cooldown_iterations

    def _end_policy(self) -> None:
        """Tell the policy how the step ended; lengths that found no place in an exchange are told now, once a step."""
        if (news := self.front.news) is None:
            self.policy.end_step(broken_off=self._parking)
            return
        rest: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(rest, (news.rest(), self.stats.parked), group=self.group)
        told = read([number for numbers, _ in rest for number in numbers])
        self.policy.end_step(finished=self._told.finished + told.finished, left=sum(parked for _, parked in rest))

    def _end_pass(self, tokens: int) -> Pass:
        now = time.perf_counter()
        last = Pass(now - self._started, 1e3 * (now - self._mark), self.pair.layout, tokens)
        self._mark = now
        if self.drafts is not None and self.pair.layout is Layout.TP:
            last.drafted, last.whole = self.drafts.drafter.take_pass(), not self._prefilling
        return last

    def _changing(self) -> TailDrafts | None:
        """The drafts, if TP is to go from decoding ahead to drafting, or back, before the next iteration."""
        if self.drafts is None or self.pair.layout is not Layout.TP:
            return None
        return self.drafts if self.drafts.wants_change(self.pair.tp.scheduler.running) else None

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

    def _iterate(self) -> tuple[int, list[str]]:
        """One forward pass; returns tokens sampled for this rank's requests and requests to take off the core.

        With asynchronous scheduling the tokens are those of the pass before: the one launched here is still running.
        """
        core = self.pair.active.core
        self._prefilling = _prefills(core.scheduler, self._prefilling)
        phases.enter(phases.PREFILL if self._prefilling else phases.decode(self.pair.layout.value))
        if self.pair.layout is Layout.EP and not core.scheduler.has_requests():
            # The peers' expert layers are collectives: a rank without requests takes part with a dummy batch.
            core.execute_dummy_batch()
        client: Any = self.pair.front.engine_core
        outputs = client.get_output()
        if not outputs.outputs and not self.front.audience.tokens:
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

    def _try_switch(self, to: Layout, iteration: int, exchange: Exchange | None) -> int:
        """Switch if the requests fit; returns how many samples are unfinished."""
        timer = PhaseTimer(to.value)
        live = self._quiesce(exchange, timer)
        if live == 0:
            return live  # the next turn of the loop ends the step
        t = time.perf_counter() - self._started
        try:
            with timer.phase("decide"):
                ranks = self.switcher.place() if to is Layout.EP else {}
                fit = self.switcher.fits_ep(ranks) if to is Layout.EP else self.switcher.fits_tp()
                self.front.leave_layout(self.pair.active.scheduler.requests)
            reason = fit.refusal
            if reason is None:
                if to is Layout.EP:
                    record = self.switcher.to_ep(fit, ranks, self.front, timer, iteration=iteration, t=t)
                else:
                    record = self.switcher.to_tp(fit, timer, iteration=iteration, t=t)
        except QuiesceError as error:
            reason = f"not at rest: {error}"
        if reason is None:
            self.front.layout = to.value
            self.policy.switched()
            self.profiler.after_switch()
            self.stats.switches.append(record)
            self.stats.switch_s += record.pause_ms / 1e3
            return live
        self._unprepare(iteration)  # its pages are of more use to those that stay
        self.policy.cancelled(iteration)
        self.stats.cancelled.append(CancelledSwitch(iteration, t, live, reason))
        return live

    def _quiesce(self, exchange: Exchange | None, timer: PhaseTimer | None = None) -> int:
        """Take everything that is in flight and deliver it; returns how many samples are unfinished then."""
        with timer.phase("drain") if timer is not None else nullcontext():
            if exchange is not None:
                self._settle(exchange)
            tokens, aborts = self._drain()
        with timer.phase("quiesce") if timer is not None else nullcontext():
            # Draining finishes requests, so they are counted anew before anything is decided.
            drained = Pass(0.0, 0.0, self.pair.layout, tokens)
            live, all_tokens = self._agree(self._exchange(drained, aborts + self.front.abort(self.aborts)))
        if self.stats.iterations:
            self.stats.iterations[-1].live = live
            self.stats.iterations[-1].tokens += all_tokens
        if self.on_iteration and tokens:
            self._call(self.on_iteration, self.front.finished, live, self.pair.layout.value, tokens)
        return live


def _prefills(scheduler: Any, before: bool) -> bool:
    """Whether the next pass computes prompts. Nothing new does unless it has waited, or did so the time before."""
    return bool(scheduler.waiting) or (before and any(request.is_prefill_chunk for request in scheduler.running))
