"""RolloutGroup: one switch group of ranks behind two calls, `generate` and `update_weights`."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import ray

from moebius.engine.types import SampleKey, SampleRequest, StepOutcome
from moebius.rollout.batch import Limits, Prompt, assign, build_requests, check_sampling, collect, to_token_ids
from moebius.rollout.checkpoint import check_model
from moebius.rollout.config import RolloutConfig
from moebius.rollout.errors import BadInput, GroupNotReady, MoebiusError, RankDied
from moebius.rollout.open_step import OpenStep
from moebius.rollout.placement import connect, resolve_device
from moebius.rollout.ranks import RankError, Ranks
from moebius.rollout.report import StepReport, build_report
from moebius.rollout.report_startup import RankStart
from moebius.rollout.types import LengthTrace, Rollout, Sampling
from moebius.rollout.weights import DEFAULT_BUCKET_BYTES, NamedTensors, buckets
from moebius.rollout.worker import Progress

OnProgress = Callable[[int, int, int, int, str], None]  # samples done, in all, tokens so far, live samples, layout

ABORT_S = 60.0  # for ranks to end a step after an abort
UPDATE_CALL_S = 600.0  # for one bucket of weights
_log = logging.getLogger(__name__)


class RolloutGroup:
    """A started switch group. One call at a time; only `abort` and `shutdown` may come from another thread.

    Ranks are Ray actors on one node, started from `config` (Ray itself too, if there is none). A rank that dies takes
    the group down; `restart()` builds a new one from the checkpoint. Use it as a context manager or call `shutdown()`.

    Raises:
        BadInput: the model folder or a setting is wrong; found before anything is started.
        MoebiusError: Ray cannot be reached, a resource is missing, or a rank could not start.
    """

    def __init__(self, config: RolloutConfig) -> None:
        folder = check_model(config.engine, config.ranks)
        # Ranks run in another working directory.
        self.config = config.model_copy(update={"engine": config.engine.model_copy(update={"model": str(folder)})})
        self.last_report: StepReport | None = None
        self.policy_version = 0
        self._one_call = threading.Lock()
        self._ranks: Ranks | None = None
        self._problem: str | None = None
        self._next_step = 0
        self._serial = 0  # of run_step calls: tells ranks which one an abort is for
        self._running: int | None = None
        self._update_s: float | None = None
        self.startup: list[RankStart] = []  # how each rank started, the last time
        self._unreported_start: list[RankStart] | None = None
        self._updated = False  # the ranks hold, or held, other weights than the checkpoint's
        self._tokenizer: Any = None
        connect(config)
        self.device = resolve_device(config)
        self._start()

    # ---- one rollout step -----------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling | Mapping[str, Any] | None = None,
        step: int | None = None,
        on_progress: OnProgress | None = None,
        lengths: LengthTrace | None = None,
    ) -> list[Rollout]:
        """Draw `n` samples of each prompt; returns one Rollout per prompt, in order, with all its samples.

        Args:
            prompts: token ids, texts, or chat messages (lists of {"role", "content"}); kinds may be mixed. None at all
                give an empty list.
            n: samples per prompt, at least 1.
            sampling: settings; a mapping changes single fields of the configured ones.
            step: number of the rollout step, which sample seeds depend on; None counts on from the last one.
            on_progress: called about twice a second with samples done, samples in all, output tokens so far,
                unfinished samples and the layout. An error in it ends the step.
            lengths: replay these output lengths exactly instead of stopping by content.

        After `step_timeout_s` unfinished samples are ended; they carry the finish reason "abort", as after `abort()`.

        Raises:
            BadInput: found before anything is sent; the group goes on working.
            GroupNotReady: shut down, a rank died, or a weight update failed; the message says what to do.
            RankDied: a rank died during the step; `restart()` the group and repeat the step.
            IncompleteStep: samples are missing or double.
            MoebiusError: another call is running, or a rank failed.
        """
        with self._exclusively("generate"):
            ranks = self._ready()
            own = self._sampling(sampling)
            requests, prompt_ids, step = self._requests(prompts, n, own, step, lengths)
            if not requests:
                self.last_report = None
                return []
            outcomes = self._run_step(ranks, requests, step, on_progress)
            rollouts = collect(outcomes, prompt_ids, n, step)
            self.report_step(outcomes, step, prompt_ids)
            return rollouts

    def open_step(self, step: int | None = None, expected: int | None = None) -> OpenStep:
        """Begin a step that takes prompts while it runs. The group serves nothing else until it is closed.

        `step` is as in `generate`. Few live samples mean the step's tail only when its burst has come in: when
        `expected` samples have been submitted, or, where that is not said, when the step is being closed. Until then
        the policies `rollout` and `predictive` stay in EP. Raises GroupNotReady, MoebiusError as `generate`.
        """
        if not self._one_call.acquire(blocking=False):
            raise MoebiusError("open_step: another call is running on this group; a group serves one at a time")
        try:
            ranks = self._ready()
            step = self._step_number(step)
            self._serial += 1
            try:
                refs = ranks.submit("run_step", [(self._serial, [], True)] * self.config.ranks)
            except BaseException:
                self._lose(ranks, f"step {step} broke off while it was sent")
                raise
            self._running = self._serial
        except BaseException:
            self._one_call.release()
            raise
        return OpenStep(self, ranks, self._serial, step, refs, expected)

    # ---- for OpenStep -----------------------------------------------------------------------------------------------

    def requests_of(
        self, prompts: Sequence[Prompt], n: int, sampling: Sampling | Mapping[str, Any] | None, step: int, first: int
    ) -> tuple[list[SampleRequest], list[list[int]]]:
        """Requests and token ids of prompts that are numbered from `first`. Raises BadInput."""
        return self._requests(prompts, n, self._sampling(sampling), step, None, first)[:2]

    def report_step(self, outcomes: list[StepOutcome], step: int, prompt_ids: list[list[int]]) -> None:
        """Make `last_report`."""
        self.last_report = build_report(
            outcomes,
            step=step,
            policy_version=self.policy_version,
            model=self.config.engine.model,
            device=self.device,
            prompt_tokens=[len(ids) for ids in prompt_ids],
            update_weights_s=self._update_s,
            startup=self._unreported_start,
        )
        self._update_s = self._unreported_start = None
        self._next_step = step + 1

    def step_closed(self) -> None:
        """The open step is over, whole or lost; called once."""
        self._running = None
        self._one_call.release()

    def step_lost(self, ranks: Ranks, error: MoebiusError) -> None:
        """A rank failed in the open step."""
        self._step_lost(ranks, error)

    def abort(self, keys: Iterable[SampleKey | tuple[int, int]] | None = None) -> None:
        """End samples (prompt, sample) of the running step early, None: all of them. Any thread; does not wait.

        They come back from `generate` with the tokens they have and the finish reason "abort". Without a running step
        nothing happens.
        """
        ranks, serial = self._ranks, self._running
        if ranks is not None and serial is not None:
            ranks.tell("abort", serial, None if keys is None else [SampleKey(*key) for key in keys])

    @property
    def captured_lengths(self) -> LengthTrace | None:
        """Output lengths of the last step, to replay with `generate(lengths=...)`; None before the first step."""
        return None if self.last_report is None else LengthTrace.from_report(self.last_report)

    # ---- weights --------------------------------------------------------------------------------------------------

    def update_weights(
        self, named_tensors: NamedTensors, version: int, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES
    ) -> None:
        """Replace all weights by those of policy `version`, all or nothing.

        Args:
            named_tensors: a mapping or stream of Hugging Face names and tensors on any device, experts one by one or
                fused (see moebius.engine.weights). A stream is read as it is sent.
            version: an int, at least the present `policy_version`; it is stamped on every sample drawn from then on.
            bucket_bytes: how much is sent at once.

        Until an update has succeeded after a failed one, `generate` raises GroupNotReady.

        Raises:
            BadInput: a name, shape, dtype or the version is wrong, or weights are missing.
            GroupNotReady, RankDied, MoebiusError: as in `generate`.
        """
        with self._exclusively("update_weights"):
            ranks = self._alive()
            if not isinstance(version, int) or isinstance(version, bool) or version < self.policy_version:
                raise BadInput(
                    f"update_weights: version must be an int of at least {self.policy_version}, the present "
                    f"policy version, got {version!r}"
                )
            if bucket_bytes < 1:
                raise BadInput(f"update_weights: bucket_bytes must be at least 1, got {bucket_bytes}")
            started = time.perf_counter()
            # Until the commit, ranks hold a mixture of old and new weights.
            self._problem = f"the weight update to policy version {version} did not complete; send a full update"
            try:
                self._send(ranks, named_tensors, version, bucket_bytes)
            except BaseException as error:
                self._update_failed(ranks, version, error)
                raise
            self._problem = None
            self._updated = True
            self.policy_version = version
            self._update_s = time.perf_counter() - started

    def _send(self, ranks: Ranks, named_tensors: NamedTensors, version: int, bucket_bytes: int) -> None:
        how: dict[str, Any] = {"what": f"the update to version {version}", "timeout_s": UPDATE_CALL_S}
        size = len(ranks.handles)
        loading: dict[Any, int] = {}
        try:
            ranks.call("begin_update", [(version,)] * size, **how)
            for bucket in buckets(named_tensors, bucket_bytes):
                # One bucket loads while the next is packed: two in memory, never more.
                ranks.gather(loading, **how)
                ref = ray.put(bucket)
                loading = ranks.submit("update_tensors", [(ref,)] * size)
            ranks.gather(loading, **how)
            ranks.call("commit_update", **how)
        except RankError as error:
            if error.by_all and isinstance(error.cause, ValueError):
                raise BadInput(f"update to version {version}: {error.cause}") from error
            raise
        finally:
            # After a failure too: a bucket that is still loading must not run into the next update.
            if loading:
                ray.wait(list(loading), num_returns=len(loading), timeout=UPDATE_CALL_S)

    def _update_failed(self, ranks: Ranks, version: int, error: BaseException) -> None:
        if isinstance(error, RankDied) or (isinstance(error, RankError) and not error.by_all):
            self._lose(ranks, str(error))
        else:
            self._problem = (
                f"the weight update to policy version {version} failed ({type(error).__name__}: {error}); "
                "send a full update"
            )

    # ---- life -----------------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """End all ranks, whatever state they are in, and start new ones from the checkpoint.

        If weights had been updated, they are lost with the ranks: `generate` then refuses until `update_weights` has
        sent them again.
        """
        with self._exclusively("restart"):
            if self._ranks is not None:
                self._ranks.close(gently=self._problem is None)
                self._ranks = None
            connect(self.config)
            self._start()
            if self._updated:
                self._problem = (
                    f"the group was restarted and holds the checkpoint's weights, not policy version "
                    f"{self.policy_version}; send them with update_weights"
                )

    def shutdown(self) -> None:
        """End all ranks and free what they held. May be called again, and from another thread during a step."""
        ranks, self._ranks = self._ranks, None
        self._problem = "the group was shut down; restart() it or make a new one"
        atexit.unregister(self.shutdown)
        if ranks is not None:
            # A running call holds the lock; its ranks would not close in order.
            idle = self._one_call.acquire(blocking=False)
            try:
                ranks.close(gently=idle)
            finally:
                if idle:
                    self._one_call.release()

    def __enter__(self) -> RolloutGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.shutdown()

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt + output."""
        return self._limits.max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._limits.vocab_size

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer. Raises BadInput when the model folder has none."""
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            try:
                self._tokenizer = AutoTokenizer.from_pretrained(self.config.engine.model, local_files_only=True)
            except (OSError, ValueError) as error:
                raise BadInput(
                    f"texts and chat messages need a tokenizer, and {self.config.engine.model} has none that loads "
                    f"({error}); give token ids"
                ) from error
        return self._tokenizer

    def pids(self) -> list[int]:
        """Process ids of the ranks on their node."""
        return [host.pid for host in self._alive().hosts]

    def _start(self) -> None:
        try:
            self._ranks, info = Ranks.start(self.config, self.device)
        except RankError as error:
            self._problem = f"the group could not start: {error}"
            if isinstance(error.cause, ValueError):
                raise BadInput(str(error)) from error
            raise
        except MoebiusError as error:
            self._problem = f"the group could not start: {error}"
            raise
        self.startup = self._unreported_start = self._ranks.starts
        self._limits = Limits(info.max_model_len, info.vocab_size, info.has_tokenizer)
        self._problem = None
        atexit.register(self.shutdown)

    def _alive(self) -> Ranks:
        if self._ranks is None:
            raise GroupNotReady(self._problem or "the group was not started")
        return self._ranks

    def _ready(self) -> Ranks:
        ranks = self._alive()
        if self._problem is not None:
            raise GroupNotReady(self._problem)
        return ranks

    def _lose(self, ranks: Ranks, why: str) -> None:
        """Give up on ranks that cannot go on together."""
        if self._ranks is ranks:
            self._ranks = None
            self._problem = f"{why.splitlines()[0]}; call restart()"
        ranks.close(gently=False)

    @contextmanager
    def _exclusively(self, name: str) -> Iterator[None]:
        if not self._one_call.acquire(blocking=False):
            raise MoebiusError(f"{name}: another call is running on this group; a group serves one at a time")
        try:
            yield
        finally:
            self._one_call.release()

    # ---- parts of generate ----------------------------------------------------------------------------------------

    def _sampling(self, sampling: Sampling | Mapping[str, Any] | None) -> Sampling:
        if isinstance(sampling, Mapping):
            sampling = Sampling.parse(self.config.sampling.model_dump() | dict(sampling))
        own = self.config.sampling if sampling is None else Sampling.parse(sampling)
        check_sampling(own, self._limits)
        return own

    def _requests(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        step: int | None,
        lengths: LengthTrace | None,
        first: int = 0,
    ) -> tuple[list[SampleRequest], list[list[int]], int]:
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise BadInput(f"n: expected at least 1 sample per prompt, got {n!r}")
        step = self._step_number(step)
        if isinstance(prompts, str | Mapping) or not isinstance(prompts, Sequence):
            raise BadInput(f"prompts: expected a list of prompts, got {type(prompts).__name__}")
        ids = [to_token_ids(p, i, self._limits, lambda: self.tokenizer) for i, p in enumerate(prompts)]
        seed = self.config.engine.seed if sampling.seed is None else sampling.seed
        requests = build_requests(
            ids, n, sampling, seed=seed, step=step, limits=self._limits, lengths=lengths, first=first
        )
        return requests, ids, step

    def _step_number(self, step: int | None) -> int:
        if step is None:
            return self._next_step
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 1 << 63:
            raise BadInput(f"step: expected an int of at least 0, got {step!r}")
        return step

    def _run_step(
        self, ranks: Ranks, requests: list[SampleRequest], step: int, on_progress: OnProgress | None
    ) -> list[StepOutcome]:
        self._serial += 1
        serial = self._serial
        calls = [(serial, own) for own in assign(requests, self.config.ranks)]
        try:
            refs = ranks.submit("run_step", calls)
        except BaseException:
            # Some ranks may have the step and others not: they would never meet again.
            self._lose(ranks, f"step {step} broke off while it was sent")
            raise
        self._running = serial
        limit = self.config.step_timeout_s
        started = time.monotonic()
        aborted = False

        def on_poll(progress: Sequence[Progress]) -> None:
            nonlocal aborted
            if limit is not None and not aborted and time.monotonic() - started > limit:
                _log.warning("step %d has run for step_timeout_s=%g: unfinished samples are ended", step, limit)
                self.abort()
                aborted = True
            if on_progress:
                done, tokens = sum(p.done for p in progress), sum(p.tokens for p in progress)
                on_progress(done, len(requests), tokens, progress[0].live, progress[0].layout)

        what = f"step {step}"
        try:
            timeout = None if limit is None else limit + ABORT_S
            outcomes = ranks.gather(refs, what=what, timeout_s=timeout, on_poll=on_poll)
        except RankDied as error:
            self._step_lost(ranks, error)
            raise RankDied(str(error), rank=error.rank, step=step) from error
        except RankError as error:
            if error.by_all and str(error.cause).startswith("RequestRefused"):
                raise BadInput(f"step {step}: {error.cause}") from error  # no rank has started
            # The engines refuse further steps themselves after one that broke off.
            self._step_lost(ranks, error)
            raise
        except BaseException:
            self._interrupt(ranks, refs, what)
            raise
        finally:
            self._running = None
        if on_progress:
            tokens = sum(len(result.token_ids) for outcome in outcomes for result in outcome.results)
            iterations = outcomes[0].stats.iterations
            on_progress(len(requests), len(requests), tokens, 0, iterations[-1].layout if iterations else "EP")
        return outcomes

    def _step_lost(self, ranks: Ranks, error: MoebiusError) -> None:
        closed_by_user = self._ranks is not ranks
        self._lose(ranks, str(error))
        if closed_by_user:
            raise GroupNotReady(self._problem or "the group was shut down during the step") from error

    def _interrupt(self, ranks: Ranks, refs: dict[Any, int], what: str) -> None:
        """The caller broke off (Ctrl-C, an error in on_progress): end the step so that the group can go on."""
        self.abort()
        try:
            ranks.gather(refs, what=f"the abort of {what}", timeout_s=ABORT_S)
        except (RankDied, RankError) as error:
            self._lose(ranks, str(error))
