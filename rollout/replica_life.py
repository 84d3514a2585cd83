"""The life of several replicas: their start on a cluster, and the loss of single ones, which come back meanwhile."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from moebius.engine.costs import CostModel
from moebius.engine.types import MemoryTag
from moebius.rollout.backlog import Backlog
from moebius.rollout.checkpoint import check_model
from moebius.rollout.config import Place, RolloutConfig
from moebius.rollout.errors import GroupNotReady, MoebiusError
from moebius.rollout.failure_types import pause_s
from moebius.rollout.group import RolloutGroup
from moebius.rollout.interrupts import held_back, pause, waiting
from moebius.rollout.placement import connect, resolve_device
from moebius.rollout.replica_homes import Homes
from moebius.rollout.replica_member import Member, Room
from moebius.rollout.replica_task import Task
from moebius.rollout.report import StepReport
from moebius.rollout.report_startup import RankStart

A = TypeVar("A")
B = TypeVar("B")
POLL_S, ENDING_S = 0.02, 60.0  # between looks; for calls on all replicas to end that the caller broke off
MakeGroup = Callable[[RolloutConfig], RolloutGroup]
_log = logging.getLogger(__name__)


class ReplicaLife:
    """What all parts of `RolloutReplicas` rest on."""

    _unfinished: Sequence[Task] = ()  # calls on replicas that Ctrl-C has left running

    def __init__(
        self,
        config: RolloutConfig,
        homes: Callable[[RolloutConfig, str], Room] = Homes,
        make_group: MakeGroup = RolloutGroup,
    ) -> None:
        """`homes` and `make_group` are replaced in tests."""
        folder = check_model(config.engine, config.ranks)
        self.config = config.model_copy(update={"engine": config.engine.model_copy(update={"model": str(folder)})})
        self.backlog = Backlog()  # complete groups that nobody was given, and prompts that no replica has
        self.last_report: StepReport | None = None
        self.policy_version = 0
        self.losses = 0  # of single replicas, so far
        self._one_call = threading.Lock()
        self._make_group = make_group
        self._closed = False
        self._update = 0  # number of the last one that was committed
        self._comparing = threading.Lock()
        self._next_step = 0
        self._update_s: float | None = None
        self._update_ended_at: float | None = None
        self._asleep: set[MemoryTag] = set()
        self._asleep_keeps = False  # weights that are asleep have a copy in host memory
        self._memory_lock = threading.Lock()  # what is asleep, and a replica that comes back meanwhile
        self._no_more = threading.Event()  # attempts to start lost replicas
        connect(config)
        self.device = resolve_device(config)
        self._make_homes = homes
        self._take_homes()
        try:
            self._members = self._start_all()
        except BaseException:
            self._closed = True
            self._homes.close()
            raise
        self.startup: list[RankStart] = self._starts()
        self._unreported_start: list[RankStart] | None = self.startup
        atexit.register(self.shutdown)

    def _take_homes(self) -> None:
        self._homes = self._make_homes(self.config, self.device)
        atexit.register(self._homes.close)  # before the groups' own, so that it runs after them

    # ---- state ------------------------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether a replica has ranks."""
        return not self._closed and any(member.group.running for member in self._members)

    @property
    def closed(self) -> bool:
        """Whether the replicas were shut down."""
        return self._closed

    @property
    def in_service(self) -> list[int]:
        """Numbers of the replicas that take prompts."""
        return [member.index for member in self._members if member.in_service]

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt + output."""
        return self._members[0].group.max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._members[0].group.vocab_size

    @property
    def has_tokenizer(self) -> bool:
        """Whether samples come with their text."""
        return self._members[0].group.has_tokenizer

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer. Raises BadInput when the model folder has none."""
        return self._members[0].group.tokenizer

    @property
    def costs(self) -> CostModel | None:
        """Of iterations and switches, as the first replica has them."""
        return self._members[0].group.costs

    @property
    def costs_from(self) -> str:
        """Where `costs` come from, or why there are none."""
        return self._members[0].group.costs_from

    def pids(self) -> list[int]:
        """Process ids of all ranks on their nodes; of a lost replica none."""
        return [pid for member in self._members if member.group.running for pid in member.group.pids()]

    # ---- starting ---------------------------------------------------------------------------------------------------

    def _start_all(self) -> list[Member]:
        """All replicas at once. One that cannot start ends the others: settings or the machine are at fault."""
        started: list[Member | None] = [None] * self.config.replicas
        failures: list[BaseException] = []
        over = threading.Event()  # nobody waits any more

        def start(index: int) -> None:
            try:
                place = self._homes.place(index)
                group = self._make_group(self._own(place))
            except BaseException as error:  # noqa: BLE001  (raised below)
                failures.append(error)
                return
            if over.is_set():
                group.shutdown()
                return
            started[index] = Member(index, group, place.node or "")

        # Not the pool's: those would hold up the end of a process that is told to stop meanwhile.
        threads = [threading.Thread(target=start, args=(i,), daemon=True) for i in range(self.config.replicas)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if failures:
                raise failures[0]
        except BaseException:
            over.set()
            for member in started:
                if member is not None:
                    member.group.shutdown()
            raise
        return [member for member in started if member is not None]

    def _own(self, place: Place) -> RolloutConfig:
        """The configuration of one replica."""
        # Its prompts go to the others at once: they need not wait until it has started again.
        failures = self.config.failures.model_copy(update={"on_failure": "raise"})
        return self.config.model_copy(update={"replicas": 1, "place": place, "failures": failures})

    def _starts(self) -> list[RankStart]:
        found = []
        for member in self._members:
            first = member.index * self.config.ranks
            for start in member.group.startup:
                memory = start.memory.model_copy(update={"rank": first + start.rank})
                found.append(start.model_copy(update={"rank": first + start.rank, "memory": memory}))
        return found

    # ---- losses -----------------------------------------------------------------------------------------------------

    def lose(self, member: Member, error: MoebiusError) -> None:
        """A replica cannot go on: start it again while the others do, if it may."""
        _log.warning("replica %d is lost: %s", member.index, error)
        self.losses += 1
        member.life += 1
        # What it had parked is drawn anew by whoever has room, with the same seeds.
        self.backlog.keep(member.group.backlog.take(), {})
        if self._closed or member.reviving is not None:
            return
        settings = self.config.failures
        if settings.on_failure == "raise" or member.restarts >= settings.max_restarts:
            member.problem = str(error).splitlines()[0]
            return
        member.resting.clear()
        member.reviving = threading.Thread(target=self._revive, args=(member,), daemon=True)
        member.reviving.start()

    def _revive(self, member: Member) -> None:
        """Start a lost replica, with a pause after each attempt that fails, as often as is allowed.

        No error is final before that: the same settings have started it before, and the others do not wait for it.
        """
        most, failed = self.config.failures.max_restarts, 0
        try:
            while not self._no_more.wait(pause_s(failed)):
                member.resting.clear()
                member.restarts += 1
                try:
                    self._bring_up(member)
                    _log.warning("replica %d was started again", member.index)
                    return
                except MoebiusError as error:
                    failed, member.problem = failed + 1, f"it could not be started again: {error}"
                    _log.error("replica %d, attempt %d of %d: %s", member.index, member.restarts, most, member.problem)
                    if member.restarts >= most:
                        return
                member.resting.set()
        except Exception as error:  # noqa: BLE001  (told to whoever asks why it is out of service)
            member.problem = f"it could not be started again: {error}"
            _log.exception("replica %d could not be started again", member.index)
        finally:
            member.reviving = None
            member.resting.set()

    def _bring_up(self, member: Member) -> None:
        """New ranks for a replica, on another node if its own is gone."""
        place = self._homes.place(member.index)
        if place == member.group.config.place:
            member.group.restart()
            # With `failures.keep_weights` it has the last ones, unless others have come since.
            member.update = member.update if member.group.problem is None else -1
        else:
            member.group.shutdown()
            member.group = self._make_group(self._own(place))
            member.node, member.update = place.node or "", 0
        if self._closed:
            member.group.shutdown()
            return
        self._compare()
        with self._memory_lock:
            if self._asleep:  # the others have given this memory to somebody
                member.group.sleep(self._asleep, self._asleep_keeps)
            member.problem = None

    def _compare(self) -> None:
        """See which replicas hold the weights of the last update."""
        with self._comparing:
            for member in self._members:
                member.stale = member.update != self._update

    def _revive_lost(self) -> None:
        """Also those whose loss no call has told of, such as an abort of parked samples."""
        for member in self._members:
            if member.reviving is None and member.problem is None and not member.group.running:
                self.lose(member, GroupNotReady(member.group.problem or "its ranks are lost"))

    def _await_revivals(self) -> None:
        """Until no replica is being started; one whose start has failed may yet be tried again, after a pause."""
        for member in self._members:
            if member.reviving is not None:
                with waiting():
                    member.resting.wait()

    def _await_any(self, useful: Callable[[Member], bool]) -> None:
        """Until a replica is `useful`, if one that is lost may yet come back."""
        while any(m.reviving is not None for m in self._members) and not any(useful(m) for m in self._members):
            pause(POLL_S)

    def ready(self) -> list[Member]:
        """Replicas that take prompts."""
        return [] if self._closed else [member for member in self._members if member.in_service]

    def awaits_replica(self) -> bool:
        """Whether one is in service, or being started again."""
        able = (m.reviving is not None or (m.in_service and m.group.problem is None) for m in self._members)
        return not self._closed and any(able)

    @property
    def gave_up(self) -> bool:
        """Whether all replicas are lost, after too many restarts in a row."""
        most = self.config.failures.max_restarts
        return all(not member.group.running and member.restarts >= most for member in self._members)

    def _serving(self) -> list[Member]:
        """Replicas that take prompts; waits for one that is being started if there is no other.

        Raises GroupNotReady with what keeps each.
        """
        if self._closed:
            raise GroupNotReady("the replicas were shut down; restart() them or make new ones")
        self._revive_lost()
        self._await_any(lambda member: member.in_service)
        self._compare()
        found = [member for member in self._members if member.in_service]
        if not found:
            words = "; ".join(f"replica {member.index}: {member.why_not}" for member in self._members)
            raise GroupNotReady(f"no replica is in service: {words}; send weights with update_weights, or restart()")
        return found

    def restart(self) -> None:
        """Start the lost replicas anew, all of them if none is lost; otherwise as `RolloutGroup.restart`."""
        with self._exclusively("restart"):
            if self._closed:
                self._take_homes()
                self._closed = False
                atexit.register(self.shutdown)
            self._end_revivals()
            down = [m for m in self._members if not m.group.running or m.problem] or self._members
            for member in down:
                self.backlog.keep(member.group.backlog.take(), {})
                member.life += 1
            for member, error in zip(down, self.in_parallel(down, self._restarted), strict=True):
                if error is not None:
                    member.problem = f"it could not be started again: {error}"
                    raise error
                member.restarts = 0
            self.startup = self._unreported_start = self._starts()

    def _end_revivals(self) -> None:
        """No attempts after those under way: the caller wants it now."""
        self._no_more.set()
        try:
            for thread in [member.reviving for member in self._members if member.reviving is not None]:
                with waiting():
                    thread.join()
        finally:  # after Ctrl-C, lost replicas are to come back as before
            if not self._closed:
                self._no_more.clear()

    def _restarted(self, member: Member) -> MoebiusError | None:
        try:
            self._bring_up(member)
        except MoebiusError as error:
            return error
        return None

    def shutdown(self) -> None:
        """End all ranks and free what they held. May be called again, and from another thread during a step."""
        self._closed = True
        self._no_more.set()
        atexit.unregister(self.shutdown)
        with ExitStack() as rest:  # all of it, whatever Ctrl-C does meanwhile; last in, first out
            rest.callback(atexit.unregister, self._homes.close)
            rest.callback(self._homes.close)
            for member in reversed(self._members):
                rest.callback(member.group.shutdown)

    # ---- calls ------------------------------------------------------------------------------------------------------

    def in_parallel(self, items: Iterable[A], call: Callable[[A], B]) -> list[B]:
        """`call` of each at the same time; answers in order. All have ended when this returns or raises."""
        tasks = [Task(lambda item=item: call(item)) for item in items]  # type: ignore[misc]
        try:
            for task in tasks:
                task.join()
        except BaseException:  # Ctrl-C: what was begun must not run into the next call
            self._unfinished = tasks  # after another Ctrl-C, that call waits for it
            for task in tasks:
                task.join(ENDING_S)
            raise
        return [task.result() for task in tasks]

    @contextmanager
    def _exclusively(self, name: str) -> Iterator[None]:
        with held_back():
            with self._held_for(name):
                yield
            self._one_call.release()

    @contextmanager
    def _held_for(self, name: str) -> Iterator[None]:
        """The replicas serve one call, which goes on after the block unless that fails."""
        if not self._one_call.acquire(blocking=False):
            raise MoebiusError(f"{name}: another call is running on these replicas; they serve one at a time")
        try:
            self._await_unfinished(name)
            yield
        except BaseException:
            self._one_call.release()
            raise

    def _await_unfinished(self, name: str) -> None:
        for task in self._unfinished:
            task.join(ENDING_S)
            if task.is_alive():
                raise MoebiusError(f"{name}: what a call that was broken off has begun is still running; try again")
        if self._unfinished:
            # What replicas have parked since then is with them, not to be drawn anew.
            for at in {at for member in self._members for at in member.group.backlog.groups}:
                self.backlog.groups.pop(at, None)
        self._unfinished = ()

    def _all(self, members: Sequence[Member], call: Callable[[Member], B]) -> dict[int, B]:
        """`call` of each replica at the same time. One whose ranks are lost by it is left out of the answer, by number.

        Raises what else goes wrong, when all have ended; GroupNotReady if none is left.
        """

        def guarded(member: Member) -> tuple[B | None, MoebiusError | None]:
            try:
                return call(member), None
            except MoebiusError as error:
                return None, error

        found: dict[int, B] = {}
        failure: MoebiusError | None = None
        lost: MoebiusError | None = None
        for member, (answer, error) in zip(members, self.in_parallel(members, guarded), strict=True):
            if error is None:
                found[member.index] = answer  # type: ignore[assignment]
            elif member.group.running:
                failure = error
            else:
                lost = error
                self.lose(member, error)
        if failure is not None:
            raise failure
        if not found and lost is not None:
            raise lost
        return found
