"""Processes that share a GPU: what they are told of it, and the settings of verl and TRL there."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import shared_gpu, trl_gpu, verl_gpu
from benchmarks.shared_gpu import SharedGpu, results_name
from benchmarks.verl_jobs import OURS, Job, Shape
from moebius.rollout.bench.results import make_results, read_results
from moebius.rollout.rank_setup import RankSetup, rank_environment

# What a rank does, on the GPU that Ray calls 1: `argv[1]` are the variables that it sets.
RANK = """
import ctypes, json, os, subprocess, sys
names = ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "NCCL_HOSTID")
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
in_c = lambda: {name: (getenv(name.encode()) or b"-").decode() for name in names}
first = in_c()
os.environ.update(json.loads(sys.argv[1]))
own = {name: os.environ[name] for name in names}
child = subprocess.check_output([sys.executable, "-c", "import os; print(os.environ['NCCL_HOSTID'])"], text=True)
read, write = os.pipe()
if not os.fork():
    os.write(write, in_c()["NCCL_HOSTID"].encode())
    os._exit(0)
print(json.dumps([first, own, in_c(), child.strip(), os.read(read, 100).decode()]))
"""


@pytest.fixture
def shared() -> Iterator[SharedGpu]:
    made = SharedGpu("3", 2)
    yield made
    made.close()
    assert not made.folder.exists()


def test_every_process_takes_the_one_gpu_and_is_a_host(shared: SharedGpu, tmp_path: Path) -> None:
    there = os.environ | {"CUDA_VISIBLE_DEVICES": "3", "NCCL_HOSTID": "taken over", "LOCAL_RANK": "1"}
    environment = shared.environment(there)
    assert "CUDA_VISIBLE_DEVICES" not in environment, "Ray would refuse two GPUs"
    assert json.loads(environment["RAY_OVERRIDE_RESOURCES"]) == {"GPU": 2}
    setup = RankSetup(None, 1, 2, "cuda", ["0", "1"], 1, "x")  # type: ignore[arg-type]
    said = subprocess.run(
        [sys.executable, "-c", RANK, json.dumps(rank_environment(setup))], env=environment, text=True, check=True,
        stdout=subprocess.PIPE,
    ).stdout  # fmt: skip
    first, own, in_c, child, forked = json.loads(said)
    assert first == {"CUDA_VISIBLE_DEVICES": "-", "LOCAL_RANK": "0", "NCCL_HOSTID": own["NCCL_HOSTID"]}
    assert own == in_c and (own["CUDA_VISIBLE_DEVICES"], own["LOCAL_RANK"]) == ("3", "0")
    assert len({"taken over", own["NCCL_HOSTID"], child, forked}) == 4
    told = subprocess.run(
        [sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"], text=True, check=True,
        env=environment | {"CUDA_VISIBLE_DEVICES": ""}, stdout=subprocess.PIPE,
    ).stdout  # fmt: skip
    assert told == "\n", "a process that Ray gives no GPU has none"


def test_where_ranks_share(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {"none": [], "one": ["5"], "two": ["0", "1"]}
    for there, expected in (("one", "5"), ("two", None)):
        monkeypatch.setattr(shared_gpu, "visible_devices", lambda there=there: seen[there])
        found = SharedGpu.where_needed("cuda", 2)
        assert (found and found.gpu) == expected
        assert results_name("trl", found) == ("trl_x2" if found is None else "trl_shared_x1")
        if found is not None:
            found.close()
    assert SharedGpu.where_needed("cpu", 2) is None
    monkeypatch.setattr(shared_gpu, "visible_devices", lambda: seen["none"])
    with pytest.raises(SystemExit, match="no GPU is visible"):
        SharedGpu.where_needed("cuda", 2)


def test_settings_on_a_shared_gpu(shared: SharedGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = tmp_path / "calls"
    ours = Shape().settings("moebius", "cuda", "/tmp/ray", calls, shared=True)
    assert f"++{OURS}.engine.custom_all_reduce=False" in ours and f"++{OURS}.calls={calls}" in ours
    stock = Shape().settings("vllm", "cuda", "/tmp/ray", calls, shared=True)
    assert "actor_rollout_ref.rollout.data_parallel_size=1" in stock and not [s for s in stock if OURS in s]
    assert trl_gpu.settings(tmp_path, "cuda", tmp_path, shared=True)["engine"]["custom_all_reduce"] is False
    server, trainer = trl_gpu.environments("cuda", 1, shared)
    assert "CUDA_VISIBLE_DEVICES" not in server and trainer["CUDA_VISIBLE_DEVICES"] == "3"
    assert server["PYTHONPATH"].split(os.pathsep)[0] == trainer["PYTHONPATH"].split(os.pathsep)[0] == str(shared.folder)
    monkeypatch.setattr(SharedGpu, "where_needed", lambda device, ranks: shared)
    options = argparse.Namespace(out=tmp_path, runs=["moebius", "vllm"], device="cuda", limit=60.0, patience=90.0)
    comparison = verl_gpu.Comparison(options, Shape())
    assert comparison.patience == 0 and comparison.shape.prompts == verl_gpu.SHARED_PROMPTS
    comparison.write()
    assert comparison.path == tmp_path / "verl_shared_x1.json"
    assert any("say nothing" in note for note in comparison.notes()) and "two engines" in comparison.notes()[1]


def test_calls_of_a_job(tmp_path: Path) -> None:
    lines = [
        {"call": "update_weights", "version": 1},
        {"call": "received", "rank": 0, "bytes": 8, "sum": 2.5, "s": 0.1},
        {"call": "received", "rank": 1, "bytes": 8, "sum": 2.5, "s": 0.2},
        {"call": "generate", "prompt": 3},
        {"call": "generated", "tokens": 2},
        {"call": "generate", "prompt": 4},
        {"call": "sleep"},
        {"call": "received", "rank": 0, "bytes": 8, "sum": 2.5},
        {"call": "received", "rank": 1, "bytes": 8, "sum": 2.0},
    ]
    (tmp_path / "moebius.calls.jsonl").write_text("".join(json.dumps({"t": 1.0, **line}) + "\n" for line in lines))
    with (tmp_path / "moebius.log").open("w") as log:
        process = subprocess.Popen([sys.executable, "-c", ""])
        process.wait()
        rows = Job("moebius", tmp_path, process, log, str(tmp_path / "ray")).calls()
        assert not Job("vllm", tmp_path, process, log, str(tmp_path / "ray")).calls()
    assert [(row["call"], row["times"]) for row in rows] == [
        ("update_weights", 1), ("received", 2), ("generate", 2), ("sleep", 1), ("received", 1), ("received", 1)
    ]  # fmt: skip
    assert rows[1] == {"call": "received", "bytes": 8, "sum": 2.5, "times": 2}, "both ranks got the same"


def test_a_command_counts_ranks_and_its_ranks_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sees a GPU per rank; a rank, which is told of them as by the fleet, the one that there is."""
    seen = tmp_path / "seen.json"
    rank = "import json, os; os.environ['CUDA_VISIBLE_DEVICES'] = '7,7'; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    command = f"""
import json, os, subprocess, sys
listed = os.environ["CUDA_VISIBLE_DEVICES"]
rank = subprocess.check_output([sys.executable, "-c", {rank!r}], text=True).strip()
json.dump([listed, rank], open({str(seen)!r}, "w"))
text = open({str(tmp_path / "old.json")!r}).read()
open({str(tmp_path / "memory.json")!r}, "w").write(text)
sys.exit(5)
"""
    results = make_results("memory", command="bench memory", options={}, results={"x": 1.0}, curves=[], series={})
    (tmp_path / "old.json").write_text(results.model_dump_json())
    monkeypatch.setattr(shared_gpu, "visible_devices", lambda: ["7"])
    words = ["shared_gpu", "--ranks", "2", "--out", str(tmp_path), sys.executable, "-c", command]
    monkeypatch.setattr(sys, "argv", words)
    assert shared_gpu.main() == 5, "the command's own status"
    assert json.loads(seen.read_text()) == ["7,7", "7"]
    (note,) = read_results(tmp_path / "memory.json").notes
    assert note.startswith("one GPU shared by 2 ranks") and "say nothing" in note
    assert read_results(tmp_path / "old.json").notes == [], "another run's"
    monkeypatch.setattr(shared_gpu, "visible_devices", lambda: ["0", "1"])
    with pytest.raises(SystemExit):
        shared_gpu.main()
