"""Drafts in the TP runtime: vLLM's proposer for it, and how long a draft is. docs/tail-speculation.md says it in words.

All TP ranks must draft alike, or their schedulers part. They do, because a draft is a function of what is equal on all
of them: the tokens of all requests, the texts that `TailDrafts` has gathered, and costs that every rank has; the one
thing that differs, when the index is ready, is agreed on in the step's exchange.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.config import VllmConfig
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.sample.logits_processor import build_logitsprocs

from moebius.engine import sampler
from moebius.engine.config import TailConfig
from moebius.engine.draft_index import DraftIndex, Drafts
from moebius.engine.draft_lengths import Acceptance, Cost, best_lengths
from moebius.engine.draft_library import scope_of
from moebius.engine.verify import KeyedVerifier, check_processors

DRAFTER = f"{__name__}.TailDrafter"


@dataclass(slots=True)
class RequestDrafts:
    """One request's part of a tail."""

    tokens: int = 0  # sampled in TP
    drafted: int = 0  # of which so many were verified
    accepted: int = 0


@dataclass(slots=True)
class Tally:
    """What came of the drafts of a step; the same on all ranks."""

    verified: list[int]  # by position in a draft: how often a token was verified there behind accepted ones
    accepted: list[int]  # and was right
    drafted: int = 0  # verified tokens in all, also those behind a wrong one
    iterations: int = 0  # in TP
    with_drafts: int = 0  # of them with at least one draft
    tokens: int = 0
    rows: int = 0  # requests that got tokens, summed over the iterations
    spent_ms: float = 0.0  # by the costs, in iterations whose drafts' lengths were chosen
    plain_ms: float = 0.0  # what the same tokens would have taken without drafts
    by_request: dict[str, RequestDrafts] = field(default_factory=dict)


class TailDrafter:
    """What vLLM calls a custom proposer. Made by the TP runtime's model runner, and then attached to it."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        speculation: Any = vllm_config.speculative_config
        self.width = int(speculation.num_speculative_tokens)
        self.max_model_len = int(vllm_config.model_config.max_model_len)
        scheduling: Any = vllm_config.scheduler_config
        self._budget = int(scheduling.max_num_scheduled_tokens or scheduling.max_num_batched_tokens)
        self.slots = int(scheduling.max_num_seqs)
        self.cost: Cost | None = None  # None: every token that is drafted is verified
        self.index: DraftIndex | None = None  # None: there are no drafts (yet)
        self.tally = Tally([0] * self.width, [0] * self.width)
        self._slot_of: dict[str, int] = {}
        self._free = list(range(self.slots))
        self._ends = np.zeros(self.slots, dtype=np.int64)  # by slot: tokens at which the request ends at the latest
        self._chance = np.zeros((self.slots, self.width))  # by slot: of its last draft
        self._seen = Acceptance(self.slots)
        self._planned: tuple[float, float] | None = None  # of the pass to come, by costs: ms without and with drafts

    def load_model(self, *_: Any, **__: Any) -> None:
        """Part of vLLM's interface; there is no model."""

    def attach(self, runner: Any, scheduler: Any, config: TailConfig) -> None:
        """Make `runner` draft with this, and verify by what would have been sampled anyway."""
        self.runner, self.mode = runner, config.speculation
        _all_processors(runner)
        self._verifier = runner.rejection_sampler = KeyedVerifier(runner)
        # Near the model's longest text vLLM would replace the drafts of all requests by zeros; here each has its limit.
        runner.effective_drafter_max_model_len = self.max_model_len + self.width + 1
        # vLLM fills up the first pass of a request that joins others with tokens of no meaning, so that all have one
        # length, and would let it wait where they have no room; told of a schedule of lengths it does not.
        scheduler.dynamic_sd_lookup = [self.width] * (self.slots + 1)

    # ---- one tail --------------------------------------------------------------------------------------------------

    def begin(self, index: DraftIndex, slot_of: dict[str, int]) -> None:
        """Draft from `index`, where these requests have their slots."""
        self.index, self._slot_of = index, dict(slot_of)
        taken = set(slot_of.values())
        self._free = [slot for slot in range(self.slots) if slot not in taken]
        self._ends[:] = 0
        for slot in range(self.slots):
            self._seen.begin(slot)

    def end(self) -> None:
        """No drafts from now on."""
        self.index = self._planned = None
        self._slot_of = {}

    def take_tally(self) -> Tally:
        """What came of the drafts since the last call."""
        taken, self.tally = self.tally, Tally([0] * self.width, [0] * self.width)
        return taken

    # ---- one iteration ---------------------------------------------------------------------------------------------

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: npt.NDArray[np.int32],
        token_ids_cpu: npt.NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """A draft for every row of the batch, which has these tokens: table [rows, longest], of which so many count."""
        names = self.runner.input_batch.req_ids
        rows = len(sampled_token_ids)
        drafted = self._count(names, sampled_token_ids)
        if self.index is None or self._has_budgets():
            return [[] for _ in range(rows)]
        slots = self._slots(names[:rows])
        lengths = num_tokens_no_spec[:rows].astype(np.int64)
        if drafted is not None:
            accepted = np.array([max(0, len(tokens) - 1) for tokens in sampled_token_ids], dtype=np.int64)
        else:
            drafted = accepted = np.zeros(rows, dtype=np.int64)
        self._seen.judge(slots, self._chance[slots], drafted, np.minimum(accepted, drafted))
        self.index.extend(slots, token_ids_cpu, np.arange(rows), lengths)
        room = np.minimum(self._ends[slots] - lengths - 1, self.width)
        limits = np.where([bool(tokens) for tokens in sampled_token_ids], np.maximum(room, 0), 0)
        drafts = self.guess(slots, limits, lengths)
        verified = self._lengths(slots, drafts, float(lengths.mean()) if rows else 0.0)
        self._chance[slots] = drafts.chance
        return [drafts.tokens[row, :length].tolist() for row, length in enumerate(verified)]

    def guess(self, slots: npt.NDArray[np.int64], limits: npt.NDArray[np.int64], lengths: Any) -> Drafts:
        """Guesses for the requests in `slots`, which have `lengths` tokens, at most `limits` each."""
        assert self.index is not None
        return self.index.drafts(slots, limits, self.width)

    def _has_budgets(self) -> bool:
        """Whether a request of the batch has a thinking budget, whose state vLLM keeps by row and not by position."""
        holder = self.runner.input_batch.sampling_metadata.thinking_budget_state_holder
        return holder is not None and holder.has_tracked_requests()

    def _lengths(self, slots: npt.NDArray[np.int64], drafts: Drafts, context: float) -> npt.NDArray[np.int64]:
        rows = len(slots)
        most = int(min(max(0, self._budget - rows), drafts.counts.sum()))
        if self.cost is None:
            before = np.cumsum(drafts.counts) - drafts.counts
            return np.clip(most - before, 0, drafts.counts).astype(np.int64)
        ms = self.cost(rows, context, np.arange(rows, rows + most + 1, dtype=np.int64))
        chance = np.minimum(drafts.chance * self._seen.ratio(slots)[:, None], 1.0)
        lengths = best_lengths(chance, drafts.counts, ms)
        again = (lengths == 0) & (drafts.counts > 0) & self._seen.is_due(slots)
        left = most - int(lengths.sum())
        lengths[np.flatnonzero(again)[: max(0, left)]] = 1
        self._planned = (float(ms[0]), float(ms[lengths.sum()]))
        return lengths

    def _slots(self, names: list[str]) -> npt.NDArray[np.int64]:
        assert self.index is not None
        if len(self._slot_of) > len(names):
            for name in [name for name in self._slot_of if name not in self.runner.requests]:
                if self._ends[self._slot_of[name]]:  # else it is still on its way to the runner
                    self._free.append(self._slot_of.pop(name))
        found = np.empty(len(names), dtype=np.int64)
        for row, name in enumerate(names):
            slot = self._slot_of.get(name, -1)
            if slot < 0:
                slot = self._slot_of[name] = self._free.pop() if self._free else self._taken_back(names)
                prompt = self.runner.requests[name].prompt_token_ids
                self.index.begin(slot, scope_of(self.mode, prompt, name))
                self._seen.begin(slot)
                self._ends[slot] = 0
            if not self._ends[slot]:
                state = self.runner.requests[name]
                self._ends[slot] = min(self.max_model_len, state.num_prompt_tokens + state.sampling_params.max_tokens)
            found[row] = slot
        return found

    def _taken_back(self, names: list[str]) -> int:
        """The slot of a request that is not running; there is one, as no more run than there are slots."""
        running = set(names)
        return self._slot_of.pop(next(name for name in self._slot_of if name not in running))

    def _count(self, names: list[str], sampled: list[list[int]]) -> npt.NDArray[np.int64] | None:
        """Keep the tally; returns by row how many drafted tokens were verified, None if there were none."""
        drafted = self._verifier.take_drafted()
        tally = self.tally
        tally.iterations += 1
        tally.with_drafts += drafted is not None
        if self._planned is not None and (got := [len(tokens) for tokens in sampled if tokens]):
            (without, spent), self._planned = self._planned, None
            tally.plain_ms += without * sum(got) / len(got)
            tally.spent_ms += spent
        for row, tokens in enumerate(sampled):
            if not tokens:
                continue
            mine = tally.by_request.get(names[row])
            if mine is None:
                mine = tally.by_request[names[row]] = RequestDrafts()
            mine.tokens += len(tokens)
            tally.tokens += len(tokens)
            tally.rows += 1
            if drafted is not None and (count := drafted[row]):
                right = min(len(tokens) - 1, count)
                mine.drafted += count
                mine.accepted += right
                tally.drafted += count
                for position in range(min(right + 1, count)):
                    tally.verified[position] += 1
                    tally.accepted[position] += position < right
        return None if drafted is None else np.array(drafted, dtype=np.int64)


def install(runner: Any, scheduler: Any, config: TailConfig) -> TailDrafter | None:
    """Attach the drafter of a TP runtime that has one; after `sampler.install`."""
    drafter = getattr(runner, "drafter", None)
    if drafter is None:
        return None
    if not isinstance(drafter, TailDrafter) or not isinstance(runner.sampler.topk_topp_sampler, sampler.CounterSampler):
        raise RuntimeError(f"the runner drafts with {type(drafter).__name__}: it should have the tail's drafter")
    drafter.attach(runner, scheduler, config)
    return drafter


def _all_processors(runner: Any) -> None:
    """The logits processors that a runner without drafts has: with drafts vLLM leaves out min_p and logit_bias."""
    plain = copy.copy(runner.vllm_config)
    plain.speculative_config = None
    custom = runner.model_config.logits_processors or ()
    processors = build_logitsprocs(plain, runner.device, PIN_MEMORY, runner.is_pooling_model, custom)
    check_processors(processors)
    batch = runner.input_batch
    batch.logitsprocs = processors
    batch.sampling_metadata = batch._make_sampling_metadata()


def drop_drafts(scheduler: Any) -> None:
    """Forget drafts that have not been verified: a request that leaves takes none along."""
    for request in scheduler.requests.values():
        request.spec_token_ids = []
