"""Kernels of an iteration from two profiles, with numbers by hand."""

from __future__ import annotations

import pytest

from moebius.rollout.bench.kernels import differences, per_iteration


def test_an_iteration_is_the_difference_of_two_runs() -> None:
    short = {"prefill": (500.0, 3), "layer": (100.0, 20), "setup": (7.0, 1)}
    long = {"prefill": (510.0, 3), "layer": (180.0, 40), "setup": (9.0, 1), "late": (6.0, 2)}
    # What is there as often in both, only slower by chance, is no part of an iteration.
    assert per_iteration(short, long, 10) == {"layer": (8.0, 2.0), "late": pytest.approx((0.6, 0.2))}


def test_differences_are_told_largest_first() -> None:
    ours = {"a": (10.0, 1.0), "b": (50.0, 2.0), "only": (3.0, 1.0)}
    other = {"a": (12.5, 1.0), "b": (20.0, 2.0)}
    assert differences(ours, other, 2) == [
        "+30.0 us (50.0 in 2.0, 20.0 in 2.0): b",
        "+3.0 us (3.0 in 1.0, 0.0 in 0.0): only",
    ]
