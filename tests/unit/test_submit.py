"""What is sent to a cluster, and what is said when it is not there or the job fails."""

from __future__ import annotations

import shlex
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moebius.rollout import submit
from moebius.rollout.errors import BadInput, MoebiusError
from tests.integration.ray_head import free_ports


class FakeClient:
    """JobSubmissionClient's interface; the job writes two lines and ends with `status`."""

    def __init__(self, status: str = "SUCCEEDED") -> None:
        self.status, self.sent = status, {}  # type: ignore[var-annotated]

    def submit_job(self, **sent: Any) -> str:
        self.sent = sent
        return "raysubmit_1"

    async def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
        yield "step 0\n"
        yield "step 1\n"

    def get_job_info(self, job_id: str) -> Any:
        return SimpleNamespace(status=self.status, message="exit code 2" if self.status == "FAILED" else None)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "configs" / "a b.yaml"
    path.parent.mkdir()
    path.touch()
    return path


def send(config: Path, client: FakeClient, monkeypatch: pytest.MonkeyPatch, **more: Any) -> tuple[int, list[str]]:
    said: list[str] = []
    monkeypatch.setattr(submit, "_client", lambda address: client)
    code = submit.submit_job(config, ["job.out='/x y'"], working_dir=config.parents[1], echo=said.append, **more)
    return code, said


def test_a_job_is_sent_and_shown(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = FakeClient()
    code, said = send(config, client, monkeypatch, fresh=True)
    assert code == 0
    words = shlex.split(client.sent["entrypoint"])
    assert words == [
        sys.executable, "-m", "moebius.rollout.job", "--config", "configs/a b.yaml", "--set", "job.out='/x y'",
        "--fresh",
    ]  # fmt: skip
    environment = client.sent["runtime_env"]
    assert environment["working_dir"] == str(config.parents[1].resolve())
    assert int(environment["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) > 3
    assert capsys.readouterr().out == "step 0\nstep 1\n"
    assert (
        "ray job stop --address http://127.0.0.1:8265 raysubmit_1" in said[1] and said[-1] == "raysubmit_1: succeeded"
    )


def test_elsewhere_python_is_the_clusters(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient()
    send(config, client, monkeypatch, address="http://head.example:8265", wait=False)
    assert client.sent["entrypoint"].startswith("python -m ")


def test_a_failed_job_is_1_and_detached_is_not_waited_for(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = send(config, FakeClient("FAILED"), monkeypatch)
    assert code == 1 and said[-1] == "raysubmit_1: failed (exit code 2)"
    assert send(config, FakeClient("FAILED"), monkeypatch, wait=False)[0] == 0


def test_ctrl_c_ends_the_showing_only(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient()

    def interrupted(coroutine: Any) -> None:
        coroutine.close()
        raise KeyboardInterrupt

    monkeypatch.setattr(submit.asyncio, "run", interrupted)
    code, said = send(config, client, monkeypatch)
    assert code == 0 and "goes on; see it with: ray job logs" in said[-1]


def test_a_config_outside_is_refused(config: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="must lie below"):
        submit.submit_job(config, working_dir=tmp_path / "configs" / "deeper")


def test_no_cluster_is_said_with_what_to_do(config: Path) -> None:
    [port] = free_ports(1)
    with pytest.raises(MoebiusError, match=r"no Ray dashboard at .*\n.*ray start --head"):
        submit.submit_job(config, working_dir=config.parents[1], address=f"http://127.0.0.1:{port}")
