"""MoebiusEngine: one rank. Runs a step from the first prefill in EP to the last straggler in TP."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from vllm import SamplingParams
from vllm.distributed.parallel_state import get_world_group
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import FinishReason

from moebius.engine.config import EngineConfig
from moebius.engine.layout import Layout, ModelShape
from moebius.engine.policy import SwitchPolicy
from moebius.engine.requests import QuiesceError, forget_finished, release_stuck
from moebius.engine.runtime import RuntimePair
from moebius.engine.sampler import SEED_FIELD
from moebius.engine.switch import PhaseTimer, Switcher
from moebius.engine.types import (
    CancelledSwitch,
    Iteration,
    SampleKey,
    SampleRequest,
    SampleResult,
    StepOutcome,
    StepStats,
)
from moebius.engine.weights import ExpectedWeights, WeightSession
from moebius.kernels.collective import CollectiveMover

OnIteration = Callable[[int, int, str, int], None]  # finished here, live everywhere, layout, tokens here


class EngineDirty(RuntimeError):
    """The weights or the engine's state are not whole; the message says what makes them so."""


class RequestRefused(ValueError):
    """vLLM refuses a request of the step, on this or another rank; no request of the step was started."""


class MoebiusEngine:
    """One rank. All methods but `abort` must be called from one thread, and on all ranks in the same order.

    RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be set.

    Raises:
        ValueError: the model is no MoE model, or its counts do not divide by the ranks.
        PatchError: vLLM is another version, or a change to it did not take hold.
    """

    def __init__(self, config: EngineConfig) -> None:
        from transformers import AutoConfig

        self.config = config
        hf_config = AutoConfig.from_pretrained(config.model)
        self._hf_config = hf_config
        world_size = _world_size_from_env()
        shape = ModelShape.from_hf_config(hf_config.to_dict(), world_size)
        self.pair = RuntimePair(config, shape, world_size)
        world = get_world_group()
        self.rank, self.world_size = world.rank_in_group, world.world_size
        self._cpu_group = world.cpu_group
        self.switcher = Switcher(self.pair, CollectiveMover(world.device_group), world.cpu_group)
        self.policy = SwitchPolicy(config.policy)
        self.policy_version = 0
        self.tokenizer = self.pair.front.tokenizer
        model_config = self.pair.front.model_config
        self.max_model_len: int = model_config.max_model_len
        self.vocab_size: int = model_config.get_vocab_size()
        self._broken: str | None = None  # a step broke off: only a restart helps
        self._problem: str | None = None  # the weights are not whole: a full update helps
        self._update: tuple[int, WeightSession] | None = None
        self._keys: dict[str, SampleKey] = {}  # internal request id -> key, this rank's unfinished ones
        self._asked: dict[SampleKey, SampleRequest] = {}  # this rank's requests of the step
        self._abort_lock = threading.Lock()
        self._abort_keys: set[SampleKey] = set()
        self._abort_all = False
        self._return_pending = False  # the experts stand in TP layout

    # ---- one step -------------------------------------------------------------------------------------------------

    def run_step(self, requests: list[SampleRequest], *, on_iteration: OnIteration | None = None) -> StepOutcome:
        """Decode this rank's `requests` to the end. Collective: every rank calls it, some perhaps with none.

        Raises:
            EngineDirty: a weight update failed or a step broke off; the message says how to go on.
            RequestRefused: a request is not valid; the engine can go on with the next step.
        """
        if self._broken or self._problem:
            self.clear_aborts()
            raise EngineDirty(self._broken or self._problem)
        started = time.perf_counter()
        stats = StepStats(rank=self.rank, world_size=self.world_size, admitted=len(requests))
        results: list[SampleResult] = []
        try:
            self._return_to_ep(stats)
            self._admit_all(requests)
            self._loop(stats, results, started, on_iteration)
            forget_finished(self.pair.active)
        except RequestRefused:
            raise  # nothing was started on any rank
        except BaseException as error:
            self._broken = f"the last step broke off ({type(error).__name__}: {error}): restart the group"
            raise
        finally:
            self.clear_aborts()
        stats.total_s = time.perf_counter() - started
        return StepOutcome(results, stats)

    def abort(self, keys: Iterable[SampleKey] | None = None) -> None:
        """Finish these samples (None: all) of the running step early; may be called from any thread."""
        with self._abort_lock:
            if keys is None:
                self._abort_all = True
            else:
                self._abort_keys.update(SampleKey(*key) for key in keys)

    def clear_aborts(self) -> None:
        """Forget aborts that found no step; any thread."""
        with self._abort_lock:
            self._abort_keys.clear()
            self._abort_all = False

    def _return_to_ep(self, stats: StepStats) -> None:
        if self._return_pending:
            started = time.perf_counter()
            self.switcher.reshard(Layout.EP)
            self._return_pending = False
            stats.return_reshard_ms = 1e3 * (time.perf_counter() - started)
        if self.pair.layout is not Layout.EP:
            self.pair.activate(Layout.EP)
            # What the previous step cached described pages that TP has overwritten since.
            for runtime in (self.pair.ep, self.pair.tp):
                if not runtime.scheduler.reset_prefix_cache():
                    raise EngineDirty(f"pages of the {runtime.layout.value} runtime are still in use between steps")

    def _admit_all(self, requests: list[SampleRequest]) -> None:
        """Admit on all ranks or on none: a request vLLM refuses on one rank must not leave the others waiting."""
        self._asked = {request.key: request for request in requests}
        for runtime in (self.pair.ep, self.pair.tp):
            runtime.runner.sampler.topk_topp_sampler.forget_rows()
        problem = None
        try:
            for request in requests:
                self._admit(request)
        except (ValueError, TypeError) as error:
            problem = f"prompt {request.key.prompt}, sample {request.key.sample}: {error}"
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, problem, group=self._cpu_group)
        problems = [text for text in gathered if text]
        if problems:
            ids = list(self._keys)
            self._keys.clear()
            front: Any = self.pair.front
            front.output_processor.abort_requests(ids, internal=True)
            self.pair.active.core.abort_requests(ids)
            forget_finished(self.pair.active)
            raise RequestRefused(problems[0])

    def _admit(self, request: SampleRequest) -> None:
        params = SamplingParams(
            **request.sampling,
            n=1,
            extra_args={SEED_FIELD: request.seed},
            output_kind=RequestOutputKind.FINAL_ONLY,
            detokenize=self.tokenizer is not None,
        )
        name = f"{request.key.prompt}:{request.key.sample}"
        prompt: Any = {"prompt_token_ids": list(request.prompt_token_ids)}
        self._keys[self.pair.front.add_request(name, prompt, params)] = request.key

    def _loop(
        self, stats: StepStats, results: list[SampleResult], started: float, on_iteration: OnIteration | None
    ) -> None:
        self.policy.begin_step()
        iteration, tokens = 0, 0
        waiting_aborts: list[str] = []  # TP: found by this rank, to be applied by all before the next iteration
        iteration_started = time.perf_counter()
        while True:
            waiting_aborts += self._take_aborts(results)
            live, all_tokens, any_aborts = self._exchange(tokens, bool(waiting_aborts))
            now = time.perf_counter()
            if iteration:
                ms = 1e3 * (now - iteration_started)
                stats.iterations.append(Iteration(now - started, self.pair.layout.value, live, all_tokens, ms))
                self._account(stats, ms)
                if on_iteration:
                    on_iteration(len(results), live, self.pair.layout.value, tokens)
            self._apply_aborts(waiting_aborts, any_aborts)
            waiting_aborts = []
            if live == 0:
                return
            self._check_nothing_lost()
            if self.pair.layout is Layout.EP and self.policy.wants_tp(iteration, live):
                self._try_switch(stats, iteration, live, started)
            iteration_started = time.perf_counter()
            tokens, waiting_aborts = self._iterate(results)
            iteration += 1

    def _check_nothing_lost(self) -> None:
        """An unfinished request the scheduler does not know would never end."""
        known = self.pair.active.scheduler.get_num_unfinished_requests()
        if known < len(self._keys):
            raise EngineDirty(f"{len(self._keys)} requests of rank {self.rank} are unfinished, its core has {known}")

    def _exchange(self, tokens: int, aborting: bool) -> tuple[int, int, bool]:
        """One small collective per iteration: unfinished samples, tokens of the last iteration, aborts waiting."""
        counts = torch.tensor([len(self._keys), tokens, int(aborting)], dtype=torch.int64)
        dist.all_reduce(counts, group=self._cpu_group)
        live, all_tokens, aborts = counts.tolist()
        return live, all_tokens, bool(aborts)

    def _account(self, stats: StepStats, ms: float) -> None:
        if self.pair.layout is Layout.EP:
            stats.burst_s += ms / 1e3
        else:
            stats.tail_s += ms / 1e3

    def _iterate(self, results: list[SampleResult]) -> tuple[int, list[str]]:
        """One engine iteration; returns tokens sampled for this rank's requests and requests to take off the core."""
        front: Any = self.pair.front
        if self.pair.layout is Layout.EP and not self._keys:
            # The peers' expert layers are collectives: a rank without requests takes part with a dummy batch.
            front.engine_core.execute_dummy_batch()
            return 0, []
        outputs = front.engine_core.get_output()
        if self.pair.layout is Layout.TP and not outputs.outputs:
            release_stuck(self.pair.tp)
        own = [output for output in outputs.outputs if output.request_id in self._keys]
        tokens = sum(len(output.new_token_ids) for output in own)
        processed = front.output_processor.process_outputs(own, engine_core_timestamp=outputs.timestamp)
        finished = set(processed.reqs_to_abort) | {o.request_id for o in own if o.finish_reason is not None}
        by_name = {f"{key.prompt}:{key.sample}": key for key in (self._keys[i] for i in finished)}
        for output in processed.request_outputs:
            results.append(self._result(by_name[output.request_id], output))
        for request_id in finished:
            del self._keys[request_id]
        # Requests that met a stop string: only this rank's front can see that.
        return tokens, list(processed.reqs_to_abort)

    def _take_aborts(self, results: list[SampleResult]) -> list[str]:
        """Finish what the user aborted, with the tokens it has; returns the requests to take off the core."""
        with self._abort_lock:
            if not (self._abort_all or self._abort_keys):
                return []
            wanted = None if self._abort_all else set(self._abort_keys)
        processor: Any = self.pair.front.output_processor
        ids = [i for i, key in self._keys.items() if wanted is None or key in wanted]
        for request_id in ids:
            state = processor.request_states[request_id]
            output = state.make_request_output([], None, FinishReason.ABORT, None)
            results.append(self._result(self._keys.pop(request_id), output))
        processor.abort_requests(ids, internal=True)
        return ids

    def _apply_aborts(self, mine: list[str], any_rank: bool) -> None:
        """Take requests off the core. In TP all ranks do so in one order: their schedulers must stay identical."""
        if self.pair.layout is Layout.TP and any_rank:
            gathered: list[Any] = [None] * self.world_size
            dist.all_gather_object(gathered, mine, group=self._cpu_group)
            mine = [request_id for ids in gathered for request_id in ids]
        if mine:
            self.pair.active.core.abort_requests(mine)

    def _try_switch(self, stats: StepStats, iteration: int, live: int, started: float) -> None:
        timer = PhaseTimer()
        with timer.phase("decide"):
            fit = self.switcher.check_fit()
        t = time.perf_counter() - started
        reason = fit.refusal
        if reason is None:
            try:
                record = self.switcher.to_tp(fit, timer, iteration=iteration, t=t)
            except QuiesceError as error:
                reason = f"not at rest: {error}"
            else:
                self._return_pending = True
                self.policy.switched()
                stats.switches.append(record)
                stats.switch_s += record.pause_ms / 1e3
                return
        self.policy.cancelled(iteration)
        stats.cancelled.append(CancelledSwitch(iteration, t, live, reason))

    def _result(self, key: SampleKey, output: Any) -> SampleResult:
        completion = output.outputs[0]
        token_ids = list(completion.token_ids)
        logprobs = tops = None
        if completion.logprobs is not None:
            logprobs = [entry[t].logprob for t, entry in zip(token_ids, completion.logprobs, strict=True)]
            if self._asked[key].sampling.get("logprobs"):
                tops = [{t: lp.logprob for t, lp in entry.items()} for entry in completion.logprobs]
        return SampleResult(
            key=key,
            token_ids=token_ids,
            logprobs=logprobs,
            text=completion.text if self.tokenizer is not None else None,
            finish_reason=str(completion.finish_reason),
            stop_reason=completion.stop_reason,
            policy_version=self.policy_version,
            rank=self.rank,
            top_logprobs=tops,
        )

    # ---- weights --------------------------------------------------------------------------------------------------

    @cached_property
    def _expected_weights(self) -> ExpectedWeights:
        return ExpectedWeights.from_hf_config(self._hf_config)

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
        self._return_pending = False
        self.pair.activate(Layout.EP)

    def update_tensors(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Write some tensors (HF names, per expert or fused) into both runtimes. Raises ValueError as WeightSession."""
        if self._update is None:
            raise EngineDirty("no weight update is open: call begin_update first")
        version, session = self._update
        try:
            parts = [part for name, tensor in tensors for part in session.accept(name, tensor)]
            self._load(parts)
        except BaseException as error:
            self._update = None  # whatever was written, this update can no longer be whole
            self._problem = f"the update to policy version {version} failed ({error}): send a full update"
            raise

    def _load(self, parts: list[tuple[str, torch.Tensor]]) -> None:
        """Experts go into the EP slots only: TP's are the same bytes after the next switch. The rest goes into both."""
        ep, tp = self.pair.ep, self.pair.tp
        ep.install_groups()
        try:
            ep.runner.model.load_weights(iter(parts))
            tp.install_groups()
            tp.runner.model.load_weights((name, tensor) for name, tensor in parts if ".experts." not in name)
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
        for runtime in (self.pair.ep, self.pair.tp):
            if not runtime.scheduler.reset_prefix_cache():
                raise EngineDirty(f"pages of the {runtime.layout.value} runtime are in use during a weight update")
        self.policy_version = version
        self._problem = None

    def shutdown(self) -> None:
        """End both cores and the process group."""
        for runtime in (self.pair.ep, self.pair.tp):
            runtime.core.shutdown()
        if dist.is_initialized():
            dist.destroy_process_group()


def _world_size_from_env() -> int:
    try:
        return int(os.environ["WORLD_SIZE"])
    except KeyError:
        raise ValueError("WORLD_SIZE is not set: the engine runs as one of several ranks") from None
