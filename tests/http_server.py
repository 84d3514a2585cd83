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
from hypothesis import strategies as st

from moebius.rollout.serve_cli import listen

LEAST = 12  # requests to each path


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

    After `seconds` a path gets no more, but at least LEAST, however busy the machine is. Returns how often each status
    came, by path. Samples are kept few and short.
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
    # With all settings at once hardly a request is right, and most of them fail for the same few reasons.
    settings_kept = st.sampled_from([0, 1, 3, 99] if operation.path.endswith("completions") else [99])

    @settings(
        max_examples=examples, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=operation.as_strategy(), kept=settings_kept)
    def send(case: Any, kept: int) -> None:
        if time.monotonic() > deadline and statuses.total() >= LEAST:
            return
        if isinstance(case.body, dict):
            for key in [key for key in case.body if key not in ("prompt", "messages")][kept:]:
                del case.body[key]
            if "prompt" in case.body and not (kept and statuses):
                case.body = {"prompt": "2 + 2 ="}  # one that surely is; the first in any case
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
