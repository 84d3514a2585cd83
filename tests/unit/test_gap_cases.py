"""benchmarks/kernel_gaps.py maps what its cases say with any number of ranks; the driver is a stand-in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import kernel_gaps
from moebius.kernels.experts import Copy2d


class Peers:
    """Addresses of all ranks' memory: a million times one more than the rank."""

    def __init__(self, ranks: int) -> None:
        self.addresses = tuple((1 + rank) * 1_000_000 for rank in range(ranks))
        self.mapped = True

    def unmap(self) -> None:
        self.mapped = False


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[Copy2d]:
    done: list[Copy2d] = []
    memory = SimpleNamespace(as_tensor=lambda: torch.zeros(1), address=7_000_000)
    monkeypatch.setattr(kernel_gaps, "VirtualMemory", lambda chunks, device, calls: memory)
    monkeypatch.setattr(kernel_gaps, "MemoryCalls", lambda rank: None)
    monkeypatch.setattr(kernel_gaps, "gather_of", lambda group: None)
    monkeypatch.setattr(kernel_gaps, "copy_2d", lambda copy, stream: done.append(copy))
    monkeypatch.setattr(kernel_gaps.torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(kernel_gaps.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(kernel_gaps.dist, "barrier", lambda: None)
    return done


def mapped(monkeypatch: pytest.MonkeyPatch, case: str, rank: int, ranks: int) -> Peers:
    monkeypatch.setattr(kernel_gaps.dist, "get_world_size", lambda: ranks)
    opened = SimpleNamespace(open=lambda memory, rank, gather: Peers(ranks))
    monkeypatch.setattr(kernel_gaps, "VirtualPeers", opened)
    kept: list[Any] = kernel_gaps._map(case, rank, 1 << 30)
    [peers] = [part for part in kept if isinstance(part, Peers)]
    return peers


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_every_rank_copies_into_the_memory_of_the_next(
    monkeypatch: pytest.MonkeyPatch, copies: list[Copy2d], ranks: int
) -> None:
    for rank in range(ranks):
        peers = mapped(monkeypatch, "peer_copy", rank, ranks)
        copy = copies.pop()
        assert peers.addresses[copy.peer] == copy.dst, "the copy goes where it says"
        assert copy.peer == (rank + 1) % ranks


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_only_the_first_rank_imports(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    peers = [mapped(monkeypatch, "virtual_imports_only", rank, ranks) for rank in range(ranks)]
    assert [each.mapped for each in peers] == [True] + [False] * (ranks - 1)
    assert all(mapped(monkeypatch, "virtual_shared", rank, ranks).mapped for rank in range(ranks))
