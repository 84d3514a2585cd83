"""Sends a rollout job to a Ray cluster (`moebius rollout --submit`) and shows its log until it ends."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from moebius.rollout.errors import BadInput, MoebiusError

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
# Ray kills a stopped job after 3 s otherwise; ending a step and closing the engines takes longer.
STOP_WAIT_S = 60


def submit_job(
    config: str | Path,
    settings: Sequence[str] = (),
    *,
    fresh: bool = False,
    address: str | None = None,
    working_dir: str | Path = ".",
    wait: bool = True,
    echo: Callable[[str], None] = print,
) -> int:
    """Submit `python -m moebius.rollout.job` with a config file below `working_dir`, which Ray copies to the cluster.

    `settings` are overrides; `address` is the cluster's dashboard (None: RAY_API_SERVER_ADDRESS or this machine's).
    Returns 0 when the job succeeded or `wait` is off, else 1. Ctrl-C stops the showing, not the job.

    Raises BadInput for a config elsewhere, MoebiusError when the cluster cannot be reached or refuses the job.
    """
    folder = Path(working_dir).resolve()
    path = Path(config).resolve()
    if not path.is_relative_to(folder):
        raise BadInput(f"{config}: must lie below {folder}, which is copied to the cluster; run this where it does")
    where = address or os.environ.get("RAY_API_SERVER_ADDRESS") or DEFAULT_ADDRESS
    client = _client(where)
    command = entrypoint(path.relative_to(folder), settings, fresh=fresh, python=_python(where))
    environment = {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S)}
    try:
        job_id = client.submit_job(
            entrypoint=command, runtime_env={"working_dir": str(folder), "env_vars": environment}
        )
    except (RuntimeError, ValueError, ConnectionError) as error:
        raise MoebiusError(f"the cluster at {where} did not take the job: {error}") from error
    echo(f"submitted {job_id}: {command}")
    echo(f"  stop it with: ray job stop --address {where} {job_id}")
    return _follow(client, job_id, where, echo) if wait else 0


def entrypoint(config: str | Path, settings: Sequence[str], *, fresh: bool, python: str) -> str:
    """The shell command of a job."""
    words = [python, "-m", "moebius.rollout.job", "--config", str(config)]
    for setting in settings:
        words += ["--set", setting]
    return shlex.join([*words, "--fresh"] if fresh else words)


def _python(address: str) -> str:
    """On this machine this very Python; elsewhere whatever the cluster's environment calls python."""
    return sys.executable if urlparse(address).hostname in ("127.0.0.1", "localhost", "::1") else "python"


def _client(address: str) -> Any:
    from ray.job_submission import JobSubmissionClient

    try:
        return JobSubmissionClient(address)
    except (RuntimeError, ValueError, ConnectionError) as error:
        raise MoebiusError(
            f"no Ray dashboard at {address}: {error}\n"
            "  Start a cluster with `ray start --head`, or give the address it prints: --address http://HOST:8265"
        ) from error


def _follow(client: Any, job_id: str, address: str, echo: Callable[[str], None]) -> int:
    async def show() -> None:
        async for text in client.tail_job_logs(job_id):
            sys.stdout.write(text)
            sys.stdout.flush()

    try:
        asyncio.run(show())
    except KeyboardInterrupt:
        echo(f"\n{job_id} goes on; see it with: ray job logs --address {address} --follow {job_id}")
        return 0
    info = client.get_job_info(job_id)
    status = str(getattr(info.status, "value", info.status))
    echo(f"{job_id}: {status.lower()}{f' ({info.message})' if info.message else ''}")
    return 0 if status == "SUCCEEDED" else 1
