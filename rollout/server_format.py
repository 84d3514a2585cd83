"""Answers in the format of OpenAI's API, with vLLM's additions: whole, or as the pieces of a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from moebius.rollout.server_types import ChatBody, CompletionBody
from moebius.rollout.service_types import Delta
from moebius.rollout.types import Rollout

LOWEST = -9999.0  # stands for minus infinity, which JSON does not have; as in vLLM


@dataclass(slots=True)
class _Offsets:
    """How far one choice of a stream has come."""

    chars: int = 0
    begun: bool = False


@dataclass(slots=True)
class Formatter:
    """Writes the answers to one request. `tokenizer` is None for models without one."""

    body: CompletionBody | ChatBody
    request_id: str
    model: str
    tokenizer: Any
    prompts: Sequence[list[int]]
    created: int = field(default_factory=lambda: int(time.time()))
    _offsets: dict[int, _Offsets] = field(default_factory=dict)
    _tokens: int = 0

    @property
    def is_chat(self) -> bool:
        """Whether the body is that of a chat completion."""
        return isinstance(self.body, ChatBody)

    # ---- whole ----------------------------------------------------------------------------------------------------

    def answer(self, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        """The answer with all choices, prompt by prompt."""
        choices = []
        for p, rollout in enumerate(rollouts):
            for sample in rollout.samples:
                self._tokens += len(sample.token_ids)
                index = p * self.body.n + sample.sample_index
                logprobs = self._logprobs(sample.token_ids, sample.logprobs, sample.top_logprobs, 0)
                choice: dict[str, Any] = {"index": index}
                if self.is_chat:
                    choice["message"] = {"role": "assistant", "content": sample.text or ""}
                else:
                    choice["text"] = sample.text or ""
                choice |= {
                    "logprobs": logprobs,
                    "finish_reason": sample.finish_reason,
                    "stop_reason": sample.stop_reason,
                    "policy_version": sample.policy_version,
                    "versions": [list(run) for run in sample.versions],
                    "layouts": [list(run) for run in sample.layouts],
                }
                if self.body.return_token_ids:
                    choice["token_ids"] = sample.token_ids
                    if not self.is_chat:
                        choice["prompt_token_ids"] = self.prompts[p]
                choices.append(choice)
        head = self._head("chat.completion" if self.is_chat else "text_completion")
        if self.is_chat and self.body.return_token_ids:
            head["prompt_token_ids"] = self.prompts[0]
        return head | {"choices": choices, "usage": self.usage()}

    def usage(self) -> dict[str, int]:
        """Tokens of prompts, and of what has been written so far."""
        prompt = sum(len(ids) for ids in self.prompts)
        return {"prompt_tokens": prompt, "completion_tokens": self._tokens, "total_tokens": prompt + self._tokens}

    # ---- in pieces ------------------------------------------------------------------------------------------------

    def event(self, prompt: int, delta: Delta) -> str | None:
        """One event of a stream; None when there is nothing to tell."""
        index = prompt * self.body.n + delta.sample_index
        offsets = self._offsets.setdefault(index, _Offsets())
        self._tokens += len(delta.token_ids)
        text = delta.text or ""
        logprobs = self._logprobs(delta.token_ids, delta.logprobs, delta.top_logprobs, offsets.chars)
        if logprobs is not None:  # as in a whole answer: of the tokens, not of the text, which may be held back
            offsets.chars += sum(len(self._token(token)) for token in delta.token_ids)
        asked = self.body.return_token_ids or (logprobs is not None and delta.token_ids)
        if not (text or asked or delta.finish_reason) and offsets.begun:
            return None
        choice: dict[str, Any] = {"index": index}
        if self.is_chat:
            choice["delta"] = {"content": text} if offsets.begun else {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        choice |= {
            "logprobs": logprobs if delta.token_ids else None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if not offsets.begun:
                choice["prompt_token_ids"] = self.prompts[prompt]
        offsets.begun = True
        return self._chunk([choice])

    def last_event(self) -> str | None:
        """The event with the usage, where that was asked for."""
        options = self.body.stream_options
        return self._chunk([], usage=self.usage()) if options is not None and options.include_usage else None

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> str:
        head = self._head("chat.completion.chunk" if self.is_chat else "text_completion")
        return event(head | {"choices": choices} | more)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.request_id, "object": kind, "created": self.created, "model": self.model}

    # ---- tokens and logprobs --------------------------------------------------------------------------------------

    def _logprobs(
        self,
        token_ids: list[int],
        logprobs: list[float] | None,
        top_logprobs: list[dict[int, float]] | None,
        offset: int,
    ) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        tops = top_logprobs or [{token: logprob} for token, logprob in zip(token_ids, logprobs, strict=True)]
        return (
            self._chat_logprobs(token_ids, logprobs, tops)
            if self.is_chat
            else (self._plain_logprobs(token_ids, logprobs, tops, offset))
        )

    def _plain_logprobs(
        self, token_ids: list[int], logprobs: list[float], tops: list[dict[int, float]], offset: int
    ) -> dict[str, Any]:
        tokens = [self._token(token) for token in token_ids]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [max(logprob, LOWEST) for logprob in logprobs],
            "top_logprobs": [self._by_text(top) for top in tops],
            "text_offset": offsets,
        }

    def _by_text(self, top: dict[int, float]) -> dict[str, float]:
        """Several tokens may have one text: the likeliest counts."""
        found: dict[str, float] = {}
        for token, logprob in top.items():
            text = self._token(token)
            found[text] = max(found.get(text, LOWEST), logprob)
        return found

    def _chat_logprobs(
        self, token_ids: list[int], logprobs: list[float], tops: list[dict[int, float]]
    ) -> dict[str, Any]:
        assert isinstance(self.body, ChatBody)
        most = self.body.top_logprobs or 0
        content = []
        for token, logprob, top in zip(token_ids, logprobs, tops, strict=True):
            likeliest = sorted(top.items(), key=lambda item: -item[1])[:most]
            entry = self._entry(token, logprob)
            content.append(entry | {"top_logprobs": [self._entry(t, lp) for t, lp in likeliest]})
        return {"content": content}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._token(token)
        return {"token": text, "logprob": max(logprob, LOWEST), "bytes": list(text.encode("utf-8", "replace"))}

    def _token(self, token: int) -> str:
        if self.tokenizer is None or self.body.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return str(self.tokenizer.decode([token]))


def event(data: dict[str, Any] | str) -> str:
    """A server-sent event."""
    return f"data: {data if isinstance(data, str) else json.dumps(data, ensure_ascii=True)}\n\n"
