"""Generated questions: the published prompt lengths, DeepMath's columns, and answers that are right."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import pytest

from moebius.rollout.datasets import load_questions
from moebius.rollout.deepmath import load_source, to_ids
from moebius.rollout.deepmath_offline import COLUMNS, count_words, make_deepmath, prompt_lengths, write_deepmath
from moebius.rollout.demo_assets import train_tokenizer
from moebius.rollout.errors import BadInput
from moebius.rollout.job_config import DataSettings


def test_lengths_of_nine_steps_have_the_published_statistics() -> None:
    lengths = prompt_lengths(18432)
    assert (statistics.median(lengths), max(lengths)) == (120, 1352)
    assert lengths == prompt_lengths(18432) != prompt_lengths(18432, seed=1)
    first_step = lengths[:2048]  # in random order: each slice is like the whole
    assert 110 < statistics.median(first_step) < 130
    with pytest.raises(BadInput, match="at least 1"):
        prompt_lengths(0)


def test_questions_have_these_lengths_exactly_when_words_count() -> None:
    rows = make_deepmath(400)
    assert [count_words(row["question"]) for row in rows] == prompt_lengths(400)
    assert rows == make_deepmath(400) and rows != make_deepmath(400, seed=1)
    assert all(tuple(row) == COLUMNS for row in rows)
    assert len({row["question"] for row in rows}) == 400


def test_answers_are_right() -> None:
    """Worked out here from the text alone."""
    chains = 0
    for row in make_deepmath(300):
        text, answer = row["question"], int(row["final_answer"])
        if text.startswith("Compute"):
            a, b = re.fullmatch(r"Compute \$(\d+) \+ (\d+)\$\.", text).groups()  # type: ignore[union-attr]
            assert answer == int(a) + int(b)
            continue
        chains += 1
        value = int(re.match(r"Let \$a_0 = (\d+)\$", text)[1])  # type: ignore[index]
        links = re.findall(r"\$a_\{(\d+)\} = (\d+) a_\{(\d+)\} \+ (\d+)\$", text)
        for k, (number, factor, before, constant) in enumerate(links, 1):
            assert (int(number), int(before)) == (k, k - 1)
            value = int(factor) * value + int(constant)
        last, modulus = re.search(r"when \$a_\{(\d+)\}\$ is divided by \$(\d+)\$", text).groups()  # type: ignore[union-attr]
        assert int(last) == len(links) and answer == value % int(modulus)
        assert f"\\boxed{{{answer}}}" in row["r1_solution_1"]
    assert chains > 200


@pytest.mark.parametrize("instruction", ["", "\nBox it."])
def test_whole_prompts_have_these_lengths_under_a_tokenizer(instruction: str) -> None:
    tokenizer = train_tokenizer()
    data = DataSettings(source="offline", offline_questions=600, instruction=instruction)
    ids = to_ids(data, tokenizer)(load_source(data, tokenizer))
    lengths = [len(own) for own in ids]
    drawn = prompt_lengths(600)
    shortest = min(lengths)
    # Nothing is shorter than the template and the shortest sum; digits merge, so the last token may be missed.
    assert all(-4 <= have - max(want, shortest) <= 8 for have, want in zip(lengths, drawn, strict=True))
    assert abs(statistics.median(lengths) - 120) <= 3


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_files_load_as_deepmath(tmp_path: Path, suffix: str) -> None:
    path = write_deepmath(tmp_path / "new" / f"q.{suffix}", 20)
    questions = load_questions(path)
    rows = make_deepmath(20)
    assert [question.prompt for question in questions] == [row["question"] for row in rows]
    assert questions[0].meta == {"topic": rows[0]["topic"], "difficulty": rows[0]["difficulty"]}
    with pytest.raises(BadInput, match=r"\.jsonl or \.parquet"):
        write_deepmath(tmp_path / "q.csv", 1)
