"""Blocks in which Ctrl-C waits."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest

from moebius.rollout.interrupts import INSISTS, held_back, uninterrupted, waiting
from tests.unit.instant_world import Group, at_line, no_ray
from tests.unit.replica_group import FakeGroup
from tests.unit.replica_world import PROMPTS, Make, spread

__all__ = ["no_ray"]  # a fixture


def test_it_comes_at_the_end_or_where_the_block_waits() -> None:
    seen: list[str] = []
    with pytest.raises(KeyboardInterrupt), held_back():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        seen.append("after")
    with pytest.raises(KeyboardInterrupt), held_back():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        with waiting():
            seen.append("never")
    with held_back():
        with pytest.raises(KeyboardInterrupt), waiting():
            signal.raise_signal(signal.SIGINT)
        seen.append("clean")
    assert seen == ["after", "clean"]


def test_blocks_within_blocks_and_waits() -> None:
    seen: list[int] = []

    @uninterrupted
    def inner() -> None:
        signal.raise_signal(signal.SIGINT)
        seen.append(1)

    with held_back() as outer:
        with pytest.raises(KeyboardInterrupt), waiting():
            inner()  # finished, and raised as it ends: outside is a wait
        assert not outer.asked
        with pytest.raises(KeyboardInterrupt), held_back():  # noqa: PT012
            inner()
            seen.append(2)
            assert outer.asked
            with waiting():
                seen.append(3)
    assert seen == [1, 1, 2]


def test_who_insists_gets_it_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), held_back(), held_back():  # noqa: PT012
        for _ in range(INSISTS):
            signal.raise_signal(signal.SIGINT)
        pytest.fail("it did not come")
    assert signal.getsignal(signal.SIGINT) is before


def test_other_handlers_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[int] = []
    before = signal.signal(signal.SIGINT, lambda signum, frame: noted.append(signum))
    try:
        with held_back():
            signal.raise_signal(signal.SIGINT)
            assert not noted
            with waiting():
                assert len(noted) == 1, "what only takes note does so, and the wait goes on"
                signal.raise_signal(signal.SIGINT)
            assert len(noted) == 2
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with held_back():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    done: list[bool] = []
    thread = threading.Thread(target=lambda: done.append(held_back().__enter__().asked))
    thread.start()
    thread.join()
    assert done == [False]


def test_an_error_is_not_hidden_by_the_same_ctrl_c() -> None:
    with pytest.raises(KeyboardInterrupt, match="first"), held_back():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        raise KeyboardInterrupt("first")


def test_while_parked_samples_of_replicas_are_aborted(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one replica has ended is returned by the next call."""
    replicas = make(2)
    replicas.generate(PROMPTS, 2, step=0, lengths=spread([2] + [9] * 11), budget={"groups": 1})
    keys, real, ended = set(replicas.parked), FakeGroup.abort_parked, []

    def abort_parked(self: FakeGroup, keys: Any = None) -> Any:
        ended.append(found := real(self, keys))
        signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(FakeGroup, "abort_parked", abort_parked)
    with pytest.raises(KeyboardInterrupt):
        replicas.abort_parked()
    monkeypatch.setattr(FakeGroup, "abort_parked", real)
    assert ended and not replicas._one_call.locked()
    assert {key for key, _ in replicas.abort_parked()} == keys and not replicas.parked and not replicas.abort_parked()


@pytest.mark.usefixtures("no_ray")
def test_a_rollout_that_could_not_be_given_is_the_next_one() -> None:
    """Ctrl-C as a finished stream gives out a rollout: the caller may go on with it."""
    group: Any = Group()
    given = group.stream([[1], [1]], 1)
    rest = [next(given)]
    while not given._over:
        given._advance()
    waits = len(given._ready)
    assert waits > 1 and at_line(10, lambda: next(given)) and len(given._ready) == waits
    rest += list(given)
    assert len(rest) == 4 and not group._one_call.locked()
