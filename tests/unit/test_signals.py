"""The flag protocol under random interleavings: with the wait nothing unread is overwritten, without it something is.

The steps and copies are those that a real `DirectMover` enqueues. The model plays the devices: copies of a step run in
any order and mixed with each other, a row is read some time before it is written, flags reach each peer some time after
they were raised, and ranks differ in speed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moebius.kernels.experts import Copy2d
from moebius.kernels.signals import Signals
from tests.unit import direct_model as model
from tests.unit.direct_model import Memory, Shape, Slots

Program = list[list[Copy2d]]


class Devices:
    """All ranks' devices, running recorded programs. `waits` False leaves out the wait, `lag` waits for older steps."""

    def __init__(
        self,
        programs: list[Program],
        memory: Memory,
        rng: random.Random,
        *,
        waits: bool = True,
        lag: int = 0,
        early: bool = False,
    ) -> None:
        self.memory, self.rng, self.waits, self.lag, self.early = memory, rng, waits, lag, early
        self.ranks = len(programs)
        self.flags = [[0] * self.ranks for _ in programs]  # [on][of]
        self.running: dict[Any, tuple[Iterator[None], float]] = {}
        self.finished = [False] * self.ranks  # may be read: the rank's own stream has passed its last barrier
        for rank, program in enumerate(programs):
            self._start(("rank", rank), self._rank(rank, program), rng.choice((1.0, 1.0, 8.0, 40.0)))

    def run(self) -> None:
        while self.running:
            names = list(self.running)
            name = self.rng.choices(names, [self.running[n][1] for n in names])[0]
            try:
                next(self.running[name][0])
            except StopIteration:
                del self.running[name]

    def _start(self, name: Any, task: Iterator[None], speed: float) -> None:
        self.running[name] = (task, speed)

    def _rank(self, rank: int, program: Program) -> Iterator[None]:
        for step, copies in enumerate(program, start=1):
            if self.early:
                self._raise(rank, step)
            pending = [self.memory.copying(copy) for copy in copies]
            while pending:
                copy = self.rng.choice(pending)
                if next(copy, "done") == "done":
                    pending.remove(copy)
                yield
            if not self.early:
                self._raise(rank, step)
            while self.waits and any(
                self.flags[rank][peer] < step - self.lag for peer in range(self.ranks) if peer != rank
            ):
                yield
        self.finished[rank] = True

    def _raise(self, rank: int, step: int) -> None:
        for peer in range(self.ranks):
            if peer != rank:
                self._start(("flag", rank, peer, step), self._deliver(rank, peer, step), 1.0)

    def _deliver(self, rank: int, peer: int, step: int) -> Iterator[None]:
        yield
        self.flags[peer][rank] = max(self.flags[peer][rank], step)


def is_right(shape: Shape, to_tp: bool, seed: int, **mutation: Any) -> bool:
    """Whether a move under one interleaving left every byte where the plan has it."""
    storages = [torch.empty(shape.numel, dtype=torch.int16) for _ in range(shape.ranks)]
    for rank, storage in enumerate(storages):
        model.fill(Slots(shape, storage), "EP" if to_tp else "TP", rank, 0)
    programs = model.record_experts(shape, storages, to_tp)
    Devices(programs, Memory(storages), random.Random(seed), **mutation).run()
    wanted = model.reference(shape, to_tp, 0, None)
    return all(torch.equal(found, right) for found, right in zip(storages, wanted, strict=True))


def small(ranks: int) -> Shape:
    return Shape(
        ranks, layers=3, experts_per_rank=1, hidden=2, columns_per_rank=2, kv_heads=ranks, ep_pages=1, page=(1, 1)
    )


@settings(deadline=None, max_examples=120)
@given(st.integers(2, 4), st.booleans(), st.integers(0, 1 << 32))
def test_no_unread_source_is_overwritten(ranks: int, to_tp: bool, seed: int) -> None:
    assert is_right(small(ranks), to_tp, seed)


@pytest.mark.parametrize("to_tp", [True, False])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "mutation", [{"waits": False}, {"lag": 1}, {"early": True}], ids=["no wait", "wait for an older step", "flag first"]
)
def test_a_weaker_protocol_loses_bytes(ranks: int, to_tp: bool, mutation: dict[str, Any]) -> None:
    """Of 60 interleavings at least a few go wrong, so the test above could fail."""
    wrong = sum(not is_right(small(ranks), to_tp, seed, **mutation) for seed in range(60))
    assert wrong >= 5, f"only {wrong} of 60 interleavings went wrong"


@pytest.mark.parametrize("to_tp", [True, False])
def test_the_wrong_order_of_layers_loses_bytes(to_tp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    right = model.layers_of
    monkeypatch.setattr(model, "layers_of", lambda shape, way: right(shape, not way))
    assert not any(is_right(small(2), to_tp, seed) for seed in range(5))


class FakePeers:
    """Flags of one rank among several that nobody raises; addresses are numbers."""

    def __init__(self, ranks: int) -> None:
        self.tensor = torch.zeros(ranks * 32, dtype=torch.int32)
        self.addresses = tuple(1000 * (rank + 1) for rank in range(ranks))


class FakeDriver:
    """Takes down what stream operations are asked for."""

    class CUstreamWaitValue_flags:  # noqa: N801 - the driver's name
        CU_STREAM_WAIT_VALUE_GEQ = 0

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def cuStreamWriteValue32(self, *arguments: Any) -> tuple[int]:  # noqa: N802
        self.calls.append(("write", *arguments))
        return (0,)

    def cuStreamWaitValue32(self, *arguments: Any) -> tuple[int]:  # noqa: N802
        self.calls.append(("wait", *arguments))
        return (0,)


def test_stream_operations_raise_all_flags_before_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank r writes flag r of every peer, then waits for the flags of all peers here; never for its own."""
    driver = FakeDriver()
    monkeypatch.setattr("moebius.kernels.signals.driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: type("S", (), {"cuda_stream": 77})())
    signals = Signals(FakePeers(3), 1, "stream")  # type: ignore[arg-type]
    signals.barrier()
    assert driver.calls == [
        ("write", 77, 1000 + 128, 1, 0),
        ("write", 77, 3000 + 128, 1, 0),
        ("wait", 77, 2000, 1, 0),
        ("wait", 77, 2000 + 256, 1, 0),
    ]
    signals.step = (1 << 32) - 1  # values are modulo 2**32
    driver.calls.clear()
    signals.barrier()
    assert [call[3] for call in driver.calls] == [0, 0, 0, 0]
    assert not signals._short_of(5, 5) and signals._short_of(4, 5) and not signals._short_of(6, 5)
    assert signals._short_of(-1, 1 << 32), "a flag just before the wrap is behind one just after it"


def test_one_rank_has_nobody_to_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    monkeypatch.setattr("moebius.kernels.signals.driver", lambda: driver)
    signals = Signals(FakePeers(1), 0, "stream")  # type: ignore[arg-type]
    signals.barrier()
    assert (signals.step, driver.calls) == (1, [])
