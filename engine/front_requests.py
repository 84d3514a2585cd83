"""The requests a rank answers for: which they are, and what is known of each beside what its core and vLLM know."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request

from moebius.engine.length_news import LengthNews
from moebius.engine.sampler import SEED_FIELD
from moebius.engine.steady import Audience
from moebius.engine.types import SampleKey, SamplePiece, SampleRequest, SampleResult

if TYPE_CHECKING:
    from moebius.engine.tail_drafts import TailDrafts

Runs = list[tuple[int, int]]  # policy versions, and how many tokens were sampled under each, in order
Layouts = list[tuple[str, int]]  # layouts, likewise


@dataclass(slots=True)
class ParkedSample:
    """A sample that a step left unfinished. vLLM's output processor keeps its text and logprobs meanwhile."""

    asked: SampleRequest
    request: Request  # vLLM's, with all tokens so far
    runs: Runs
    layouts: Layouts
    holds_pages: bool = False  # in the EP pool
    values: list[float] | None = None  # logprobs of the tokens so far, of a quiet request that asked for them


class FrontRequests:
    """The part of a `RequestFront` that knows its requests, from their admission to their results.

    `front` is vLLM's LLMEngine, used for input and output processing only.
    """

    def __init__(self, front: Any, rank: int, policy_version: int, drafts: TailDrafts | None = None) -> None:
        self.rank, self.policy_version, self._drafts = rank, policy_version, drafts
        self.results: list[SampleResult] = []
        self.pieces: list[SamplePiece] = []  # of streamed samples
        self._sent: dict[str, tuple[int, int]] = {}  # tokens and characters that were streamed
        self.layout = "EP"  # that tokens are drawn in; `leave_layout` is called before it changes
        self.finished = 0  # results so far, also those that were taken
        self.iteration = 0  # of the step, the one that is going on
        self.is_running = False  # what is registered from now on joins a running step
        self.news: LengthNews | None = None  # where lengths are told to the other ranks
        self._started = time.perf_counter()
        self._arrived: dict[str, float] = {}  # seconds since the step began, of those that joined it
        self._first: dict[str, float] = {}  # and when the first token came; 0.0: in an earlier step
        self._front = front
        # Unfinished ones, by internal request id: a key may be there twice, once asked for here and once from a peer.
        self._keys: dict[str, SampleKey] = {}
        self._asked: dict[str, SampleRequest] = {}
        self._runs: dict[str, Runs] = {}  # only of those that were parked before
        self._layouts: dict[str, Layouts] = {}  # up to the last switch, only of those that had tokens then
        self._taken: set[SampleKey] = set()  # keys of prepared and of unfinished ones
        self.audience = Audience(self._keys)  # for the schedulers of both runtimes

    @property
    def unfinished(self) -> int:
        """How many requests have no result yet."""
        return len(self._keys)

    def prepare(self, request: SampleRequest) -> EngineCoreRequest:
        """Check a request and make it ready for a core. Raises ValueError or TypeError when vLLM refuses it."""
        if request.key in self._taken:
            raise ValueError("a sample with this key is unfinished already")
        self._check(request)
        prompt: Any = {"prompt_token_ids": list(request.prompt_token_ids)}
        processor = self._front.input_processor
        tasks = self._front.get_supported_tasks()
        try:
            params = SamplingParams(
                **request.sampling | {"detokenize": self._makes_text(request)},
                n=1,
                extra_args={SEED_FIELD: request.seed},
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            prepared: EngineCoreRequest = processor.process_inputs(
                request_name(request.key), prompt, params, supported_tasks=tasks
            )
        except AttributeError as error:  # of a value that is not of the kind vLLM takes for granted
            raise ValueError(f"sampling has a value of a wrong kind: {error}") from error
        processor.assign_request_id(prepared)
        self._taken.add(request.key)
        return prepared

    def _check(self, request: SampleRequest) -> None:
        """Refuse what vLLM takes and then fails on in the middle of a pass, which would end the step for all ranks."""
        vocab = self._front.model_config.get_vocab_size()
        if request.sampling.get("seed") is not None:
            raise ValueError("sampling has a seed: give it as the sample's own (SampleRequest.seed)")
        if request.sampling.get("structured_outputs") is not None:
            raise ValueError("structured_outputs are not supported: leave them out")
        if any(token < 0 for token in request.prompt_token_ids):
            raise ValueError("the prompt has negative token ids")
        unknown = [token for token in request.sampling.get("stop_token_ids") or () if not 0 <= token < vocab]
        if unknown:
            raise ValueError(f"stop_token_ids {unknown[:5]} are outside the vocabulary of {vocab} tokens")

    def register(self, request: SampleRequest, prepared: EngineCoreRequest) -> None:
        """Answer for a request that is about to be given to the core."""
        self._front.output_processor.add_request(prepared, None)
        self._keys[prepared.request_id] = request.key
        self._asked[prepared.request_id] = request
        self._may_be_quiet(prepared.request_id, request)
        if self.is_running:
            self._arrived[prepared.request_id] = time.perf_counter() - self._started
            if self.news is not None:
                self.news.came(request.key)

    def _may_be_quiet(self, request_id: str, asked: SampleRequest, values: list[float] | None = None) -> None:
        """Where nobody reads along and no text is made, there is nothing to do for a request until it ends.

        `values`: logprobs of the tokens it has already; whether a request is quiet does not change.
        """
        sampling = asked.sampling
        more = sampling.get("logprobs") or sampling.get("logprob_token_ids")  # than those of the sampled tokens
        if self._makes_text(asked) or asked.stream or more or sampling.get("prompt_logprobs") is not None:
            return
        self.audience.quiet.add(request_id)
        if sampling.get("logprobs") is not None:
            self.audience.logprobs[request_id] = values if values is not None else []

    def _makes_text(self, asked: SampleRequest) -> bool:
        return self._front.tokenizer is not None and asked.sampling.get("detokenize", True)

    def refuse(self, request: SampleRequest, reason: str) -> None:
        """Leave a result that says why there is none."""
        self._add(SampleResult(request.key, [], None, None, "error", reason, self.policy_version, self.rank))

    def forget_all(self) -> None:
        """Drop every request without a result; for those that no core has been given."""
        ids = list(self._keys)
        self._keys.clear()
        self._asked.clear()
        self._runs.clear()
        self._layouts.clear()
        self._taken.clear()
        for request_id in ids:
            self.audience.forget(request_id)
        self._front.output_processor.abort_requests(ids, internal=True)

    def reserve(self, keys: Iterable[SampleKey]) -> None:
        """These are of samples that will be resumed: no other request may use them."""
        self._taken.update(keys)

    def resume(self, samples: Iterable[ParkedSample]) -> None:
        """Answer for samples that an earlier step has parked."""
        for sample in samples:
            request_id = sample.request.request_id
            self._keys[request_id] = sample.asked.key
            self._asked[request_id] = sample.asked
            self._may_be_quiet(request_id, sample.asked, sample.values)
            if sample.runs:
                self._runs[request_id], self._layouts[request_id] = sample.runs, sample.layouts
                self._first[request_id] = 0.0
            self._taken.add(sample.asked.key)

    def _forget(self, request_id: str) -> SampleRequest:
        self._sent.pop(request_id, None)
        self.audience.forget(request_id)
        self._taken.discard(self._keys.pop(request_id))
        self._runs.pop(request_id, None)
        self._layouts.pop(request_id, None)
        self._arrived.pop(request_id, None)
        self._first.pop(request_id, None)
        return self._asked.pop(request_id)

    def _add(self, result: SampleResult) -> None:
        result.ended_s, result.ended_iteration = time.perf_counter() - self._started, self.iteration
        self.results.append(result)
        self.finished += 1

    def take_pieces(self) -> list[SamplePiece]:
        """Pieces since the last call."""
        taken, self.pieces = self.pieces, []
        return taken

    def take_results(self) -> list[SampleResult]:
        """Results since the last call."""
        taken, self.results = self.results, []
        return taken


def request_name(key: SampleKey) -> str:
    """What vLLM calls a sample's request, before it adds to that."""
    return f"{key.step}:{key.prompt}:{key.sample}"
