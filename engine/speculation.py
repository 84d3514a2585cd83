"""Drafts in the TP runtime: vLLM's proposer for it, and how long a draft is. docs/tail-speculation.md says it in words.

All TP ranks must draft alike, or their schedulers part. They do, because a draft is a function of what is equal on all
of them: the tokens of all requests, the texts that `TailDrafts` has gathered, and costs that every rank has; the one
thing that differs, when the index is ready, is agreed on in the step's exchange.

vLLM calls the proposer only in iterations that draft (`tail_modes`). Between them the same guesses are made now and
then, and compared with what was sampled since.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
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
from moebius.engine.draft_lengths import Acceptance, Cost, best_gain, best_lengths
from moebius.engine.draft_library import scope_of
from moebius.engine.tail_modes import TailModes
from moebius.engine.verify import KeyedVerifier, check_processors, reserve_memory

DRAFTER = f"{__name__}.TailDrafter"
PROBED = 32  # requests of which guesses are judged at a time
_EARLIER = 3.0  # right tokens that what is known from earlier tails counts as at most: other prompts, other drafts


@dataclass(slots=True)
class RequestDrafts:
    """One request's part of a tail."""

    drafted: int = 0  # tokens that were verified
    accepted: int = 0  # and were right


@dataclass(frozen=True, slots=True)
class DraftPass:
    """An iteration that drafted."""

    rows: int  # requests that got tokens
    drafted: int  # tokens verified
    context: float  # mean tokens of the requests


@dataclass(slots=True)
class Tally:
    """What came of the drafts of a step; the same on all ranks."""

    verified: list[int]  # by position in a draft: how often a token was verified there behind accepted ones
    accepted: list[int]  # and was right
    drafted: int = 0  # verified tokens in all, also those behind a wrong one
    iterations: int = 0  # in TP
    ahead: int = 0  # of them ahead, none drafting
    with_drafts: int = 0  # of them with at least one draft
    tokens: int = 0
    rows: int = 0  # requests that got tokens, summed over the iterations
    spent_ms: float = 0.0  # by rank 0's clock, in iterations that were timed
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
        self.max_samples = self.slots  # no drafts in an iteration of more requests
        self.max_rows = self._budget  # tokens of an iteration with drafts
        self.sizes = np.arange(1, 1)  # token counts that iterations with drafts are padded to, ascending
        self.verify_bytes = 0  # device memory that verification needs besides the model
        self.cost: Cost | None = None  # None: every token that is drafted is verified
        self.index: DraftIndex | None = None  # None: there are no drafts (yet)
        self.tally = Tally([0] * self.width, [0] * self.width)
        self._slot_of: dict[str, int] = {}
        self._free = list(range(self.slots))
        self._ends = np.zeros(self.slots, dtype=np.int64)  # by slot: tokens at which the request ends at the latest
        self._chance = np.zeros((self.slots, self.width))  # by slot: of its last draft
        self._seen = Acceptance(self.slots)
        self._turn = 0  # whose guesses are judged next
        self._guessed: dict[str, tuple[int, npt.NDArray[np.int32], npt.NDArray[np.float64]]] = {}  # not verified
        self._context = 0.0
        self._pass: DraftPass | None = None  # the last one, for whoever takes it

    def load_model(self, *_: Any, **__: Any) -> None:
        """Part of vLLM's interface; there is no model."""

    def attach(self, core: Any, runner: Any, config: TailConfig, sizes: list[int], steady: Any) -> None:
        """Make `runner` draft with this, and verify by what would have been sampled anyway. `sizes`: of its graphs."""
        self.runner, self.mode = runner, config.speculation
        self.max_samples, self.max_rows = config.max_samples, min(sizes[-1], self._budget)
        if not runner.model_config.enforce_eager:
            self.sizes = np.array(sizes)
        _all_processors(runner)
        self._verifier = runner.rejection_sampler = KeyedVerifier(runner)
        runner._calc_spec_decode_metadata = self._verifier.metadata
        # Near the model's longest text vLLM would replace the drafts of all requests by zeros; here each has its limit.
        runner.effective_drafter_max_model_len = self.max_model_len + self.width + 1
        self.modes = TailModes(core, runner, self.width, steady)

    def reserve(self) -> None:
        """Take the memory that verification needs; when everything else has been built."""
        self.verify_bytes = reserve_memory(self.runner, self.max_rows)

    # ---- one tail --------------------------------------------------------------------------------------------------

    def begin(self, index: DraftIndex, slot_of: dict[str, int]) -> None:
        """Draft from `index`, where these requests have their slots."""
        self.index, self._slot_of = index, dict(slot_of)
        taken = set(slot_of.values())
        self._free = [slot for slot in range(self.slots) if slot not in taken]
        self._ends[:] = 0
        self._turn, self._guessed = 0, {}
        self._seen.fade(_EARLIER)
        for slot in range(self.slots):
            self._seen.begin(slot)

    def end(self) -> None:
        """No drafts from now on."""
        self.index = self._pass = None
        self._slot_of, self._guessed = {}, {}

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
        got = np.fromiter(map(len, sampled_token_ids), dtype=np.int64, count=rows)
        drafted = self._count(names, got)
        if self.index is None or rows > self.max_samples or self._has_budgets():
            return [[] for _ in range(rows)]
        slots = self._slots(names[:rows])
        lengths = num_tokens_no_spec[:rows].astype(np.int64)
        if drafted is None:
            self._seen.wait(slots)
        else:
            self._seen.judge(slots, self._chance[slots], drafted, np.minimum(np.maximum(got - 1, 0), drafted))
        self.index.extend(slots, token_ids_cpu, np.arange(rows), lengths)
        limits = np.where(got > 0, self._room(slots, lengths), 0)
        drafts = self.guess(slots, limits, lengths)
        self._context = float(lengths.mean()) if rows else 0.0
        verified = self._lengths(slots, drafts)
        self._chance[slots] = drafts.chance
        return [tokens[:length] for tokens, length in zip(drafts.tokens.tolist(), verified.tolist(), strict=True)]

    def take_pass(self) -> DraftPass | None:
        """The iteration that drafted last. Once."""
        taken, self._pass = self._pass, None
        return taken

    def probe(self, requests: Sequence[Any]) -> tuple[float, float]:
        """While nothing is drafted: judge the guesses made last by what was sampled since, and guess again.

        `requests` are vLLM's, those that are running, in the same order on all ranks. Returns the speed that drafting
        promises by the costs alone, 1 without drafts, and how many right tokens the guesses have promised so far.
        """
        if self.index is None or self.cost is None or not requests or self._has_budgets():
            return 1.0, 0.0
        count = len(requests)
        slots = self._slots([request.request_id for request in requests])
        lengths = np.array([len(request._all_token_ids) for request in requests], dtype=np.int64)
        self._judge(requests, slots)
        new = [request._all_token_ids[known:] for request, known in zip(requests, self.index.known[slots], strict=True)]
        ends = np.cumsum([len(tokens) for tokens in new])
        self.index.append(slots, np.fromiter((t for tokens in new for t in tokens), dtype=np.int32), ends)
        # Some of them in turn, which stand for all: the host's time is what this costs.
        rows = (self._turn + np.arange(min(count, PROBED))) % count
        self._turn = (self._turn + len(rows)) % self.slots
        drafts = self.guess(slots[rows], self._room(slots, lengths)[rows], lengths[rows])
        self._guessed = {
            requests[row].request_id: (int(lengths[row]), drafts.tokens[i, :drafted], drafts.chance[i])
            for i, (row, drafted) in enumerate(zip(rows.tolist(), drafts.counts.tolist(), strict=True))
            if drafted
        }
        chance = np.minimum(drafts.chance * self._seen.ratio(slots[rows])[:, None], 1.0)
        share = count / len(rows)
        most = min(int(self._most(count) / share), int(drafts.counts.sum()))
        return best_gain(chance, drafts.counts, self.ms(count, float(lengths.mean()), most, share)), self._seen.judged

    def _judge(self, requests: Sequence[Any], slots: npt.NDArray[np.int64]) -> None:
        rows = [row for row, request in enumerate(requests) if request.request_id in self._guessed]
        chance = np.zeros((len(rows), self.width))
        known, right = np.zeros(len(rows), dtype=np.int64), np.zeros(len(rows), dtype=np.int64)
        for i, row in enumerate(rows):
            length, tokens, chance[i] = self._guessed[requests[row].request_id]
            came = requests[row]._all_token_ids[length : length + len(tokens)]
            known[i] = len(came)
            right[i] = int((np.asarray(came, dtype=np.int32) == tokens[: len(came)]).cumprod().sum())
        self._seen.judge(slots[rows], chance, known, right)

    def _room(self, slots: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Tokens that each request may still get, besides the one that needs no draft."""
        return np.minimum(np.maximum(self._ends[slots] - lengths - 1, 0), self.width)

    def _most(self, rows: int) -> int:
        """Drafted tokens that an iteration of so many requests has room for."""
        return max(0, min(self._budget, self.max_rows) - rows)

    def padded(self, tokens: int) -> int:
        """The size of the graph that an iteration with drafts of so many tokens runs in."""
        at = int(np.searchsorted(self.sizes, tokens))
        return int(self.sizes[at]) if at < len(self.sizes) else tokens

    def ms(self, rows: int, context: float, most: int, share: float = 1.0) -> npt.NDArray[np.float64]:
        """By costs, what iterations of `rows` requests take that verify 0, 1, ... `most` (times `share`) drafts."""
        assert self.cost is not None
        tokens = rows + np.ceil(share * np.arange(most + 1)).astype(np.int64)
        if len(self.sizes):  # what pads an iteration to its graph might as well be drafts
            padded = self.sizes[np.minimum(np.searchsorted(self.sizes, tokens), len(self.sizes) - 1)]
            tokens[1:] = np.maximum(tokens, padded)[1:]
        return self.cost(rows, context, tokens)

    def guess(self, slots: npt.NDArray[np.int64], limits: npt.NDArray[np.int64], lengths: Any) -> Drafts:
        """Guesses for the requests in `slots`, which have `lengths` tokens, at most `limits` each."""
        assert self.index is not None
        return self.index.drafts(slots, limits, self.width)

    def _has_budgets(self) -> bool:
        """Whether a request of the batch has a thinking budget, whose state vLLM keeps by row and not by position."""
        holder = self.runner.input_batch.sampling_metadata.thinking_budget_state_holder
        return holder is not None and holder.has_tracked_requests()

    def _lengths(self, slots: npt.NDArray[np.int64], drafts: Drafts) -> npt.NDArray[np.int64]:
        rows = len(slots)
        most = min(self._most(rows), int(drafts.counts.sum()))
        if self.cost is None:
            before = np.cumsum(drafts.counts) - drafts.counts
            return np.clip(most - before, 0, drafts.counts).astype(np.int64)
        ms = self.ms(rows, self._context, most)
        chance = np.minimum(drafts.chance * self._seen.ratio(slots)[:, None], 1.0)
        lengths = best_lengths(chance, drafts.counts, ms)
        again = (lengths == 0) & (drafts.counts > 0) & self._seen.is_due(slots)
        left = most - int(lengths.sum())
        lengths[np.flatnonzero(again)[: max(0, left)]] = 1
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

    def _count(self, names: list[str], got: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
        """Keep the tally; rows got so many tokens. Returns by row how many drafted ones were verified, None if none."""
        drafted = self._verifier.take_drafted()
        tally = self.tally
        tally.iterations += 1
        tally.with_drafts += drafted is not None
        rows = int(np.count_nonzero(got))
        self._pass = DraftPass(rows, sum(drafted or ()), self._context)
        tally.rows += rows
        tally.tokens += int(got.sum())
        if drafted is None:
            return None
        verified = np.array(drafted, dtype=np.int64)
        counts = np.where(got > 0, verified, 0)
        right = np.minimum(np.maximum(got - 1, 0), counts)
        tally.drafted += int(counts.sum())
        # At position p there were as many as got beyond it: of the rows with 0, 1, ... tokens, those with more than p.
        for into, reached in ((tally.verified, np.minimum(right + 1, counts)), (tally.accepted, right)):
            beyond = np.bincount(reached, minlength=self.width + 1)[::-1].cumsum()[::-1][1:].tolist()
            into[:] = [known + new for known, new in zip(into, beyond, strict=True)]
        mine_of = tally.by_request
        for row, count, kept in zip(*(part.tolist() for part in (np.arange(len(got)), counts, right)), strict=True):
            if count:
                if (mine := mine_of.get(names[row])) is None:
                    mine = mine_of[names[row]] = RequestDrafts()
                mine.drafted += count
                mine.accepted += kept
        return verified


def install(core: Any, runner: Any, config: TailConfig, sizes: list[int], steady: Any) -> TailDrafter | None:
    """Attach the drafter of a TP runtime that has one; after `sampler.install`. `sizes`: of graphs with drafts.

    `steady` is the runtime's `SteadyScheduling`, or None.
    """
    drafter = getattr(runner, "drafter", None)
    if drafter is None:
        return None
    if not isinstance(drafter, TailDrafter) or not isinstance(runner.sampler.topk_topp_sampler, sampler.CounterSampler):
        raise RuntimeError(f"the runner drafts with {type(drafter).__name__}: it should have the tail's drafter")
    drafter.attach(core, runner, config, sizes, steady)
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
