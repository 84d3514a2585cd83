"""How several replicas get new weights, and give their memory back: all of them, or the update is given up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import ray

from moebius.engine.types import MemoryTag
from moebius.rollout.errors import BadInput, GroupNotReady, MoebiusError
from moebius.rollout.group_life import MEMORY_TAGS
from moebius.rollout.group_memory import MemoryReport
from moebius.rollout.group_weights import PULL_S, UPDATE_CALL_S, UpdateReport
from moebius.rollout.replica_life import ReplicaLife
from moebius.rollout.replica_member import Member
from moebius.rollout.replica_task import Task
from moebius.rollout.transports import stored
from moebius.rollout.weights import DEFAULT_BUCKET_BYTES, NamedTensors, Transport, packed
from moebius.rollout.worker import UpdateMode

OneArgs = tuple[Any, ...]


class ReplicaWeights(ReplicaLife):
    """The part of `RolloutReplicas` that a trainer sends weights to, and whose memory it borrows.

    A replica whose ranks are lost during an update is left out, and started again. Every update begins with waiting for
    replicas that are being started: it brings them back into service.
    """

    last_update: UpdateReport | None = None
    # Between `begin_update` and `commit_update`: who takes part, in which life, and when it began.
    _updating: tuple[list[tuple[Member, int]], float] | None = None
    _loading: Sequence[Task] = ()  # of the last bucket
    _begun = 0  # updates

    def update_weights(
        self,
        named_tensors: NamedTensors,
        version: int,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        mode: UpdateMode | None = None,
        transport: Transport = "host",
    ) -> UpdateReport:
        """As `RolloutGroup.update_weights`, through Ray's object store: one copy per node. Raises as that."""
        if transport != "host":
            raise BadInput(
                f"update_weights: transport {transport!r} reaches only ranks of its own host; with several replicas "
                "use 'host', or a Broadcaster with pull_update"
            )
        if bucket_bytes < 1:
            raise BadInput(f"update_weights: bucket_bytes must be at least 1, got {bucket_bytes}")
        with self._exclusively("update_weights"):
            self._begin(version, mode)
            try:
                for bucket in packed(named_tensors, bucket_bytes, "host"):
                    self._load(bucket)
                self._settle()
            except BaseException:
                self._give_up()
                raise
            return self._commit("host")

    def pull_update(
        self,
        version: int,
        source: str,
        args: Sequence[OneArgs],
        *,
        mode: UpdateMode | None = None,
        timeout_s: float = PULL_S,
    ) -> UpdateReport:
        """As `RolloutGroup.pull_update`, with a tuple for each of `config.total_ranks` ranks, replica by replica.

        A source in which ranks wait for each other (a broadcast) needs all replicas: `in_service` tells.
        """
        self._one_per_rank("pull_update", args)
        with self._exclusively("pull_update"):
            self._begin(version, mode)
            self._pull(source, args, timeout_s)
            return self._commit(source)

    # ---- in parts ---------------------------------------------------------------------------------------------------

    def begin_update(self, version: int, *, mode: UpdateMode | None = None) -> None:
        """As `RolloutGroup.begin_update`."""
        with self._exclusively("begin_update"):
            self._begin(version, mode)

    def pull_tensors(self, source: str, args: Sequence[OneArgs], *, timeout_s: float = PULL_S) -> None:
        """As `RolloutGroup.pull_tensors`; args as of `pull_update`."""
        self._one_per_rank("pull_tensors", args)
        with self._exclusively("pull_tensors"):
            self._pull(source, args, timeout_s)

    def commit_update(self) -> UpdateReport:
        """As `RolloutGroup.commit_update`."""
        with self._exclusively("commit_update"):
            return self._commit("pulled in parts")

    def drop_update(self) -> None:
        """As `RolloutGroup.drop_update`."""
        with self._exclusively("drop_update"):
            self._give_up()

    def on_ranks(self, source: str, args: Sequence[OneArgs], *, timeout_s: float = UPDATE_CALL_S) -> list[Any]:
        """As `RolloutGroup.on_ranks`; args as of `pull_update`. None for the ranks of a lost replica."""
        self._one_per_rank("on_ranks", args)
        with self._exclusively("on_ranks"):
            members = self._reachable()
            found = self._all(members, lambda m: m.group.on_ranks(source, self._part(m, args), timeout_s=timeout_s))
            lost: list[Any] = [None] * self.config.ranks
            return [answer for member in self._members for answer in found.get(member.index, lost)]

    def reset_prefix_cache(self) -> None:
        """As `RolloutGroup.reset_prefix_cache`."""
        with self._exclusively("reset_prefix_cache"):
            self._all(self._reachable(), lambda member: member.group.reset_prefix_cache())

    # ---- memory -----------------------------------------------------------------------------------------------------

    def sleep(self, tags: Iterable[MemoryTag] = MEMORY_TAGS, keep_weights: bool = False) -> MemoryReport:
        """As `RolloutGroup.sleep`."""
        asked: tuple[Any, ...] = (tags,) if isinstance(tags, str) else tuple(tags)
        with self._exclusively("sleep"):
            self._reachable()  # waits for replicas that are being started
            with self._memory_lock:  # one that comes back meanwhile sleeps, too, when the others do
                report = self._memory(lambda member: member.group.sleep(asked, keep_weights))
                if "weights" in set(asked) - self._asleep:
                    self._asleep_keeps = keep_weights
                self._asleep |= set(asked)
            return report

    def wake_up(self, tags: Iterable[MemoryTag] | None = None) -> MemoryReport:
        """As `RolloutGroup.wake_up`."""
        asked: Any = MEMORY_TAGS if tags is None else (tags,) if isinstance(tags, str) else tuple(tags)
        with self._exclusively("wake_up"):
            self._reachable()
            with self._memory_lock:
                report = self._memory(lambda member: member.group.wake_up(asked))
                self._asleep -= set(asked)
            return report

    def _memory(self, call: Callable[[Member], MemoryReport]) -> MemoryReport:
        started = time.perf_counter()
        changes = []
        for index, report in self._all(self._with_ranks(), call).items():
            changes += [replace(rank, rank=index * self.config.ranks + rank.rank) for rank in report.ranks]
        return MemoryReport(changes, time.perf_counter() - started)

    # ---- parts of an update -----------------------------------------------------------------------------------------

    def _one_per_rank(self, name: str, args: Sequence[OneArgs]) -> None:
        if len(args) != self.config.total_ranks:
            raise BadInput(
                f"{name}: args needs one tuple per rank of all replicas, {self.config.total_ranks}, got {len(args)}"
            )

    def _part(self, member: Member, args: Sequence[OneArgs]) -> list[OneArgs]:
        first = member.index * self.config.ranks
        return list(args[first : first + self.config.ranks])

    def _reachable(self) -> list[Member]:
        """Replicas with ranks, those that were being started included."""
        if self._closed:
            raise GroupNotReady("the replicas were shut down; restart() them or make new ones")
        self._revive_lost()
        self._await_revivals()
        self._await_any(_has_ranks)
        return self._with_ranks()

    def _with_ranks(self) -> list[Member]:
        found = [member for member in self._members if _has_ranks(member)]
        if not found:
            words = "; ".join(f"replica {member.index}: {member.why_not}" for member in self._members)
            raise GroupNotReady(f"no replica has ranks: {words}; restart() them")
        return found

    def _begin(self, version: int, mode: UpdateMode | None) -> None:
        if not isinstance(version, int) or isinstance(version, bool) or version < self.policy_version:
            raise BadInput(
                f"update: version must be an int of at least {self.policy_version}, the present policy version, got "
                f"{version!r}"
            )
        self._give_up()
        members, started = self._reachable(), time.perf_counter()
        self._loading = []
        self._begun += 1
        self._updating = ([(member, member.life) for member in members], started)
        self._while_open(lambda member: member.group.begin_update(version, mode=mode))

    def _while_open(self, call: Callable[[Member], Any]) -> dict[int, Any]:
        """`call` of each replica that takes part; the update is over if that fails for one that is not lost.

        One that was lost since the update began is out of it, also when it is back by now.
        """
        if self._updating is None:
            raise GroupNotReady("no weight update is open: call begin_update first")
        members, started = _still_there(self._updating[0]), self._updating[1]
        if not members:
            self._updating = None
            raise GroupNotReady("the replicas that took part in this weight update are all lost: send it again")
        try:
            found = self._all(members, call)
        except BaseException:
            self._give_up()
            raise
        self._updating = ([(member, member.life) for member in members if member.index in found], started)
        return found

    def _pull(self, source: str, args: Sequence[OneArgs], timeout_s: float) -> None:
        self._while_open(lambda m: m.group.pull_tensors(source, self._part(m, args), timeout_s=timeout_s))

    def _load(self, bucket: Any) -> None:
        """Send a bucket; the one before must have been taken in: two in memory, never more."""
        self._settle()
        ref = ray.put(bucket)
        # Within a list, so that Ray does not fetch it for the actor: the source does, without a copy per rank.
        args: list[OneArgs] = [([ref],)] * self.config.ranks

        def load() -> None:
            self._while_open(lambda member: member.group.pull_tensors(stored.SOURCE, args, timeout_s=UPDATE_CALL_S))

        self._loading = [Task(load)]

    def _settle(self) -> None:
        loading, self._loading = self._loading, []
        for task in loading:
            task.result()

    def _commit(self, transport: str) -> UpdateReport:
        def commit(member: Member) -> UpdateReport:
            report = member.group.commit_update()
            member.update = self._begun
            return report

        found: dict[int, UpdateReport] = self._while_open(commit)
        assert self._updating is not None
        members, started = self._updating
        self._updating = None
        first = next(iter(found.values()))
        for member, _ in members:
            member.problem = None
        self._update = self._begun
        self._compare()  # one that was lost meanwhile may be back already, with older weights
        self.policy_version = first.version
        self._update_s, self._update_ended_at = time.perf_counter() - started, time.time()
        nbytes = max(report.nbytes for report in found.values())
        self.last_update = UpdateReport(first.version, first.mode, transport, nbytes, self._update_s)
        return self.last_update

    def _give_up(self) -> None:
        updating, self._updating = self._updating, None
        for task in self._loading:  # `_settle` tells of its error
            if task is not threading.current_thread():
                task.join()  # it must not run into the next update
        if updating is None:
            return
        for member in _still_there(updating[0]):
            try:
                member.group.drop_update()
            except MoebiusError as error:
                self.lose(member, error)


def _has_ranks(member: Member) -> bool:
    return member.group.running and member.reviving is None


def _still_there(members: Sequence[tuple[Member, int]]) -> list[Member]:
    """Those that have not been lost since, or started again on demand."""
    return [member for member, life in members if member.life == life and member.reviving is None]
