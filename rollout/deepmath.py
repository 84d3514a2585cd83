"""Questions of a job as token ids, step by step: source, filters, chat template, and a fixed order.

Which questions a step gets depends only on the settings and the step's number, so a job that is started again goes on
with the same ones.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from moebius.rollout.datasets import DEEPMATH as DEEPMATH_COLUMNS
from moebius.rollout.datasets import META, Question, load_questions
from moebius.rollout.datasets import VERL as VERL_COLUMNS
from moebius.rollout.errors import BadInput
from moebius.rollout.job_config import OFFLINE, DataSettings

_log = logging.getLogger(__name__)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_BATCH = 256  # prompts tokenized at once
_FIRST_TOKEN_ID = 10  # below lie special tokens in common vocabularies

ToIds = Callable[[Sequence[Question]], list[list[int]]]


@dataclass(frozen=True, slots=True)
class StepPrompt:
    """One prompt of a step. `index` is its question's place in the source, counted from 0, before any filter."""

    index: int
    question: Question
    token_ids: list[int]


def load_source(data: DataSettings, tokenizer: Any = None) -> list[Question]:
    """All questions of `data.source`, in its order, before filters. The tokenizer only sizes offline questions.

    Raises BadInput when there is no such file, the hub cannot be reached, or columns are missing.
    """
    if data.source == OFFLINE:
        return _offline(data, tokenizer)
    path = Path(data.source).expanduser()
    if path.suffix in (".jsonl", ".parquet"):
        return load_questions(path, data.limit)
    if path.is_dir():
        return _folder(path, data.limit)
    if _HUB_ID.fullmatch(data.source) and not path.exists():
        return _hub(data)
    raise BadInput(
        f"data.source={data.source}: no such file or folder; give a .jsonl or .parquet file, a folder of .parquet "
        f"files, a data set of the hub such as zwhe99/DeepMath-103K, or {OFFLINE}"
    )


def _folder(path: Path, limit: int | None) -> list[Question]:
    files = sorted(path.rglob("*.parquet"))
    if not files:
        raise BadInput(f"{path}: no .parquet file in it")
    questions: list[Question] = []
    for file in files:
        questions += load_questions(file, None if limit is None else limit - len(questions))
        if limit is not None and len(questions) >= limit:
            break
    return questions


def _hub(data: DataSettings) -> list[Question]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    from moebius.rollout.datasets import question_of

    try:
        table = load_dataset(data.source, split=data.split, revision=data.revision)
    except (OSError, ValueError, DatasetsError) as error:  # HTTP errors of the hub are OSErrors too
        raise BadInput(
            f"data set {data.source} (split {data.split}) cannot be loaded from the Hugging Face hub: "
            f"{type(error).__name__}: {error}\n"
            "  Without a network: fetch it elsewhere with\n"
            f"    hf download --repo-type dataset {data.source} --local-dir deepmath\n"
            "  copy the folder here and set job.data.source=deepmath; or set job.data.source=offline for generated\n"
            "  questions. With one: check HF_HUB_OFFLINE, HF_ENDPOINT, HTTPS_PROXY, and the names of set and split"
        ) from error
    wanted = [name for name in (*DEEPMATH_COLUMNS, *VERL_COLUMNS, *META) if name in table.column_names]
    # DeepMath's worked solutions are most of its bytes, and are not read.
    table = table.select_columns(wanted) if wanted else table
    rows: Iterator[dict[str, Any]] = iter(table)
    return [question_of(f"{data.source}, row {i}", row) for i, row in enumerate(islice(rows, data.limit), 1)]


def _offline(data: DataSettings, tokenizer: Any) -> list[Question]:
    from moebius.rollout.deepmath_offline import make_deepmath

    count = min(data.offline_questions, data.limit or data.offline_questions)
    if data.prompt == "random_ids":
        return [Question("", "", {"topic": "random token ids"}) for _ in range(count)]
    rows = make_deepmath(count, measure=measure_with(data, tokenizer) if tokenizer is not None else None)
    return [Question(r["question"], r["final_answer"], {name: r[name] for name in META if name in r}) for r in rows]


def measure_with(data: DataSettings, tokenizer: Any) -> Callable[[str], int]:
    """Tokens of a question's whole prompt. The template's share is measured once."""

    def own(text: str) -> int:
        return len(tokenizer.encode(text + data.instruction, add_special_tokens=False))

    around = len(to_ids(data, tokenizer)([Question("x", "")])[0]) - own("x")
    return lambda text: around + own(text)


def fingerprint(questions: Sequence[Question]) -> str:
    """SHA-256 over prompts and answers in order: tells whether a job that goes on still reads the same data."""
    digest = hashlib.sha256()
    for question in questions:
        digest.update(json.dumps([question.prompt, question.answer], ensure_ascii=False).encode())
        digest.update(b"\n")
    return digest.hexdigest()


def messages_of(question: Question, data: DataSettings) -> list[dict[str, str]]:
    """Chat messages of a question: those it has, else one of its text and `data.instruction`; `data.system` first."""
    if isinstance(question.prompt, str):
        messages = [{"role": "user", "content": question.prompt + data.instruction}]
    else:
        messages = list(question.prompt)
    has_system = any(message["role"] == "system" for message in messages)
    return messages if data.system is None or has_system else [{"role": "system", "content": data.system}, *messages]


def to_ids(data: DataSettings, tokenizer: Any) -> ToIds:
    """How questions become token ids by `data.prompt` (chat or text). Raises BadInput without a chat template."""
    if data.prompt == "text":

        def plain(questions: Sequence[Question]) -> list[list[int]]:
            texts = ["\n".join(m["content"] for m in messages_of(question, data)) for question in questions]
            return [list(ids) for ids in tokenizer(texts)["input_ids"]]

        return plain
    if not getattr(tokenizer, "chat_template", None):
        raise BadInput("the model's tokenizer has no chat template: set job.data.prompt=text")

    def chat(questions: Sequence[Question]) -> list[list[int]]:
        chats = [messages_of(question, data) for question in questions]
        try:
            texts = [
                tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True, **data.template)
                for c in chats
            ]
        except Exception as error:  # templates are programs of the model's author and raise what they like
            raise BadInput(f"the chat template refuses a question's messages: {error}") from error
        return [list(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]

    return chat


def random_ids(data: DataSettings, vocab_size: int) -> list[list[int]]:
    """Prompts of random token ids, one per offline question, with DeepMath's prompt lengths."""
    from moebius.rollout.deepmath_offline import prompt_lengths

    generator = random.Random(f"prompts:{data.offline_questions}")
    choice = range(min(_FIRST_TOKEN_ID, vocab_size - 1), vocab_size)
    return [generator.choices(choice, k=length) for length in prompt_lengths(data.offline_questions)]


@dataclass
class StepSlices:
    """The prompts of each step: questions in a fixed order, filtered, cut into slices of `per_step`.

    When all have been used, the next pass takes them in another order. With `per_step` None every step gets all.
    """

    questions: Sequence[Question]
    data: DataSettings
    to_ids: Callable[[Sequence[int]], list[list[int]]]  # by places in `questions`
    per_step: int | None
    max_prompt_tokens: int | None = None
    too_long: int = 0  # questions left out so far, by length and by difficulty
    wrong_difficulty: int = 0
    _ids: dict[int, list[int] | None] = field(default_factory=dict)  # None: left out
    _stream: list[int] = field(default_factory=list)  # places, in the order of use
    _passes: int = 0
    _rest: list[int] = field(default_factory=list)  # of the present pass, not looked at yet
    _in_pass: int = 0  # accepted in the present pass

    def step(self, number: int) -> list[StepPrompt]:
        """Prompts of step `number` (from 0). Raises BadInput when too few questions pass the filters."""
        if self.per_step is None:
            self._grow_pass()
            places = self._stream[: self._in_pass]
        else:
            self._grow((number + 1) * self.per_step)
            places = self._stream[number * self.per_step : (number + 1) * self.per_step]
        prompts = []
        for place in places:
            ids = self._ids[place]
            assert ids is not None
            prompts.append(StepPrompt(place, self.questions[place], ids))
        return prompts

    def _grow_pass(self) -> None:
        if not self._passes:
            self._begin_pass()
        while self._rest:
            self._look()
        if not self._stream:
            raise BadInput(self._too_few())

    def _grow(self, count: int) -> None:
        while len(self._stream) < count:
            if not self._rest:
                if self._passes and self._in_pass < (self.per_step or 1):
                    raise BadInput(self._too_few())
                self._begin_pass()
            self._look()

    def _begin_pass(self) -> None:
        self._rest, self._in_pass = list(range(len(self.questions))), 0
        if self.data.shuffle_seed is not None:
            random.Random(f"{self.data.shuffle_seed}:{self._passes}").shuffle(self._rest)
        self._passes += 1

    def _look(self) -> None:
        batch, self._rest = self._rest[:_BATCH], self._rest[_BATCH:]
        fresh = [place for place in batch if place not in self._ids]
        fits = [place for place in fresh if self._difficulty_fits(self.questions[place])]
        self._ids |= dict.fromkeys(fresh)
        self.wrong_difficulty += len(fresh) - len(fits)
        for place, ids in zip(fits, self.to_ids(fits) if fits else [], strict=True):
            if self.max_prompt_tokens is not None and len(ids) > self.max_prompt_tokens:
                self.too_long += 1
            else:
                self._ids[place] = ids
        taken = [place for place in batch if self._ids[place] is not None]
        self._stream += taken
        self._in_pass += len(taken)

    def _difficulty_fits(self, question: Question) -> bool:
        low, high = self.data.min_difficulty, self.data.max_difficulty
        if low is None and high is None:
            return True
        value = difficulty_of(question)
        return value is not None and (low is None or value >= low) and (high is None or value <= high)

    def _too_few(self) -> str:
        return (
            f"{self._in_pass} of {len(self.questions)} questions pass the filters ({self.wrong_difficulty} have "
            f"another difficulty or none, {self.too_long} more than {self.max_prompt_tokens} tokens), a step needs "
            f"{self.per_step or 1}: widen job.data, or lower job.prompts_per_step"
        )


def difficulty_of(question: Question) -> float | None:
    """DeepMath's column, or an entry of verl's extra_info; None when neither holds a number."""
    extra = question.meta.get("extra_info")
    value = question.meta.get("difficulty", extra.get("difficulty") if isinstance(extra, dict) else None)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
