"""What a trainer sends and receives: sampling settings, samples, rollouts, and traces of output lengths."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from moebius.rollout.errors import BadInput, validate

if TYPE_CHECKING:
    from moebius.rollout.report import StepReport


class Sampling(BaseModel):
    """How samples are drawn. Names and meanings are vLLM's; an unknown name is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    temperature: float = Field(1.0, ge=0.0, le=2.0, description="0 is greedy.")
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=-1, description="0 or -1: off.")
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(1.0, gt=0.0, description="Above 1 discourages repeated tokens.")
    max_tokens: int = Field(256, ge=1, description="Most output tokens per sample.")
    min_tokens: int = Field(0, ge=0, description="No end-of-sequence or stop token before this many output tokens.")
    stop: list[str] = Field(default_factory=list, description="Texts that end a sample.")
    stop_token_ids: list[int] = Field(default_factory=list, description="Token ids that end a sample.")
    include_stop_str_in_output: bool = False
    ignore_eos: bool = Field(False, description="Go on past end-of-sequence, up to max_tokens.")
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    logprobs: int | None = Field(
        0, ge=0, description="0: log-probability of each sampled token; k: also the k most likely; None: none."
    )
    detokenize: bool = Field(True, description="False: token ids only, no text; less work per token on the host.")
    skip_special_tokens: bool = True
    seed: int | None = Field(None, ge=0, lt=1 << 63, description="Base seed; each sample's own is derived from it.")

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_text(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("stop", "bad_words")
    @classmethod
    def _no_empty_text(cls, value: list[str] | None) -> list[str] | None:
        if value and not all(value):
            raise ValueError("must not contain an empty text")
        return value

    @field_validator("stop_token_ids", "allowed_token_ids")
    @classmethod
    def _ids_not_negative(cls, value: list[int] | None) -> list[int] | None:
        if value and min(value) < 0:
            raise ValueError("token ids must not be negative")
        return value

    @model_validator(mode="after")
    def _fields_agree(self) -> Sampling:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}; lower one of them")
        if self.stop and not self.detokenize:
            raise ValueError("stop texts are looked for in text: leave detokenize on, or use stop_token_ids")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids is empty, so no token could be sampled; leave it out to allow all")
        return self

    @classmethod
    def parse(cls, obj: Sampling | dict[str, Any] | None) -> Sampling:
        """A Sampling from a dict of its fields, or the object itself; None gives the defaults. Raises BadInput."""
        if isinstance(obj, cls):
            return obj
        if obj is not None and not isinstance(obj, dict):
            raise BadInput(f"sampling: expected a dict or Sampling, got {type(obj).__name__}")
        return validate(cls, obj or {}, "sampling")

    def engine_fields(self) -> dict[str, Any]:
        """Keyword arguments of vLLM's SamplingParams, without `n` and `seed`, which are set per sample."""
        fields = self.model_dump(exclude={"seed"})
        fields["top_k"] = max(0, self.top_k)
        return fields


@dataclass(slots=True)
class Sample:
    """One finished sample. `logprobs[i]` and `top_logprobs[i]` belong to `token_ids[i]`, natural logarithm."""

    sample_index: int
    token_ids: list[int]
    logprobs: list[float] | None
    top_logprobs: list[dict[int, float]] | None
    text: str | None
    finish_reason: str  # "stop" | "length" | "abort" | "failed" (its prompt brings ranks down; stop_reason says more)
    stop_reason: int | str | None  # the token id or text that ended it, None for end-of-sequence
    policy_version: int  # that its last token was sampled under
    rank: int  # the rank that answered for it in the end
    # Policy version and how many tokens were sampled under it, in the order of the tokens; more than one entry if the
    # weights were updated while the sample was parked.
    versions: list[tuple[int, int]] = field(default_factory=list)
    # numpy, [prompt and output tokens but the last, layers, experts per token]; only with engine.routed_experts.
    routed_experts: Any = None
    # Layout ("EP", "TP") and how many tokens were drawn in it, in the order of the tokens: one entry more per switch.
    layouts: list[tuple[str, int]] = field(default_factory=list)


@dataclass(slots=True)
class Rollout:
    """All samples of one prompt, ordered by `sample_index`."""

    prompt_index: int
    prompt_token_ids: list[int]
    samples: list[Sample]
    step: int = 0  # that the prompt was given to; it may have ended in a later one


@dataclass(slots=True)
class LengthTrace:
    """Output tokens of every (prompt, sample) of a step: captured in one run, replayed in another.

    Two runs that replay one trace decode the same number of tokens per sample, so their times can be compared.
    """

    lengths: dict[tuple[int, int], int] = field(default_factory=dict)

    @classmethod
    def from_report(cls, report: StepReport) -> LengthTrace:
        """The lengths of a step report. Aborted samples count with the tokens they had."""
        return cls({(s.prompt, s.sample): s.output_tokens for s in report.samples})

    def forced(self, sampling: Sampling, prompt: int, sample: int) -> Sampling:
        """`sampling` changed so that this sample gets exactly its traced length (at least 1 token).

        Raises BadInput when the trace has no such sample.
        """
        length = self.lengths.get((prompt, sample))
        if length is None:
            raise BadInput(
                f"the length trace has no prompt {prompt}, sample {sample} (it holds {len(self.lengths)} samples); "
                "replay it with the prompts and n it was captured with"
            )
        ends: dict[str, Any] = {"ignore_eos": True, "stop": [], "stop_token_ids": [], "min_tokens": 0}
        return sampling.model_copy(update=ends | {"max_tokens": max(1, length)})

    def save(self, path: str | Path) -> None:
        """Write as JSON: {"schema_version": 1, "lengths": [[prompt, sample, tokens], ...]}."""
        rows = [[prompt, sample, tokens] for (prompt, sample), tokens in sorted(self.lengths.items())]
        Path(path).write_text(json.dumps({"schema_version": 1, "lengths": rows}) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> LengthTrace:
        """Read what `save` wrote. Raises BadInput when the file is missing or something else."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            if data["schema_version"] != 1:
                raise BadInput(f"{path}: schema_version {data['schema_version']}, this version reads 1")
            lengths = {(int(prompt), int(sample)): int(tokens) for prompt, sample, tokens in data["lengths"]}
        except OSError as error:
            raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
        except BadInput:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise BadInput(f"{path}: not a length trace ({error}); write one with LengthTrace.save") from error
        if len(lengths) != len(data["lengths"]) or any(tokens < 0 for tokens in lengths.values()):
            raise BadInput(f"{path}: a sample occurs twice or has a negative length")
        return cls(lengths)
