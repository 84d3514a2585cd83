"""What ranks tell each other once per iteration: one small all-reduce that runs beside the forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from vllm.v1.engine import EngineCoreRequest

from moebius.engine.inbox import Taken
from moebius.engine.layout import Layout
from moebius.engine.speculation import DraftPass


class LostRequest(RuntimeError):
    """An unfinished request is in no scheduler: it would never end."""


@dataclass(slots=True)
class Pass:
    """One iteration as this rank saw it; None of it is known to the others yet."""

    t: float  # when it was over, seconds since the step began
    ms: float
    layout: Layout
    tokens: int
    drafted: DraftPass | None = None  # what it was, if it drafted; the same on all ranks
    whole: bool = False  # it computed no prompts; the same on all TP ranks


@dataclass(slots=True)
class News:
    """What a rank has to tell in TP, where all cores have all requests."""

    aborts: list[str]
    arrivals: list[EngineCoreRequest]


@dataclass(slots=True)
class Counts:
    """What one exchange tells, the same on all ranks; sums but for `seconds`."""

    live: int  # unfinished samples
    tokens: int
    news: bool  # a rank has something to tell
    is_open: bool  # a rank may still get requests
    is_filling: bool  # of the burst
    is_parking: bool  # a rank has been asked to park
    failed: bool  # a function given to the step has raised an error on a rank
    seconds: float  # rank 0's clock, since the step began
    lengths: list[int]  # see `length_news`; empty where the policy does not learn lengths
    is_short: bool = False  # requests of a rank wait for more pages than staging has left; see `Staging.is_short`
    ready: int = 0  # what ranks say about their drafts' texts; see `TailDrafts.told`


class Exchange:
    """One small all-reduce on its way. `known` is how many unfinished requests this rank's core has."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        layout: Layout,
        live: int,
        known: int,
        seconds: float,
        *,
        last: Pass | None,
        news: News,
        taken: Taken,
        failed: bool,
        lengths: list[int],
        ready: int | None = None,
        short: bool = False,
    ) -> None:
        self.last, self.news = last, news
        self._known = known if layout is Layout.TP else None  # TP cores have all ranks' requests
        has_news = bool(news.aborts or news.arrivals)
        tokens = last.tokens if last else 0
        clock = int(1e6 * seconds) if dist.get_rank(group) == 0 else 0
        is_open = taken.is_open or bool(news.arrivals)
        flags = [has_news, is_open, taken.is_filling, taken.is_parking, failed, short, known < live]
        self._head = 3 + len(flags)
        self._drafts = ready is not None  # only where TP has drafts, hence on all ranks or none
        more = [*lengths, ready] if ready is not None else lengths
        self._sums = torch.tensor([live, tokens, clock, *flags, *more], dtype=torch.int64)
        # What dist.all_reduce(async_op=True) comes to, without a third of its time, which every iteration pays.
        self._work = group.allreduce([self._sums])

    def wait(self) -> Counts:
        """The counts. Raises LostRequest, on all ranks alike."""
        self._work.wait()
        sums = self._sums.tolist()
        live, tokens, clock, *flags, lost = sums[: self._head]
        if lost or (self._known is not None and self._known < live):
            raise LostRequest("a core does not know all of its unfinished requests: they would never end")
        news, is_open, is_filling, is_parking, failed, is_short = (bool(flag) for flag in flags)
        ready = sums.pop() if self._drafts else 0
        seconds, lengths = clock / 1e6, sums[self._head :]
        return Counts(
            live, tokens, news, is_open, is_filling, is_parking, failed, seconds=seconds, lengths=lengths,
            is_short=is_short, ready=ready,
        )  # fmt: skip
