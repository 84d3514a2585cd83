"""This rank's front: from what cores put out to results, and requests on their way to another step or rank.

A core knows tokens; a front knows whose they are, their text, their stop strings and their logprobs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import RequestState
from vllm.v1.request import Request

from moebius.engine.front_requests import FrontRequests, Layouts, ParkedSample, Runs, request_name
from moebius.engine.inbox import AbortBox
from moebius.engine.outputs import single_tokens
from moebius.engine.runs import extended
from moebius.engine.types import SamplePiece, SampleRequest, SampleResult


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


class RequestFront(FrontRequests):
    """The requests this rank answers for. `front` is vLLM's LLMEngine, used for input and output processing only."""

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

    def _catch_up(self, request_id: str, coming: int = 0) -> None:
        """Show vLLM's output processor the tokens it was not shown, but for the last `coming`."""
        request = self.audience.behind.pop(request_id, None)
        if request is None:
            return
        detokenizer: Any = self._front.output_processor.request_states[request_id].detokenizer
        tokens = request._output_token_ids
        detokenizer.update(tokens[detokenizer.num_output_tokens() : len(tokens) - coming], False)

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

    # ---- from one step to the next ----------------------------------------------------------------------------------

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
                external_req_id=request_name(key),
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
