"""What the benchmarks of verl and TRL make of logs, and which settings they hand out."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.trl_gpu import environments, settings, wait_until_serving
from benchmarks.verl_gpu import OURS, Job, Shape, take_turns
from moebius.rollout.config import RolloutConfig

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
    take_turns(jobs, Namespace(startup_limit=2.0, patience=0.1, train_limit=1.0, device="cpu"))
    assert order == ["ready", "late"] or order == ["late", "ready"]  # a busy machine may start both late
    problems = {job.name: job.problem for job in jobs}
    assert problems["never"].startswith("did not start within 2 s")
    assert problems["failed"].startswith("ended with status 4 before training")
    assert not problems["ready"] and all(job.process.poll() is not None for job in jobs)


def test_settings_of_the_runs() -> None:
    calls = Path("/tmp/calls")
    ours = Shape().settings("moebius", "cuda", "/tmp/ray", calls)
    assert not [setting for setting in ours if setting.startswith(f"++{OURS}.policy.kind")]
    static = Shape().settings("static_tp", "cuda", "/tmp/ray", calls)
    assert f"++{OURS}.policy.kind=static_tp" in static and f"++{OURS}.calls={calls}" in static
    stock = Shape().settings("vllm", "cuda", "/tmp/ray", calls)
    assert "actor_rollout_ref.rollout.name=vllm" in stock and not [s for s in stock if OURS in s]
    graphs = Shape(graphs=True, samples=4).settings("vllm", "cuda", "/tmp/ray", calls)
    assert "actor_rollout_ref.rollout.cudagraph_capture_sizes=[1,2,4,8,16,32,64,128]" in graphs


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
