"""What the tail drafts from: finished samples of all ranks, put together beside the decoding and taken into use by all
ranks between the same two iterations; and whether it drafts at all, which all ranks decide alike."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from moebius.engine.config import TailConfig
from moebius.engine.costs import CostModel
from moebius.engine.draft_index import DraftIndex
from moebius.engine.draft_lengths import Cost, roofline
from moebius.engine.draft_library import DraftLibrary, Text, Tokens, scope_of, share
from moebius.engine.draft_mode import ModeChoice
from moebius.engine.layout import Layout
from moebius.engine.requests import RequestBatch
from moebius.engine.runtime import Runtime, RuntimePair
from moebius.engine.speculation import DraftPass, TailDrafter
from moebius.engine.types import DraftStats, SampleResult

_log = logging.getLogger(__name__)
_NEWEST = 0.5  # weight of the newest step in what is known of the tail's speed
_TIME_EVERY = 4  # iterations ahead of which one is timed
_FAILED = 1 << 32  # in what ranks tell each other, beside counts of ranks that are ready
# What an iteration takes for every layer besides reading weights and KV (launches, all-reduces), as bytes that could be
# read meanwhile: with it the roofline follows TP of Qwen3-30B-A3B on two H200, scheduled ahead, within 4 % from 2 to
# 128 requests (docs/tail-speculation.md).
_LAYER_BYTES = 0.2e9
Live = list[tuple[str, int, Tokens]]  # request id, tokens of its prompt, all its tokens


class TailDrafts:
    """One rank's texts to draft from. `begin` and `end` are called on all ranks at the same points of a step."""

    def __init__(
        self, drafter: TailDrafter, config: TailConfig, group: dist.ProcessGroup, timeout_s: float = 600
    ) -> None:
        """Collective: makes a process group for the texts, so that they do not wait for the step's own exchanges."""
        self.drafter, self.mode = drafter, config.speculation
        self.library = DraftLibrary(self.mode, config.draft_memory_tokens)
        ranks = dist.get_process_group_ranks(group)
        timeout = timedelta(seconds=timeout_s)
        self._group = dist.new_group(ranks, timeout, "gloo") if self.mode != "ngram" else None
        self._world = len(ranks)
        self._index = DraftIndex(1 << (config.draft_memory_tokens.bit_length() - 1 or 1), drafter.slots)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="moebius-drafts")
        self._build: Future[dict[str, int]] | None = None
        self.choice = ModeChoice(drafter.width)
        self.problem: str | None = None  # why there are no drafts any more; on all ranks
        self._at: float | None = None  # when the last iteration in TP was over, by rank 0's clock
        self.costs: CostModel | None = None
        self.cost: Cost | None = None
        self.speed = 1.0  # by measured costs, of the tail against one without drafts, the last steps' above all
        self.is_paused = False  # while costs are measured
        _compile(drafter.slots, drafter.width)

    @property
    def ready(self) -> int:
        """What the others are told: 1 if what was begun can be taken into use on this rank, _FAILED if it failed."""
        if self._build is None or not self._build.done():
            return 0
        return 1 if self._build.exception() is None else _FAILED

    def told(self, ready: int) -> None:
        """The sum of all ranks' `ready`: all begin to draft between the same two iterations, or none will."""
        if failed := ready // _FAILED:
            self._give_up(failed)
        elif ready == self._world:
            self.adopt()

    def _give_up(self, ranks: int) -> None:
        """For good: ranks may have parted in the collective, and would take one tail's texts for those of another."""
        error = self._build.exception() if self._build is not None and self._build.done() else None
        mine = f", here {type(error).__name__}: {error}" if error is not None else ""
        _log.error(
            "drafts are off until the group is restarted: texts could not be put together on %d rank(s)%s",
            ranks, mine, exc_info=error,
        )  # fmt: skip
        self.problem = (
            f"drafts are off until the group is restarted: texts could not be put together on {ranks} rank(s); the log "
            "of such a rank says why"
        )
        self._build = None

    def begin(self, live: Live) -> None:
        """TP begins with these requests, the same on all ranks in the same order; texts are put together meanwhile."""
        self.end()
        self.choice.begin()
        self.drafter.modes.begin({name: len(tokens) - prompt for name, prompt, tokens in live})
        if self.is_paused or self.problem is not None:
            return
        scopes = [scope_of(self.mode, tokens[:prompt], name) for name, prompt, tokens in live]
        wanted = {0} if self.mode == "suffix" else set(scopes)
        texts = self.library.of(wanted, len(self._index.text) // (2 * self._world))
        rows = [(name, scope, tokens) for (name, _, tokens), scope in zip(live, scopes, strict=True)]
        self._build = self._thread.submit(self._make, texts, rows)

    def begin_with(self, batches: Sequence[RequestBatch]) -> None:
        """`begin` with the requests of a switch."""
        self.begin([row for batch in batches for row in _rows(batch)])

    def begin_in(self, runtime: Runtime) -> None:
        """`begin` with the requests that the TP scheduler has."""
        requests = runtime.scheduler.requests.values()
        self.begin(
            [(r.request_id, r.num_prompt_tokens, np.asarray(r._all_token_ids, dtype=np.int32)) for r in requests]
        )

    def adopt(self) -> None:
        """Draft from what was put together; on all ranks between the same two iterations."""
        if self._build is not None:
            self.drafter.begin(self._index, self._build.result())
            self._build = None

    def end(self) -> None:
        """No drafts until the next `begin`. Nothing may be in flight in TP."""
        self._build = None
        self.drafter.end()
        self.drafter.modes.end()
        self.choice.drafting = False
        self._at = None

    # ---- ahead or drafting -----------------------------------------------------------------------------------------

    def wants_change(self, running: Sequence[Any]) -> bool:
        """Whether to change the mode before the next iteration; `running` are the TP scheduler's requests.

        On all ranks at the same points of a step, once per iteration.
        """
        choice = self.choice
        choice.passed()
        if not running:
            return False
        fits = self.drafter.index is not None and len(running) <= self.drafter.max_samples
        if fits and choice.is_due:
            choice.probed(*self.drafter.probe(running))
        return choice.change(fits)

    def change(self) -> None:
        """Change the mode; when nothing is in flight."""
        self.choice.changed()
        if self.choice.drafting:
            self.drafter.modes.draft()
        else:
            self.drafter.modes.ahead()
        self._at = None

    def timed(self, seconds: float, tokens: int, done: DraftPass | None, running: Sequence[Any], whole: bool) -> None:
        """An iteration in TP was over at `seconds` by rank 0's clock and gave so many tokens over all ranks.

        `done`: what it was if it drafted. `whole`: it decoded only, and nothing but iterations has happened since the
        last one. `running`: the requests of the next. All of it is the same on all ranks.
        """
        before, self._at = self._at, seconds
        tally = self.drafter.tally
        if done is None and not self.choice.drafting:
            tally.iterations += 1
            tally.ahead += 1
            tally.tokens += tokens
            tally.rows += tokens
        cost, rows = self.drafter.cost or self.cost, tokens if done is None else done.rows
        if before is None or not whole or not rows or cost is None:
            return
        ms = 1e3 * (seconds - before)
        if done is None:
            tally.plain_ms += ms
            tally.spent_ms += ms
            if tally.ahead % _TIME_EVERY == 0 and running:
                context = sum(request.num_tokens for request in running) / len(running)
                self.choice.timed_ahead(ms, float(cost(rows, context, _one(rows))[0]))
            return
        without, spent = (
            float(cost(rows, done.context, _one(n))[0]) for n in (rows, self.drafter.padded(rows + done.drafted))
        )
        self.choice.timed_drafting(ms, without, spent, rows, tokens)
        if (scale := self.choice.scale) is not None:
            tally.plain_ms += scale * without * tokens / rows
            tally.spent_ms += ms

    # ---- texts -----------------------------------------------------------------------------------------------------

    def note(self, request_id: str, prompt: Sequence[int], result: SampleResult) -> None:
        """A sample of this rank has ended: keep its text, and tell it what came of its drafts."""
        if not self.is_paused:
            self.library.add(prompt, result.token_ids)
        if (mine := self.drafter.tally.by_request.get(request_id)) is not None:
            result.drafted, result.accepted = mine.drafted, mine.accepted

    def know(self, costs: CostModel | None, pair: RuntimePair, *, adaptive: bool) -> None:
        """What iterations cost; the same on all ranks."""
        self.costs = costs
        self.cost = tail_cost(pair, costs)
        self.drafter.cost = self.cost if adaptive else None
        self.choice.force = None if adaptive else True

    def stats(self) -> DraftStats:
        """What came of the step's drafts; the next step begins anew."""
        t, lengths = self.drafter.take_tally(), self.drafter.modes.take_lengths()
        if self.costs is not None and t.spent_ms:
            self.speed += _NEWEST * (t.plain_ms / t.spent_ms - self.speed)
        plain = None
        if self.cost is not None and (scale := self.choice.scale) is not None:
            plain = scale * plain_seconds(self.cost, lengths)
        return DraftStats(
            self.mode, t.verified, t.accepted, t.drafted, t.iterations, t.with_drafts, t.tokens, t.rows, plain,
            t.ahead, self.choice.changes, self.problem,
        )  # fmt: skip

    def close(self) -> None:
        """Wait for the thread, unless it may be stuck; before the process groups are gone."""
        self._thread.shutdown(wait=self.problem is None)

    def _make(self, texts: list[Text], rows: list[tuple[str, int, Tokens]]) -> dict[str, int]:
        """In the thread. One build at a time, in the same order on all ranks: it has a collective."""
        index = self._index
        index.forget()
        for scope, tokens in texts if self._group is None else share(texts, self._group):
            index.add(scope, tokens)
        slots: dict[str, int] = {}
        for slot, (name, scope, tokens) in enumerate(rows[: self.drafter.slots]):
            index.begin(slot, scope)
            _extend(index, slot, tokens)
            slots[name] = slot
        return slots


def plain_seconds(cost: Cost, tokens: Sequence[int], context: float = 0.0) -> float:
    """Seconds of a tail in TP without drafts, whose samples get so many tokens each, all beginning together.

    In its n-th iteration those run that get at least n tokens. KV is left out at context 0. `cost` in ms.
    """
    ends = np.sort(np.asarray([n for n in tokens if n > 0], dtype=np.int64))
    if not len(ends):
        return 0.0
    spans = np.diff(ends, prepend=0)  # iterations between two ends
    live = np.arange(len(ends), 0, -1, dtype=np.int64)
    ms = [float(cost(int(n), context, _one(int(n)))[0]) * span for n, span in zip(live, spans, strict=True) if span]
    return float(sum(ms)) / 1e3


def _one(tokens: int) -> npt.NDArray[np.int64]:
    return np.array([tokens], dtype=np.int64)


def _rows(batch: RequestBatch) -> Live:
    ends = np.cumsum(batch.lengths)
    return [
        (name, int(prompt), batch.tokens[end - length : end])
        for name, prompt, length, end in zip(
            batch.ids, batch.prompt_lengths, batch.lengths.tolist(), ends.tolist(), strict=True
        )
    ]


def _extend(index: DraftIndex, slot: int, tokens: Tokens) -> None:
    one: Any = np.zeros(1, dtype=np.int64)
    index.extend(one + slot, tokens[None], one, one + len(tokens))


def _compile(slots: int, width: int) -> None:
    """Compile now what would be compiled in the first iteration with drafts."""
    index = DraftIndex(16, slots)
    index.add(0, np.array([1, 2, 3], dtype=np.int32))
    index.begin(0, 0)
    _extend(index, 0, np.array([1, 2], dtype=np.int32))
    table = np.zeros((1, 4), dtype=np.int32)
    slot = np.zeros(1, dtype=np.int64)
    index.extend(slot, table, slot, slot + 4)
    index.append(slot, table[0, :1], slot + 1)
    index.drafts(slot, slot + 2, width)


def tail_cost(pair: RuntimePair, costs: CostModel | None) -> Cost:
    """What an iteration in TP takes that verifies drafts, from measured costs, else from bytes.

    A request's drafted tokens share its KV reads and cost otherwise what as many requests do.
    """
    if costs is None:
        return _by_bytes(pair)
    known = costs

    def ms(requests: int, context: float, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        kv = known.ms(Layout.TP, requests, context) - known.ms(Layout.TP, requests, 0.0)
        return known.ms(Layout.TP, tokens, 0.0) + kv

    return ms


def _by_bytes(pair: RuntimePair) -> Cost:
    runtime, shape = pair.tp, pair.shape
    experts = sum(w.numel() * w.element_size() for m in runtime.expert_modules for w in (m.w13_weight, m.w2_weight))
    everything = sum(p.numel() * p.element_size() for p in runtime.runner.model.parameters())
    kv = runtime.kv[0]
    per_token = len(runtime.kv) * kv.element_size() * kv[0].numel() / runtime.page_size
    chosen = getattr(runtime.core.vllm_config.model_config.hf_text_config, "num_experts_per_tok", None)
    fixed = _LAYER_BYTES * shape.num_layers
    few = min(chosen or 8, shape.num_experts)
    return roofline(everything - experts, shape.num_experts, few, experts, per_token, fixed)
