"""The rank actor's own logic, with a stand-in for the engine: threads, aborts, errors."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest

from moebius.engine.config import EngineConfig
from moebius.engine.inbox import AbortBox, Inbox
from moebius.engine.types import SampleKey, SampleRequest, StepOutcome, StepStats
from moebius.rollout.rank_setup import RankSetup, rank_environment
from moebius.rollout.worker import EngineError, RankWorker


class SlowEngine:
    """Runs a step until told to finish, and keeps aborts until the end of the next step, as the engine does."""

    def __init__(self) -> None:
        self.started, self.finish = threading.Event(), threading.Event()
        self.aborts: list[Any] = []
        self.seen: list[list[Any]] = []  # aborts in force, by step
        self.threads: set[str] = set()
        self.inbox = Inbox()

    def run_step(self, requests: list[Any], on_iteration: Any, on_results: Any = None) -> StepOutcome:
        self.threads.add(threading.current_thread().name)
        on_iteration(1, 5, "EP", 3)
        on_iteration(2, 4, "TP", 4)
        self.started.set()
        assert self.finish.wait(10)
        self.seen.append(self.aborts)
        self.aborts = []
        return StepOutcome([], StepStats(rank=0, world_size=2))

    def abort(self, keys: Any) -> None:
        self.aborts.append(keys)

    def park(self) -> None:
        self.inbox.park()

    def kv_use(self) -> float:
        return 0.0

    def clear_aborts(self) -> None:
        self.aborts = []

    def begin_update(self, version: int, mode: str) -> None:
        self.threads.add(threading.current_thread().name)
        raise {0: ValueError("no"), 1: KeyError("x"), 2: OddError("odd"), 3: OddValueError("odd")}[version]


class OddError(Exception):
    """An exception class that the driver does not have."""


class OddValueError(ValueError):
    """Likewise, but about a value."""


@pytest.fixture
def engine() -> SlowEngine:
    return SlowEngine()


@pytest.fixture
def worker(engine: SlowEngine) -> RankWorker:
    worker = RankWorker(0)
    worker._engine = engine  # type: ignore[assignment]
    return worker


def run_in_background(worker: RankWorker, serial: int) -> threading.Thread:
    thread = threading.Thread(target=worker.run_step, args=(serial, []))
    thread.start()
    return thread


def test_questions_are_answered_during_a_step(worker, engine):
    thread = run_in_background(worker, 1)
    assert engine.started.wait(10)
    assert worker.ping() == 0
    progress = worker.progress()
    assert (progress.done, progress.live, progress.layout, progress.tokens) == (2, 4, "TP", 7)
    engine.finish.set()
    thread.join()


def test_all_engine_calls_come_from_one_thread(worker, engine):
    engine.finish.set()
    for serial in (1, 2):
        run_in_background(worker, serial).join()
    with pytest.raises(ValueError, match="no"):
        worker.begin_update(0)
    assert len(engine.threads) == 1
    assert threading.current_thread().name not in engine.threads


def test_aborts_reach_their_own_step_only(worker, engine):
    worker.abort(1, [SampleKey(0, 0)])  # overtakes its step
    thread = run_in_background(worker, 1)
    assert engine.started.wait(10)
    worker.abort(1, None)
    engine.finish.set()
    thread.join()
    worker.abort(1, None)  # too late
    engine.abort(None)  # as if it had come just after the engine was done
    run_in_background(worker, 2).join()
    assert engine.seen == [[[SampleKey(0, 0)], None], []]


@pytest.mark.parametrize(
    ("version", "kind", "words"),
    [(0, ValueError, "^no$"), (1, KeyError, "x"), (2, EngineError, "^OddError: odd$"), (3, ValueError, "^OddValue")],
)
def test_errors_are_ones_the_driver_can_load(worker, version, kind, words):
    with pytest.raises(kind, match=words) as error:
        worker.begin_update(version)
    assert error.type.__module__ in ("builtins", "moebius.rollout.worker")


def test_calls_before_start_are_refused():
    with pytest.raises(RuntimeError, match="rank 1 has no engine"):
        RankWorker(1).run_step(1, [])


def test_environment_of_a_gpu_rank():
    setup = RankSetup(EngineConfig(model="m"), 1, 2, "cuda", ["4", "6"], 1234, "moebius-1-2-00000000")
    env = rank_environment(setup)
    assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"], env["MASTER_PORT"]) == ("1", "1", "2", "1234")
    assert env["CUDA_VISIBLE_DEVICES"] == "4,6"
    assert env["NCCL_NVLS_ENABLE"] == "0"
    assert "OMP_NUM_THREADS" not in env


def test_environment_of_a_cpu_rank():
    env = rank_environment(RankSetup(EngineConfig(model="m"), 0, 2, "cpu", [], 1234, "moebius-1-2-00000000"))
    assert env["OMP_NUM_THREADS"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in env
    assert env["MOEBIUS_GROUP_ID"] == "moebius-1-2-00000000"


@pytest.mark.parametrize(("module", "forbidden"), [("group", ["vllm"]), ("worker", ["vllm", "torch"])])
def test_importing_it_does_not_import_vllm(module, forbidden):
    code = f"import sys, moebius.rollout.{module}; print([m for m in {forbidden} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def request(number: int) -> SampleRequest:
    return SampleRequest(SampleKey(number, 0), [1], {}, 0)


@pytest.mark.parametrize("order", ["submitted first", "closed first", "before the step"])
def test_a_step_closes_when_all_requests_have_come(worker, engine, order):
    """Ray may run `close_step` before a `submit` that was sent earlier, and both before the step."""
    first, second = [request(0)], [request(1), request(2)]
    if order == "before the step":
        worker.close_step(1, 3)
        worker.submit(1, first)
    thread = threading.Thread(target=worker.run_step, args=(1, [], True))
    thread.start()
    assert engine.started.wait(10)
    if order == "submitted first":
        worker.submit(1, first)
        worker.submit(1, second)
        worker.close_step(1, 3)
    else:
        if order == "closed first":
            worker.close_step(1, 3)
            worker.submit(1, first)
        assert engine.inbox.take().is_open, "two requests are missing"
        worker.submit(1, second)
    assert not engine.inbox.take().is_open
    engine.finish.set()
    thread.join()


@pytest.mark.parametrize("order", ["parked first", "submitted first", "before the step"])
def test_a_step_parks_when_all_requests_have_come(worker, engine, order):
    """A request that comes after the wish to park must not be lost."""
    if order == "before the step":
        worker.park_step(1, 2)
        worker.submit(1, [request(0)])
    thread = threading.Thread(target=worker.run_step, args=(1, [], True))
    thread.start()
    assert engine.started.wait(10)
    if order == "submitted first":
        worker.submit(1, [request(0), request(1)])
        assert not engine.inbox.take().is_parking
        worker.park_step(1, 2)
    else:
        if order == "parked first":
            worker.park_step(1, 2)
            worker.submit(1, [request(0)])
        assert not engine.inbox.take().is_parking, "a request is missing"
        worker.submit(1, [request(1)])
    taken = engine.inbox.take()
    assert taken.is_parking and not taken.is_open
    engine.finish.set()
    thread.join()


def test_an_early_abort_of_all_ends_what_was_submitted_before_it(worker, engine):
    worker.submit(1, [request(0)])
    worker.abort(1, None)
    worker.submit(1, [request(1)])
    box = AbortBox(engine.inbox)
    engine.abort = box.add  # type: ignore[method-assign]
    thread = threading.Thread(target=worker.run_step, args=(1, [], True))
    thread.start()
    assert engine.started.wait(10)
    assert box.among({"a": SampleKey(0, 0), "b": SampleKey(1, 0)}) == ["a"]
    engine.finish.set()
    thread.join()


def test_an_abort_of_all_does_not_end_what_comes_later():
    inbox = Inbox()
    box = AbortBox(inbox)
    inbox.open()
    inbox.submit([request(1)])
    box.add(None)  # the step has not begun: all that it begins with are meant
    box.begin([SampleKey(0, 0)])
    inbox.submit([request(2)])
    keys = {str(i): SampleKey(i, 0) for i in range(5)}
    assert box.among(keys) == ["0", "1"]
    assert box.among(keys) == [], "told once"
    box.add(None)
    inbox.submit([request(3)])
    assert box.among(keys) == ["0", "1", "2"]
    box.add([SampleKey(3, 0)])
    box.clear()
    assert box.among(keys) == []


def test_a_whole_step_after_a_parked_one_does_not_park(worker, engine):
    """The wish to park was for the step before; `close_step` of the next one must not act on it."""
    first = threading.Thread(target=worker.run_step, args=(1, [], True))
    first.start()
    assert engine.started.wait(5)
    worker.park_step(1, 0)
    assert engine.inbox.take().is_parking
    engine.finish.set()
    first.join(5)
    engine.started.clear()
    engine.finish.clear()
    second = threading.Thread(target=worker.run_step, args=(2, [], False, True))
    second.start()
    assert engine.started.wait(5)
    worker.close_step(2, 0)
    assert not engine.inbox.take().is_parking
    engine.finish.set()
    second.join(5)
