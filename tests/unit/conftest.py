"""What several files of unit tests start from. Imports are within: most files need none of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from moebius.rollout.replicas import RolloutReplicas
    from tests.unit.fake_driver import FakeDriver, FakeMachine
    from tests.unit.replica_world import Make


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes replicas whose groups sample without an engine."""
    from moebius.rollout import replica_life, replica_weights
    from moebius.rollout.replicas import RolloutReplicas
    from tests.unit.replica_group import FakeGroup, FakeHomes, folder_of, settings

    monkeypatch.setattr(replica_life, "check_model", folder_of)
    monkeypatch.setattr(replica_life, "connect", lambda config: None)
    monkeypatch.setattr(replica_life, "resolve_device", lambda config: "cpu")
    monkeypatch.setattr(replica_weights.ray, "put", lambda bucket: bucket)
    monkeypatch.setattr(replica_life, "pause_s", lambda failed: 0.02 * failed)
    made: list[RolloutReplicas] = []

    def build(replicas: int = 2, **changes: Any) -> RolloutReplicas:
        group: Any = FakeGroup
        made.append(RolloutReplicas(settings(replicas, **changes), FakeHomes, group))
        return made[-1]

    yield build
    for replicas in made:
        replicas.shutdown()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMachine]:
    """One whose driver's books are looked at; each thread that plays a rank sets `current.driver`."""
    from moebius.kernels import virtual
    from tests.unit.fake_driver import FakeCalls, FakeMachine
    from tests.unit.virtual_world import current

    monkeypatch.setattr("moebius.kernels.cuda_memory.driver", lambda: current.driver)
    monkeypatch.setattr(virtual, "MemoryCalls", lambda device: FakeCalls(current.driver))
    machine = FakeMachine()
    yield machine
    machine.close()


@pytest.fixture
def driver(machine: FakeMachine) -> FakeDriver:
    """Of the rank that this thread plays."""
    from tests.unit.fake_driver import FakeDriver
    from tests.unit.virtual_world import current

    current.driver = FakeDriver(machine)
    return current.driver
