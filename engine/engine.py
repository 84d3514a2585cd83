"""MoebiusEngine: one rank. Runs a step from the first prefill in EP to the last straggler in TP."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.parallel_state import get_world_group

from moebius.engine.account import MemoryAccount, memory_account
from moebius.engine.admission import PolicyRefused, RequestRefused
from moebius.engine.agreed_step import OnIteration, OnResults
from moebius.engine.config import EngineConfig
from moebius.engine.cost_cache import costs_at_start
from moebius.engine.costs import CostModel
from moebius.engine.front import RequestFront
from moebius.engine.front_requests import ParkedSample
from moebius.engine.garbage import nothing_collected
from moebius.engine.inbox import AbortBox, Inbox
from moebius.engine.layout import Layout, ModelShape
from moebius.engine.movers import make_mover
from moebius.engine.parking import forget_prefixes, free_pages, held_pages, keep_to_itself
from moebius.engine.policy import SwitchPolicy, resolved
from moebius.engine.profile import SwitchProfiler
from moebius.engine.requests import forget_finished
from moebius.engine.runtime import RuntimePair
from moebius.engine.settle import settle
from moebius.engine.sleeping import Sleeper
from moebius.engine.staging import Staging
from moebius.engine.step import CallbackFailed, Step
from moebius.engine.switch import Switcher
from moebius.engine.tail_drafts import TailDrafts
from moebius.engine.types import (
    MemoryChange,
    MemoryTag,
    SampleKey,
    SampleRequest,
    SampleResult,
    StepOutcome,
    StepStats,
    UpdateStats,
)
from moebius.engine.updates import Mode, WeightUpdates


class EngineDirty(RuntimeError):
    """The weights or the engine's state are not whole; the message says what makes them so."""


class MoebiusEngine:
    """One rank. All methods but `abort` must be called from one thread, and on all ranks in the same order.

    RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be set.

    Raises:
        ValueError: the model is no MoE model, or its counts do not divide by the ranks.
        PatchError: vLLM is another version, or a change to it did not take hold.
    """

    def __init__(self, config: EngineConfig) -> None:
        from transformers import AutoConfig

        if config.policy.costs_file is not None or config.policy.costs is None:
            file = config.policy.costs_file
            costs = None if file is None else CostModel.load(file)
            config = config.model_copy(update={"policy": resolved(config.policy, costs)})  # capture sizes depend on it
        self.config = config
        hf_config = AutoConfig.from_pretrained(config.model, **config.hf_overrides)
        world_size = _world_size_from_env()
        shape = ModelShape.from_hf_config(hf_config.to_dict(), world_size)
        self.pair = RuntimePair(config, shape, world_size)
        world = get_world_group()
        self.rank, self.world_size = world.rank_in_group, world.world_size
        self._cpu_group = world.cpu_group
        mover = make_mover(config, self.pair, world.device_group, world.cpu_group)
        staging = Staging(self.pair, mover, config, world.cpu_group)
        self.switcher = Switcher(self.pair, mover, world.cpu_group, staging)
        if self.pair.drafter is not None:
            self.switcher.drafts = TailDrafts(
                self.pair.drafter, config.tail, world.cpu_group, config.collective_timeout_s
            )
        self.policy = SwitchPolicy(config.policy.model_copy(update={"costs": None}))  # gets its costs below
        self.profiler = SwitchProfiler(config.profile, self.rank)
        self.policy_version = 0
        self._updates = 0
        self.tokenizer = self.pair.front.tokenizer
        model_config = self.pair.front.model_config
        self.max_model_len: int = model_config.max_model_len
        self.vocab_size: int = model_config.get_vocab_size()
        self._broken: str | None = None  # a step broke off: only a restart helps
        self._sleeper = Sleeper(self.pair, self.switcher, world.cpu_group)
        self._weights = WeightUpdates(self.pair, self.switcher, world.cpu_group, hf_config)
        self.inbox = Inbox()  # may be used from any thread
        self._aborts = AbortBox(self.inbox)
        self._parked: list[ParkedSample] = []  # unfinished samples of earlier steps that this rank answers for
        # After all captures, before anything is measured.
        kernel_us = [] if config.enforce_eager else settle(self.pair.buffer.storage.device)
        known = costs_at_start(self)
        self.policy.costs, self.policy.config = known.costs, resolved(config.policy, known.costs)
        if self.switcher.drafts is not None:
            self.switcher.drafts.know(known.costs, self.pair, adaptive=config.tail.adaptive)
        self.config = config.model_copy(update={"policy": self.policy.config})
        self.startup = self.pair.clock.report(self.rank)
        self.startup.calibration_s, self.startup.costs = known.seconds, known.origin
        self.startup.kernel_us = kernel_us

    # ---- one step -------------------------------------------------------------------------------------------------

    def run_step(
        self,
        requests: list[SampleRequest],
        *,
        on_iteration: OnIteration | None = None,
        on_results: OnResults | None = None,
    ) -> StepOutcome:
        """Decode this rank's `requests` to the end. Collective: every rank calls it, some perhaps with none.

        While `inbox` is open, requests handed to it join the step, and the step goes on until all ranks have closed
        theirs. A request of the inbox that vLLM refuses comes back with finish_reason "error" and the reason as
        stop_reason. With `on_results`, results are passed to it (on this thread) instead of being returned at the end.

        After `park()` the step ends with samples unfinished. The rank that answers for them keeps them, and the next
        step, which begins in EP, goes on with them before anything new.

        Raises:
            CallbackFailed: `on_iteration` or `on_results` raised an error on some rank; all samples were ended, and the
                engine can go on.
            EngineDirty: a weight update failed or a step broke off; the message says how to go on.
            RequestRefused: a request is not valid; the engine can go on with the next step.
            PolicyRefused: the policy lacks its costs; likewise.
        """
        if refusal := self._refusal():
            self.clear_aborts()
            self.inbox.clear()
            raise EngineDirty(refusal)
        started = time.perf_counter()
        stats = StepStats(rank=self.rank, world_size=self.world_size, admitted=len(requests))
        self._aborts.begin([request.key for request in requests] + self.parked)
        try:
            if not self.policy.keeps_layout or self._any_parked():
                self._return_to_ep(stats)
            for runtime in (self.pair.ep, self.pair.tp):
                runtime.runner.sampler.topk_topp_sampler.forget_rows()
            step = Step(
                self.pair,
                self.switcher,
                self.policy,
                self.profiler,
                self.inbox,
                self._aborts,
                self._cpu_group,
                stats=stats,
                policy_version=self.policy_version,
                parked=self._parked,
                keep_pages=self.config.park_keeps_kv,
                on_iteration=on_iteration,
                on_results=on_results,
            )
            step.admit(requests)
            step.run()
            self._parked = step.parked
            self.switcher.staging.drop()
            self.switcher.clean_up()
            stats.decisions = step.decisions()
            forget_finished(self.pair.active)
            if self.switcher.drafts is not None:
                self.switcher.drafts.end()
                stats.drafts = self.switcher.drafts.stats()
                self.policy.tail_speed = self.switcher.drafts.speed
        except (RequestRefused, PolicyRefused):
            raise  # nothing was started on any rank
        except BaseException as error:
            self._broken = f"the last step broke off ({type(error).__name__}: {error}): restart the group"
            raise
        finally:
            self.clear_aborts()
            self.inbox.clear()
        if step.failure is not None:
            raise CallbackFailed(step.failure)
        stats.total_s = time.perf_counter() - started
        return StepOutcome(step.front.results, stats, self.parked)

    def _refusal(self) -> str | None:
        """Why no step can run, and what helps."""
        asleep = f"memory was given back ({', '.join(sorted(self._sleeper.asleep))}): call wake_up first"
        return self._broken or (asleep if self._sleeper.asleep else self._weights.problem)

    def _check_update(self) -> None:
        if self._broken:
            raise EngineDirty(self._broken)
        if "weights" in self._sleeper.asleep:
            raise EngineDirty("the weights' memory was given back: call wake_up before an update")

    def abort(self, keys: Iterable[SampleKey] | None = None) -> None:
        """Finish these samples (None: all) of the running step early; may be called from any thread."""
        self._aborts.add(keys)

    def park(self) -> None:
        """End the running step soon, on all ranks, with its samples unfinished; may be called from any thread."""
        self.inbox.park()

    @property
    def parked(self) -> list[SampleKey]:
        """Unfinished samples of earlier steps that this rank keeps for the next one."""
        return [sample.asked.key for sample in self._parked]

    def abort_parked(self, keys: Iterable[SampleKey] | None = None) -> list[SampleResult]:
        """End these parked samples (None: all) with the tokens they have; returns those that are on this rank."""
        wanted = None if keys is None else {SampleKey(*key) for key in keys}
        ended = [sample for sample in self._parked if wanted is None or sample.asked.key in wanted]
        self._parked = [sample for sample in self._parked if not any(sample is other for other in ended)]
        for sample in ended:
            self._free_pages(sample)
        return RequestFront(self.pair.front, self.rank, self.policy_version).end_parked(ended)

    def _free_pages(self, sample: ParkedSample) -> None:
        if sample.holds_pages:
            free_pages(self.pair.ep, sample.request)
            sample.holds_pages = False

    def _any_parked(self) -> bool:
        """Whether a rank has parked samples; a collective."""
        count = torch.tensor([len(self._parked)])
        dist.all_reduce(count, group=self._cpu_group)
        return bool(count.item())

    def clear_aborts(self) -> None:
        """Forget aborts that found no step; any thread."""
        self._aborts.clear()

    def _return_to_ep(self, stats: StepStats) -> None:
        if self.switcher.experts_in is Layout.TP:
            started = time.perf_counter()
            self.switcher.reshard(Layout.EP)
            stats.return_reshard_ms = 1e3 * (time.perf_counter() - started)
        if self.pair.layout is not Layout.EP:
            self.pair.activate(Layout.EP)
            # What the previous step cached described pages that TP has overwritten since.
            self._reset_prefix_caches()

    def _reset_prefix_caches(self) -> None:
        ids = [s.request.request_id for s in self._parked if s.holds_pages]
        for runtime, held in ((self.pair.ep, held_pages(self.pair.ep, ids)), (self.pair.tp, 0)):
            if runtime.usable_pages - runtime.free_pages != held:
                raise EngineDirty(f"pages of the {runtime.layout.value} runtime are still in use between steps")
            forget_prefixes(runtime)

    # ---- weights --------------------------------------------------------------------------------------------------

    def begin_update(self, version: int, mode: Mode = "in_place") -> None:
        """Start a full update to policy `version`. An `in_place` one makes steps refused until it commits.

        Raises:
            EngineDirty: a step broke off before, so that more than the weights may be wrong.
        """
        self._check_update()
        self._weights.begin(version, mode)

    def update_tensors(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Take some tensors (HF names, per expert or fused) for both runtimes. Raises ValueError as WeightSession."""
        self._weights.tensors(tensors)

    def commit_update(self, problem: str | None = None) -> UpdateStats:
        """End the update on all ranks or on none; a collective. `problem`: why this rank cannot.

        Raises ValueError naming what is missing, or the problem.
        """
        return self._updated(self._weights.commit(problem))

    def drop_update(self) -> None:
        """End an update without a commit: a staged one leaves no trace, after another a full one is needed."""
        self._weights.drop()

    def pull_update(
        self,
        version: int,
        source: Callable[..., Iterable[list[tuple[str, torch.Tensor]]]],
        arguments: tuple[Any, ...],
        mode: Mode = "in_place",
    ) -> UpdateStats:
        """A whole update from `source(*arguments)`, which yields lists of names and tensors; a collective.

        Raises EngineDirty as `begin_update`, and ValueError if any rank had a problem.
        """
        self._check_update()
        return self._updated(self._weights.pull(version, source, arguments, mode))

    def _updated(self, stats: UpdateStats) -> UpdateStats:
        self._reset_prefix_caches()
        self._updates += 1
        for sample in self._parked:
            if sample.holds_pages:
                keep_to_itself(sample.request, self._updates)
        self.policy_version = stats.version
        return stats

    # ---- memory ---------------------------------------------------------------------------------------------------

    def sleep(self, tags: Sequence[MemoryTag] = ("weights", "kv_cache"), *, keep_weights: bool = False) -> MemoryChange:
        """Give memory back between two steps, at unchanged addresses; a collective. Until `wake_up`, steps are refused.

        Without `keep_weights` the weights are gone: steps are refused until a full update has come. Parked samples that
        held KV pages compute their KV again.

        Raises BackingError where memory cannot be given back, EngineDirty after a broken step.
        """
        if self._broken:
            raise EngineDirty(self._broken)
        if "kv_cache" in tags:
            for sample in self._parked:
                self._free_pages(sample)
            self._reset_prefix_caches()
        self._weights.drop()
        lose = "weights" in tags and not keep_weights and "weights" not in self._sleeper.asleep
        change = self._sleeper.sleep(tags, keep_weights=keep_weights)
        if lose:
            self._weights.problem = "the weights were given back by sleep: send a full update"
        return change

    def wake_up(self, tags: Sequence[MemoryTag] = ("weights", "kv_cache")) -> MemoryChange:
        """Take memory again; a collective."""
        return self._sleeper.wake_up(tags)

    def reset_prefix_cache(self) -> None:
        """Forget what pages hold, between two steps. Parked samples keep theirs."""
        self._reset_prefix_caches()

    def kv_use(self) -> float:
        """Share of the active runtime's KV pages that are in use."""
        return float(self.pair.active.scheduler.kv_cache_manager.usage)

    def memory_account(self) -> MemoryAccount:
        """Where this rank's memory goes at present."""
        return memory_account(self.pair, self.startup, self.rank)

    def shutdown(self) -> None:
        """End both cores and the process group; a collective. The process is to end next: nothing is collected."""
        if self.switcher.drafts is not None:
            self.switcher.drafts.close()
        self.switcher.mover.close()
        with nothing_collected():
            for runtime in (self.pair.ep, self.pair.tp):
                runtime.core.shutdown()
        if dist.is_initialized():
            dist.destroy_process_group()


def _world_size_from_env() -> int:
    try:
        return int(os.environ["WORLD_SIZE"])
    except KeyError:
        raise ValueError("WORLD_SIZE is not set: the engine runs as one of several ranks") from None
