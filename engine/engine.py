"""MoebiusEngine: one rank. Runs a step from the first prefill in EP to the last straggler in TP."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from functools import cached_property

import torch
import torch.distributed as dist
from vllm.distributed.parallel_state import get_world_group

from moebius.engine.account import MemoryAccount, memory_account
from moebius.engine.config import EngineConfig
from moebius.engine.costs import CostModel
from moebius.engine.expert_writer import ExpertWriter
from moebius.engine.inbox import AbortBox, Inbox
from moebius.engine.layout import Layout, ModelShape, ShardMap
from moebius.engine.movers import make_mover
from moebius.engine.policy import SwitchPolicy, resolved
from moebius.engine.profile import SwitchProfiler
from moebius.engine.requests import forget_finished, reset_prefix_cache
from moebius.engine.runtime import RuntimePair
from moebius.engine.step import OnIteration, OnResults, PolicyRefused, RequestRefused, Step
from moebius.engine.switch import Switcher
from moebius.engine.types import SampleKey, SampleRequest, StepOutcome, StepStats
from moebius.engine.weights import ExpectedWeights, WeightSession


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

        costs = None if config.policy.costs is None else CostModel.load(config.policy.costs)
        config = config.model_copy(update={"policy": resolved(config.policy, costs)})  # capture sizes depend on it
        self.config = config
        hf_config = AutoConfig.from_pretrained(config.model, **config.hf_overrides)
        self._hf_config = hf_config
        world_size = _world_size_from_env()
        shape = ModelShape.from_hf_config(hf_config.to_dict(), world_size)
        self.pair = RuntimePair(config, shape, world_size)
        world = get_world_group()
        self.rank, self.world_size = world.rank_in_group, world.world_size
        self._cpu_group = world.cpu_group
        mover = make_mover(config, self.pair, world.device_group, world.cpu_group)
        self.switcher = Switcher(self.pair, mover, world.cpu_group)
        self.policy = SwitchPolicy(config.policy, costs)
        self.profiler = SwitchProfiler(config.profile, self.rank)
        self.policy_version = 0
        self.tokenizer = self.pair.front.tokenizer
        model_config = self.pair.front.model_config
        self.max_model_len: int = model_config.max_model_len
        self.vocab_size: int = model_config.get_vocab_size()
        self._broken: str | None = None  # a step broke off: only a restart helps
        self._problem: str | None = None  # the weights are not whole: a full update helps
        self._update: tuple[int, WeightSession] | None = None
        self.inbox = Inbox()  # may be used from any thread
        self._aborts = AbortBox()
        self.startup = self.pair.clock.report(self.rank)

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

        Raises:
            EngineDirty: a weight update failed or a step broke off; the message says how to go on.
            RequestRefused: a request is not valid; the engine can go on with the next step.
            PolicyRefused: the policy lacks its costs; likewise.
        """
        if self._broken or self._problem:
            self.clear_aborts()
            self.inbox.clear()
            raise EngineDirty(self._broken or self._problem)
        started = time.perf_counter()
        stats = StepStats(rank=self.rank, world_size=self.world_size, admitted=len(requests))
        try:
            if not self.policy.keeps_layout:
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
                on_iteration=on_iteration,
                on_results=on_results,
            )
            step.admit(requests)
            step.run()
            stats.decisions = step.decisions()
            forget_finished(self.pair.active)
        except (RequestRefused, PolicyRefused):
            self.inbox.clear()
            raise  # nothing was started on any rank
        except BaseException as error:
            self._broken = f"the last step broke off ({type(error).__name__}: {error}): restart the group"
            raise
        finally:
            self.clear_aborts()
        stats.total_s = time.perf_counter() - started
        return StepOutcome(step.front.results, stats)

    def abort(self, keys: Iterable[SampleKey] | None = None) -> None:
        """Finish these samples (None: all) of the running step early; may be called from any thread."""
        self._aborts.add(keys)

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
        for runtime in (self.pair.ep, self.pair.tp):
            if not reset_prefix_cache(runtime):
                raise EngineDirty(f"pages of the {runtime.layout.value} runtime are still in use between steps")

    # ---- weights --------------------------------------------------------------------------------------------------

    @cached_property
    def _expected_weights(self) -> ExpectedWeights:
        return ExpectedWeights.from_hf_config(self._hf_config)

    @cached_property
    def _expert_writer(self) -> ExpertWriter:
        shape, modules = self.pair.shape, self.pair.ep.expert_modules
        return ExpertWriter(
            [module.w13_weight for module in modules],
            [module.w2_weight for module in modules],
            shape.moe_layers,
            ShardMap(shape, self.world_size).ep_experts(self.rank).start,
        )

    def begin_update(self, version: int) -> None:
        """Start a full update to policy `version`. Until it commits, steps are refused.

        Raises:
            EngineDirty: a step broke off before, so that more than the weights may be wrong.
        """
        if self._broken:
            raise EngineDirty(self._broken)
        self._problem = f"the update to policy version {version} was not completed: send a full update"
        self._update = (version, WeightSession(self._expected_weights))
        # All experts are about to be written in EP layout: nothing to move back.
        self.switcher.experts_in = Layout.EP
        self.pair.activate(Layout.EP)

    def update_tensors(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Write some tensors (HF names, per expert or fused) into both runtimes. Raises ValueError as WeightSession."""
        if self._update is None:
            raise EngineDirty("no weight update is open: call begin_update first")
        version, session = self._update
        try:
            rest: list[tuple[str, torch.Tensor]] = []
            for name, tensor in tensors:
                parts = session.accept(name, tensor)
                if not self._expert_writer.write(name, tensor):
                    rest += parts
            self._load_rest(rest)
        except BaseException as error:
            self._update = None  # whatever was written, this update can no longer be whole
            self._problem = f"the update to policy version {version} failed ({error}): send a full update"
            raise

    def _load_rest(self, parts: list[tuple[str, torch.Tensor]]) -> None:
        """What is not an expert goes into both runtimes. TP's experts are the EP slots' bytes after the next switch."""
        ep, tp = self.pair.ep, self.pair.tp
        try:
            for runtime in (ep, tp):
                runtime.install_groups()
                runtime.runner.model.load_weights(iter(parts))
        finally:
            ep.install_groups()

    def commit_update(self) -> None:
        """End the update. Raises ValueError naming what is missing."""
        if self._update is None:
            raise EngineDirty("no weight update is open: call begin_update first")
        version, session = self._update
        self._update = None
        try:
            session.finish()
        except ValueError as error:
            self._problem = f"the update to policy version {version} failed ({error}): send a full update"
            raise
        self._reset_prefix_caches()
        self.policy_version = version
        self._problem = None

    def memory_account(self) -> MemoryAccount:
        """Where this rank's memory goes at present."""
        return memory_account(self.pair, self.startup, self.rank)

    def shutdown(self) -> None:
        """End both cores and the process group; a collective."""
        self.switcher.mover.close()
        for runtime in (self.pair.ep, self.pair.tp):
            runtime.core.shutdown()
        if dist.is_initialized():
            dist.destroy_process_group()


def _world_size_from_env() -> int:
    try:
        return int(os.environ["WORLD_SIZE"])
    except KeyError:
        raise ValueError("WORLD_SIZE is not set: the engine runs as one of several ranks") from None
