"""Questions from files: DeepMath columns or verl's, as .jsonl or .parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moebius.rollout.errors import BadInput

DEEPMATH = ("question", "final_answer")
VERL = ("prompt", "reward_model")
# Kept beside the question; other columns (DeepMath's worked solutions are most of its bytes) are not read.
META = ("topic", "difficulty", "data_source", "ability", "extra_info")


@dataclass(frozen=True, slots=True)
class Question:
    """One question. `prompt` is plain text, or chat messages [{"role": ..., "content": ...}, ...]."""

    prompt: str | list[dict[str, str]]
    answer: str
    meta: dict[str, Any] = field(default_factory=dict)


def load_questions(path: str | Path, limit: int | None = None) -> list[Question]:
    """The first `limit` questions (all when None) of a .jsonl or .parquet file, in file order.

    Columns are DeepMath's (question, final_answer; optional topic, difficulty) or verl's (prompt, a list of role and
    content; reward_model.ground_truth). Raises BadInput for a missing, empty or broken file or a missing column; the
    message names the line or row, counted from 1.
    """
    path = Path(path)
    if limit is not None and limit < 1:
        raise BadInput(f"limit must be at least 1, got {limit}")
    if path.suffix not in (".jsonl", ".parquet"):
        raise BadInput(f"{path}: expected a .jsonl or .parquet file")
    if not path.is_file():
        raise BadInput(f"{path}: no such file")
    rows = _jsonl(path) if path.suffix == ".jsonl" else _parquet(path)
    questions = []
    for where, row in rows:
        questions.append(question_of(where, row))
        if len(questions) == limit:
            break
    if not questions:
        raise BadInput(f"{path}: holds no questions")
    return questions


def _jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:  # broken JSON or broken UTF-8
                raise BadInput(f"{path}, line {number}: not valid JSON: {error}") from error
            if not isinstance(row, dict):
                raise BadInput(f"{path}, line {number}: expected an object, got {type(row).__name__}")
            yield f"{path}, line {number}", row


def _parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            _columns(str(path), names)
            wanted = [name for name in (*DEEPMATH, *VERL, *META) if name in names]
            number = 0
            for batch in file.iter_batches(batch_size=1024, columns=wanted):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except (pa.ArrowException, OSError) as error:
        raise BadInput(f"{path}: not a readable parquet file: {error}") from error


def _columns(where: str, present: Any) -> tuple[str, str]:
    """Which of the two schemas `present` column names hold."""
    names = list(present)
    for schema in (DEEPMATH, VERL):
        if all(name in names for name in schema):
            return schema
    raise BadInput(
        f"{where}: needs columns {' and '.join(DEEPMATH)} (DeepMath) or {' and '.join(VERL)} (verl); "
        f"there are: {', '.join(map(str, names)) or 'none'}"
    )


def question_of(where: str, row: dict[str, Any]) -> Question:
    """The question in a row with DeepMath's or verl's columns. Raises BadInput that begins with `where`."""
    meta = {name: row[name] for name in META if row.get(name) is not None}
    if _columns(where, row) == DEEPMATH:
        prompt = row["question"]
        if not isinstance(prompt, str) or not prompt.strip():
            raise BadInput(f"{where}: question must be a text that is not empty, got {prompt!r}")
        return Question(prompt, _answer(where, "final_answer", row["final_answer"]), meta)
    reward = row["reward_model"]
    if not isinstance(reward, dict) or "ground_truth" not in reward:
        raise BadInput(f"{where}: reward_model must hold ground_truth, got {reward!r}")
    return Question(
        _messages(where, row["prompt"]), _answer(where, "reward_model.ground_truth", reward["ground_truth"]), meta
    )


def _answer(where: str, name: str, value: Any) -> str:
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise BadInput(f"{where}: {name} must be a text or a number, got {value!r}")
    return str(value)


def _messages(where: str, value: Any) -> list[dict[str, str]]:
    messages = value if isinstance(value, list) else []
    good = [m for m in messages if isinstance(m, dict) and all(isinstance(m.get(k), str) for k in ("role", "content"))]
    if messages and len(good) == len(messages):
        return [{"role": m["role"], "content": m["content"]} for m in good]
    raise BadInput(f"{where}: prompt must be a list of messages with role and content texts, got {value!r}")
