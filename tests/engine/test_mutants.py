"""The checks are worth their name only if broken engines fail them: each mutant must be noticed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from moebius.engine.config import PolicyConfig
from moebius.engine.types import SampleKey, SampleRequest
from moebius.kernels.noise import derive_seed
from tests.engine import updating, work
from tests.engine.fleet import Fleet, RankError


def requests(step: int, max_tokens: int = 12) -> list[SampleRequest]:
    prompts = [[3 + (37 * p + i * i) % 250 for i in range(48)] for p in range(6)]
    return [
        SampleRequest(SampleKey(p, s), prompts[p], {"temperature": 0.0 if s else 1.0, "max_tokens": max_tokens + p,
                      "ignore_eos": True, "logprobs": 0}, derive_seed(5, step, p, s))
        for p in range(6) for s in range(2)
    ]  # fmt: skip


def skip_one_layer(engine: Any) -> None:
    move, calls = engine.switcher.mover.experts_ep_to_tp, iter(range(10**6))
    engine.switcher.mover.experts_ep_to_tp = lambda *a: 0 if next(calls) % 4 == 2 else move(*a)


def duplicate_a_page(engine: Any) -> None:
    import moebius.engine.switch as switch

    original = switch.import_requests

    def mutant(*args: Any) -> Any:
        placement = original(*args)
        placement.target[1] = placement.target[0]
        return placement

    switch.import_requests = mutant


def skip_the_prefix_cache_reset(engine: Any) -> None:
    import moebius.engine.engine as engine_module
    import moebius.engine.switch as switch

    del engine
    engine_module.forget_prefixes = lambda runtime: None
    switch.reset_prefix_cache = lambda runtime: True


def drop_a_record(engine: Any) -> None:
    import moebius.engine.switch as switch

    original = switch.import_requests
    switch.import_requests = lambda runtime, batches, order, own: original(runtime, batches, order[:-1], own)


def restore(engine: Any) -> None:
    import moebius.engine.engine as engine_module
    import moebius.engine.switch as switch
    from moebius.engine.parking import forget_prefixes
    from moebius.engine.requests import import_requests, reset_prefix_cache

    switch.import_requests, switch.reset_prefix_cache = import_requests, reset_prefix_cache
    engine_module.forget_prefixes = forget_prefixes
    engine.switcher.mover.__dict__.pop("experts_ep_to_tp", None)
    for runtime in (engine.pair.ep, engine.pair.tp):
        assert reset_prefix_cache(runtime)


@pytest.fixture(scope="module")
def own_fleet(models: list[str]) -> Iterator[Fleet]:
    """Mutants leave an engine in no state to share. Few pages, so that stale ones are sure to be overwritten."""
    page = 4 * 2 * 16 * 2 * 64 * 4  # layers x heads x tokens x (K, V) x head_dim x fp32
    settings = work.config(models[0], enable_prefix_caching=True, kv_cache_bytes=48 * page)
    fleet = Fleet(2, work.make_engine, settings, timeout_s=120)
    yield fleet
    fleet.kill()


SWITCHED = PolicyConfig(kind="scheduled", at_iteration=5)


def two_steps(fleet: Fleet) -> list[dict]:
    """The same prompts twice, the second time with longer answers: stale caches have something to be hit by."""
    return [
        work.collect(fleet.call(work.run, SWITCHED, per_rank=work.split(requests(step, 12 + 8 * step), 2)))
        for step in range(2)
    ]


@pytest.fixture(scope="module")
def healthy(own_fleet: Fleet) -> list[dict]:
    want = two_steps(own_fleet)
    compare(own_fleet, want)
    return want


def compare(fleet: Fleet, want: list[dict]) -> None:
    for got, expected in zip(two_steps(fleet), want, strict=True):
        work.assert_same(got, expected)


# The last one leaves the engine refusing further steps.
@pytest.mark.parametrize(
    "mutant", [skip_one_layer, duplicate_a_page, skip_the_prefix_cache_reset, drop_a_record], ids=lambda f: f.__name__
)
def test_mutant_is_noticed(own_fleet: Fleet, healthy: list[dict], mutant: Any, models: list[str]) -> None:
    own_fleet.call(updating.load_checkpoint, models[0], 1, False)  # whole experts, whatever the mutant before did
    own_fleet.call(mutant)
    with pytest.raises((AssertionError, RankError)):
        compare(own_fleet, healthy)
    if mutant is drop_a_record:
        with pytest.raises(RankError, match="restart the group"):
            own_fleet.call(updating.load_checkpoint, models[0], 2, False)
    else:
        own_fleet.call(restore)
        own_fleet.call(updating.load_checkpoint, models[0], 1, False)
        compare(own_fleet, healthy)
