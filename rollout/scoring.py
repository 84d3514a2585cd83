"""Rewards of samples: a function `(text, answer) -> float` named as module:function, run in processes of its own.

The function may take a third argument `meta`: a mapping with what the source says of the question, such as topic and
difficulty. A reward function can hang or crash on odd text; here that costs one sample its reward, not the step.
"""

from __future__ import annotations

import importlib
import inspect
import math
import multiprocessing
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from moebius.rollout.errors import BadInput, MoebiusError

if TYPE_CHECKING:
    from moebius.rollout.datasets import Question
    from moebius.rollout.types import Rollout

SHIPPED = {"math": "moebius.rollout.scoring:math_score"}
START_S = 120.0  # for a scorer's module to be imported
_POLL_S = 0.2

Scorer = Callable[[str, str, Mapping[str, Any]], float]


class ToScore(NamedTuple):
    """A sample's text, the right answer, and what else is known of the question."""

    text: str
    answer: str
    meta: Mapping[str, Any]


@dataclass(slots=True)
class Scores:
    """Rewards in the order of the samples; None where there is none, and why, each reason with its count."""

    rewards: list[float | None]
    failures: dict[str, int] = field(default_factory=dict)

    @property
    def mean(self) -> float | None:
        """Mean of the rewards there are."""
        known = [reward for reward in self.rewards if reward is not None]
        return sum(known) / len(known) if known else None

    @property
    def words(self) -> str:
        """The mean reward, and how many samples have none; nothing when there were no samples."""
        missing = self.rewards.count(None)
        parts = [] if self.mean is None else [f"reward {self.mean:.3f}"]
        return ", ".join(parts + ([f"{missing} samples without reward"] if missing else []))


def load_scorer(name: str) -> Scorer:
    """The function that "math" or "module:function" names; also found in the working directory.

    Raises BadInput when there is no such module or function, or it takes other arguments than (text, answer[, meta]).
    """
    module_name, colon, function_name = SHIPPED.get(name, name).partition(":")
    if not colon or not module_name or not function_name:
        raise BadInput(f"scorer '{name}': write it as module:function, or one of: {', '.join(SHIPPED)}")
    if name == "math":
        _need_math_verify()
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise BadInput(f"scorer '{name}': cannot import {module_name}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise BadInput(f"scorer '{name}': {module_name} has no function {function_name}")
    parameters = inspect.signature(function).parameters
    if "meta" in parameters:
        return lambda text, answer, meta: function(text, answer, meta=meta)
    try:
        inspect.signature(function).bind("", "")
    except TypeError as error:
        raise BadInput(f"scorer '{name}': must take (text, answer) or (text, answer, meta): {error}") from error
    return lambda text, answer, meta: function(text, answer)


def _need_math_verify() -> None:
    try:
        import math_verify  # noqa: F401
    except ImportError as error:
        raise BadInput("scorer 'math' needs math-verify: pip install -e '.[math]'") from error


_BOXED = re.compile(r"\\boxed\s*\{")


def math_score(text: str, answer: str) -> float:
    """1.0 when the final answer in `text` equals `answer`, else 0.0, as math-verify compares them.

    What stands before a closing </think> is not looked at. The last \\boxed{...} is compared as text first: answers
    such as "Yes" are no mathematics. Call it in the main thread of a process: math-verify's time limit needs that.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    text = text.rpartition("</think>")[2]
    boxed = last_boxed(text)
    if boxed is not None and _plain(boxed) == _plain(answer):
        return 1.0
    latex = LatexExtractionConfig()
    right = parse(f"\\boxed{{{answer}}}", extraction_config=[latex])
    given = parse(text, extraction_config=[ExprExtractionConfig(), latex])
    return float(bool(right and given and verify(right, given)))


def last_boxed(text: str) -> str | None:
    """What stands in the last complete \\boxed{...}, braces matched; None without one."""
    for start in reversed([match.end() for match in _BOXED.finditer(text)]):
        depth = 1
        for i in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            if depth == 0:
                return text[start:i]
    return None


def _plain(text: str) -> str:
    inner = re.sub(r"\\(?:text|mathrm|textbf)\s*\{([^{}]*)\}", r"\1", text)
    return re.sub(r"\s+|\$", "", inner).rstrip(".").lower()


@dataclass
class _Worker:
    process: Any
    connection: Connection
    item: int | None = None  # what it works on, since when
    since: float = 0.0


class ScorerPool:
    """Processes that score; a context manager. Raises BadInput when the scorer cannot be loaded.

    A process that takes longer than `timeout_s` for a sample, or ends, is replaced, and the sample has no reward.
    """

    def __init__(self, name: str, *, workers: int = 2, timeout_s: float = 30.0) -> None:
        self.name, self.timeout_s = name, timeout_s
        # Not forked: the job's process has Ray's threads.
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []
        try:
            for _ in range(workers):
                self._workers.append(self._start())
        except BaseException:
            self.close()
            raise

    def score(self, items: Sequence[ToScore], check: Callable[[], None] = lambda: None) -> Scores:
        """Rewards of `items`; `check` is called now and then and may raise to break off.

        Raises MoebiusError when the function raised, hung or returned no number for every one of them.
        """
        scores = Scores([None] * len(items))
        waiting = deque(range(len(items)))
        while waiting or any(worker.item is not None for worker in self._workers):
            check()
            for worker in self._workers:
                if worker.item is None and waiting:
                    worker.item, worker.since = waiting.popleft(), time.monotonic()
                    try:
                        worker.connection.send(tuple(items[worker.item]))
                    except OSError:  # it has ended; found below
                        continue
            busy = {worker.connection: worker for worker in self._workers if worker.item is not None}
            for ready in wait(list(busy), timeout=_POLL_S):
                self._take(busy[ready], scores)  # type: ignore[index]
            for worker in self._workers:
                if worker.item is not None and time.monotonic() - worker.since > self.timeout_s:
                    self._fail(worker, f"took longer than {self.timeout_s:g} s", scores)
        if items and len(items) == sum(scores.failures.values()):
            raise MoebiusError(
                f"scorer '{self.name}' gave no reward for any of {len(items)} samples: {scores.failures}"
            )
        return scores

    def _take(self, worker: _Worker, scores: Scores) -> None:
        assert worker.item is not None
        try:
            reward, failure = worker.connection.recv()
        except (EOFError, OSError):
            self._fail(worker, "its process ended", scores)
            return
        scores.rewards[worker.item] = reward
        if failure:
            scores.failures[failure] = scores.failures.get(failure, 0) + 1
        worker.item = None

    def _fail(self, worker: _Worker, reason: str, scores: Scores) -> None:
        scores.failures[reason] = scores.failures.get(reason, 0) + 1
        worker.process.kill()
        worker.process.join()
        worker.connection.close()
        self._workers[self._workers.index(worker)] = self._start()

    def _start(self) -> _Worker:
        here, there = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(there, self.name), daemon=True)
        process.start()
        there.close()
        problem = f"scorer '{self.name}' did not start in {START_S:.0f} s"
        try:
            problem = here.recv() if here.poll(START_S) else problem
        except (EOFError, OSError):
            problem = f"the process of scorer '{self.name}' ended at its start"
        if problem:
            process.kill()
            process.join()
            raise BadInput(problem)
        return _Worker(process, here)

    def close(self) -> None:
        """End the processes."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.process.join()
            worker.connection.close()

    def __enter__(self) -> ScorerPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def started(name: str | None, **settings: Any) -> AbstractContextManager[ScorerPool | None]:
    """A pool for the scorer, to be closed; None without a scorer."""
    return nullcontext() if name is None else ScorerPool(name, **settings)


def rewards_of(
    pool: ScorerPool | None, rollouts: Sequence[Rollout], questions: Sequence[Question]
) -> tuple[list[list[float | None]] | None, str]:
    """Rewards by prompt and sample, and words about them; None and no words without a pool.

    `questions[i]` belongs to prompt i.
    """
    if pool is None:
        return None, ""
    scores = pool.score(to_score(rollouts, questions))
    flat = iter(scores.rewards)
    return [[next(flat) for _ in rollout.samples] for rollout in rollouts], scores.words


def to_score(rollouts: Sequence[Rollout], questions: Sequence[Question]) -> list[ToScore]:
    """What a scorer gets of each sample, by prompt and sample. `questions[i]` belongs to prompt i."""
    pairs = [(sample, questions[rollout.prompt_index]) for rollout in rollouts for sample in rollout.samples]
    return [ToScore(sample.text or "", question.answer, question.meta) for sample, question in pairs]


def _serve(connection: Connection, name: str) -> None:
    """A scoring process: first says what is wrong with the scorer (nothing: ""), then answers (reward, failure)."""
    try:
        scorer = load_scorer(name)
    except Exception as error:  # noqa: BLE001  (a user's module may raise what it likes)
        connection.send(str(error) if isinstance(error, BadInput) else f"scorer '{name}': {error!r} at import")
        return
    connection.send("")
    while True:
        try:
            text, answer, meta = connection.recv()
        except (EOFError, OSError):  # the job has ended
            return
        try:
            value = float(scorer(text, answer, meta))
            result = (value, "") if math.isfinite(value) else (None, f"returned {value}")
        except Exception as error:  # noqa: BLE001  (a user's function, on text that a model made up)
            result = (None, f"raised {type(error).__name__}: {error}"[:200])
        connection.send(result)
