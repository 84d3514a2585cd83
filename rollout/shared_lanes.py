"""What happens behind a shared step: prompts go to replicas, samples come back, replicas are lost and come back."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moebius.engine.types import SampleKey, SamplePiece
from moebius.rollout.backlog import PromptGroup
from moebius.rollout.errors import BadInput, GroupNotReady, MoebiusError, RankDied
from moebius.rollout.failure_types import FAILED
from moebius.rollout.open_step import OpenStep
from moebius.rollout.replica_queue import Load, deal
from moebius.rollout.report_lanes import LaneOutcome
from moebius.rollout.suspicion import Place, Suspicion
from moebius.rollout.types import Sample

if TYPE_CHECKING:
    from moebius.rollout.replica_member import Member
    from moebius.rollout.replica_steps import ReplicaSteps

_log = logging.getLogger(__name__)


@dataclass
class Part:
    """One replica's part of the step, until it is lost."""

    member: Member
    step: OpenStep
    began: float  # time.perf_counter() when it was opened
    groups: list[PromptGroup] = field(default_factory=list)
    later: int = 0  # prompts that it got after the step had begun
    live: int = 0  # unfinished samples
    told: bool = False  # that nothing more is to come for it
    lost: str | None = None

    def take(self, groups: Iterable[PromptGroup]) -> None:
        """It has been given these."""
        for group in groups:
            self.groups.append(group)
            self.live += len(group.missing)


class SharedLanes:
    """The part of a `SharedStep` that deals with replicas."""

    def __init__(
        self, replicas: ReplicaSteps, members: Sequence[Member], step: int, own: Sequence[PromptGroup],
        older: Sequence[PromptGroup], *, replay: bool = True,
    ) -> None:  # fmt: skip
        """`older` are prompts of earlier steps that no rank has. Raises as `RolloutGroup.open_step`."""
        self.step = step
        self._replicas, self._ranks, self._replay = replicas, replicas.config.ranks, replay
        self._prompts = list(own)
        self._groups = {(g.step, g.prompt): g for g in (*older, *own)}
        self._queue: deque[PromptGroup] = deque([*older, *own])
        self._suspicion = Suspicion()
        self._filled = False  # the burst is in
        self._closed: bool = False
        self._parts: list[Part] = []
        self._ended: dict[SampleKey, Sample] = {}
        self._fresh: list[tuple[SampleKey, Sample]] = []
        self._pieces: list[SamplePiece] = []
        self._streamed: set[Place] = set()  # of whose samples something was told while they ran
        self._lock = threading.Lock()  # of what follows
        self._asked: list[list[SampleKey] | None] = []  # aborts of other threads
        self._aborted: set[SampleKey] = set()  # so far
        self._released = True  # until it has begun, the replicas are the caller's to release
        try:
            self._begin(members)
        except BaseException:  # Ctrl-C, too: nobody else ends what replicas have begun with
            self.break_off()
            raise
        self._released = False

    def _begin(self, members: Sequence[Member]) -> None:
        room = self._room("EP")
        shares = deal(self._queue, [Load(len(m.group.parked), room=room) for m in members])
        problem: MoebiusError | None = None
        for member, share in zip(members, shares, strict=True):
            try:
                self._join(member, share)
            except BadInput:
                raise
            except MoebiusError as error:
                problem = error
                self._queue.extendleft(reversed(share))
                if not member.group.running:  # else it sleeps, or waits for weights
                    self._replicas.lose(member, error)
        if not self._parts:
            raise problem or GroupNotReady("no replica can serve")
        self._deal()

    def _join(self, member: Member, share: Sequence[PromptGroup]) -> None:
        began = time.perf_counter()
        part = Part(member, member.group.open_step(self.step, None, share), began)
        self._parts.append(part)
        part.take(part.step.groups())  # also what it had parked
        self._groups |= {(g.step, g.prompt): g for g in part.step.groups()}

    def _open(self) -> list[Part]:
        return [part for part in self._parts if part.lost is None]

    def _room(self, layout: str) -> int:
        """Samples that a replica decodes at once."""
        engine = self._replicas.config.engine
        return engine.max_num_seqs * (self._ranks if layout == "EP" else 1)

    # ---- while it runs ----------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Take what has ended, let other replicas go on with what a lost one had, and hand out what waits."""
        if self._closed:
            return
        for part in self._open():
            try:
                self._take(part, part.step.finished())
                self._take_pieces(part)
            except BadInput:  # the ranks refuse its prompts
                self.break_off()
                raise
            except MoebiusError as error:
                self._lose(part, error)
        suspects = self._suspicion.suspects
        if suspects:
            self._suspicion.ended([at for at in suspects if self._groups[at].complete])
        if self._queue or not self._open():
            self._rejoin()
        if not self._open() and not self._replicas.awaits_replica():
            self._all_lost()
        self._apply_aborts()
        self._deal()

    def _take(self, part: Part, fresh: Iterable[tuple[SampleKey, Sample]]) -> None:
        for key, sample in fresh:
            sample.rank += part.member.index * self._ranks
            part.live -= 1
            self._note(key, sample)

    def _note(self, key: SampleKey, sample: Sample) -> None:
        self._ended[key] = sample
        self._fresh.append((key, sample))

    def _take_pieces(self, part: Part) -> None:
        for piece in part.step.pieces():
            self._pieces.append(piece)
            self._streamed.add((piece.key.step, piece.key.prompt))

    @contextmanager
    def _handing_out(self) -> Iterator[None]:
        """After Ctrl-C in this block, prompts off the queue that no replica was given wait for one again."""
        try:
            yield
        except BaseException:
            if not self._closed:
                self._find_strays()
            raise

    def _find_strays(self) -> None:
        given = {(g.step, g.prompt) for part in self._open() for g in part.step.groups()}
        given |= {(g.step, g.prompt) for g in self._queue}
        strays = {at: group for at, group in self._groups.items() if at not in given and not group.complete}
        for part in self._open():
            mine = [group for group in part.groups if (group.step, group.prompt) in strays]
            part.groups = [group for group in part.groups if (group.step, group.prompt) not in strays]
            part.live -= sum(len(group.missing) for group in mine)
        self._queue.extendleft(reversed(list(strays.values())))

    def _deal(self) -> None:
        with self._handing_out():
            self._deal_queue()

    def _deal_queue(self) -> None:
        parts = self._open()
        if self._queue and parts:
            progress = [part.step.progress() for part in parts]
            loads = [
                Load(part.live, room=self._room(ranks[0].layout), kv_use=max(rank.kv_use for rank in ranks))
                for part, ranks in zip(parts, progress, strict=True)
            ]
            for part, share in zip(parts, self._shares(loads), strict=True):
                self._hand_out(part, share)
        if self._filled and not self._queue:
            for part in self._open():
                if not part.told:
                    part.step.filled()
                    part.told = True

    def _shares(self, loads: Sequence[Load]) -> list[list[PromptGroup]]:
        """Prompts of the queue for each; while some are suspected of bringing ranks down, of those whose turn it is."""
        if not self._suspicion.trying:
            return deal(self._queue, loads)
        able = deque(g for g in self._queue if self._suspicion.may_run((g.step, g.prompt)))
        shares = deal(able, loads)
        given = {(g.step, g.prompt) for share in shares for g in share}
        self._queue = deque(g for g in self._queue if (g.step, g.prompt) not in given)
        return shares

    def _hand_out(self, part: Part, share: Sequence[PromptGroup]) -> None:
        if not share:
            return
        part.take(share)
        part.later += len(share)
        try:
            part.step.submit_groups(share)  # it looks at the ranks
        except BadInput:
            self.break_off()
            raise
        except MoebiusError as error:
            self._lose(part, error)

    def _apply_aborts(self) -> None:
        if not self._open():
            return  # there are ranks again, or the step is lost, by one of the next looks
        with self._lock:
            asked, self._asked = self._asked, []
        for keys in asked:
            self._abort([k for g in self._groups.values() for k in g.missing] if keys is None else keys)

    def _abort(self, keys: Sequence[SampleKey]) -> None:
        """Also of prompts that wait: they are handed out first, so that every sample comes back from a rank."""
        with self._handing_out():
            self._abort_all(set(keys))

    def _abort_all(self, wanted: set[SampleKey]) -> None:
        self._aborted |= wanted
        ending = [group for group in self._queue if wanted.intersection(group.missing)]
        self._queue = deque(group for group in self._queue if not wanted.intersection(group.missing))
        for i, group in enumerate(ending):
            if parts := self._open():
                self._hand_out(parts[i % len(parts)], [group])
            else:
                self._put_back([group])
        for part in self._open():
            own = [key for group in part.groups for key in group.missing if key in wanted]
            if own:
                part.member.group.abort(own)

    # ---- losses -----------------------------------------------------------------------------------------------------

    def _lose(self, part: Part, error: MoebiusError) -> None:
        part.lost = str(error).splitlines()[0]
        self._take(part, part.step.finished())  # what had ended before that
        part.live = 0
        left = {(group.step, group.prompt): group for group in part.groups if not group.complete}
        _log.warning(
            "step %d: replica %d is lost, its %d unfinished prompts go to the others: %s",
            self.step, part.member.index, len(left), part.lost,
        )  # fmt: skip
        guilty = self._suspicion.lost(left)
        for at in [at for at in left if not self._replay or at == guilty or at in self._streamed]:
            group = left.pop(at)
            if at == guilty:
                why = "given up, since ranks were lost again and again while they worked on this prompt, at last"
            else:
                why = "what was streamed cannot be drawn again" if self._replay else "its ranks were lost"
            self._give_up(group, f"{why}: {part.lost}", part.member.index * self._ranks)
        self._put_back(list(left.values()))
        # The group's own records of them: they are in the queue, or have been told of.
        part.member.group.backlog.take()
        part.member.group.backlog.take_complete()
        self._replicas.lose(part.member, error)

    def _put_back(self, groups: Sequence[PromptGroup]) -> None:
        """Prompts whose replica is lost are next; an abort of theirs holds with the next replica, too."""
        self._queue.extendleft(reversed(groups))
        if again := [key for group in groups for key in group.missing if key in self._aborted]:
            with self._lock:
                self._asked.append(again)

    def _give_up(self, group: PromptGroup, why: str, rank: int) -> None:
        for key in group.missing:
            logprobs: list[float] | None = None if group.requests[key.sample].sampling.get("logprobs") is None else []
            text = "" if self._replicas.has_tokenizer else None
            version = self._replicas.policy_version
            group.samples[key.sample] = Sample(key.sample, [], logprobs, None, text, FAILED, why, version, rank)
            self._note(key, group.samples[key.sample])

    def _rejoin(self) -> None:
        """Replicas that have come back take part again."""
        here = {part.member.index for part in self._open()}
        for member in self._replicas.ready():
            if member.index not in here:
                try:
                    self._join(member, [])
                except MoebiusError as error:
                    if not member.group.running:
                        self._replicas.lose(member, error)

    def _all_lost(self) -> None:
        self._closed = True
        self._replicas.backlog.keep((g for g in self._queue if g.step != self.step), {})
        self._release(None)
        if self._replicas.closed:
            raise GroupNotReady("the replicas were shut down during the step")
        words = "; ".join(f"replica {part.member.index}: {part.lost}" for part in self._parts)
        raise RankDied(f"step {self.step}: all replicas are lost: {words}", step=self.step)

    def break_off(self) -> None:
        """End what the replicas do for it, if it runs: its samples are dropped, those of earlier steps kept.

        Another Ctrl-C meanwhile is raised when that is done: a replica whose step stays open serves nobody.
        """
        if self._closed:
            return
        self._closed = True
        with ExitStack() as rest:  # last in, first out
            rest.callback(self._release, None)
            rest.callback(self._take_back_older)
            for part in reversed(self._open()):
                rest.callback(self._drop, part)

    def _take_back_older(self) -> None:
        self._replicas.take_back(group for group in self._groups.values() if group.step != self.step)

    def _drop(self, part: Part) -> None:
        group = part.member.group
        try:
            try:
                part.step.park()  # what earlier steps have left stays
            finally:
                group.abort_parked([key for key in group.parked if key.step == self.step])
        except BadInput:
            return  # it refuses for the same reason
        except MoebiusError as error:
            self._replicas.lose(part.member, error)

    # ---- its end ----------------------------------------------------------------------------------------------------

    def _end(self, how: Callable[[OpenStep], Any]) -> None:
        if self._closed:
            return
        broken: BaseException | None = None
        try:
            self._look()  # raises if all are lost
        except BaseException as interrupt:
            if self._closed:
                raise
            broken = interrupt  # Ctrl-C: when all have ended
        self._closed = True
        try:
            older = [group for group in self._groups.values() if group.step != self.step]
            numbers = {(g.step, g.prompt): len(self._prompts) + i for i, g in enumerate(older)}
            parts = self._open()
            for part in parts:
                part.step.report_numbers = numbers
            outcomes = self._replicas.in_parallel(parts, lambda part: self._end_part(part, how))
            for part, error in zip(parts, outcomes, strict=True):
                if error is not None:
                    self._lose(part, error)
            self._replicas.backlog.keep((group for group in self._queue if group.missing), {})
        except BaseException:
            # Ctrl-C: what is parked on a replica is known there; all else of earlier steps is drawn anew.
            self._replicas.take_back(g for g in self._groups.values() if g.step != self.step or g in self._queue)
            self._release(None)
            raise
        self._release(numbers)
        if broken is not None:
            raise broken

    def _end_part(self, part: Part, how: Callable[[OpenStep], Any]) -> MoebiusError | None:
        try:
            how(part.step)
        except MoebiusError as error:
            return error
        self._take(part, part.step.finished())
        part.member.restarts = 0
        return None

    def _release(self, numbers: Mapping[Place, int] | None) -> None:
        """Let the replicas serve other calls; with `numbers` of the prompts of earlier steps, make the report."""
        if self._released:
            return
        self._released = True
        if numbers is None:
            self._replicas.step_closed(None)
            return
        ended = []
        for key, sample in self._ended.items():
            at = (key.step, key.prompt)
            ended.append((key.prompt if key.step == self.step else numbers[at], sample, len(self._groups[at].ids)))
        self._replicas.step_closed((self.step, self._outcomes(), ended))

    def _outcomes(self) -> list[LaneOutcome]:
        """One per replica: of one that was lost and came back the last part, and why it was lost."""
        first = min(part.began for part in self._parts)
        found = []
        for index in sorted({part.member.index for part in self._parts}):
            own = [part for part in self._parts if part.member.index == index]
            last, lost = own[-1], [part.lost for part in own if part.lost is not None]
            found.append(
                LaneOutcome(
                    replica=index,
                    node=last.member.node,
                    began_s=last.began - first,
                    prompts=sum(len(part.groups) for part in own),
                    later=sum(part.later for part in own),
                    lost=lost[0] if lost else None,
                    report=None if last.lost is not None else last.member.group.last_report,
                )
            )
        return found
