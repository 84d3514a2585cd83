"""Scorers: found or refused in words, the shipped one, and processes that hang, crash or raise."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import pytest

from moebius.rollout.datasets import Question
from moebius.rollout.errors import BadInput, MoebiusError
from moebius.rollout.scoring import (
    ScorerPool,
    Scores,
    ToScore,
    last_boxed,
    load_scorer,
    math_score,
    rewards_of,
    started,
)
from moebius.rollout.types import Rollout, Sample

HERE = "tests.unit.test_scoring"


def scripted(text: str, answer: str) -> Any:
    """Does what the text says; run in other processes."""
    if text == "hang":
        time.sleep(600)
    if text == "crash":
        os._exit(9)
    if text == "raise":
        raise KeyError("no such thing")
    return {"nan": float("nan"), "words": "good"}.get(text, float(text == answer))


def by_meta(text: str, answer: str, meta: Mapping[str, Any]) -> float:
    return float(meta["difficulty"])


def three_arguments(text: str, answer: str, other: str) -> float:
    return 0.0


def items(*texts: str) -> list[ToScore]:
    return [ToScore(text, "x", {"difficulty": i}) for i, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", "module:function"),
        ("m:", "module:function"),
        ("no_such_module_here:f", "cannot import no_such_module_here"),
        (f"{HERE}:nobody", "has no function nobody"),
        (f"{HERE}:HERE", "has no function HERE"),
        (f"{HERE}:three_arguments", "must take"),
    ],
)
def test_scorers_that_do_not_load(name: str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        load_scorer(name)


def test_the_extra_is_named_when_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(BadInput, match=r"-e .\.\[math\]"):
        load_scorer("math")


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
        (r"\boxed{\text{Yes}}", "Yes", 1.0),
        (r"\boxed{\text{No}}", "Yes", 0.0),
        (r"\boxed{1} then \boxed{\{1, 2\}}", r"\{1,2\}", 1.0),
        (r"\boxed{\dfrac{\pi}{4}}", r"\frac{\pi}{4}", 1.0),
        (r"<think>\boxed{3}</think> \boxed{4}", "3", 0.0),
        (r"<think>\boxed{4}</think> \boxed{3}", "3", 1.0),
        ("the answer is 7", "7", 1.0),
        (r"\boxed{7", "8", 0.0),
        ("", "8", 0.0),
        (r"\boxed{}", r"\infty", 0.0),
    ],
)
def test_math(text: str, answer: str, reward: float) -> None:
    pytest.importorskip("math_verify")
    assert math_score(text, answer) == reward


def test_last_boxed() -> None:
    assert last_boxed(r"\boxed{a} \boxed{b{c}d}") == "b{c}d"
    assert last_boxed(r"\boxed{a} \boxed{b{c}") == "a"
    assert last_boxed("nothing") is None


def test_a_pool_survives_what_its_function_does() -> None:
    with ScorerPool(f"{HERE}:scripted", workers=2, timeout_s=3) as pool:
        texts = ["x", "y", "hang", "crash", "raise", "nan", "words", "x"] + ["y"] * 20
        scores = pool.score(items(*texts))
        assert scores.rewards == [1.0, 0.0, None, None, None, None, None, 1.0] + [0.0] * 20
        assert scores.failures == {
            "took longer than 3 s": 1,
            "its process ended": 1,
            "raised KeyError: 'no such thing'": 1,
            "returned nan": 1,
            "raised ValueError: could not convert string to float: 'good'": 1,
        }
        assert scores.mean == 2 / 23 and scores.words == "reward 0.087, 5 samples without reward"
        assert pool.score([]) == Scores([])
        with pytest.raises(MoebiusError, match="no reward for any of 2 samples"):
            pool.score(items("raise", "raise"))
        with pytest.raises(ZeroDivisionError):
            pool.score(items("hang"), lambda: 1 // 0)


def test_a_pool_that_cannot_start_says_why() -> None:
    with pytest.raises(BadInput, match="has no function nobody"):
        ScorerPool(f"{HERE}:nobody", workers=1)


def test_meta_reaches_the_function() -> None:
    with ScorerPool(f"{HERE}:by_meta", workers=1) as pool:
        assert pool.score(items("a", "b", "c")).rewards == [0.0, 1.0, 2.0]


def test_rewards_go_by_prompt_and_sample() -> None:
    def sample(index: int, text: str | None) -> Sample:
        return Sample(index, [1], None, None, text, "stop", None, 0, 0)

    rollouts = [Rollout(0, [1], [sample(0, "a"), sample(1, "b")]), Rollout(1, [1], [sample(0, None), sample(1, "b")])]
    questions = [Question("?", "a"), Question("?", "b")]
    with started(f"{HERE}:scripted", workers=1) as pool:
        assert rewards_of(pool, rollouts, questions) == ([[1.0, 0.0], [0.0, 1.0]], "reward 0.500")
    with started(None) as none:
        assert rewards_of(none, rollouts, questions) == (None, "")
