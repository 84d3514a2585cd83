"""A Ray cluster of its own, as `ray start --head` makes it, that disturbs no other on the machine."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from ray.job_submission import JobSubmissionClient

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
START_S = 180.0
ENVIRONMENT = {
    "PATH": f"{BIN}:{os.environ.get('PATH', '')}",  # what jobs call python
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_JOB_STOP_WAIT_TIME_S": "60",
    "RAY_worker_niceness": "0",  # as in tests/conftest.py
}


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for probe in sockets:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in sockets]
    for probe in sockets:
        probe.close()
    return ports


class RayHead:
    """A context manager: starts the cluster with its own temporary folder and ports, and ends all its processes.

    Never `ray stop`: that ends every cluster of the user.
    """

    def __init__(self, cpus: int = 4) -> None:
        # Ray's sockets need a short path.
        self.temp = Path(tempfile.mkdtemp(prefix="mray", dir="/tmp"))
        names = (
            "port", "dashboard-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port",
            "ray-client-server-port", "metrics-export-port", "node-manager-port", "object-manager-port",
            "runtime-env-agent-port",
        )  # fmt: skip
        ports = dict(zip(names, free_ports(len(names)), strict=True))
        self.dashboard = f"http://127.0.0.1:{ports['dashboard-port']}"
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | ENVIRONMENT
        command = [str(BIN / "ray"), "start", "--head", "--block", f"--num-cpus={cpus}", f"--temp-dir={self.temp}"]
        command += ["--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1", "--include-dashboard=true"]
        command += ["--min-worker-port=0", "--max-worker-port=0", f"--object-store-memory={256 << 20}"]
        command += [f"--{name}={port}" for name, port in ports.items()]
        self._log = (self.temp / "head.log").open("wb")
        self._process = subprocess.Popen(
            command, env=self.environment, stdout=self._log, stderr=self._log, start_new_session=True
        )

    def __enter__(self) -> RayHead:
        try:
            self.client = self._connect()
        except BaseException:
            self._end()
            raise
        return self

    def _connect(self) -> JobSubmissionClient:
        deadline = time.monotonic() + START_S
        while True:
            assert self._process.poll() is None, (self.temp / "head.log").read_text()
            try:
                client = JobSubmissionClient(self.dashboard)
                client.list_jobs()
                return client
            except (ConnectionError, RuntimeError):  # not up yet
                assert time.monotonic() < deadline, (self.temp / "head.log").read_text()
                time.sleep(0.5)

    def run(self, *command: str, seconds: float = 300) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment (ray, moebius, python) in the repository root."""
        return subprocess.run(
            [str(BIN / command[0]), *command[1:]],
            cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=seconds, check=False,
        )  # fmt: skip

    def submit(self, *arguments: str) -> str:
        """`ray job submit --working-dir . -- python -m moebius.rollout.job ...`, not waiting; returns the job's id."""
        job_id = f"job-{time.monotonic_ns()}"
        command = ["ray", "job", "submit", "--address", self.dashboard, "--working-dir", ".", "--no-wait"]
        done = self.run(*command, "--submission-id", job_id, "--", "python", "-m", "moebius.rollout.job", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return job_id

    def wait(self, job_id: str, seconds: float = 300) -> str:
        """The job's status when it has ended."""
        deadline = time.monotonic() + seconds
        while not (status := self.client.get_job_status(job_id)).is_terminal():
            assert time.monotonic() < deadline, self.logs(job_id)
            time.sleep(0.3)
        return str(status.value)

    def wait_for_log(self, job_id: str, words: str, seconds: float = 300) -> None:
        """Until the job's log holds `words`."""
        deadline = time.monotonic() + seconds
        while words not in (log := self.logs(job_id)):
            ended = self.client.get_job_status(job_id).is_terminal()
            assert not ended and time.monotonic() < deadline, f"no '{words}' in the log:\n{log}"
            time.sleep(0.2)

    def logs(self, job_id: str) -> str:
        return str(self.client.get_job_logs(job_id))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        """End exactly the processes that carry this cluster's folder in their command line or environment."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        deadline = time.monotonic() + 20
        while (left := _processes_of(str(self.temp))) and time.monotonic() < deadline:
            time.sleep(0.3)
        for pid in left:
            _kill(pid)
        self._log.close()
        shutil.rmtree(self.temp, ignore_errors=True)


def _processes_of(folder: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                text = (entry / "cmdline").read_bytes()
            except OSError:  # it has ended
                continue
            if folder.encode() in text:
                found.append(int(entry.name))
    return found


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def job_pid(out: Path) -> int:
    """Process of the job that writes to `out`."""
    return int((out / ".lock").read_text().split()[1])


def arguments(**settings: Any) -> list[str]:
    """--set KEY=VALUE of settings, their dots written as double underscores."""
    return [word for key, value in settings.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]
