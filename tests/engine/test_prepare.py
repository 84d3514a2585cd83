"""PREPARE and COMMIT: what was sent ahead gives the same tokens, whether it is used or not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moebius.engine.config import PolicyConfig
from tests.engine import work
from tests.engine.fleet import Fleet

REQUESTS = work.rich_requests(12)


@pytest.fixture(scope="module")
def preparing(models: list[str]) -> Iterator[Fleet]:
    """Two ranks that prepare every switch they expect."""
    settings = work.config(models[0], enable_prefix_caching=True, prepare="on", attention_weights="shared")
    fleet = Fleet(2, work.make_engine, settings)
    yield fleet
    fleet.close()


@pytest.fixture(scope="module")
def reference(preparing: Fleet) -> dict:
    """EP alone; no switch is expected there."""
    outcomes = preparing.call(work.run, work.EP, per_rank=work.split(REQUESTS, 2, "skew"))
    assert not outcomes[0].stats.prepared_at
    return work.collect(outcomes)


@pytest.mark.parametrize(
    ("policy", "first"),
    [
        (PolicyConfig(threshold=12), 1),
        (PolicyConfig(threshold=12, prepare_margin=1.0), 0),
        (PolicyConfig(kind="scheduled", at_iteration=12, prepare_iterations=3), 9),
    ],
)
def test_prepared_switches(preparing: Fleet, reference: dict, policy: PolicyConfig, first: int) -> None:
    outcomes = preparing.call(work.run, policy, per_rank=work.split(REQUESTS, 2, "skew"))
    work.assert_same(work.collect(outcomes), reference)
    for outcome in outcomes:
        (switch,) = outcome.stats.switches
        (prepared,) = outcome.stats.prepared_at
        assert switch.prepared and first <= prepared < switch.iteration and switch.expert_bytes > 0
    assert preparing.call(work.free_pages) == preparing.call(work.usable_pages)


def test_prepared_in_vain(preparing: Fleet, reference: dict) -> None:
    """The step is over before the switch: the pages come back, and the next step is prepared anew."""
    never = PolicyConfig(kind="scheduled", at_iteration=10_000, prepare_iterations=9_995)
    outcomes = preparing.call(work.run, never, per_rank=work.split(REQUESTS, 2, "skew"))
    work.assert_same(work.collect(outcomes), reference)
    assert [o.stats.prepared_at for o in outcomes] == [[5], [5]] and not outcomes[0].stats.switches
    assert preparing.call(work.free_pages) == preparing.call(work.usable_pages)


def test_no_room_means_no_preparation(preparing: Fleet, reference: dict) -> None:
    """A reserved page in use on one rank: no rank prepares, and the switch is an ordinary one."""
    policy = PolicyConfig(kind="scheduled", at_iteration=12, prepare_iterations=6)
    outcomes = preparing.call(work.run_with_a_reserved_page_in_use, policy, per_rank=work.split(REQUESTS, 2, "skew"))
    work.assert_same(work.collect(outcomes), reference)
    for outcome in outcomes:
        assert not outcome.stats.prepared_at and not outcome.stats.switches[0].prepared


def test_expert_bytes_after_a_prepared_switch(preparing: Fleet) -> None:
    """They are those of a switch at once, in every slot of TP, and come home as they were."""
    policy = PolicyConfig(kind="scheduled", at_iteration=12, prepare_iterations=3)
    unprepared = PolicyConfig(kind="scheduled", at_iteration=0)
    found = []
    for chosen in (policy, unprepared):
        outcomes = preparing.call(work.run, chosen, per_rank=work.split(REQUESTS, 2, "round"))
        assert outcomes[0].stats.switches[0].prepared == (chosen is policy)
        found.append(preparing.call(work.tp_expert_hashes))
    assert found[0] == found[1]


def test_a_model_without_room_is_refused_in_words(models: list[str]) -> None:
    settings = work.config(models[0], prepare="on", kv_cache_bytes=1 << 18, max_model_len=64)
    with pytest.raises(Exception, match=r"engine.prepare is on, but a switch cannot be prepared.*KV pages"):
        Fleet(2, work.make_engine, settings)
