"""The HTTP front over a stand-in group: who may ask, what is refused, and answers when something breaks meanwhile."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from moebius.engine.config import EngineConfig, PolicyConfig
from moebius.rollout.config import RolloutConfig
from moebius.rollout.errors import BadInput
from moebius.rollout.serve_cli import check_exposure, for_serving, is_loopback, listen, read_token
from moebius.rollout.server import make_app
from moebius.rollout.server_errors import BODY_LIMIT
from moebius.rollout.server_format import Formatter
from moebius.rollout.server_types import ChatBody, CompletionBody
from moebius.rollout.service import RolloutService
from moebius.rollout.service_types import ServiceSettings
from moebius.rollout.types import Rollout, Sample
from tests.http_server import fuzz, serving
from tests.unit.service_group import FakeGroup

BODY: dict[str, Any] = {"prompt": [1, 2], "max_tokens": 5, "return_token_ids": True}


@pytest.fixture
def group() -> FakeGroup:
    return FakeGroup()


@pytest.fixture
def url(group: FakeGroup) -> Iterator[str]:
    service = RolloutService(group, ServiceSettings(idle_s=0.05, max_restarts=0))  # type: ignore[arg-type]
    with serving(make_app(service, token="secret")) as url:
        yield url


def call(url: str, body: Any = None, token: str | None = "secret", **more: Any) -> httpx.Response:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return httpx.request("GET" if body is None else "POST", url, json=body, headers=headers, timeout=20, **more)


def test_a_token_is_asked_for(url: str) -> None:
    for path in ("/metrics", "/v1/models", "/nothing"):
        for token in (None, "x", "secre", "secret2"):
            answer = call(url + path, token=token)
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["type"] == "authentication_error"
    assert call(f"{url}/v1/completions", BODY, token="Secret").status_code == 401
    assert call(f"{url}/health", token=None).status_code == 200
    assert call(f"{url}/v1/completions", BODY).status_code == 200
    assert "moebius_live_samples" in call(f"{url}/metrics").text


def test_bodies_without_a_length_are_limited(url: str) -> None:
    def endless() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(BODY_LIMIT // (1 << 20) + 2):
            yield b"a" * (1 << 20)

    try:
        answer = httpx.post(f"{url}/v1/completions", content=endless(), headers={"Authorization": "Bearer secret"})
        assert 400 <= answer.status_code < 500
    except httpx.TransportError:  # it does not even listen to the end
        pass
    assert call(f"{url}/v1/completions", BODY).status_code == 200


def test_a_loss_is_told(url: str, group: FakeGroup) -> None:
    group.hold = True
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(call, f"{url}/v1/completions", BODY)
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=BODY | {"stream": True}, headers={"Authorization": "Bearer secret"}
        ) as stream:
            while group.step is None or len(group.step.live) < 2:
                pass
            group.lose()
            told = list(stream.iter_lines())
        error = json.loads(told[0].removeprefix("data: "))["error"]
        assert "rank 1 died" in error["message"] and told[-2] == "data: [DONE]"
        assert whole.result().status_code == 503
    health = call(f"{url}/health", token=None)
    assert health.status_code == 503 and "rank 1 died" in health.json()["error"]["message"]
    answer = call(f"{url}/v1/completions", BODY)
    assert answer.status_code == 503 and answer.headers["retry-after"]


def test_admin_routes(url: str, group: FakeGroup) -> None:
    assert call(f"{url}/pause", {}, params={"mode": "keep"}).json() == {"status": "paused"}
    assert call(f"{url}/is_paused").json() == {"is_paused": True}
    assert call(f"{url}/resume", {}).json() == {"status": "resumed"}
    assert call(f"{url}/reset_prefix_cache", {}).json() == {"success": True} and group.log[-1] == "reset"
    wrong = call(f"{url}/pause", {}, params={"mode": "stop"})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "mode"
    assert call(f"{url}/abort_requests", {"request_ids": ["x"]}).json() == {"status": "aborted", "aborted": 0}
    assert call(f"{url}/is_sleeping").json() == {"is_sleeping": False}


def test_minus_infinity_can_be_written() -> None:
    sample = Sample(0, [4, 5], [-0.5, -math.inf], [{4: -0.5, 7: -math.inf}] * 2, None, "length", None, 0, 0)
    plain = Formatter(CompletionBody(prompt=[1], logprobs=2), "id", "m", None, [[1]])
    chat = Formatter(
        ChatBody(messages=[{"role": "user"}], logprobs=True, top_logprobs=2), "id", "m", None, [[1]]  # type: ignore[list-item]
    )  # fmt: skip
    for formatter in (plain, chat):
        text = json.dumps(formatter.answer([Rollout(0, [1], [sample])]), allow_nan=False)
        assert "-9999.0" in text and "token_id:4" in text


def test_without_a_token_only_programs_of_this_machine_are_served(group: FakeGroup) -> None:
    service = RolloutService(group, ServiceSettings(idle_s=0.05))  # type: ignore[arg-type]
    with serving(make_app(service)) as url:
        port = url.rpartition(":")[2]
        for headers in [
            {"Host": "evil.example"},
            {"Host": "[x"},
            {"Origin": "https://evil.example"},
            {"Origin": "null"},
        ]:
            answer = httpx.post(f"{url}/pause", headers=headers)
            assert answer.status_code == 403 and answer.json()["error"]["type"] == "permission_error"
        assert not service.stats().paused
        for headers in [{}, {"Host": f"localhost:{port}", "Origin": f"http://127.0.0.1:{port}"}, {"Host": "[::1]:1"}]:
            assert httpx.get(f"{url}/metrics", headers=headers).status_code == 200


def test_exposure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "127.8.8.8")] == [True] * 4
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"))
    check_exposure("127.0.0.1", None)
    check_exposure("0.0.0.0", "secret")
    with pytest.raises(BadInput, match="give a token"):
        check_exposure("0.0.0.0", None)
    file = tmp_path / "token"
    with pytest.raises(BadInput, match="cannot be read"):
        read_token(file)
    file.write_text("\n")
    with pytest.raises(BadInput, match="empty"):
        read_token(file)
    file.write_text("secret\n")
    assert read_token(file) == "secret"
    monkeypatch.delenv("MOEBIUS_TOKEN", raising=False)
    assert read_token(None) is None
    monkeypatch.setenv("MOEBIUS_TOKEN", "other")
    assert read_token(None) == "other"


def test_a_port_in_use_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(BadInput, match="cannot listen"):
        listen("127.0.0.1", taken.getsockname()[1])


def test_the_policy_of_serving() -> None:
    plain = RolloutConfig(ranks=2, engine=EngineConfig(model="m"))
    assert for_serving(plain).engine.policy.kind == "interactive"
    tuned = RolloutConfig(ranks=2, engine=EngineConfig(model="m", policy=PolicyConfig(threshold=9)))
    assert for_serving(tuned).engine.policy == PolicyConfig(kind="interactive", threshold=9)
    chosen = RolloutConfig(ranks=2, engine=EngineConfig(model="m", policy=PolicyConfig(kind="rollout")))
    assert for_serving(chosen, Path("r")).engine.policy.kind == "rollout"
    assert for_serving(chosen, Path("r")).service.reports == "r"


def test_no_request_breaks_it(group: FakeGroup) -> None:
    service = RolloutService(group, ServiceSettings(idle_s=0.05))  # type: ignore[arg-type]
    with serving(make_app(service, model_name="tiny")) as url:
        everything = set(httpx.get(f"{url}/openapi.json").json()["paths"])
        statuses = fuzz(url, 25, everything - {"/sleep", "/pause"}, seconds=3)
        assert statuses["/v1/completions"][200] and statuses["/v1/completions"][400]
        assert statuses["/update_weights"][400] and statuses["/init_weight_transfer_engine"][400]
        assert httpx.post(f"{url}/drop_weight_update").status_code == 200
        assert httpx.post(f"{url}/v1/completions", json=BODY).status_code == 200, "it serves on"
        assert fuzz(url, 25, {"/sleep", "/pause"})["/pause"][200]
        assert httpx.post(f"{url}/resume").status_code == 200 and httpx.post(f"{url}/wake_up").status_code == 200
        assert httpx.post(f"{url}/v1/completions", json=BODY).status_code == 200
