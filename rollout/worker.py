"""The actor of one rank: owns its engine and answers questions while a step runs.

vLLM reads its environment when it is imported and keeps thread-local state, so the environment is set first and every
engine call goes to one dedicated thread; the actor's other threads answer `progress`, `abort` and `ping`.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from moebius.engine import phases
from moebius.engine.config import EngineConfig
from moebius.engine.garbage import imports_kept
from moebius.engine.types import (
    MemoryChange,
    MemoryTag,
    SampleKey,
    SamplePiece,
    SampleRequest,
    SampleResult,
    StepOutcome,
    UpdateStats,
)
from moebius.rollout.marks import Marker, mark_path, read_mark
from moebius.rollout.rank_setup import DEFAULT_ENVIRONMENT, EngineInfo, RankHost, RankSetup, rank_environment
from moebius.rollout.shm import clean_leftovers, make_ident, name_python_segments, parse_ident, remove_own

if TYPE_CHECKING:
    from moebius.engine.engine import MoebiusEngine
    from moebius.rollout.kept import KeptWriter
    from moebius.rollout.transports.ipc import IpcBucket
    from moebius.rollout.weights import Bucket

T = TypeVar("T")
UpdateMode = Literal["in_place", "staged"]
_log = logging.getLogger(__name__)


class EngineError(RuntimeError):
    """The engine or vLLM raised an exception of its own; the message begins with its name, the log has the trace."""


@dataclass(frozen=True, slots=True)
class Progress:
    """State of the running (or last) step: own finished samples and sampled tokens, unfinished ones over all ranks."""

    done: int = 0
    live: int = 0
    layout: str = "EP"
    tokens: int = 0
    iteration_ms: float = 0.0  # of the last iterations, idle time left out
    kv_use: float = 0.0  # share of KV pages in use
    serial: int = 0  # of the step, as `run_step` counts


class RankWorker:
    """Methods of the rank actor; `moebius.rollout.ranks` turns the class into one. All are called by the driver."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._engine: MoebiusEngine | None = None
        self._progress = Progress()
        self._iterated_at: float | None = None  # the last iteration's end, while samples are live
        self._serial = 0  # of the latest run_step call
        self._stepping = False
        self._early: list[tuple[int, Callable[[MoebiusEngine], None]]] = []
        self._finished: deque[SampleResult | SamplePiece] = deque()
        self._received = 0  # requests of the open step
        self._awaited: int | None = None  # how many it gets in all, once that is known
        self._to_park = False  # when they have come
        self._abort_lock = threading.Lock()
        self._keeping: KeptWriter | None = None  # of the weights of the open update

    def host(self) -> RankHost:
        """Where this process runs, and the file that holds its standard error."""
        import ray

        context = ray.get_runtime_context()
        try:
            log_file: str | None = os.readlink("/proc/self/fd/2")
        except OSError:  # no /proc: only the hint in error messages is lost
            log_file = None
        devices = [str(device) for device in context.get_accelerator_ids().get("GPU", [])]
        return RankHost(self.rank, os.getpid(), context.get_node_id(), devices, log_file)

    def claim(self) -> tuple[str, int]:
        """Rank 0 only: clean up after dead runs on this node, then name the group and find a free port."""
        clean_leftovers()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        return str(make_ident()), port

    def start(self, setup: RankSetup) -> EngineInfo:
        """Build the engine; a collective over all ranks of the group."""
        os.environ.update(rank_environment(setup))
        for name, value in DEFAULT_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        ident = parse_ident(setup.ident)
        if ident is not None:
            name_python_segments(ident)
            phases.observers.append(Marker(mark_path(ident, self.rank)))
        phases.enter(phases.START)
        info = self._on_engine_thread(lambda: self._build(setup.engine))
        phases.enter(phases.IDLE)
        return info

    def phase_of(self, rank: int) -> str | None:
        """What a rank of this group did last; answers while a step runs."""
        mark = read_mark(os.environ.get("MOEBIUS_GROUP_ID", ""), rank)
        return None if mark is None else mark.phase

    def run_step(
        self, serial: int, requests: Sequence[SampleRequest], is_open: bool = False, piecemeal: bool = False
    ) -> StepOutcome:
        """Decode this rank's own requests; a collective over all ranks. `serial` counts these calls, for `abort`.

        An open step takes more by `submit` until `close_step` or `park_step`, and gives its results to `take_results`,
        as one that is only `piecemeal` does.
        """
        self._progress = Progress(serial=serial)

        def step() -> StepOutcome:
            engine = self._running()
            with self._abort_lock:
                self._serial, self._stepping = serial, True
                engine.clear_aborts()
                engine.inbox.clear()
                if is_open or piecemeal:
                    self._finished.clear()  # of a step that was lost
                self._received, self._awaited, self._to_park = 0, None, False
                if is_open:
                    engine.inbox.open()
                early, self._early = self._early, []
                for tag, call in early:
                    if tag == serial:
                        call(engine)
            try:
                on_results = self._finished.extend if is_open or piecemeal else None
                outcome = engine.run_step(list(requests), on_iteration=self._iterated, on_results=on_results)
                phases.enter(phases.IDLE)  # after an error the phase it came in is told
                return outcome
            finally:
                engine.inbox.close()
                with self._abort_lock:
                    self._stepping = False
                    engine.clear_aborts()  # one may have come after the engine was done with the step

        return self._on_engine_thread(step)

    def submit(self, serial: int, requests: Sequence[SampleRequest]) -> None:
        """Hand requests to open step `serial`; they wait for it if it has not begun here."""

        def submit(engine: MoebiusEngine) -> None:
            engine.inbox.submit(requests)
            self._received += len(requests)
            self._close_if_complete(engine)

        self._to_step(serial, submit)

    def filled(self, serial: int) -> None:
        """The burst of open step `serial` has been submitted, on all ranks."""
        self._to_step(serial, lambda engine: engine.inbox.filled())

    def close_step(self, serial: int, requests: int) -> None:
        """Open step `serial` gets `requests` here in all. It closes when they have come: calls may overtake."""

        def close(engine: MoebiusEngine) -> None:
            self._awaited = requests
            self._close_if_complete(engine)

        self._to_step(serial, close)

    def park_step(self, serial: int, requests: int) -> None:
        """Open step `serial`, which gets `requests` here in all, is to end soon and to keep what is unfinished."""

        def park(engine: MoebiusEngine) -> None:
            self._awaited, self._to_park = requests, True
            self._close_if_complete(engine)

        self._to_step(serial, park)

    def _close_if_complete(self, engine: MoebiusEngine) -> None:
        if self._awaited is not None and self._received >= self._awaited:
            if self._to_park:
                engine.park()
            engine.inbox.close()

    def abort_parked(self, keys: list[SampleKey] | None) -> list[SampleResult]:
        """End parked samples (None: all) with the tokens they have; only between steps. Returns those of this rank."""
        return self._on_engine_thread(lambda: self._running().abort_parked(keys))

    def take_results(self, serial: int) -> list[SampleResult | SamplePiece]:
        """Results of the open step, and pieces of streamed samples, since the last call; answers while it runs."""
        del serial  # there is one at a time
        taken: list[SampleResult | SamplePiece] = []
        while self._finished:
            taken.append(self._finished.popleft())
        return taken

    def _to_step(self, serial: int, call: Callable[[MoebiusEngine], None]) -> None:
        """Calls may overtake the step's own: they wait for it, in order. Those that come after it are dropped."""
        with self._abort_lock:
            if serial > self._serial:
                self._early.append((serial, call))
            elif serial == self._serial and self._stepping and self._engine is not None:
                call(self._engine)

    def begin_update(self, version: int, mode: UpdateMode = "in_place", keep: str | None = None) -> None:
        """Open a weight update. `keep`: this rank's share of the tensors is also written to files of that name."""
        self._keep(keep)
        self._in_phase(phases.UPDATE, lambda: self._running().begin_update(version, mode), then=phases.UPDATE)

    def _keep(self, files: str | None) -> None:
        from moebius.rollout.kept import KeptWriter  # imports torch

        self._keeping = None if files is None else KeptWriter(files, self.rank, int(os.environ["WORLD_SIZE"]))

    def _in_phase(self, phase: str, call: Callable[[], T], then: str = phases.IDLE) -> T:
        def run() -> T:
            phases.enter(phase)
            found = call()
            phases.enter(then)
            return found

        return self._on_engine_thread(run)

    def update_tensors(self, bucket: Bucket | IpcBucket) -> None:
        """Load one bucket of the open update. Raises ValueError for tensors the model does not have."""

        def load() -> None:
            with warnings.catch_warnings():
                # The bucket is mapped read-only from the object store; the engine only copies out of it.
                warnings.filterwarnings("ignore", message="The given (NumPy array|buffer) is not writable")
                tensors = bucket.tensors()
            self._running().update_tensors(tensors)
            if self._keeping is not None:
                self._keeping.take(tensors)

        self._in_phase(phases.UPDATE, load, then=phases.UPDATE)

    def commit_update(self) -> UpdateStats:
        """Close the open update; a collective. Raises ValueError when tensors are missing or cannot be kept."""
        keeping, self._keeping = self._keeping, None
        problem = None
        try:
            if keeping is not None:
                keeping.end()
        except ValueError as error:  # the others must not wait for this rank
            problem = f"rank {self.rank}: {error}"
        return self._in_phase(phases.UPDATE, lambda: self._running().commit_update(problem))

    def drop_update(self) -> int:
        """Give the open update up, if there is one; returns the policy version that serves."""
        self._keeping = None
        engine = self._running()
        self._in_phase(phases.UPDATE, engine.drop_update)
        return engine.policy_version

    def pull_update(
        self, version: int, source: str, args: tuple[Any, ...], mode: UpdateMode, keep: str | None = None
    ) -> UpdateStats:
        """A whole update from a function of this process; a collective. Raises ValueError if a rank has a problem.

        `keep` as in `begin_update`.
        """
        self._keep(keep)
        function = _calling(source) if self._keeping is None else self._keeping.along(_calling(source))

        def pull() -> UpdateStats:
            stats = self._running().pull_update(version, function, args, mode)
            self._keeping = None
            return stats

        return self._in_phase(phases.UPDATE, pull)

    def pull_tensors(self, source: str, args: tuple[Any, ...]) -> None:
        """Some tensors of the open update, from a function of this process. It is read to its end even after an error:
        a sender, or other ranks, may wait for every reader."""

        def pull() -> None:
            failure: Exception | None = None
            for tensors in _calling(source)(*args):
                try:
                    if failure is None:
                        self._running().update_tensors(tensors)
                        if self._keeping is not None:
                            self._keeping.take(tensors)
                except ValueError as error:
                    failure = error
            if failure is not None:
                raise failure

        self._in_phase(phases.UPDATE, pull, then=phases.UPDATE)

    def call_function(self, source: str, args: tuple[Any, ...]) -> Any:
        """Call the function at "module:name" on the engine's thread."""
        return self._on_engine_thread(lambda: _calling(source)(*args))

    def sleep(self, tags: tuple[MemoryTag, ...], keep_weights: bool) -> MemoryChange:
        """Give memory back; only between steps; a collective."""
        return self._in_phase(phases.SLEEP, lambda: self._running().sleep(tags, keep_weights=keep_weights))

    def wake_up(self, tags: tuple[MemoryTag, ...]) -> MemoryChange:
        """Take memory again; a collective."""
        return self._in_phase(phases.WAKE, lambda: self._running().wake_up(tags))

    def reset_prefix_cache(self) -> None:
        """Forget what KV pages hold; only between steps."""
        self._on_engine_thread(lambda: self._running().reset_prefix_cache())

    def abort(self, serial: int, keys: list[SampleKey] | None) -> None:
        """End samples of step `serial` (None: all) with the tokens they have. Does not wait.

        Calls may overtake each other: an abort that comes before its step is kept for it, one that comes after its
        step is dropped, as the engine would apply it to the next.
        """
        self._to_step(serial, lambda engine: engine.abort(keys))

    def progress(self) -> Progress:
        """State of the running step; answers while it runs."""
        return self._progress

    def ping(self) -> int:
        """The rank; answers while a step runs."""
        return self.rank

    def pid(self) -> int:
        """Process id on the rank's node."""
        return os.getpid()

    def shutdown(self) -> None:
        """Close the engine, and as rank 0 remove the group's shared memory. Waits for a running step."""
        engine, self._engine = self._engine, None
        if engine is not None:
            self._on_engine_thread(engine.shutdown)
        ident = parse_ident(os.environ.get("MOEBIUS_GROUP_ID", ""))
        if ident is not None and self.rank == 0:
            remove_own(ident)

    def _build(self, config: EngineConfig) -> EngineInfo:
        started = time.perf_counter()
        with imports_kept():
            from moebius.engine.engine import MoebiusEngine  # imports vLLM
        imported = time.perf_counter()
        engine = MoebiusEngine(config)
        engine.startup.import_s = imported - started
        self._engine = engine
        return EngineInfo(
            max_model_len=engine.max_model_len,
            vocab_size=engine.vocab_size,
            policy_version=engine.policy_version,
            has_tokenizer=engine.tokenizer is not None,
            startup=engine.startup,
            memory=engine.memory_account(),
            costs=engine.policy.costs,
        )

    def _running(self) -> MoebiusEngine:
        if self._engine is None:
            raise RuntimeError(f"rank {self.rank} has no engine: it was not started, or was shut down")
        return self._engine

    def _on_engine_thread(self, call: Callable[[], T]) -> T:
        try:
            return self._thread.submit(call).result()
        except Exception as error:
            if type(error).__module__ == "builtins":
                raise
            # The driver could unpickle the engine's own exceptions only by importing the engine and vLLM.
            _log.exception("rank %d", self.rank)
            kind = ValueError if isinstance(error, ValueError) else EngineError
            raise kind(f"{type(error).__name__}: {error}") from None

    def _iterated(self, done: int, live: int, layout: str, tokens: int) -> None:
        last, now = self._iterated_at, time.perf_counter()
        self._iterated_at = now if live else None
        mean = self._progress.iteration_ms
        if last is not None:
            mean = 0.9 * mean + 100 * (now - last) if mean else 1e3 * (now - last)
        kv_use = self._running().kv_use()
        self._progress = Progress(done, live, layout, self._progress.tokens + tokens, mean, kv_use, self._serial)


def _calling(source: str) -> Callable[..., Any]:
    """The function at "module:name", imported when it is called: a failure is then one of the update."""

    def call(*args: Any) -> Any:
        module, _, name = source.partition(":")
        try:
            function = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"weight source {source!r} cannot be used ({error}): name an importable function as module:function"
            ) from error
        return function(*args)

    return call


def actor_options(device: str, cpus: float) -> dict[str, Any]:
    """Ray options of a rank actor. It is never restarted by Ray: a group lives and dies as a whole."""
    return {
        "num_cpus": cpus,
        "num_gpus": 1 if device == "cuda" else 0,
        "max_concurrency": 8,
        "max_restarts": 0,
        "max_task_retries": 0,
    }
