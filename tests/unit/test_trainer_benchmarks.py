"""What the benchmarks of verl and TRL make of logs, and which settings they hand out."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks import logprob_floor, verl_gpu
from benchmarks.trl_gpu import environments, settings, wait_until_serving
from benchmarks.verl_gate import logprob_differences
from benchmarks.verl_jobs import OURS, Job, Shape, take_turns
from moebius.rollout.bench.results import Results, read_results
from moebius.rollout.config import RolloutConfig
from moebius.rollout.demo_assets import make_tiny_model

STEP = (
    "\x1b[36m(TaskRunnerV1 pid=7)\x1b[0m step:{n} - timing_s/gen:{gen} - timing_s/gen/tail:np.float64(2.5) - "
    "moebius/switches:1.0 - bench/logprob_difference_mean:1e-03 - response_length/mean:22.9 - actor/lr:0.001\n"
)


def job(folder: Path, text: str, code: int = 0) -> Job:
    (folder / "moebius.log").write_text(text)
    process = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"])
    process.wait()
    return Job("moebius", folder, process, (folder / "moebius.log").open("a"), str(folder / "ray"))


def test_steps_of_a_job(tmp_path: Path) -> None:
    done = job(tmp_path, "starting\n" + STEP.format(n=1, gen=9) + STEP.format(n=2, gen=4) + STEP.format(n=3, gen=3))
    done.end()
    assert [step["timing_s/gen"] for step in done.steps] == [9, 4, 3]
    found = done.results()
    assert found["gen_s"] == 3.5 and found["gen/tail_s"] == 2.5 and found["moebius/switches"] == 1
    assert found["bench/logprob_difference_mean"] == pytest.approx(1e-3) and "actor/lr" not in found


def test_a_job_that_fails_says_why(tmp_path: Path) -> None:
    failed = job(tmp_path, "x\nValueError: vllm is not there\nmore\n", code=3)
    failed.look()
    failed.end()
    assert failed.problem == "ended with status 3 before training: ValueError: vllm is not there"
    assert failed.results()["steps"] == 0


def test_jobs_take_turns(tmp_path: Path) -> None:
    """One is ready at once, one late, one fails and one never starts."""
    order: list[str] = []

    class Made(Job):
        def train(self, device: str, limit_s: float) -> None:
            order.append(self.name)

    code = {
        "late": "import time, pathlib; time.sleep(0.6); pathlib.Path('late.ready').touch(); time.sleep(30)",
        "never": "import time; time.sleep(30)",
        "failed": "raise SystemExit(4)",
        "ready": "import pathlib, time; pathlib.Path('ready.ready').touch(); time.sleep(30)",
    }
    jobs = [
        Made(
            name, tmp_path, subprocess.Popen([sys.executable, "-c", text], cwd=tmp_path, start_new_session=True),
            (tmp_path / f"{name}.log").open("w"), str(tmp_path / "ray"),
        )
        for name, text in code.items()
    ]  # fmt: skip
    written: list[int] = []
    take_turns(jobs, "cpu", time.monotonic() + 3.0, 0.1, lambda: written.append(len(order)))
    for one in jobs:
        one.end()
    assert order == ["ready", "late"] or order == ["late", "ready"]  # a busy machine may start both late
    assert written == [1, 2]
    problems = {job.name: job.problem for job in jobs}
    assert problems["never"].startswith("did not start in time")
    assert problems["failed"].startswith("ended with status 4 before training")
    assert not problems["ready"] and all(job.process.poll() is not None for job in jobs)


def test_differences_by_layout() -> None:
    rollout = torch.tensor([[-1.0, -1.0, -1.0, -1.0], [-2.0, -2.0, 0.0, 0.0], [-3.0, -3.0, -3.0, 0.0]])
    actor = rollout - torch.tensor([[0.1, 0.2, 0.3, 0.5], [0.7, 0.9, 9.0, 9.0], [2.0, 2.0, 2.0, 9.0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]])
    batch = {"rollout_log_probs": rollout, "old_log_probs": actor, "response_mask": mask}
    # Of the third sample one turn only is told of.
    found = logprob_differences(batch, ["EP:1 TP:2 EP:1", "TP:2", "EP:2"])
    assert found["bench/logprob_difference_mean"] == pytest.approx((0.1 + 0.2 + 0.3 + 0.5 + 0.7 + 0.9 + 6.0) / 9)
    assert found["bench/logprob_difference_ep_mean"] == pytest.approx(0.3) and found["bench/tokens_ep"] == 2
    assert found["bench/logprob_difference_tp_max"] == pytest.approx(0.9) and found["bench/tokens_tp"] == 4
    assert found["bench/logprob_difference_tp_mean"] == pytest.approx(0.525)
    unknown = logprob_differences(batch, ["", "", ""])  # of vLLM
    assert unknown["bench/logprob_difference_max"] == pytest.approx(2.0) and unknown["bench/tokens_tp"] == 0
    assert "bench/logprob_difference_tp_mean" not in unknown


# What a job of verl is here: it starts, trains when it may, and does not end by itself unless told to.
STUB = """
import pathlib, sys, time
folder, name, ends = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "ends"
(folder / f"{name}.ready").touch()
while not (folder / f"{name}.go").exists():
    time.sleep(0.02)
print("x step:1 - timing_s/gen:2.5", flush=True)
while not ends:
    time.sleep(1)
"""


def compare(folder: Path, monkeypatch: pytest.MonkeyPatch, limit: float, kill_after: float | None = None) -> Results:
    """A comparison of one job that ends and one that hangs."""
    (folder / "stub.py").write_text(STUB)

    class Made(Job):
        @classmethod
        def start(cls, name: str, shape: Shape, device: str, data: Path, folder: Path, shared: None = None) -> Job:
            command = [sys.executable, str(folder / "stub.py"), str(folder), name]
            log = (folder / f"{name}.log").open("w")
            process = subprocess.Popen(
                [*command, "ends" if name == "moebius" else "hangs"], stdout=log, start_new_session=True
            )
            return Job(name, folder, process, log, str(folder / "ray"))

    class NoFloor:
        def __init__(self, *_: object) -> None: ...

        def result(self, limit_s: float) -> tuple[dict[str, float], str]:
            return {verl_gpu.FLOOR: 0.04}, ""

        def end(self) -> None: ...

    monkeypatch.setattr(verl_gpu, "Job", Made)
    monkeypatch.setattr(verl_gpu, "Floor", NoFloor)
    monkeypatch.setattr(verl_gpu, "ENDING_S", 1.0)
    monkeypatch.setattr(verl_gpu, "APART_S", 0.0)
    monkeypatch.setattr(Shape, "prepare", lambda self, folder: None)
    options = Namespace(out=folder, runs=["moebius", "vllm"], device="cpu", limit=limit, patience=5.0)
    comparison = verl_gpu.Comparison(options, Shape.tiny())
    if kill_after is not None:
        kept = signal.signal(signal.SIGTERM, verl_gpu.stop)
        timer = threading.Timer(kill_after, os.kill, (os.getpid(), signal.SIGTERM))
        timer.start()
    try:
        comparison.run()
    finally:
        if kill_after is not None:
            timer.join()
            signal.signal(signal.SIGTERM, kept)
    verl_gpu.show(comparison.jobs, comparison.floor, Console(file=io.StringIO()))
    assert all(job.process.poll() is not None for job in comparison.jobs), "a job was left behind"
    return read_results(folder / "verl_x2.json")


def test_what_has_finished_is_written_when_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    found = compare(tmp_path, monkeypatch, limit=4.0)
    assert time.monotonic() - began < 7
    assert found.results["moebius/gen_s"] == 2.5 and found.results[verl_gpu.FLOOR] == 0.04
    assert found.results["vllm/gen_s"] == 2.5, "the step that it came to"
    assert len(found.notes) == 1 and found.notes[0].startswith("vllm: did not end within")


def test_what_has_finished_is_written_at_sigterm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    found = compare(tmp_path, monkeypatch, limit=60.0, kill_after=1.5)
    assert time.monotonic() - began < 8 and found.results["moebius/gen_s"] == 2.5
    assert found.notes == ["broken off from outside"]


def test_settings_of_the_runs() -> None:
    calls = Path("/tmp/calls")
    ours = Shape().settings("moebius", "cuda", "/tmp/ray", calls)
    assert not [setting for setting in ours if setting.startswith(f"++{OURS}.policy.kind")]
    static = Shape().settings("static_tp", "cuda", "/tmp/ray", calls)
    assert f"++{OURS}.policy.kind=static_tp" in static and f"++{OURS}.calls={calls}" in static
    stock = Shape().settings("vllm", "cuda", "/tmp/ray", calls)
    assert "actor_rollout_ref.rollout.name=vllm" in stock and not [s for s in stock if OURS in s]
    graphs = Shape(graphs=True, prompts=32, samples=4).settings("vllm", "cuda", "/tmp/ray", calls)
    assert "actor_rollout_ref.rollout.cudagraph_capture_sizes=[1,2,4,8,16,32,64,128]" in graphs


def test_difference_by_rounding(tmp_path: Path) -> None:
    found = logprob_floor.measure(make_tiny_model(tmp_path / "model", num_layers=2), "cpu")
    assert 0 < found[verl_gpu.FLOOR] < 1e-5 < 1e3 * found["floor_logprob_difference_max"], "as float32 rounds"


@pytest.mark.parametrize(
    ("says", "limit_s", "result"),
    [
        ("print('loading'); print('{\"floor_logprob_difference_mean\": 0.5}')", 60.0, ({verl_gpu.FLOOR: 0.5}, "")),
        ("raise OSError('no such model')", 60.0, ({}, "OSError: no such model")),
        ("import time; time.sleep(60)", 0.6, ({}, "did not end within 1 s")),
    ],
)
def test_the_measurement_beside(says: str, limit_s: float, result: object, monkeypatch: pytest.MonkeyPatch) -> None:
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda _, **settings: start([sys.executable, "-c", says], **settings))
    floor = logprob_floor.Floor(Path("model"), "cpu")
    assert floor.result(limit_s) == result
    floor.end()


def test_where_server_and_trainer_run(tmp_path: Path) -> None:
    config = RolloutConfig.model_validate(settings(tmp_path, "cuda", tmp_path))
    assert config.engine.policy.kind == "rollout" and config.ranks == 2
    server, trainer = environments("cuda", 2)
    assert (server["CUDA_VISIBLE_DEVICES"], trainer["CUDA_VISIBLE_DEVICES"]) == ("0,1", "0")
    assert trainer["NCCL_HOSTID"] and "NCCL_HOSTID" not in server and server["NCCL_SOCKET_IFNAME"] == "lo"
    server, trainer = environments("cuda", 3)
    assert trainer["CUDA_VISIBLE_DEVICES"] == "2" and "NCCL_HOSTID" not in trainer


def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("no such model\n")
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(2)"])
    process.wait()
    with pytest.raises(RuntimeError, match="status 2:\nno such model"):
        wait_until_serving(process, log, 5)
    log.write_text("serving on http://127.0.0.1:8123\n")
    assert wait_until_serving(process, log, 5) == "http://127.0.0.1:8123"
