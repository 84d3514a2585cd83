"""Families besides Qwen3-MoE: tokens equal the stock engine's in both layouts, through switches and weight updates."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from moebius.engine.config import EngineConfig, PolicyConfig
from moebius.engine.families import CHECKED
from tests.engine import stock_engine, updating, work
from tests.engine.families import FAMILIES, make_family_model
from tests.engine.fleet import Fleet

RANKS = 2
REQUESTS = work.rich_requests(8, samples=1, longest=40)
POLICIES = {
    "static EP": work.EP,
    "static TP": work.TP,
    "mid decode": PolicyConfig(kind="scheduled", at_iteration=9),
}


def stock_tokens(_: Any, settings: EngineConfig) -> dict:
    """What a fresh stock engine makes of REQUESTS; one process serves all families."""
    return stock_engine.plain_run(stock_engine.PlainEngine(settings), REQUESTS)


@dataclass
class Subject:
    """One family under test: its fleet, its two checkpoints, and what a stock engine makes of the first."""

    fleet: Fleet
    models: list[str]
    reference: dict

    def check(self, function: Any, argument: Any) -> list[Any]:
        outcomes = self.fleet.call(function, argument, per_rank=work.split(REQUESTS, RANKS))
        work.assert_same(work.collect(outcomes), self.reference)
        return outcomes


@pytest.fixture(scope="module")
def stock() -> Iterator[Fleet]:
    fleet = Fleet(1, dict)
    yield fleet
    fleet.close()


@pytest.fixture(scope="module", params=FAMILIES)
def subject(
    request: pytest.FixtureRequest, stock: Fleet, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    root = tmp_path_factory.mktemp(request.param)
    models = [make_family_model(request.param, root / str(seed), seed) for seed in range(2)]
    with ThreadPoolExecutor(1) as pool:  # the reference is made while the fleet starts
        reference = pool.submit(stock.call, stock_tokens, work.config(models[0]))
        fleet = Fleet(RANKS, work.make_engine, work.config(models[0], enable_prefix_caching=True))
    yield Subject(fleet, models, reference.result()[0])
    fleet.close()


def test_families_are_those_the_engine_names() -> None:
    assert set(FAMILIES) | {"qwen3_moe"} == set(CHECKED)


@pytest.mark.parametrize("policy", POLICIES)
def test_layouts_and_a_switch(subject: Subject, policy: str) -> None:
    outcomes = subject.check(work.run, POLICIES[policy])
    switches = outcomes[0].stats.switches
    assert [s.to for s in switches] == ([] if policy == "static EP" else ["TP"])
    if policy == "mid decode":
        assert all(o.stats.switches[0].kv_bytes > 0 and o.stats.switches[0].expert_bytes > 0 for o in outcomes)


def test_there_and_back(subject: Subject) -> None:
    outcomes = subject.check(work.run_alternating, [4, 9, 14])
    assert [s.to for s in outcomes[0].stats.switches] == ["TP", "EP", "TP"]


def unused_weights(engine: Any) -> tuple[int, list[list[int]]]:
    """How many weights are in memory that sleep gives back, and the shapes of those that no model has."""
    held = engine.pair.dense.tensors()
    models = [runtime.runner.model for runtime in (engine.pair.ep, engine.pair.tp)]
    starts = [weight.data_ptr() for model in models for weight in model.parameters()]
    used = [any(0 <= start - weight.data_ptr() < weight.nbytes for start in starts) for weight in held]
    return len(held), [list(weight.shape) for weight, is_used in zip(held, used, strict=True) if not is_used]


def test_only_weights_that_are_used_are_held(tmp_path: Path) -> None:
    """A tied output head is replaced by the embedding once it is made."""
    fleet = Fleet(
        RANKS, work.make_engine, work.config(make_family_model("qwen2_moe", tmp_path, tie_word_embeddings=True))
    )
    try:
        for held, unused in fleet.call(unused_weights):
            assert held and not unused
    finally:
        fleet.close()


@pytest.mark.parametrize("fused", [False, True], ids=["per expert", "fused"])
def test_full_update(subject: Subject, fused: bool) -> None:
    """Every weight differs between the checkpoints: one that the second update left out would show in the tokens."""
    subject.fleet.call(updating.load_checkpoint, subject.models[1], 1, not fused)
    outcomes = subject.fleet.call(work.run, work.EP, per_rank=work.split(REQUESTS, RANKS))
    changed = work.collect(outcomes)
    assert sum(changed[key][0] != subject.reference[key][0] for key in changed) > len(changed) // 2
    subject.fleet.call(updating.load_checkpoint, subject.models[0], 2, fused)
    subject.check(work.run, PolicyConfig(kind="scheduled", at_iteration=9))
    subject.check(work.run, work.TP)
