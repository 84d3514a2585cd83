"""What a job asks in each step: opens its questions with the model's tokenizer."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moebius.rollout.checkpoint import check_model
from moebius.rollout.config import RolloutConfig
from moebius.rollout.deepmath import StepPrompt, StepSlices, fingerprint, load_source, random_ids, to_ids
from moebius.rollout.errors import BadInput


@dataclass
class StepSource:
    """The prompts of a job's steps."""

    slices: StepSlices
    per_step: int  # prompts
    identity: dict[str, Any]
    about: str  # one line

    @classmethod
    def open(cls, config: RolloutConfig) -> StepSource:
        """Load questions and tokenizer. Raises BadInput for what is wrong with either."""
        job = config.job
        if job is None:
            raise BadInput("the configuration has no job: section")
        folder = check_model(config.engine, config.ranks)
        if job.data.prompt == "random_ids":
            questions = load_source(job.data)
            ids = random_ids(job.data, _vocab_size(folder, config.engine.hf_overrides))

            def tokenize(places: Sequence[int]) -> list[list[int]]:
                return [ids[place] for place in places]
        else:
            tokenizer = load_tokenizer(folder)
            questions = load_source(job.data, tokenizer)
            convert = to_ids(job.data, tokenizer)

            def tokenize(places: Sequence[int]) -> list[list[int]]:
                return convert([questions[place] for place in places])

        slices = StepSlices(questions, job.data, tokenize, job.prompts_per_step, max_prompt_tokens(config))
        first = slices.step(0)
        sizes = [len(prompt.token_ids) for prompt in first]
        about = (
            f"{len(questions):,} questions of {job.data.source}; step 0 has {len(first):,} prompts, median "
            f"{statistics.median(sizes):,.0f} tokens, longest {max(sizes):,}; left out so far: "
            f"{slices.wrong_difficulty:,} by difficulty, {slices.too_long:,} by length"
        )
        identity = {"count": len(questions), "sha256": fingerprint(questions)}
        return cls(slices, len(first), identity, about)

    def step(self, number: int) -> list[StepPrompt]:
        """Prompts of step `number`."""
        return self.slices.step(number)


def max_prompt_tokens(config: RolloutConfig) -> int | None:
    """Longest prompt to keep: as set, else what max_tokens leaves of max_model_len; None when both are open."""
    job, limit = config.job, config.engine.max_model_len
    if job is not None and job.data.max_prompt_tokens is not None:
        return job.data.max_prompt_tokens
    return None if limit is None else limit - config.sampling.max_tokens


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in a model's folder. Raises BadInput without one."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise BadInput(
            f"{folder} has no tokenizer that loads ({error}); for a model without one set job.data.source=offline and "
            "job.data.prompt=random_ids"
        ) from error


def _vocab_size(folder: Path, hf_overrides: dict[str, Any]) -> int:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | hf_overrides
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    if not isinstance(size, int):
        raise BadInput(f"{folder / 'config.json'}: has no vocab_size")
    return size
