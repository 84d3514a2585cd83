"""The process that uses a GPU for a moment, with libcuda replaced: which calls, in what order, and what it says."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moebius.engine.settle import settle
from moebius.kernels.visitor import send_visitor, visit

CALLS = (
    "cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuMemAlloc_v2", "cuMemsetD8_v2",
    "cuCtxSynchronize",
)  # fmt: skip


class Libcuda:
    """Notes calls; the one called `broken` fails."""

    def __init__(self, broken: str = "") -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._broken = broken

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append((name, *arguments))
            return 100 if name == self._broken else 0

        return call


def test_it_writes_to_memory_of_the_device_and_waits() -> None:
    cuda = Libcuda()
    visit(cuda, 3)
    assert [name for name, *_ in cuda.calls] == list(CALLS)
    assert cuda.calls[1][2] == 3


@pytest.mark.parametrize("broken", CALLS)
def test_a_call_that_fails_is_named(broken: str) -> None:
    cuda = Libcuda(broken)
    with pytest.raises(RuntimeError, match=f"{broken} returned 100"):
        visit(cuda, 0)
    assert cuda.calls[-1][0] == broken


def test_the_process_says_why_it_could_not() -> None:
    problem = send_visitor(10_000)  # there is no such GPU, here or anywhere
    assert problem is not None
    assert "libcuda" in problem or "cuDeviceGet returned" in problem or "cuInit returned" in problem


def test_what_is_run_and_what_comes_of_it() -> None:
    seen: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        seen.append(command)
        return SimpleNamespace(returncode=0, stderr="")

    assert send_visitor(1, run=run) is None
    assert seen[0][0] == sys.executable and seen[0][-2].endswith("visitor.py") and seen[0][-1] == "1"
    silent = SimpleNamespace(returncode=-9, stderr="")
    assert send_visitor(1, run=lambda *_, **__: silent) == "it ended with status -9"


def test_a_process_that_hangs_or_cannot_start_is_no_error() -> None:
    def slow(command: list[str], timeout: float, **_: Any) -> Any:
        raise subprocess.TimeoutExpired(command, timeout)

    def missing(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError("no python")

    assert "timed out after 2 seconds" in str(send_visitor(0, 2, run=slow))
    assert send_visitor(0, run=missing) == "no python"


@pytest.mark.parametrize("executable", [None, ""])
def test_a_python_without_a_name_is_no_error(monkeypatch: pytest.MonkeyPatch, executable: str | None) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    assert "executable" in str(send_visitor(0))


def test_without_a_gpu_there_is_nothing_to_settle() -> None:
    assert settle(torch.device("cpu")) == []
