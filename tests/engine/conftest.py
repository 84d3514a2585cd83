"""Engines shared by the tests: starting one costs many seconds, so each is started once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from moebius.rollout.demo import make_tiny_model
from tests.engine import stock_engine, work
from tests.engine.fleet import Fleet

RANKS = 2


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three checkpoints of one architecture: the policy before and after two updates."""
    root: Path = tmp_path_factory.mktemp("models")
    for seed in range(3):
        make_tiny_model(root / str(seed), seed=seed)
    return [str(root / str(seed)) for seed in range(3)]


@pytest.fixture(scope="session")
def plain_engines(models: list[str]) -> Iterator[list[Fleet]]:
    """A fresh stock engine per checkpoint."""
    fleets = [Fleet(1, stock_engine.PlainEngine, work.config(model)) for model in models]
    yield fleets
    for fleet in fleets:
        fleet.close()


@pytest.fixture(scope="session")
def fleet(models: list[str]) -> Iterator[Fleet]:
    """Two ranks with prefix caching and one set of attention weights, scheduled asynchronously."""
    settings = work.config(models[0], enable_prefix_caching=True, attention_weights="shared")
    fleet = Fleet(RANKS, work.make_engine, settings)
    yield fleet
    fleet.close()


@pytest.fixture(scope="module")
def fleet_without_cache(models: list[str]) -> Iterator[Fleet]:
    """Two ranks without prefix caching, with attention weights of each layout's own, scheduled synchronously."""
    fleet = Fleet(RANKS, work.make_engine, work.config(models[0], async_scheduling=False))
    yield fleet
    fleet.close()
