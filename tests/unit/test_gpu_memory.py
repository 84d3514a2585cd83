"""What a process holds asleep, from samples of its memory."""

from __future__ import annotations

import pytest

from benchmarks.gpu_memory import summary


def test_asleep_is_where_ranks_stay() -> None:
    awake, asleep = 8e9, 2.004e9
    first = [awake, awake, asleep, asleep, asleep, awake, 5e9, asleep, awake, 3e9, 1e9]  # it ends in small steps
    second = [awake, awake, 5e9, asleep, asleep, awake, awake, asleep, awake, awake, 0.5e9]
    samples = [
        {"s": 0.25 * i, "devices": 9e10, "ranks/1": one, "ranks/2": two, "trainer/3": 4e9 + i}
        for i, (one, two) in enumerate(zip(first, second, strict=True))
    ]
    found = summary(samples)
    assert found == pytest.approx({"ranks_most_gb": 16.0, "ranks_asleep_gb": 4.0, "trainer_most_gb": 4.0}, abs=1e-6)


def test_ranks_that_never_slept_have_no_such_value() -> None:
    assert summary([{"s": 0.0, "ranks/1": 8e9}, {"s": 0.25, "ranks/1": 7.9e9}]) == {"ranks_most_gb": 8.0}
    assert summary([]) == {}
