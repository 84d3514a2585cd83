"""A server on a thread of the test's process, over a real group or a stand-in; and requests drawn from its schema."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import schemathesis
import uvicorn
from hypothesis import HealthCheck, Phase, given, settings

from moebius.rollout.serve_cli import listen


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """Serve the application on a free port of loopback; gives its address."""
    sock = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + 30
        while not server.started:
            assert thread.is_alive() and time.monotonic() < deadline, "the server did not start"
            time.sleep(0.02)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the server did not end"


def fuzz(url: str, examples: int, paths: Collection[str], seconds: float = 30) -> dict[str, Counter[int]]:
    """Requests drawn from the OpenAPI description to each of `paths`; answers of 500 and above fail.

    Returns how often each status came, by path. Samples are kept few and short.
    """
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    found: dict[str, Counter[int]] = {}
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path in paths:
            found[operation.path] = _fuzz_one(operation, examples, time.monotonic() + seconds)
    assert set(found) == set(paths)
    return found


def _fuzz_one(operation: Any, examples: int, deadline: float) -> Counter[int]:
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=examples, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=operation.as_strategy())
    def send(case: Any) -> None:
        if time.monotonic() > deadline:
            return
        if isinstance(case.body, dict):
            for key, most in (("max_tokens", 3), ("max_completion_tokens", 3), ("n", 4)):
                if isinstance(case.body.get(key), int):
                    case.body[key] = min(case.body[key], most)
        answer = case.call(timeout=20)
        statuses[answer.status_code] += 1
        assert answer.status_code < 500, f"{operation.path}: {answer.status_code} {answer.text} to {case.body!r}"
        if answer.status_code >= 400:
            assert answer.json()["error"]["message"], answer.text

    send()
    return statuses
