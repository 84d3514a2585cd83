"""A group's life: from its start over the loss of its ranks to its end, and the rule of one call at a time."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from moebius.engine.costs import CostModel
from moebius.engine.types import MemoryTag
from moebius.rollout.backlog import Backlog
from moebius.rollout.batch import Limits
from moebius.rollout.checkpoint import check_model
from moebius.rollout.config import RolloutConfig
from moebius.rollout.errors import BadInput, GroupNotReady, MoebiusError
from moebius.rollout.failure_types import Loss
from moebius.rollout.interrupts import held_back, uninterrupted
from moebius.rollout.placement import connect, resolve_device
from moebius.rollout.ranks import RankError, Ranks
from moebius.rollout.report import StepReport
from moebius.rollout.report_startup import RankStart

MEMORY_TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache")
_log = logging.getLogger(__name__)


class GroupLife:
    """What all parts of a `RolloutGroup` rest on."""

    _recovering: int | None = None  # the thread that may call while a call is running

    def __init__(self, config: RolloutConfig) -> None:
        if config.replicas > 1:
            raise BadInput(
                f"replicas={config.replicas}: a RolloutGroup is one; several replicas are RolloutReplicas, or made by "
                "moebius.rollout.start.start_group"
            )
        folder = check_model(config.engine, config.ranks)
        # Ranks run in another working directory.
        self.config = config.model_copy(update={"engine": config.engine.model_copy(update={"model": str(folder)})})
        self.last_report: StepReport | None = None
        self.policy_version = 0
        self._one_call = threading.Lock()
        self._ranks: Ranks | None = None
        self._problem: str | None = None
        self._shut_down = False
        self.backlog = Backlog()  # what steps have left unfinished
        self._next_step = 0
        self._serial = 0  # of run_step calls: tells ranks which one an abort is for
        self._running: int | None = None  # serial of the running step
        self._running_step = 0  # its number
        self._update_s: float | None = None  # of an update that no report has told of yet
        self._update_ended_at: float | None = None  # Unix seconds
        self._asleep: set[MemoryTag] = set()
        self.startup: list[RankStart] = []  # how each rank started, the last time
        self._unreported_start: list[RankStart] | None = None
        self.costs: CostModel | None = None  # of iterations and switches, as the policy and reports use them
        self._updated = False  # the ranks hold, or held, other weights than the checkpoint's
        self._tokenizer: Any = None
        self.losses: list[Loss] = []  # times the ranks were lost and came back
        self.gave_up = False  # after too many restarts in a row
        connect(config)
        self.device = resolve_device(config)
        try:
            self._start()
        except BaseException:
            if self.running:  # Ctrl-C came meanwhile, and nobody gets this group
                self.shutdown()
            raise

    @uninterrupted
    def shutdown(self) -> None:
        """End all ranks and free what they held. May be called again, and from another thread during a step."""
        self._shut_down = True  # first: ranks that are being started meanwhile are ended by who starts them
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

    @property
    def running(self) -> bool:
        """Whether there are ranks. They may be waiting for a weight update all the same."""
        return self._ranks is not None

    @property
    def problem(self) -> str | None:
        """Why steps cannot be opened, and what to do; None if they can, once all memory is there."""
        return self._problem

    @property
    def closed(self) -> bool:
        """Whether the group was shut down."""
        return self._shut_down

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt + output."""
        return self._limits.max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._limits.vocab_size

    @property
    def has_tokenizer(self) -> bool:
        """Whether samples come with their text."""
        return self._limits.has_tokenizer

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

    @property
    def costs_from(self) -> str:
        """Where `costs` come from, or why there are none."""
        return self.startup[0].costs if self.startup else ""

    def pids(self) -> list[int]:
        """Process ids of the ranks on their node."""
        return [host.pid for host in self._alive().hosts]

    def phases(self) -> list[str | None]:
        """What each rank does at present (see moebius.engine.phases); None where that cannot be seen."""
        ranks = self._alive()
        return [ranks.phase(rank) for rank in range(self.config.ranks)]

    @uninterrupted
    def _start(self) -> None:
        try:
            ranks, info = Ranks.start(self.config, self.device)
        except RankError as error:
            self._problem = f"the group could not start: {error}"
            # Of settings that have started ranks before, it is no proof that they are wrong: vLLM says ValueError, too,
            # where memory is not free yet.
            if isinstance(error.cause, ValueError) and not self.startup:
                raise BadInput(str(error)) from error
            raise
        except MoebiusError as error:
            self._problem = f"the group could not start: {error}"
            raise
        self.startup = self._unreported_start = ranks.starts
        self.costs = info.costs
        if (spent := max(start.calibration_s for start in self.startup)) > 0:
            _log.warning(
                "the start measured what the policy needs to know, which took %.1f s: %s", spent, self.costs_from
            )
        self._limits = Limits(info.max_model_len, info.vocab_size, info.has_tokenizer)
        self._problem = None
        self._asleep = set()
        atexit.register(self.shutdown)
        self._ranks = ranks

    def _alive(self) -> Ranks:
        if self._ranks is None:
            raise GroupNotReady(self._problem or "the group was not started")
        return self._ranks

    def _check_awake(self, tags: Sequence[MemoryTag] = MEMORY_TAGS) -> None:
        asleep = sorted(self._asleep.intersection(tags))
        if asleep:
            raise GroupNotReady(f"the memory of {' and '.join(asleep)} was given back by sleep; call wake_up first")

    def _ready(self) -> Ranks:
        ranks = self._alive()
        self._check_awake()
        if self._problem is not None:
            raise GroupNotReady(self._problem)
        return ranks

    def _lose(self, ranks: Ranks, why: str) -> None:
        """Give up on ranks that cannot go on together."""
        if self._ranks is ranks:
            self._ranks = None
            self._problem = f"{why.splitlines()[0]}; call restart()"
            self.backlog.lost()
        ranks.close(gently=False)

    @contextmanager
    def _exclusively(self, name: str) -> Iterator[None]:
        """The group serves this call alone, and Ctrl-C comes only where it waits."""
        with held_back():
            if self._recovering == threading.get_ident():  # the call that is running has asked for this one
                yield
                return
            if not self._one_call.acquire(blocking=False):
                raise MoebiusError(f"{name}: another call is running on this group; a group serves one at a time")
            try:
                yield
            finally:
                self._one_call.release()
