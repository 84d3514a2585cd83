"""This rank's front: the requests it answers for, from admission to result, and their move to another rank's front.

A core knows tokens; a front knows whose they are, their text, their stop strings and their logprobs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import RequestState
from vllm.v1.request import Request

from moebius.engine.inbox import AbortBox
from moebius.engine.length_news import LengthNews
from moebius.engine.outputs import single_tokens
from moebius.engine.runs import extended
from moebius.engine.sampler import SEED_FIELD
from moebius.engine.steady import Audience
from moebius.engine.types import SampleKey, SamplePiece, SampleRequest, SampleResult

if TYPE_CHECKING:
    from moebius.engine.tail_drafts import TailDrafts

Runs = list[tuple[int, int]]  # policy versions, and how many tokens were sampled under each, in order
Layouts = list[tuple[str, int]]  # layouts, likewise


@dataclass(slots=True)
class FrontRecord:
    """What a front knows of a request and a core does not; plain data that can be sent."""

    request_id: str
    asked: SampleRequest
    logprobs: Any  # vLLM's, of the tokens so far; None when not asked for
    cumulative_logprob: float | None
    runs: Runs  # of tokens sampled in earlier steps
    layouts: Layouts  # of all tokens
    arrived_s: float = 0.0
    first_s: float | None = None  # None: it has no token yet
    routes: list[Any] = field(default_factory=list)  # vLLM's arrays of the experts that tokens went to
    values: list[float] | None = None  # logprobs of the tokens so far, of a quiet request that asked for them


@dataclass(slots=True)
class ParkedSample:
    """A sample that a step left unfinished. vLLM's output processor keeps its text and logprobs meanwhile."""

    asked: SampleRequest
    request: Request  # vLLM's, with all tokens so far
    runs: Runs
    layouts: Layouts
    holds_pages: bool = False  # in the EP pool
    values: list[float] | None = None  # logprobs of the tokens so far, of a quiet request that asked for them


class RequestFront:
    """The requests this rank answers for. `front` is vLLM's LLMEngine, used for input and output processing only."""

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
                _name(request.key), prompt, params, supported_tasks=tasks
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

    def _catch_up(self, request_id: str, coming: int = 0) -> None:
        """Show vLLM's output processor the tokens it was not shown, but for the last `coming`."""
        request = self.audience.behind.pop(request_id, None)
        if request is None:
            return
        detokenizer: Any = self._front.output_processor.request_states[request_id].detokenizer
        tokens = request._output_token_ids
        detokenizer.update(tokens[detokenizer.num_output_tokens() : len(tokens) - coming], False)

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

    def deliver(self, outputs: Any) -> tuple[int, list[str]]:
        """Process a core's outputs; returns tokens of own requests, and own requests that met a stop string.

        The latter must be taken off the core: only this front can see stop strings.
        """
        own = [output for output in outputs.outputs if output.request_id in self._keys]
        tokens = sum(len(output.new_token_ids) for output in own) + self.audience.take_tokens()
        for output in own:
            if output.request_id in self.audience.behind:
                self._catch_up(output.request_id, len(output.new_token_ids))
            if output.new_logprobs is not None and output.request_id in self.audience.logprobs:
                values = output.new_logprobs.logprobs[: len(output.new_token_ids), 0].tolist()
                self.audience.logprobs[output.request_id] += values
                output.new_logprobs = None
        told: dict[str, int] = {}  # tokens that are known of requests whose new ones are looked at one by one
        if self._drafts is not None:
            own = [part for output in own for part in self._one_by_one(output, told)]
        now = time.perf_counter() - self._started
        if len(self._first) < len(self._keys):  # else nobody waits for a first token
            for output in own:
                if output.request_id not in self._first and output.new_token_ids:
                    self._first[output.request_id] = now
        processed = self._front.output_processor.process_outputs(own, engine_core_timestamp=outputs.timestamp)
        finished = set(processed.reqs_to_abort) | {o.request_id for o in own if o.finish_reason is not None}
        # Not told apart by their names, which are made of keys; vLLM keeps the order.
        ended = dict.fromkeys(output.request_id for output in own if output.request_id in finished)
        for request_id, result in zip(ended, processed.request_outputs, strict=True):
            if request_id in told:
                tokens -= told[request_id] - len(result.outputs[0].token_ids)  # what came behind a stop string
            self._end(request_id, result)
        for request_id in dict.fromkeys(output.request_id for output in own if output.request_id in self._keys):
            if self._asked[request_id].stream:
                self._stream(request_id)
        return tokens, list(processed.reqs_to_abort)

    def _one_by_one(self, output: EngineCoreOutput, told: dict[str, int]) -> list[EngineCoreOutput]:
        """An output of several tokens as one of each, where stop strings are looked for.

        vLLM looks for them once per output and keeps the tokens behind one. After the part that has the stop string it
        ignores the others.
        """
        if len(output.new_token_ids) < 2 or not self._asked[output.request_id].sampling.get("stop"):
            return [output]
        state = self._front.output_processor.request_states[output.request_id]
        told[output.request_id] = state.detokenizer.num_output_tokens() + len(output.new_token_ids)
        return single_tokens(output)

    def _stream(self, request_id: str) -> None:
        """Put aside what is new of a streamed sample."""
        asked, state = self._asked[request_id], self._front.output_processor.request_states[request_id]
        tokens, chars = self._sent.get(request_id, (0, 0))
        token_ids = list(state.detokenizer.output_token_ids[tokens:])
        if not token_ids:
            return
        entries = state.logprobs_processor.logprobs
        logprobs, tops = _logprobs(asked, token_ids, None if entries is None else entries[tokens:])
        text = None
        if self._makes_text(asked):
            # As vLLM's own streams: what may be the beginning of a stop string stays behind.
            detokenizer = state.detokenizer
            whole = detokenizer.output_text
            held = detokenizer.stop_buffer_length if detokenizer.stop else 0
            text = whole[chars : max(chars, len(whole) - held)]
        self.pieces.append(SamplePiece(asked.key, tokens, token_ids, logprobs, tops, chars, text))
        self._sent[request_id] = (tokens + len(token_ids), chars + len(text or ""))

    def abort(self, aborts: AbortBox) -> list[str]:
        """Finish what was asked for, with the tokens it has; returns the requests to take off the core."""
        ids = aborts.among(self._keys)
        if ids:
            self._abort(ids)
        return ids

    def _abort(self, ids: list[str]) -> None:
        for request_id in ids:
            self._catch_up(request_id)
            state = self._front.output_processor.request_states[request_id]
            self._end(request_id, state.make_request_output([], None, FinishReason.ABORT, None))
        self._front.output_processor.abort_requests(ids, internal=True)

    # ---- from one step to the next ----------------------------------------------------------------------------------

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

    def park(self, requests: Mapping[str, Request]) -> list[ParkedSample]:
        """Give up everything unfinished, for `resume` in a later step; `requests` are the core's, with all tokens."""
        ids = list(self._keys)
        parked = []
        for request_id in ids:
            self._catch_up(request_id)
            runs, layouts = self._runs_of(request_id, requests[request_id].num_output_tokens)
            values = self.audience.logprobs.get(request_id)
            parked.append(ParkedSample(self._forget(request_id), requests[request_id], runs, layouts, values=values))
        return parked

    def end_parked(self, samples: Iterable[ParkedSample]) -> list[SampleResult]:
        """Results of parked samples that will not go on, with the tokens they have; no core has them."""
        self.resume(samples)
        ids = list(self._keys)
        self._abort(ids)
        return self.take_results()

    def _runs_of(self, request_id: str, tokens: int) -> tuple[Runs, Layouts]:
        """The first `tokens` tokens of a request by policy version, and by layout; new ones are of the present ones."""
        return (
            extended(self._runs.get(request_id, ()), self.policy_version, tokens),
            extended(self._layouts.get(request_id, ()), self.layout, tokens),
        )

    def leave_layout(self, requests: Mapping[str, Request]) -> None:
        """What follows may be drawn in the other layout; `requests` are the core's, with nothing in flight.

        Where the layout stays after all, nothing has changed.
        """
        for request_id in self._keys:
            if tokens := requests[request_id].num_output_tokens:
                layouts = self._layouts.get(request_id, ())
                self._layouts[request_id] = extended(layouts, self.layout, tokens)

    # ---- to another rank's front ------------------------------------------------------------------------------------

    def release(self, request_ids: Iterable[str]) -> list[FrontRecord]:
        """Give up those of these requests that are here, and return what their next front must know."""
        processor = self._front.output_processor
        records = []
        for request_id in request_ids:
            if request_id not in self._keys:
                continue
            state = processor.request_states[request_id]
            logprobs = state.logprobs_processor
            runs, layouts = self._runs.get(request_id, []), self._layouts.get(request_id, [])
            arrived = self._arrived.get(request_id, 0.0)
            first, values = self._first.get(request_id), self.audience.logprobs.get(request_id)
            asked = self._forget(request_id)
            told = (logprobs.logprobs, logprobs.cumulative_logprob, runs, layouts)
            record = FrontRecord(request_id, asked, *told, arrived, first, state.routed_experts_chunks, values)
            records.append(record)
        processor.abort_requests([record.request_id for record in records], internal=True)
        return records

    def adopt(self, records: Iterable[FrontRecord], requests: Mapping[str, Request]) -> None:
        """Answer for the requests of `records` from now on; `requests` are the core's, with all their tokens."""
        processor = self._front.output_processor
        for record in records:
            request, key = requests[record.request_id], record.asked.key
            core_request = EngineCoreRequest(
                request_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                mm_features=None,
                sampling_params=request.sampling_params,
                pooling_params=None,
                arrival_time=request.arrival_time,
                lora_request=None,
                cache_salt=request.cache_salt,
                data_parallel_rank=None,
                external_req_id=_name(key),
            )
            processor.add_request(core_request, None)
            self._replay(processor.request_states[request.request_id], record, request)
            self._keys[request.request_id] = key
            self._asked[request.request_id] = record.asked
            self._may_be_quiet(request.request_id, record.asked, record.values)
            self._arrived[request.request_id] = record.arrived_s
            if record.first_s is not None:
                self._first[request.request_id] = record.first_s
            if record.runs:
                self._runs[request.request_id] = record.runs
            if record.layouts:
                self._layouts[request.request_id] = record.layouts
            self._taken.add(key)

    def _replay(self, state: RequestState, record: FrontRecord, request: Request) -> None:
        """Bring a new front state to where the old one was."""
        detokenizer: Any = state.detokenizer
        state.is_prefilling = not request.num_output_tokens
        if request.num_output_tokens:
            # Its stop strings have been looked for in these tokens; what follows is looked at from the next one on.
            stop = getattr(detokenizer, "stop", None)
            if stop:
                detokenizer.stop = []
            detokenizer.update(list(request._output_token_ids), False)
            if stop:
                detokenizer.stop = stop
        assert state.logprobs_processor is not None
        state.logprobs_processor.logprobs = record.logprobs
        state.logprobs_processor.cumulative_logprob = record.cumulative_logprob
        state.routed_experts_chunks = record.routes

    def _end(self, request_id: str, output: Any) -> None:
        told = self._runs_of(request_id, len(output.outputs[0].token_ids))
        arrived, first = self._arrived.get(request_id, 0.0), self._first.get(request_id, 0.0)
        values = self.audience.logprobs.get(request_id)
        asked = self._forget(request_id)
        result = self._result(asked, output, *told, values)
        result.arrived_s, result.first_s = arrived, first
        if self._drafts is not None:
            self._drafts.note(request_id, asked.prompt_token_ids, result)
        if self.news is not None:
            self.news.ended(result.key, len(result.token_ids), cut=result.finish_reason == "abort")
        self._add(result)

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

    def _result(
        self, asked: SampleRequest, output: Any, runs: Runs, layouts: Layouts, values: list[float] | None
    ) -> SampleResult:
        completion = output.outputs[0]
        token_ids = list(completion.token_ids)
        logprobs, tops = (values, None) if values is not None else _logprobs(asked, token_ids, completion.logprobs)
        if logprobs is not None and len(logprobs) != len(token_ids):
            raise RuntimeError(f"{asked.key}: {len(logprobs)} logprobs of {len(token_ids)} tokens")
        return SampleResult(
            key=asked.key,
            token_ids=token_ids,
            logprobs=logprobs,
            text=completion.text if self._makes_text(asked) else None,
            finish_reason=str(completion.finish_reason),
            stop_reason=completion.stop_reason,
            policy_version=runs[-1][0] if runs else self.policy_version,
            rank=self.rank,
            top_logprobs=tops,
            versions=runs,
            layouts=layouts,
            routed_experts=completion.routed_experts,
        )


def _logprobs(
    asked: SampleRequest, token_ids: list[int], entries: Any
) -> tuple[list[float] | None, list[dict[int, float]] | None]:
    """Of the sampled tokens, and of the likeliest where they were asked for; `entries` are vLLM's, None for none."""
    if entries is None:
        return None, None
    logprobs = [entry[token].logprob for token, entry in zip(token_ids, entries, strict=True)]
    if not asked.sampling.get("logprobs"):
        return logprobs, None
    return logprobs, [{token: found.logprob for token, found in entry.items()} for entry in entries]


def _name(key: SampleKey) -> str:
    return f"{key.step}:{key.prompt}:{key.sample}"
