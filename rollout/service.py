"""RolloutService: one group behind an asyncio front, for callers that learn of their requests one by one.

Agents, trainers' own rollout servers and HTTP clients ask for one prompt at a time. The service gathers what they ask
for into steps: `begin_step` announces one, else a step opens with the first request and closes when there has been
nothing to do for a while. docs/serving.md explains what that means for switches.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from moebius.engine.types import MemoryTag
from moebius.kernels.noise import derive_seed
from moebius.rollout.batch import Prompt
from moebius.rollout.errors import BadInput
from moebius.rollout.service_driver import Driver
from moebius.rollout.service_types import Delta, Mode, ServiceSettings, ServiceStats, Ticket
from moebius.rollout.types import Rollout, Sampling

if TYPE_CHECKING:
    from moebius.rollout.group_weights import UpdateReport
    from moebius.rollout.report import StepReport
    from moebius.rollout.start import AnyGroup
    from moebius.rollout.weights import NamedTensors

T = TypeVar("T")
MODES = ("park", "abort", "finish")


class RolloutService:
    """Serves requests on a started group, which nobody else may call meanwhile. Made and used on any event loop.

    `close()` it before the group is shut down; the group stays the caller's.
    """

    def __init__(
        self,
        group: AnyGroup,
        settings: ServiceSettings | None = None,
        on_report: Callable[[StepReport], None] | None = None,
    ) -> None:
        """`on_report` is called with the report of each step that has run, on the service's thread."""
        self.group = group
        self.settings = settings if settings is not None else group.config.service
        self._driver = Driver(group, self.settings, on_report)
        self._tickets: dict[str, Ticket] = {}
        self._lock = threading.Lock()  # of `_tickets`, and of the tokenizer, which is not for several threads
        self._version: int | None = None

    # ---- requests -------------------------------------------------------------------------------------------------

    def prepare(
        self,
        prompt: Prompt,
        sampling: Sampling | Mapping[str, Any] | None = None,
        *,
        n: int = 1,
        request_id: str | None = None,
        step: int | None = None,
    ) -> Ticket:
        """Check a request and turn its prompt into tokens, which may take a while for long texts; any thread.

        Arguments are those of `generate`; the result goes to `admit` or `stream`. Raises BadInput.
        """
        if isinstance(n, int) and n > self.settings.max_pending:
            raise BadInput(f"n: {n} samples are more than the service takes (service.max_pending)")
        fields = self.group.config.sampling
        repeatable = False
        if isinstance(sampling, Mapping):
            repeatable = sampling.get("seed") is not None
            own = Sampling.parse(fields.model_dump() | dict(sampling))
        else:
            repeatable = sampling is not None and sampling.seed is not None
            own = fields if sampling is None else Sampling.parse(sampling)
        with self._lock:
            _, [ids] = self.group.requests_of([prompt], n, own, 0, 0)
            request_id = request_id or f"req-{uuid.uuid4().hex}"
            if request_id in self._tickets:
                raise BadInput(f"request_id {request_id!r} is that of an unfinished request; give another")
        seeds = None
        if repeatable and own.seed is not None:
            seeds = [derive_seed(own.seed, step or 0, 0, sample) for sample in range(n)]
            own = own.model_copy(update={"seed": None})  # said by `seeds`; alike settings are submitted together
        return Ticket(request_id, ids, n, own, seeds)

    def admit(self, tickets: Sequence[Ticket]) -> None:
        """Take prepared requests in, all or none; `result` waits for one. Any thread. Raises as `generate`."""
        names = [ticket.request_id for ticket in tickets]
        with self._lock:
            twice = next((name for i, name in enumerate(names) if name in self._tickets or name in names[:i]), None)
            if twice is not None:
                raise BadInput(f"request_id {twice!r} is that of an unfinished request; give another")
            self._tickets.update(zip(names, tickets, strict=True))
        for ticket in tickets:
            ticket.done.set_running_or_notify_cancel()  # cancelling a waiter must not cancel what the thread fulfils
            ticket.done.add_done_callback(partial(self._forget, ticket))
        try:
            self._driver.add(tickets)
        except BaseException:
            for ticket in tickets:
                self._forget(ticket)
            raise

    async def result(self, ticket: Ticket) -> Rollout:
        """The rollout of an admitted request. Cancelling this aborts it. Raises as `generate`."""
        try:
            return await asyncio.wrap_future(ticket.done)
        except asyncio.CancelledError:
            self._driver.abort([ticket])
            raise

    async def generate(
        self,
        prompt: Prompt,
        sampling: Sampling | Mapping[str, Any] | None = None,
        *,
        n: int = 1,
        request_id: str | None = None,
        step: int | None = None,
    ) -> Rollout:
        """Draw `n` samples of a prompt; waits while the service is paused or asleep.

        Args:
            prompt: token ids, a text, or chat messages.
            sampling: settings; a mapping changes single fields of the group's. With a `seed` the samples depend on
                nothing but it, the prompt, their index and `step`; without, on the order of requests too.
            request_id: to `abort` it by; must differ from those of all unfinished requests.

        Samples that were aborted have the finish reason "abort" and the tokens they had; cancelling the call aborts.

        Raises:
            BadInput: something is wrong with the request.
            QueueFull: too much is waiting: try again later.
            GroupNotReady, RankDied, MoebiusError: the request was lost, or can no longer be served.
        """
        ticket = self.prepare(prompt, sampling, n=n, request_id=request_id, step=step)
        self.admit([ticket])
        return await self.result(ticket)

    def stream(self, tickets: Sequence[Ticket]) -> Stream:
        """Admit prepared requests, and tell of their samples as they are drawn. On an event loop. Raises as `admit`."""
        stream = Stream(tickets, self._driver)
        self.admit(tickets)
        return stream

    def _forget(self, ticket: Ticket, done: object = None) -> None:
        with self._lock:
            self._tickets.pop(ticket.request_id, None)

    def requests(self) -> list[str]:
        """Ids of unfinished requests."""
        with self._lock:
            return list(self._tickets)

    async def abort(self, request_ids: Iterable[str] | None = None) -> int:
        """End requests (None: all) with the tokens they have; returns how many were found, when they have ended."""
        with self._lock:
            wanted = self._tickets if request_ids is None else dict.fromkeys(request_ids)
            tickets = [self._tickets[key] for key in wanted if key in self._tickets]
        self._driver.abort(tickets)
        for ticket in tickets:
            await asyncio.wait([asyncio.wrap_future(ticket.done)])
        return len(tickets)

    # ---- steps ----------------------------------------------------------------------------------------------------

    def begin_step(self, expected: int, step: int | None = None, *, hold: bool = False) -> None:
        """Announce a step of `expected` samples; what is live at present belongs to it.

        Within an announced step: so many more are still to come. With `hold` the count alone does not end the burst,
        `filled` does: for agents that come back with further requests.

        Few live samples are the step's tail when that many have been asked for. `step` is the number that seeds
        depend on, and that the report gets if it is above those of all steps before. Does not wait. Raises BadInput.
        """
        if not isinstance(expected, int) or isinstance(expected, bool) or expected < 1:
            raise BadInput(f"begin_step: expected must be a number of samples, at least 1, got {expected!r}")
        self._driver.post(lambda: self._driver.announce(expected, step, hold))

    def filled(self) -> None:
        """The burst of the announced step is in: few live samples are its tail from now on. Does not wait."""
        self._driver.post(self._driver.filled)

    async def end_step(self) -> StepReport | None:
        """No more requests come for the announced step: its report, when all of it has ended; None if nothing ran."""
        ended: Future[StepReport | None] = Future()
        await self._on_thread(lambda: self._driver.end(ended))
        return await asyncio.wrap_future(ended)

    # ---- pauses ---------------------------------------------------------------------------------------------------

    async def pause(self, mode: Mode = "park") -> None:
        """Sample nothing until `resume`; requests that come meanwhile wait.

        What is live is parked (it goes on afterwards), aborted (as `abort` of everything), or finished first. Returns
        when nothing is sampled any more. Raises BadInput for another mode.
        """
        if mode not in MODES:
            raise BadInput(f"pause: mode must be one of {', '.join(MODES)}, got {mode!r}")
        await self._on_thread(lambda: self._driver.pause(mode))

    async def resume(self) -> None:
        """Go on after `pause`."""

        def resume() -> None:
            self._driver.paused = None

        await self._on_thread(resume)

    async def sleep(
        self, tags: Iterable[str] | None = None, *, keep_weights: bool = False, mode: Mode | None = None
    ) -> None:
        """Give memory back (tags: weights, kv_cache; None: both) until `wake_up`; requests wait.

        What is live is parked, aborted or finished first (`mode`; None: `service.on_update`). Without `keep_weights`,
        weights must be sent again after waking. Raises as RolloutGroup.sleep.
        """
        asked = _tags(tags)

        def sleep() -> None:
            self._driver.quiesce(mode or self.settings.on_update)
            self.group.sleep(asked, keep_weights=keep_weights)
            self._driver.asleep |= set(asked)

        await self._on_thread(sleep)

    async def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Take memory (None: all of it) again. Raises as RolloutGroup.wake_up."""
        asked = None if tags is None else _tags(tags)

        def wake_up() -> None:
            self.group.wake_up(asked)
            self._driver.asleep -= set(asked or self._driver.asleep)
            self._driver.unblock()

        await self._on_thread(wake_up)

    # ---- weights --------------------------------------------------------------------------------------------------

    async def update_weights(self, named_tensors: NamedTensors, version: int, **how: Any) -> UpdateReport:
        """Replace all weights, as RolloutGroup.update_weights, which also takes `how`; a stream is read on the
        service's thread.

        What is live is parked, aborted or finished first (`service.on_update`) and goes on under the new weights.
        """
        return await self._update(lambda: self.group.update_weights(named_tensors, version, **how))

    async def pull_update(self, version: int, source: str, args: Sequence[tuple[Any, ...]], **how: Any) -> UpdateReport:
        """Have every rank fetch the weights itself, as RolloutGroup.pull_update; otherwise as `update_weights`."""
        return await self._update(lambda: self.group.pull_update(version, source, args, **how))

    async def _update(self, update: Callable[[], UpdateReport]) -> UpdateReport:
        return await self._on_thread(lambda: self._driver.update(update))

    async def begin_update(self, version: int) -> None:
        """Open an update that comes in parts; one that is open is given up. Requests wait until it is over."""
        await self._on_thread(lambda: self._driver.begin_update(version))

    async def pull_tensors(self, source: str, args: Sequence[tuple[Any, ...]]) -> None:
        """Have the ranks fetch some of the open update's tensors, as RolloutGroup.pull_tensors."""
        await self._on_thread(lambda: self._driver.within_update(lambda: self.group.pull_tensors(source, args)))

    async def commit_update(self) -> UpdateReport:
        """End the open update: the new weights serve. Raises as RolloutGroup.commit_update."""
        return await self._on_thread(self._driver.commit_update)

    async def drop_update(self) -> None:
        """Give the open update up, if there is one."""
        await self._on_thread(self._driver.drop_update)

    async def on_ranks(self, source: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a function in every rank's process between two steps, as RolloutGroup.on_ranks."""

        def call() -> list[Any]:
            self._driver.quiesce(self.settings.on_update)
            return self.group.on_ranks(source, args)

        return await self._on_thread(call)

    async def clear_kv_cache(self) -> None:
        """Forget cached prefixes. What is live goes on afterwards."""

        def clear() -> None:
            self._driver.quiesce(self.settings.on_update)
            self.group.reset_prefix_cache()

        await self._on_thread(clear)

    # ---- state ----------------------------------------------------------------------------------------------------

    def set_version(self, version: int | None) -> None:
        """Name the weights' version as the trainer counts; None: as updates have said. Samples keep the latter."""
        self._version = version

    @property
    def version(self) -> int:
        """Policy version of the weights."""
        return self.group.policy_version if self._version is None else self._version

    def stats(self) -> ServiceStats:
        """A copy of what the service does and has done."""
        stats = self._driver.stats
        return replace(
            stats,
            version=self.version,
            requests=stats.requests.copy(),
            samples=stats.samples.copy(),
            switches=stats.switches.copy(),
            phase_ms=stats.phase_ms.copy(),
        )

    def close(self, timeout_s: float = 60.0) -> None:
        """End all requests early (finish reason "abort") and the service. Blocks; may be called again."""
        self._driver.close(timeout_s)

    async def _on_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._driver.post(call))


class Stream:
    """Pieces of the samples of several requests, as (index of the request, piece); iterate over it once.

    Each sample ends with a piece that has a finish reason. Iterating raises as `RolloutService.generate`. `close`
    aborts what has not ended.
    """

    def __init__(self, tickets: Sequence[Ticket], driver: Driver) -> None:
        self._tickets, self._driver = list(tickets), driver
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Delta | None]] = asyncio.Queue()
        for index, ticket in enumerate(self._tickets):
            ticket.sink = partial(self._tell, index)
            ticket.done.add_done_callback(partial(self._end, index))

    def _end(self, index: int, done: object) -> None:
        self._tell(index, None)

    def _tell(self, index: int, delta: Delta | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, delta))
        except RuntimeError:  # the loop is closed: nobody listens any more
            self._driver.abort([self._tickets[index]])

    async def __aiter__(self) -> AsyncIterator[tuple[int, Delta]]:
        left = len(self._tickets)
        while left:
            index, delta = await self._queue.get()
            if delta is not None:
                yield index, delta
                continue
            self._tickets[index].done.result()  # raises its error
            left -= 1

    def close(self) -> None:
        """Abort what has not ended."""
        unfinished = [ticket for ticket in self._tickets if not ticket.done.done()]
        if unfinished:
            self._driver.abort(unfinished)


def _tags(tags: Iterable[str] | None) -> tuple[MemoryTag, ...]:
    known: tuple[MemoryTag, ...] = ("weights", "kv_cache")
    asked = set(known if tags is None else tags)
    wrong = sorted(asked.difference(known))
    if wrong or not asked:
        raise BadInput(f"tags: expected some of {', '.join(known)}, got {', '.join(wrong) or 'none'}")
    return tuple(tag for tag in known if tag in asked)
