"""`moebius serve` as its documentation says to start it, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from moebius.rollout.demo_assets import make_tiny_model
from moebius.rollout.shm import start_ticks
from tests.segments import segment_names

ROOT = Path(__file__).parents[2]


def test_it_serves_until_it_is_told_to_end(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", num_layers=2)
    token = tmp_path / "token"
    token.write_text("secret\n")
    program, config = Path(sys.executable).parent / "moebius", ROOT / "configs" / "serve_tiny_cpu.yaml"
    command = [
        str(program), "serve", "--config", str(config),
        "--set", f"engine.model={model}", "--set", "service.idle_s=0.1", "--port", "0", "--model-name", "tiny",
        "--reports", str(tmp_path / "reports"), "--token-file", str(token),
    ]  # fmt: skip
    # A folder of its own, so that no other cluster's leftovers count.
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    env |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    segments = segment_names()
    log = (tmp_path / "log").open("w+")
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=env, cwd=tmp_path)
    assert server.stdout is not None
    try:
        lines = []
        for line in server.stdout:
            lines.append(line)
            if line.startswith("serving on "):
                break
        else:
            pytest.fail("it did not start: " + "".join(lines) + (tmp_path / "log").read_text())
        url = lines[-1].split()[2]
        assert url.startswith("http://127.0.0.1:") and "a token is asked for" in lines[-1]
        headers = {"Authorization": "Bearer secret"}
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert httpx.get(f"{url}/v1/models", headers=headers).json()["data"][0]["id"] == "tiny"
        answer = httpx.post(
            f"{url}/v1/completions", headers=headers, json={"prompt": "2 + 2 =", "max_tokens": 4}, timeout=60
        )
        assert answer.json()["usage"]["completion_tokens"] >= 1
        info = httpx.get(f"{url}/server_info", headers=headers, params={"config_format": "json"}).json()
        assert info["moebius"]["engine"]["policy"]["kind"] == "interactive"
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
            raise
    assert server.returncode == 0, (tmp_path / "log").read_text()
    assert start_ticks(server.pid) is None
    reports = sorted((tmp_path / "reports").glob("step_*.json"))
    assert reports and json.loads(reports[0].read_text())["counts"]["samples"] == 1
    left = {name for name in segment_names() - segments if "moebius" in name or "cpushm" in name}
    assert not left
