"""Bodies that the HTTP front takes, in the format of OpenAI's API with vLLM's additions. Unknown fields are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MOST_CHOICES = 1024  # samples of one request
MOST_LOGPROBS = 20  # of the likeliest tokens, as vLLM's default
IGNORED = ("metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user")  # no effect on tokens

Tokens = list[Annotated[int, Field(ge=0)]]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, data: Any) -> Any:
        try:
            _refuse_surrogates(data)
        except RecursionError:
            raise ValueError("the body is nested too deeply") from None
        return {key: value for key, value in data.items() if key not in IGNORED} if isinstance(data, dict) else data


def _refuse_surrogates(value: Any) -> None:
    """Half of a surrogate pair is no character: no tokenizer takes it, and no answer could repeat it."""
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError("a text holds half of a surrogate pair, which is not a character") from error
    elif isinstance(value, list):
        for item in value:
            _refuse_surrogates(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            _refuse_surrogates(key)
            _refuse_surrogates(item)


class StreamOptions(_Body):
    """What a stream tells besides."""

    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False


class SamplingBody(_Body):
    """Fields that completions and chat completions share. None: as in the server's configuration."""

    model: str | None = None
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = Field(None, description="Also return token ids of prompt and output.")
    return_tokens_as_token_ids: bool | None = Field(None, description='Write tokens in logprobs as "token_id:ID".')
    request_id: str | None = Field(None, min_length=1, max_length=256, description="To abort the request by.")

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> SamplingBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only for requests with stream=true")
        return self

    def sampling(self, logprobs: int | None) -> dict[str, Any]:
        """Fields of Sampling that were given."""
        own = {
            "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
            "max_tokens", "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos",
            "logit_bias", "allowed_token_ids", "bad_words", "skip_special_tokens",
        }  # fmt: skip
        given = self.model_dump(include=own, exclude_none=True)
        if self.seed is not None:
            given["seed"] = self.seed % (1 << 63)
        return given | {"logprobs": logprobs}


class CompletionBody(SamplingBody):
    """Body of /v1/completions."""

    # Lists before texts: pydantic says of a wrong prompt what the last of these says.
    prompt: Tokens | list[Tokens] | list[str] | str = Field(description="One prompt or several, token ids or texts.")
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    best_of: int | None = None
    echo: Literal[False] | None = None
    suffix: None = None

    @model_validator(mode="after")
    def _best_of(self) -> CompletionBody:
        if self.best_of is not None and self.best_of != self.n:
            raise ValueError("best_of must equal n: samples are not ranked")
        if not self.prompt:
            raise ValueError("prompt is empty")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [list(self.prompt)]
        return list(self.prompt)


class TextPart(_Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A chat message; further fields go to the chat template as they are."""

    model_config = ConfigDict(extra="allow", frozen=True)

    role: str
    content: str | list[TextPart] | None = None

    def plain(self) -> dict[str, Any]:
        """For a chat template: text parts are joined."""
        fields = self.model_dump(exclude_none=True)
        if isinstance(self.content, list):
            fields["content"] = "".join(part.text for part in self.content)
        return fields | {"content": fields.get("content", "")}


class TextFormat(_Body):
    """The only format of answers."""

    type: Literal["text"]


class ChatBody(SamplingBody):
    """Body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    tools: list[dict[str, Any]] | None = Field(None, description="Rendered by the chat template; calls are not parsed.")
    tool_choice: Literal["none"] | None = None
    response_format: TextFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _agree(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message needs add_generation_prompt=false")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("give one of max_tokens and max_completion_tokens")
        return self
