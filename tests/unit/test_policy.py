"""When to switch: pure decisions, the same on every rank."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from moebius.engine.config import PolicyConfig
from moebius.engine.policy import SwitchPolicy


def first_switch(config: PolicyConfig, live: list[int], refused: frozenset[int] = frozenset()) -> list[int]:
    """Iterations at which the policy asks for a switch, when those in `refused` are cancelled."""
    policy = SwitchPolicy(config)
    policy.begin_step()
    asked = []
    for iteration, count in enumerate(live):
        if policy.wants_tp(iteration, count):
            asked.append(iteration)
            if iteration in refused:
                policy.cancelled(iteration)
            else:
                policy.switched()
    return asked


@pytest.mark.parametrize(
    ("config", "want"),
    [
        (PolicyConfig(threshold=4), [3]),
        (PolicyConfig(threshold=100), [0]),
        (PolicyConfig(threshold=0), []),
        (PolicyConfig(kind="scheduled", at_iteration=2), [2]),
        (PolicyConfig(kind="static_tp"), [0]),
        (PolicyConfig(kind="static_ep", threshold=100), []),
    ],
)
def test_first_switch(config: PolicyConfig, want: list[int]) -> None:
    assert first_switch(config, [9, 8, 5, 4, 4, 1, 0]) == want


def test_refused_switch_is_retried_after_the_cooldown() -> None:
    config = PolicyConfig(threshold=5, cooldown_iterations=3)
    assert first_switch(config, [5] * 10, refused=frozenset({0, 3})) == [0, 3, 6]


def test_each_step_begins_anew() -> None:
    policy = SwitchPolicy(PolicyConfig(threshold=5))
    for _ in range(2):
        policy.begin_step()
        assert policy.wants_tp(0, 5)
        policy.switched()
        assert not policy.wants_tp(1, 5)


@given(
    st.lists(st.integers(0, 40), max_size=60), st.integers(0, 40), st.integers(1, 9), st.frozensets(st.integers(0, 60))
)
def test_never_above_the_threshold_nor_within_the_cooldown(
    live: list[int], threshold: int, cooldown: int, refused: frozenset[int]
) -> None:
    asked = first_switch(PolicyConfig(threshold=threshold, cooldown_iterations=cooldown), live, refused)
    assert all(0 < live[i] <= threshold for i in asked)
    assert all(b - a >= cooldown for a, b in itertools.pairwise(asked))
    assert sum(i not in refused for i in asked) <= 1


def test_unknown_fields_are_errors() -> None:
    with pytest.raises(ValidationError):
        PolicyConfig(treshold=3)  # type: ignore[call-arg]
