"""Questions from DeepMath and verl files, and what is said about broken ones."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moebius.rollout.datasets import Question, load_questions
from moebius.rollout.errors import BadInput

DEEPMATH = [
    {"question": "1+1?", "final_answer": "2", "topic": "Algebra", "difficulty": 4.5, "r1_solution_1": "long"},
    {"question": "2+2?", "final_answer": "4", "topic": None, "difficulty": 5.0, "r1_solution_1": "long"},
]
VERL = [
    {
        "data_source": "zwhe99/DeepMath-103K",
        "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": "1+1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 0},
    }
]


def write(tmp_path, suffix, rows):
    path = tmp_path / f"data.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_deepmath(tmp_path, suffix):
    assert load_questions(write(tmp_path, suffix, DEEPMATH)) == [
        Question("1+1?", "2", {"topic": "Algebra", "difficulty": 4.5}),
        Question("2+2?", "4", {"difficulty": 5.0}),
    ]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_verl(tmp_path, suffix):
    (question,) = load_questions(write(tmp_path, suffix, VERL))
    assert question.prompt == VERL[0]["prompt"]
    assert question.answer == "2"
    assert question.meta["data_source"] == "zwhe99/DeepMath-103K"
    assert question.meta["extra_info"] == {"index": 0}


def test_limit(tmp_path):
    path = write(tmp_path, "jsonl", DEEPMATH)
    assert [q.answer for q in load_questions(path, limit=1)] == ["2"]
    assert len(load_questions(path, limit=9)) == 2
    with pytest.raises(BadInput, match="limit"):
        load_questions(path, limit=0)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_missing_column_names_those_there(tmp_path, suffix):
    rows = [{"question": "1+1?", "reply": "2"}]
    with pytest.raises(BadInput, match=r"question and final_answer.*there are: question, reply"):
        load_questions(write(tmp_path, suffix, rows))


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_empty_file(tmp_path, suffix):
    path = tmp_path / f"data.{suffix}"
    if suffix == "parquet":
        pq.write_table(
            pa.table({"question": pa.array([], pa.string()), "final_answer": pa.array([], pa.string())}), path
        )
    else:
        path.write_text("\n\n")
    with pytest.raises(BadInput, match="holds no questions"):
        load_questions(path)


def test_corrupt_line_is_numbered(tmp_path):
    path = write(tmp_path, "jsonl", DEEPMATH)
    path.write_text(path.read_text() + "\n" + '{"question": "3+3?", "fin')
    with pytest.raises(BadInput, match="line 4: not valid JSON"):
        load_questions(path)
    path.write_bytes(b'{"question": "\xff\xff"}\n')
    with pytest.raises(BadInput, match="line 1: not valid JSON"):
        load_questions(path)
    path.write_text("[1]\n")
    with pytest.raises(BadInput, match="line 1: expected an object, got list"):
        load_questions(path)


def test_corrupt_parquet(tmp_path):
    path = write(tmp_path, "parquet", DEEPMATH)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(BadInput, match="not a readable parquet file"):
        load_questions(path)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"question": " ", "final_answer": "2"}, "line 1: question must be a text"),
        ({"question": "1+1?", "final_answer": None}, "line 1: final_answer must be a text or a number"),
        ({"prompt": "1+1?", "reward_model": {"ground_truth": "2"}}, "prompt must be a list of messages"),
        ({"prompt": [{"role": "user"}], "reward_model": {"ground_truth": "2"}}, "prompt must be a list of messages"),
        ({"prompt": [], "reward_model": {"ground_truth": "2"}}, "prompt must be a list of messages"),
        ({"prompt": [{"role": "user", "content": "x"}], "reward_model": {}}, "must hold ground_truth"),
    ],
)
def test_rows_that_are_wrong(tmp_path, row, words):
    with pytest.raises(BadInput, match=words):
        load_questions(write(tmp_path, "jsonl", [row]))


def test_wrong_paths(tmp_path):
    with pytest.raises(BadInput, match="no such file"):
        load_questions(tmp_path / "none.jsonl")
    (tmp_path / "x.csv").write_text("a,b\n")
    with pytest.raises(BadInput, match=r"expected a \.jsonl or \.parquet"):
        load_questions(tmp_path / "x.csv")
