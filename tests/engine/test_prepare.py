"""PREPARE and COMMIT: what was sent ahead gives the same tokens, whether it is used or not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moebius.engine.config import PolicyConfig
from moebius.engine.types import SampleKey, SampleRequest
from moebius.rollout.demo import make_tiny_model
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
        assert switch.prepared and first <= prepared < switch.iteration
        assert switch.staged_layers == switch.expert_layers == 4 and switch.staged_bytes == switch.expert_bytes > 0
    assert preparing.call(work.free_pages) == preparing.call(work.usable_pages)


def test_prepared_in_vain(preparing: Fleet, reference: dict) -> None:
    """The step is over before the switch: the pages come back, and the next step is prepared anew."""
    never = PolicyConfig(kind="scheduled", at_iteration=10_000, prepare_iterations=9_995)
    outcomes = preparing.call(work.run, never, per_rank=work.split(REQUESTS, 2, "skew"))
    work.assert_same(work.collect(outcomes), reference)
    assert [o.stats.prepared_at for o in outcomes] == [[5], [5]] and not outcomes[0].stats.switches
    assert preparing.call(work.free_pages) == preparing.call(work.usable_pages)


def test_no_room_means_no_preparation(preparing: Fleet, reference: dict) -> None:
    """The last page in use on one rank: no rank prepares, and the switch is an ordinary one."""
    policy = PolicyConfig(kind="scheduled", at_iteration=12, prepare_iterations=6)
    share = work.split(REQUESTS, 2, "skew")
    outcomes = preparing.call(work.run_with_a_reserved_page_in_use, policy, 1, per_rank=share)
    work.assert_same(work.collect(outcomes), reference)
    for outcome in outcomes:
        assert not outcome.stats.prepared_at and not outcome.stats.switches[0].prepared
        assert outcome.stats.switches[0].staged_bytes == 0 < outcome.stats.switches[0].expert_bytes


def test_less_room_on_one_rank_means_fewer_layers_on_all(preparing: Fleet, reference: dict) -> None:
    """10 pages hold what is to come of two layers, of which the second is whole, but not of three."""
    policy = PolicyConfig(kind="scheduled", at_iteration=12, prepare_iterations=6)
    share = work.split(REQUESTS, 2, "skew")
    outcomes = preparing.call(work.run_with_a_reserved_page_in_use, policy, 11, per_rank=share)
    work.assert_same(work.collect(outcomes), reference)
    for outcome in outcomes:
        (switch,) = outcome.stats.switches
        assert switch.prepared and switch.staged_layers == 2 and switch.expert_layers == 4
        assert 2 * switch.staged_bytes == switch.expert_bytes
    assert preparing.call(work.free_pages) == preparing.call(work.usable_pages)


def test_expert_bytes_after_a_prepared_switch(preparing: Fleet) -> None:
    """They are those of a switch at once, in every slot of TP, and come home as they were."""
    policy = PolicyConfig(kind="scheduled", at_iteration=12, prepare_iterations=3)
    found = []
    try:
        for layers in (4, 3, 1, 0):
            (sent, _) = preparing.call(work.stage_at_most, layers)
            chosen = policy if layers else PolicyConfig(kind="scheduled", at_iteration=0)
            outcomes = preparing.call(work.run, chosen, per_rank=work.split(REQUESTS, 2, "round"))
            (switch,) = outcomes[0].stats.switches
            assert (switch.staged_layers, switch.staged_bytes, switch.expert_bytes) == (layers, layers * sent, 4 * sent)
            found.append(preparing.call(work.tp_expert_hashes))
    finally:
        preparing.call(work.stage_at_most, 4)
    assert all(hashes == found[-1] for hashes in found)


@pytest.fixture(scope="module")
def large_experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four layers whose experts are larger than the KV of all requests."""
    return str(make_tiny_model(tmp_path_factory.mktemp("large"), moe_intermediate=512, seed=7))


def test_a_kv_cache_too_small_for_all_layers(large_experts: str) -> None:
    """Some are staged, the others moved beside their copies; tokens are those of a step that is not switched."""
    settings = work.config(large_experts, enable_prefix_caching=True, prepare="on", kv_cache_bytes=6 << 20)
    fleet = Fleet(2, work.make_engine, settings)
    try:
        share = work.split(REQUESTS[:12], 2, "skew")
        reference = work.collect(fleet.call(work.run, work.EP, per_rank=share))
        outcomes = fleet.call(work.run, PolicyConfig(threshold=6), per_rank=share)
        work.assert_same(work.collect(outcomes), reference)
        assert fleet.call(work.free_pages) == fleet.call(work.usable_pages)
        for outcome in outcomes:
            (switch,) = outcome.stats.switches
            assert switch.prepared and 1 <= switch.staged_layers < switch.expert_layers == 4
            # Of three matrices of 128 x 512 and four experts per layer half goes to the peer.
            assert switch.staged_bytes == switch.staged_layers * 4 * 3 * 128 * 512 * 4 // 2
            assert switch.expert_bytes == switch.staged_bytes * 4 // switch.staged_layers
        check_that_pages_come_back(fleet)
    finally:
        fleet.close()


def check_that_pages_come_back(fleet: Fleet) -> None:
    """A request that outgrows what staging has left gets the pages back; it does not wait for a switch far off."""
    sampling = {"max_tokens": 400, "ignore_eos": True, "temperature": 1.0, "logprobs": 0}
    keys = [[SampleKey(rank, sample) for sample in range(3)] for rank in range(2)]
    share = [([SampleRequest(key, [5, 6, 7], sampling, 9 * r + key.sample) for key in keys[r]],) for r in range(2)]
    reference = work.collect(fleet.call(work.run, work.EP, per_rank=share))
    never = PolicyConfig(kind="scheduled", at_iteration=10_000, prepare_iterations=9_995)
    outcomes = fleet.call(work.run, never, per_rank=share)
    work.assert_same(work.collect(outcomes), reference)
    assert outcomes[0].stats.prepared_at[0] == 5 and not outcomes[0].stats.switches
    assert len(outcomes[0].stats.iterations) < 1200
    assert fleet.call(work.free_pages) == fleet.call(work.usable_pages)


def test_a_model_without_room_is_refused_in_words(large_experts: str) -> None:
    settings = work.config(large_experts, prepare="on", kv_cache_bytes=1 << 18, max_model_len=64)
    with pytest.raises(Exception, match=r"engine.prepare is on, but a switch cannot be prepared: 0 of 4 layers"):
        Fleet(2, work.make_engine, settings)
