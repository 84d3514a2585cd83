"""Shards: what is in them, that they are whole or not there, and that a folder holds one job."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moebius.rollout.datasets import Question
from moebius.rollout.deepmath import StepPrompt
from moebius.rollout.errors import BadInput
from moebius.rollout.shards import (
    JobFolder,
    differences,
    finished_steps,
    read_shard,
    shard_fault,
    shard_path,
    shard_rows,
    shard_schema,
    write_shard,
)
from moebius.rollout.types import Rollout, Sample

PROMPTS = [
    StepPrompt(17, Question("1+1?", "2", {"difficulty": 3.5}), [5, 6]),
    StepPrompt(4, Question([{"role": "user", "content": "é?"}], "3"), [7]),
]
ROLLOUTS = [
    Rollout(
        0,
        [5, 6],
        [
            Sample(
                0,
                [8, 9],
                [-0.5, -0.25],
                [{8: -0.5, 3: -1.0}, {9: -0.25}],
                "ab",
                "stop",
                2,
                7,
                1,
                [(6, 1), (7, 1)],
                layouts=[("EP", 1), ("TP", 1)],
            ),
            Sample(1, [], [], [], "", "abort", None, 7, 0),
        ],
    ),
    Rollout(
        1,
        [7],
        [
            Sample(0, [1], None, None, None, "length", "x", 7, 0),
            Sample(1, [2], None, None, None, "stop", None, 7, 1),
        ],
    ),
]


def rows(rewards: list[float | None] | None = None) -> list[dict[str, Any]]:
    return shard_rows(3, PROMPTS, ROLLOUTS, rewards)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = write_shard(tmp_path, 3, rows([1.0, None, 0.5, 0.0]))
    assert path == shard_path(tmp_path, 3) == tmp_path / "step_0003.parquet"
    found = read_shard(path)
    assert found[0] == {
        "step": 3, "prompt_index": 0, "sample_index": 0, "question_index": 17, "question": "1+1?", "answer": "2",
        "meta": '{"difficulty": 3.5}', "prompt_token_ids": [5, 6], "token_ids": [8, 9], "logprobs": [-0.5, -0.25],
        "top_logprobs": [[(8, -0.5), (3, -1.0)], [(9, -0.25)]], "text": "ab", "finish_reason": "stop",
        "stop_reason": "2", "policy_version": 7, "rank": 1, "reward": 1.0,
        "versions": [{"policy_version": 6, "tokens": 1}, {"policy_version": 7, "tokens": 1}],
        "layouts": [{"layout": "EP", "tokens": 1}, {"layout": "TP", "tokens": 1}],
    }  # fmt: skip
    assert [row["versions"] for row in found[1:]] == [row["layouts"] for row in found[1:]] == [[]] * 3
    assert [row["reward"] for row in found] == [1.0, None, 0.5, 0.0]
    assert found[2]["question"] == '[{"role": "user", "content": "é?"}]'
    assert found[2]["logprobs"] is None and found[2]["text"] is None and found[2]["stop_reason"] == "x"
    assert [(row["prompt_index"], row["sample_index"]) for row in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [path.name for path in tmp_path.iterdir()] == ["step_0003.parquet"]
    assert {row["reward"] for row in shard_rows(0, PROMPTS, ROLLOUTS)} == {None}


def test_shards_written_before_versions_and_layouts_were_recorded(tmp_path: Path) -> None:
    path = write_shard(tmp_path, 3, rows())
    pq.write_table(pq.read_table(path).drop_columns(["versions", "layouts"]), path)
    assert shard_fault(path, 3, 4) is None
    assert [(row["versions"], row["layouts"]) for row in read_shard(path)] == [(None, None)] * 4
    assert set(read_shard(path)[0]) == set(shard_schema().names)


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("keep me")
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / ".lock").symlink_to(outside)
    with pytest.raises(BadInput, match="is a link"), JobFolder(tmp_path / "job"):
        pass
    assert outside.read_text() == "keep me"
    (tmp_path / "job" / "step_0003.parquet").symlink_to(outside)
    write_shard(tmp_path / "job", 3, rows())
    assert outside.read_text() == "keep me" and not (tmp_path / "job" / "step_0003.parquet").is_symlink()


def test_a_step_that_is_done_again_replaces_its_shard(tmp_path: Path) -> None:
    write_shard(tmp_path, 3, rows()[:1])
    write_shard(tmp_path, 3, rows())
    assert len(read_shard(shard_path(tmp_path, 3))) == 4 and finished_steps(tmp_path) == [3]


def test_writing_that_breaks_off_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shard(tmp_path, 3, rows()[:1])

    def half(table: Any, file: Any, **_: Any) -> None:
        file.write(b"PAR1 half")
        raise OSError("disk full")

    monkeypatch.setattr(pq, "write_table", half)
    for step in (3, 4):
        with pytest.raises(OSError, match="disk full"):
            write_shard(tmp_path, step, rows())
    assert [path.name for path in tmp_path.iterdir()] == ["step_0003.parquet"]
    assert len(read_shard(shard_path(tmp_path, 3))) == 1


def test_faults(tmp_path: Path) -> None:
    path = write_shard(tmp_path, 3, rows())
    assert shard_fault(path) is None and shard_fault(path, 3, 4) is None
    assert "holds 4 samples, expected 6" in str(shard_fault(path, 3, 6))
    assert "holds step 3, expected 2" in str(shard_fault(path, 2))
    assert "no such file" in str(shard_fault(tmp_path / "none.parquet"))
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    assert "not a shard" in str(shard_fault(tmp_path / "other.parquet"))
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(BadInput, match="not a readable parquet file"):
        read_shard(path)


def test_unfinished_steps(tmp_path: Path) -> None:
    for step in (0, 2, 3, 7):
        write_shard(tmp_path, step, shard_rows(step, PROMPTS, ROLLOUTS))
    shard_path(tmp_path, 3).write_bytes(b"torn")
    (tmp_path / ".step_0001.parquet.77.tmp").write_bytes(b"killed while writing")
    (tmp_path / "step_0001.json").write_text("{}")  # the report comes before the shard
    assert JobFolder(tmp_path).unfinished(5, 4) == [1, 3, 4]


def hold(path: Path, ready: Any, release: Any) -> None:
    with JobFolder(path):
        ready.set()
        release.wait(60)


def test_a_second_job_is_kept_out_and_a_killed_one_is_not_in_the_way(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready, release = context.Event(), context.Event()
    other = context.Process(target=hold, args=(tmp_path / "out", ready, release))
    other.start()
    assert ready.wait(60)
    with pytest.raises(BadInput, match=f"another job .pid {other.pid} on"), JobFolder(tmp_path / "out"):
        pass
    other.kill()
    other.join()
    with JobFolder(tmp_path / "out"), pytest.raises(BadInput, match="another job"), JobFolder(tmp_path / "out"):
        pass


def test_a_folder_holds_one_job(tmp_path: Path) -> None:
    with JobFolder(tmp_path / "out") as folder:
        folder.claim({"settings": {"n": 1, "engine": {"model": "a"}}})
        folder.claim({"settings": {"n": 1, "engine": {"model": "a"}}})
        with pytest.raises(BadInput, match=r'settings\.engine\.model: "a" -> "b"'):
            folder.claim({"settings": {"n": 1, "engine": {"model": "b"}}})
        write_shard(folder.path, 0, rows())
        folder.clear()
        folder.claim({"settings": {"n": 2}})
        assert sorted(path.name for path in folder.path.iterdir()) == [".lock", "job.json"]


def test_results_of_something_else_are_not_mixed_in(tmp_path: Path) -> None:
    (tmp_path / "rollouts.jsonl").touch()
    with JobFolder(tmp_path) as folder:
        with pytest.raises(BadInput, match=r"results of something else \(rollouts.jsonl\)"):
            folder.claim({})
        folder.clear()
        folder.claim({})
        (tmp_path / "job.json").write_text("{")
        with pytest.raises(BadInput, match="cannot be read"):
            folder.claim({})


def test_differences() -> None:
    assert differences({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1, "c": 5}, "e": 4}) == [
        "a.c: 2 -> 5", "d: 3 -> null", "e: null -> 4",
    ]  # fmt: skip
    assert differences({"a": {"b": 1}}, {"a": {"b": 1}}) == []
