"""A rollout job on a real cluster: killed, stopped, resumed; and refusals in words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from moebius.rollout.shards import read_shard, shard_path
from moebius.rollout.types import LengthTrace
from tests.integration.ray_head import RayHead, arguments
from tests.integration.resume import CONFIG, STEPS, experiment


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    with RayHead() as head:
        yield head


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("job")


def test_a_killed_and_a_stopped_job_go_on(head: RayHead, folder: Path) -> None:
    found = experiment(head, folder)
    # Killed in step 1 and stopped in a later one: what was finished stays, what ran is done again.
    assert found["steps_after_kill"] and len(found["steps_after_kill"]) < STEPS
    assert found["steps_after_kill"] < found["steps_after_stop"] and len(found["steps_after_stop"]) < STEPS
    first = len(found["steps_after_stop"])
    assert f"steps to do: {first}" in found["log_of_last"] and "succeeded" in found["log_of_last"]
    assert (found["steps_present"], found["duplicate_rows"], found["outputs_equal"]) == (STEPS, 0, True), found
    shard = read_shard(shard_path(folder / "disturbed", 0))
    assert len(shard) == 16 and all(row["reward"] is not None and row["text"] for row in shard)
    assert {row["policy_version"] for row in shard} == {0}
    report = json.loads((folder / "disturbed" / "step_0000.json").read_text())
    assert [s["output_tokens"] for s in report["samples"]] == [len(row["token_ids"]) for row in shard]
    assert report["switches"], "the tiny configuration is there to show a switch"


def test_captured_lengths_are_replayed_in_a_job(head: RayHead, folder: Path) -> None:
    lengths, out = folder / "lengths", folder / "static"
    done = head.run("moebius", "capture", str(folder / "quiet"), str(lengths))
    assert done.returncode == 0 and f"{16 * STEPS} samples in {STEPS} steps" in done.stdout, done.stdout + done.stderr
    common = arguments(engine__model=folder / "model", engine__policy__kind="static_ep")
    job = head.submit("--config", CONFIG, *common, "--steps", "2", "--out", str(out), "--replay-lengths", str(lengths))
    assert head.wait(job) == "SUCCEEDED", head.logs(job)
    for step in range(2):
        trace = LengthTrace.load(lengths / f"lengths_{step:04d}.json")
        rows = read_shard(shard_path(out, step))
        assert {(r["prompt_index"], r["sample_index"]): len(r["token_ids"]) for r in rows} == trace.lengths

    done = head.run("moebius", "report", str(folder / "quiet"), str(out), "--out", str(folder / "comparison"))
    assert done.returncode == 0 and "over the better static run" in done.stdout, done.stdout + done.stderr
    assert "did different work" not in done.stdout
    assert {p.name for p in (folder / "comparison").iterdir()} >= {"comparison.html", "comparison.csv"}


def test_a_relative_folder_is_refused_in_rays_copy(head: RayHead, folder: Path) -> None:
    job = head.submit("--config", CONFIG, *arguments(engine__model=folder / "model"), "--out", "runs/x")
    assert head.wait(job) == "FAILED"
    assert "temporary copy of the working directory" in head.logs(job)
