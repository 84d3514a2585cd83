"""Settings of a rollout job: which questions, how many per step, where results go, how they are scored."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

DEEPMATH_ID = "zwhe99/DeepMath-103K"
OFFLINE = "offline"
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class DataSettings(_Part):
    """Questions, and how they become prompts."""

    source: str = Field(
        DEEPMATH_ID,
        description="A data set on the Hugging Face hub; a .jsonl or .parquet file with DeepMath's or verl's columns, "
        "or a folder of .parquet files; offline: generated questions with DeepMath's prompt lengths.",
    )
    split: str = Field("train", description="Split of a hub data set.")
    revision: str | None = Field(None, description="Revision of a hub data set; None: its main branch.")
    limit: PositiveInt | None = Field(None, description="Read only the first so many questions.")
    offline_questions: PositiveInt = Field(18432, description="offline: questions to generate; nine steps of 2,048.")
    min_difficulty: float | None = Field(None, description="Leave out easier questions, and those without difficulty.")
    max_difficulty: float | None = Field(None, description="Leave out harder questions, and those without difficulty.")
    max_prompt_tokens: PositiveInt | None = Field(
        None, description="Leave out longer prompts. None: what sampling.max_tokens leaves of engine.max_model_len."
    )
    shuffle_seed: int | None = Field(0, description="Order of the questions; None: as in the source.")
    prompt: Literal["chat", "text", "random_ids"] = Field(
        "chat",
        description="chat: the tokenizer's chat template; text: system and question as they are; random_ids (offline "
        "only): random token ids of the same lengths, for models without a tokenizer.",
    )
    system: str | None = Field(None, description="System message before the question.")
    instruction: str = Field(BOXED, description="Text after a plain question; prompts that are messages stay as is.")
    template: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the chat template, such as enable_thinking: false."
    )

    @model_validator(mode="after")
    def _agrees(self) -> DataSettings:
        low, high = self.min_difficulty, self.max_difficulty
        if low is not None and high is not None and low > high:
            raise ValueError(f"min_difficulty={low} is above max_difficulty={high}")
        if self.prompt == "random_ids" and self.source != OFFLINE:
            raise ValueError(f"prompt: random_ids goes with source: {OFFLINE}, whose prompts have lengths but no text")
        return self


class JobSettings(_Part):
    """A job: `steps` rollout steps, each of `prompts_per_step` questions and `n` samples of each."""

    out: str = Field(description="Folder for step_NNNN.parquet, step_NNNN.json and report.html; ~ and $NAME expand.")
    steps: PositiveInt = 1
    prompts_per_step: PositiveInt | None = Field(None, description="Questions per step; None: all, in every step.")
    n: PositiveInt = Field(1, description="Samples per prompt.")
    data: DataSettings = DataSettings()
    scorer: str | None = Field(None, description="math (math-verify) or module:function; None: no rewards.")
    score_workers: PositiveInt = Field(2, description="Processes that score.")
    score_timeout_s: float = Field(30, gt=0, description="Longest time to score one sample; after it: no reward.")
    replay_lengths: str | None = Field(
        None,
        description="Give every sample the length it had in this run: its folder, or one of `moebius capture`, or one "
        "file of --capture-lengths for every step. deepmath: lengths drawn with the published statistics.",
    )
    restarts: int = Field(1, ge=0, description="How often the job starts its ranks again after one died.")
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="Serve metrics for Prometheus on this port of 127.0.0.1; 0: any free one."
    )
    progress_s: float = Field(30, gt=0, description="Seconds between two lines about a running step.")
    tiny_model: bool = Field(
        False, description="Make a tiny random model in the folder engine.model if there is none, to try things out."
    )
