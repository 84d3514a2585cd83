"""One rollout step on one rank: the loop from the first prefill in EP to the last straggler in TP.

Ranks agree once per iteration (moebius.engine.agreed_step), on counts one iteration old.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from moebius.engine import phases
from moebius.engine.agreed_step import AgreedStep
from moebius.engine.exchange import Exchange, Pass
from moebius.engine.layout import Layout
from moebius.engine.length_news import Lengths, read
from moebius.engine.parking import take_out
from moebius.engine.policy import Observation
from moebius.engine.requests import QuiesceError, release_stuck
from moebius.engine.switch import PhaseTimer
from moebius.engine.tail_drafts import TailDrafts
from moebius.engine.types import CancelledSwitch, PolicyDecision

_PREPARE_AGAIN = 16  # iterations between two attempts to prepare a switch
_IDLE_S = 0.001  # between two looks for requests while an open step has none


class CallbackFailed(RuntimeError):
    """A function given to the step raised an error, on this or another rank; all samples of the step were ended."""


class Step(AgreedStep):
    """One step of one rank. Collective: all ranks make one and run it."""

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

    # ---- switches, and the end --------------------------------------------------------------------------------------

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

    def _end_policy(self) -> None:
        """Tell the policy how the step ended; lengths that found no place in an exchange are told now, once a step."""
        if (news := self.front.news) is None:
            self.policy.end_step(broken_off=self._parking)
            return
        rest: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(rest, (news.rest(), self.stats.parked), group=self.group)
        told = read([number for numbers, _ in rest for number in numbers])
        self.policy.end_step(finished=self._told.finished + told.finished, left=sum(parked for _, parked in rest))


def _prefills(scheduler: Any, before: bool) -> bool:
    """Whether the next pass computes prompts. Nothing new does unless it has waited, or did so the time before."""
    return bool(scheduler.waiting) or (before and any(request.is_prefill_chunk for request in scheduler.running))
