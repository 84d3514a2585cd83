"""How a group gets new weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray

from moebius.engine.types import UpdateStats
from moebius.rollout.errors import (
    BadInput,
    CallersError,
    GroupNotReady,
    MoebiusError,
    RankDied,
    as_the_caller_raised,
    callers,
)
from moebius.rollout.interrupts import waiting
from moebius.rollout.ranks import RankError, Ranks
from moebius.rollout.recovery import GroupRecovery
from moebius.rollout.weights import DEFAULT_BUCKET_BYTES, NamedTensors, Transport, packed
from moebius.rollout.worker import UpdateMode

UPDATE_CALL_S = 600.0  # for one bucket of weights
PULL_S = 3600.0  # for an update that the ranks fetch themselves
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """How long a weight update took. `nbytes` came to each rank; `seconds` are the whole call."""

    version: int
    mode: str  # "in_place" | "staged"
    transport: str  # "host", "ipc", or the source of a pulled update
    nbytes: int
    seconds: float

    @property
    def gbps(self) -> float:
        """Gigabytes (10^9 bytes) per second that came to each rank."""
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class _Session:
    """An update that is going on."""

    ranks: Ranks
    version: int
    mode: UpdateMode
    problem_before: str | None
    started: float
    keep: str | None  # files that the ranks keep the weights in


class GroupWeights(GroupRecovery):
    """The part of a `RolloutGroup` that a trainer sends weights to."""

    last_update: UpdateReport | None = None
    _session: _Session | None = None  # between `begin_update` and `commit_update`

    def update_weights(
        self,
        named_tensors: NamedTensors,
        version: int,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        mode: UpdateMode | None = None,
        transport: Transport = "host",
    ) -> UpdateReport:
        """Replace all weights by those of policy `version`, all or nothing.

        Args:
            named_tensors: a mapping or stream of Hugging Face names and tensors on any device, experts one by one or
                fused (see moebius.engine.weights). A stream is read as it is sent.
            version: an int, at least the present `policy_version`; it is stamped on every token sampled from then on.
            bucket_bytes: how much is sent at once.
            mode: in_place: tensors are written as they come, nothing is held twice; after a failed update `generate`
                raises GroupNotReady until one has succeeded. staged: ranks hold them in host memory until all have
                come; after a failed update the old weights serve on. None: `update_mode` of the configuration.
            transport: host: through Ray's object store. ipc: the ranks read this process's CUDA memory (one host).

        Parked samples go on under the new weights.

        Raises:
            BadInput: a name, shape, dtype or the version is wrong, or weights are missing.
            GroupNotReady, RankDied, MoebiusError: as in `generate`.
        """

        if bucket_bytes < 1:
            raise BadInput(f"update_weights: bucket_bytes must be at least 1, got {bucket_bytes}")
        buckets = packed(_as_given(named_tensors), bucket_bytes, transport)

        def send(ranks: Ranks, mode: UpdateMode, keep: str | None) -> list[UpdateStats]:
            return self._send(ranks, buckets, version, mode, keep)

        with as_the_caller_raised():
            return self._update("update_weights", version, mode, transport, send)

    def pull_update(
        self,
        version: int,
        source: str,
        args: Sequence[tuple[Any, ...]],
        *,
        mode: UpdateMode | None = None,
        timeout_s: float = PULL_S,
    ) -> UpdateReport:
        """Replace all weights by those that every rank fetches itself, all or nothing.

        Args:
            version, mode: as in `update_weights`.
            source: "module:function", importable by the ranks. In rank r's process, on the thread of its engine,
                `function(*args[r])` is called and yields lists of (name, tensor), on any device; each must stay as it
                is until the next one is asked for. moebius.rollout.transports has some.
            args: one tuple per rank.
            timeout_s: for all of it.

        Raises as `update_weights`; BadInput also for whatever the source raised.
        """
        self._one_per_rank("pull_update", args)

        def pull(ranks: Ranks, mode: UpdateMode, keep: str | None) -> list[UpdateStats]:
            calls = [(version, source, tuple(arguments), mode, keep) for arguments in args]
            return ranks.call("pull_update", calls, what=f"the update to version {version}", timeout_s=timeout_s)

        return self._update("pull_update", version, mode, source, pull)

    def reset_prefix_cache(self) -> None:
        """Forget which prompts' KV is still there; between steps. An update does so by itself."""
        with self._exclusively("reset_prefix_cache"):
            self._ask("reset_prefix_cache", None, "forgetting cached prefixes", UPDATE_CALL_S)

    # ---- the same in parts, for callers to whom an update comes in several calls ---------------------------------

    def begin_update(self, version: int, *, mode: UpdateMode | None = None) -> None:
        """Open an update; arguments as in `update_weights`. Then `pull_tensors`, often, and `commit_update`."""
        with self._exclusively("begin_update"):
            session = self._begin("begin_update", version, mode)
            with self._failing(session):
                how: dict[str, Any] = {"what": f"the update to version {version}", "timeout_s": UPDATE_CALL_S}
                calls = [(version, session.mode, session.keep)] * self.config.ranks
                session.ranks.call("begin_update", calls, **how)
            self._session = session

    def pull_tensors(self, source: str, args: Sequence[tuple[Any, ...]], *, timeout_s: float = PULL_S) -> None:
        """Some of the open update's tensors, as `pull_update` fetches all. The update is over if this fails."""
        with self._exclusively("pull_tensors"):
            session = self._opened()
            self._one_per_rank("pull_tensors", args)
            with self._failing(session):
                calls = [(source, tuple(arguments)) for arguments in args]
                session.ranks.call("pull_tensors", calls, what="fetching weights", timeout_s=timeout_s)

    def commit_update(self) -> UpdateReport:
        """End the open update: the new weights serve. Raises as `update_weights`."""
        with self._exclusively("commit_update"):
            session = self._opened()
            self._session = None
            with self._failing(session):
                what = f"the update to version {session.version}"
                # Held: who stops waiting here does not know which weights serve.
                stats = session.ranks.call("commit_update", what=what, timeout_s=UPDATE_CALL_S, held=True)
            return self._done(session, "pulled in parts", stats)

    def drop_update(self) -> None:
        """Give the open update up, if there is one."""
        with self._exclusively("drop_update"):
            session, self._session = self._session, None
            if session is not None and session.ranks is self._ranks:
                told = self._give_up(session, MoebiusError("it was given up"))
                if not self.running:
                    raise told

    def on_ranks(self, source: str, args: Sequence[tuple[Any, ...]], *, timeout_s: float = UPDATE_CALL_S) -> list[Any]:
        """Call the function at "module:function" in every rank's process, on the thread of its engine, with `args[r]`.

        For what a weight source has to prepare there. Between steps. Returns the answers; raises as `pull_update`.
        """
        with self._exclusively("on_ranks"):
            self._one_per_rank("on_ranks", args)
            calls = [(source, tuple(arguments)) for arguments in args]
            try:
                return self._ask("call_function", calls, source, timeout_s)
            except RankError as error:
                if error.by_all and isinstance(error.cause, ValueError):
                    raise BadInput(f"{source}: {error.cause}") from error
                raise

    def _ask(self, method: str, args: Sequence[tuple[Any, ...]] | None, what: str, timeout_s: float) -> list[Any]:
        """A call between steps that changes no weights; ranks that do not all answer are lost."""
        ranks = self._alive()
        try:
            return ranks.call(method, args, what=what, timeout_s=timeout_s)
        except (RankDied, RankError) as error:
            if isinstance(error, RankError) and error.by_all:
                raise
            raise self.after_loss(ranks, error, what) from error

    # ---- parts of an update -----------------------------------------------------------------------------------------

    def _one_per_rank(self, name: str, args: Sequence[tuple[Any, ...]]) -> None:
        if len(args) != self.config.ranks:
            raise BadInput(f"{name}: args needs one tuple per rank, {self.config.ranks}, got {len(args)}")

    def _opened(self) -> _Session:
        if self._session is None or self._session.ranks is not self._ranks:
            raise GroupNotReady("no weight update is open: call begin_update first")
        return self._session

    def _update(
        self,
        name: str,
        version: int,
        mode: UpdateMode | None,
        transport: str,
        send: Callable[[Ranks, UpdateMode, str | None], list[UpdateStats]],
    ) -> UpdateReport:
        with self._exclusively(name):
            session = self._begin(name, version, mode)
            with self._failing(session):
                stats = send(session.ranks, session.mode, session.keep)
            return self._done(session, transport, stats)

    def _begin(self, name: str, version: int, mode: UpdateMode | None) -> _Session:
        mode = self.config.update_mode if mode is None else mode
        if mode not in ("in_place", "staged"):
            raise BadInput(f"{name}: mode must be 'in_place' or 'staged', got {mode!r}")
        ranks = self._alive()
        self._check_awake(["weights"])
        if not isinstance(version, int) or isinstance(version, bool) or version < self.policy_version:
            raise BadInput(
                f"{name}: version must be an int of at least {self.policy_version}, the present policy version, got "
                f"{version!r}"
            )
        self._session = None  # the ranks drop one that is still open
        session = _Session(ranks, version, mode, self._problem, time.perf_counter(), self._new_set(ranks))
        if mode == "in_place":  # until the commit, ranks hold a mixture of old and new weights
            self._problem = f"the weight update to policy version {version} did not complete; send a full update"
        return session

    def _committed(self, session: _Session) -> None:
        self._problem = None
        self._updated = True
        self.policy_version = session.version
        self._keep_only(session.keep)

    def _done(self, session: _Session, transport: str, stats: list[UpdateStats]) -> UpdateReport:
        self._committed(session)
        self._update_s, self._update_ended_at = time.perf_counter() - session.started, time.time()
        nbytes = max(rank.nbytes for rank in stats)
        self.last_update = UpdateReport(session.version, session.mode, transport, nbytes, self._update_s)
        return self.last_update

    @contextmanager
    def _failing(self, session: _Session) -> Iterator[None]:
        """What an error in the block means for the session, the group and the caller."""
        try:
            yield
        except BaseException as error:
            self._session = None
            told = self._give_up(session, error)
            if told is not error:
                raise told from error
            if isinstance(error, RankError) and error.by_all and isinstance(error.cause, ValueError):
                raise BadInput(f"update to version {session.version}: {error.cause}") from error
            raise

    def _give_up(self, session: _Session, error: BaseException) -> BaseException:
        """What a failed update leaves of the group; returns the error to raise."""
        if isinstance(error, RankDied) or (isinstance(error, RankError) and not error.by_all):
            return self.after_loss(session.ranks, error, f"the update to version {session.version}")
        if session.mode == "in_place":
            cause = error.error if isinstance(error, CallersError) else error
            self._problem = (
                f"the weight update to policy version {session.version} failed ({type(cause).__name__}: {cause}); "
                "send a full update"
            )
            return error
        what = "giving an update up"
        try:
            served = session.ranks.call("drop_update", what=what, timeout_s=UPDATE_CALL_S)
        except (RankDied, RankError) as lost:
            if isinstance(error, KeyboardInterrupt):  # who wants to leave does not wait for a start
                self._lose(session.ranks, str(lost))
                return error
            told = self.after_loss(session.ranks, lost, what)
            _log.warning("%s", told)
            # The update's own error says more, unless the group is no more.
            return error if self.running else told
        except BaseException:  # Ctrl-C again: nobody knows which weights they have
            self._lose(session.ranks, f"the update to version {session.version} was broken off")
            raise
        if session.version != self.policy_version and all(version == session.version for version in served):
            self._committed(session)  # the wait was broken off, and the ranks were faster
        else:
            self._problem = session.problem_before
        return error

    def _send(self, ranks: Ranks, buckets: Any, version: int, mode: UpdateMode, keep: str | None) -> list[UpdateStats]:
        how: dict[str, Any] = {"what": f"the update to version {version}", "timeout_s": UPDATE_CALL_S}
        size = len(ranks.handles)
        loading: dict[Any, int] = {}
        try:
            ranks.call("begin_update", [(version, mode, keep)] * size, **how)
            for bucket in buckets:
                # One bucket loads while the next is packed: two in memory, never more.
                ranks.gather(loading, **how)
                ref = ray.put(bucket)
                loading = ranks.submit("update_tensors", [(ref,)] * size)
            ranks.gather(loading, **how)
            return ranks.call("commit_update", held=True, **how)
        finally:
            # After a failure too: a bucket that is still loading must not run into the next update.
            if loading:
                with waiting():
                    ray.wait(list(loading), num_returns=len(loading), timeout=UPDATE_CALL_S)


def _as_given(named_tensors: NamedTensors) -> Iterator[Any]:
    """The pairs; an error of the caller's stream is told from one of the ranks."""
    pairs = iter(named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors)
    while True:
        with callers(), waiting():
            try:
                pair = next(pairs)
            except StopIteration:
                return
        yield pair
