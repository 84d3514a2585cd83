"""Questions of a job: where they come from, which pass the filters, and which step gets which."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebius.rollout.batch import Limits, to_token_ids
from moebius.rollout.datasets import Question
from moebius.rollout.deepmath import (
    StepSlices,
    difficulty_of,
    fingerprint,
    load_source,
    messages_of,
    random_ids,
    to_ids,
)
from moebius.rollout.demo_assets import train_tokenizer
from moebius.rollout.errors import BadInput
from moebius.rollout.job_config import DataSettings

ROWS = [
    {"question": f"{i}+1?", "final_answer": str(i + 1), "difficulty": float(i % 9), "topic": "A"} for i in range(40)
]
VERL = [
    {
        "data_source": "zwhe99/DeepMath-103K",
        "prompt": [{"role": "user", "content": f"{i}+1?"}],
        "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
        "extra_info": {"difficulty": float(i)},
    }
    for i in range(3)
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer()


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def slices(data: DataSettings, per_step: int | None, questions: int = 20, **more: Any) -> StepSlices:
    """Question i has difficulty i and a prompt of i + 1 tokens."""
    own = [Question(f"q{i}", str(i), {"difficulty": i}) for i in range(questions)]
    return StepSlices(own, data, lambda places: [[7] * (place + 1) for place in places], per_step, **more)


# ---- sources ----------------------------------------------------------------------------------------


def test_one_file_a_folder_and_the_hub_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jsonl = tmp_path / "a.jsonl"
    jsonl.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    file = parquet(tmp_path / "a.parquet", ROWS)
    parquet(tmp_path / "d/data/train-00000.parquet", ROWS[:30])
    parquet(tmp_path / "d/data/train-00001.parquet", ROWS[30:])
    asked: list[tuple[str, str, str | None]] = []

    def load_dataset(name: str, split: str, revision: str | None) -> datasets.Dataset:
        asked.append((name, split, revision))
        return datasets.Dataset.from_list([row | {"r1_solution_1": "long"} for row in ROWS])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    sources = [str(jsonl), str(file), str(tmp_path / "d"), "zwhe99/DeepMath-103K"]
    found = [load_source(DataSettings(source=source, revision="r")) for source in sources]
    assert all(questions == found[0] for questions in found) and len(found[0]) == 40
    assert asked == [("zwhe99/DeepMath-103K", "train", "r")]
    assert found[0][3] == Question("3+1?", "4", {"difficulty": 3.0, "topic": "A"})
    assert len({fingerprint(questions) for questions in found}) == 1
    assert fingerprint(found[0]) != fingerprint(found[0][1:])
    for source in sources:
        assert load_source(DataSettings(source=source, limit=35)) == found[0][:35]


def test_verl_parquet_keeps_its_messages_and_difficulty(tmp_path: Path) -> None:
    questions = load_source(DataSettings(source=str(parquet(tmp_path / "v.parquet", VERL))))
    assert [difficulty_of(question) for question in questions] == [0.0, 1.0, 2.0]
    assert messages_of(questions[0], DataSettings(instruction=" now")) == VERL[0]["prompt"]


def test_an_unreachable_hub_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's own error, in offline mode, with an empty cache."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(BadInput) as error:
        load_source(DataSettings(source="nobody-there/no-such-set"))
    words = str(error.value)
    for part in (
        "nobody-there/no-such-set",
        "hf download --repo-type dataset",
        "job.data.source=offline",
        "HTTPS_PROXY",
    ):
        assert part in words


@pytest.mark.parametrize("source", ["nothing", "a/b/c", "no/such/file.txt"])
def test_a_source_that_is_nothing(source: str) -> None:
    with pytest.raises(BadInput, match="no such file or folder"):
        load_source(DataSettings(source=source))


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no \.parquet file"):
        load_source(DataSettings(source=str(tmp_path)))


# ---- prompts ----------------------------------------------------------------------------------------


def test_chat_prompts_are_what_the_group_makes_of_messages(tokenizer: Any) -> None:
    data = DataSettings(system="Think.", instruction=" Box it.")
    [ids] = to_ids(data, tokenizer)([Question("1+1?", "2")])
    messages = [{"role": "system", "content": "Think."}, {"role": "user", "content": "1+1? Box it."}]
    assert ids == to_token_ids(messages, 0, Limits(512, 512, True), lambda: tokenizer)
    assert tokenizer.decode(ids).endswith("assistant:")


def test_text_prompts(tokenizer: Any) -> None:
    data = DataSettings(prompt="text", instruction="!")
    assert to_ids(data, tokenizer)([Question("1+1?", "2")]) == [tokenizer.encode("1+1?!")]


def test_template_arguments_reach_the_template(tokenizer: Any) -> None:
    tokenizer = train_tokenizer()
    tokenizer.chat_template = "{{ 'A' if think else 'B' }}"
    texts = [
        tokenizer.decode(to_ids(DataSettings(template={"think": think}), tokenizer)([Question("x", "")])[0])
        for think in (True, False)
    ]
    assert texts == ["A", "B"]


def test_templates_that_are_missing_or_refuse(tokenizer: Any) -> None:
    bare = train_tokenizer()
    bare.chat_template = None
    with pytest.raises(BadInput, match=r"job\.data\.prompt=text"):
        to_ids(DataSettings(), bare)
    bare.chat_template = "{{ raise_exception('no system here') }}"
    with pytest.raises(BadInput, match="no system here"):
        to_ids(DataSettings(), bare)([Question("x", "")])


def test_random_ids_have_the_lengths_and_stay_in_the_vocabulary() -> None:
    data = DataSettings(source="offline", prompt="random_ids", offline_questions=500)
    ids = random_ids(data, 300)
    assert ids == random_ids(data, 300) and len(ids) == len(load_source(data)) == 500
    assert sorted(map(len, ids))[250] == 120 and all(10 <= token < 300 for own in ids for token in own)
    with pytest.raises(ValueError, match="random_ids goes with"):
        DataSettings(prompt="random_ids")


# ---- slices -----------------------------------------------------------------------------------------


@given(per_step=st.integers(1, 20), steps=st.integers(1, 8), seed=st.none() | st.integers(0, 5))
def test_slices_do_not_depend_on_which_were_asked_for_before(per_step: int, steps: int, seed: int | None) -> None:
    data = DataSettings(shuffle_seed=seed)
    every = slices(data, per_step)
    all_steps = [[p.index for p in every.step(step)] for step in range(steps)]
    assert [p.index for p in slices(data, per_step).step(steps - 1)] == all_steps[-1]
    flat = [index for step in all_steps for index in step]
    for start in range(0, len(flat), 20):  # each pass uses every question once
        one_pass = flat[start : start + 20]
        assert len(set(one_pass)) == len(one_pass)


def test_orders_of_seeds_and_passes_differ() -> None:
    def first(seed: int | None, step: int = 0) -> list[int]:
        return [p.index for p in slices(DataSettings(shuffle_seed=seed), 20).step(step)]

    assert first(None) == first(None, 1) == list(range(20))
    assert first(0) != first(1) and first(0) != first(0, 1) and sorted(first(0, 1)) == list(range(20))


def test_filters_and_their_counts() -> None:
    data = DataSettings(min_difficulty=3, max_difficulty=15, shuffle_seed=None)
    found = slices(data, 5, max_prompt_tokens=10)
    assert [p.index for p in found.step(0)] == [3, 4, 5, 6, 7]
    assert [p.index for p in found.step(1)] == [8, 9, 3, 4, 5]  # the second pass begins
    assert (found.wrong_difficulty, found.too_long) == (7, 6)
    assert all(len(p.token_ids) == p.index + 1 for p in found.step(0))


def test_too_few_questions_are_counted() -> None:
    found = slices(DataSettings(min_difficulty=15), 8, max_prompt_tokens=18)
    with pytest.raises(BadInput, match=r"3 of 20 questions pass.*15 have another difficulty.*2 more than 18 tokens.*8"):
        found.step(0)
    with pytest.raises(BadInput, match="0 of 20"):
        slices(DataSettings(min_difficulty=50), None).step(0)


def test_without_a_size_every_step_gets_all() -> None:
    found = slices(DataSettings(), None, max_prompt_tokens=12)
    assert [p.index for p in found.step(0)] == [p.index for p in found.step(4)]
    assert sorted(p.index for p in found.step(0)) == list(range(12))


def test_questions_without_difficulty_fail_a_difficulty_filter() -> None:
    own = [Question("a", "1"), Question("b", "2", {"difficulty": 5.0})]
    found = StepSlices(own, DataSettings(min_difficulty=1), lambda places: [[1] for _ in places], None)
    assert [p.index for p in found.step(0)] == [1]


def test_settings_that_contradict() -> None:
    with pytest.raises(ValueError, match="above max_difficulty"):
        DataSettings(min_difficulty=5, max_difficulty=4)
