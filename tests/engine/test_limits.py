"""Switches that do not fit, requests and weights that are not valid: refused in words, and the engine goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moebius.engine.config import PolicyConfig
from moebius.engine.types import SampleKey, SampleRequest
from moebius.rollout.demo import make_tiny_model
from tests.engine import updating, work
from tests.engine.fleet import Fleet, RankError


@pytest.fixture(scope="module")
def one_head_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One KV head on two ranks: TP replicates it, so TP holds half of what both EP ranks hold together."""
    model: Path = tmp_path_factory.mktemp("one-head") / "model"
    make_tiny_model(model, heads=4, kv_heads=1, num_layers=2)
    page = 2 * 16 * 2 * 64 * 4  # layers x tokens x (K, V) x head_dim x fp32
    settings = work.config(str(model), kv_cache_bytes=33 * page, max_model_len=256)
    fleet = Fleet(2, work.make_engine, settings)
    yield fleet
    fleet.close()


def long_requests(count: int, tokens: int) -> list[SampleRequest]:
    sampling = {"temperature": 1.0, "max_tokens": tokens, "ignore_eos": True}
    return [SampleRequest(SampleKey(p, 0), [5 + p] * 60, sampling, 100 + p) for p in range(count)]


def test_switch_that_does_not_fit_is_cancelled_and_retried(one_head_fleet: Fleet) -> None:
    straggler = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True}
    requests = [*long_requests(12, 24), SampleRequest(SampleKey(99, 0), [9] * 20, straggler, 1)]
    policy = PolicyConfig(kind="scheduled", at_iteration=8, cooldown_iterations=5)
    outcomes = one_head_fleet.call(work.run, policy, per_rank=work.split(requests, 2))
    stats = outcomes[0].stats
    assert stats.cancelled and "pages" in stats.cancelled[0].reason
    gaps = [b.iteration - a.iteration for a, b in zip(stats.cancelled, stats.cancelled[1:], strict=False)]
    assert all(gap == 5 for gap in gaps)
    assert len(stats.switches) == 1 and stats.switches[0].live < 13, "it fits once most others are done"
    got = work.collect(outcomes)
    want = work.collect(one_head_fleet.call(work.run, work.EP, per_rank=work.split(requests, 2)))
    work.assert_same(got, want)


def test_switch_that_never_fits(one_head_fleet: Fleet) -> None:
    requests = long_requests(12, 16)
    policy = PolicyConfig(kind="scheduled", at_iteration=6, cooldown_iterations=1000)
    outcomes = one_head_fleet.call(work.run, policy, per_rank=work.split(requests, 2))
    assert not outcomes[0].stats.switches
    assert len(outcomes[0].stats.cancelled) == 1
    assert {len(r.token_ids) for o in outcomes for r in o.results} == {16}


def squeeze_tp(engine: Any, running: int | None) -> int:
    """Let TP run so many at once, unchecked; None: back to normal. Returns how often pages were freed."""
    import moebius.engine.requests as requests
    import moebius.engine.step as loop
    import moebius.engine.switch as switch

    if running is None:
        freed = engine.times_freed
        switch.Fit.refusal, loop.release_stuck = engine.kept
        engine.pair.tp.scheduler.max_num_running_reqs = engine.config.max_num_seqs
        return freed
    engine.kept, engine.times_freed = (switch.Fit.refusal, loop.release_stuck), 0

    def counted(runtime: Any) -> bool:
        freed = requests.release_stuck(runtime)
        engine.times_freed += freed
        return freed

    switch.Fit.refusal, loop.release_stuck = property(lambda self: None), counted
    engine.pair.tp.scheduler.max_num_running_reqs = running
    return 0


def test_requests_that_hold_pages_do_not_block_each_other(one_head_fleet: Fleet) -> None:
    """Three requests hold 30 of 32 pages, one may run and needs 14 in the end: pages of waiting ones must be freed."""
    sampling = {"temperature": 1.0, "max_tokens": 60, "ignore_eos": True, "logprobs": 0}
    requests = [SampleRequest(SampleKey(p, 0), [5 + p] * 150, sampling, 100 + p) for p in range(3)]
    want = work.collect(one_head_fleet.call(work.run, work.EP, per_rank=work.split(requests, 2)))
    one_head_fleet.call(squeeze_tp, 1)
    policy = PolicyConfig(kind="scheduled", at_iteration=5)
    outcomes = one_head_fleet.call(work.run, policy, per_rank=work.split(requests, 2))
    freed = one_head_fleet.call(squeeze_tp, None)
    assert outcomes[0].stats.switches[0].live == 3
    assert freed[0] == freed[1] > 0, "the situation did not come about"
    work.assert_same(work.collect(outcomes), want)


def squeeze_ep(engine: Any, running: int | None) -> None:
    """After a return to EP: all requests on rank 0, which runs so many at once, unchecked; None: back to normal."""
    import moebius.engine.switch as switch

    if running is None:
        switch.Fit.refusal = engine.kept
        engine.pair.ep.scheduler.max_num_running_reqs = engine.config.max_num_seqs
        del engine.switcher.place
        return
    engine.kept = switch.Fit.refusal
    switch.Fit.refusal = property(lambda self: None)
    engine.switcher.place = lambda: dict.fromkeys(engine.pair.tp.scheduler.requests, 0)
    engine.pair.ep.scheduler.max_num_running_reqs = running


def test_requests_that_hold_pages_do_not_block_each_other_in_ep(one_head_fleet: Fleet) -> None:
    """As above after a switch back: rank 0 is given 30 of 32 pages, and one request needs 14 in the end."""
    sampling = {"temperature": 1.0, "max_tokens": 60, "ignore_eos": True, "logprobs": 0}
    requests = [SampleRequest(SampleKey(p, 0), [5 + p] * 150, sampling, 100 + p) for p in range(3)]
    want = work.collect(one_head_fleet.call(work.run, work.EP, per_rank=work.split(requests, 2)))
    one_head_fleet.call(squeeze_ep, 1)
    kept, one_head_fleet.timeout_s = one_head_fleet.timeout_s, 60
    outcomes = one_head_fleet.call(work.run_alternating, [3, 6], per_rank=work.split(requests, 2))
    one_head_fleet.timeout_s = kept
    one_head_fleet.call(squeeze_ep, None)
    assert outcomes[0].stats.switches[1].live_by_rank == [3, 0]
    work.assert_same(work.collect(outcomes), want)


def test_more_requests_than_tp_runs_at_once(one_head_fleet: Fleet) -> None:
    """Refused by the capacity check until few enough are left."""
    requests = long_requests(4, 20)
    policy = PolicyConfig(kind="scheduled", at_iteration=5, cooldown_iterations=100)
    one_head_fleet.call(limit_running, 3)
    outcomes = one_head_fleet.call(work.run, policy, per_rank=work.split(requests, 2))
    one_head_fleet.call(limit_running, 32)
    assert "4 requests have KV, TP runs 3 at once" in outcomes[0].stats.cancelled[0].reason
    assert not outcomes[0].stats.switches


def limit_running(engine: Any, running: int) -> None:
    engine.pair.tp.scheduler.max_num_running_reqs = running


def fail_to_quiesce_once(engine: Any) -> None:
    """On rank 1, the first snapshot of a switch finds something in flight."""
    import moebius.engine.switch as switch

    original = switch.check_at_rest

    def failing(runtime: Any) -> Any:
        switch.check_at_rest = original
        raise switch.QuiesceError("a batch is still in flight")

    if engine.rank == 1:
        switch.check_at_rest = failing


def test_switch_that_fails_before_anything_moved_leaves_ep_running(fleet: Fleet) -> None:
    requests = long_requests(6, 20)
    want = work.collect(fleet.call(work.run, work.EP, per_rank=work.split(requests, 2)))
    fleet.call(fail_to_quiesce_once)
    policy = PolicyConfig(kind="scheduled", at_iteration=4, cooldown_iterations=6)
    outcomes = fleet.call(work.run, policy, per_rank=work.split(requests, 2))
    work.assert_same(work.collect(outcomes), want)
    for outcome in outcomes:
        assert [c.iteration for c in outcome.stats.cancelled] == [4]
        assert "rank 1: a batch is still in flight" in outcome.stats.cancelled[0].reason
        assert [s.iteration for s in outcome.stats.switches] == [10]


def test_request_vllm_refuses_is_named_and_nothing_starts(fleet: Fleet) -> None:
    good = SampleRequest(SampleKey(0, 0), [5, 6], {"max_tokens": 4, "temperature": 0.0}, 1)
    bad = SampleRequest(SampleKey(1, 3), [5, 6], {"max_tokens": 4, "temperature": -2.0}, 1)
    for parts in ([([good],), ([bad],)], [([good, bad],), ([],)]):
        with pytest.raises(RankError, match=r"prompt 1, sample 3.*temperature") as error:
            fleet.call(work.run, work.EP, per_rank=parts)
        assert error.value.kind == "RequestRefused"
    outcomes = fleet.call(work.run, work.EP, per_rank=[([good],), ([],)])
    assert [r.key for r in outcomes[0].results] == [good.key]


def update_with(engine: Any, directory: str, change: str) -> None:
    from safetensors.torch import load_file

    tensors = load_file(f"{directory}/model.safetensors")
    name = next(n for n in tensors if n.endswith("q_proj.weight"))
    match change:
        case "missing":
            del tensors[name]
        case "unknown":
            tensors["model.layers.0.nonsense"] = tensors[name]
        case "shape":
            tensors[name] = tensors[name][:-1]
    engine.begin_update(7)
    engine.update_tensors(list(tensors.items()))
    engine.commit_update()


@pytest.mark.parametrize("change", ["missing", "unknown", "shape"])
def test_failed_update_is_refused_until_a_full_one(fleet: Fleet, models: list[str], change: str) -> None:
    request = SampleRequest(SampleKey(0, 0), [5, 6], {"max_tokens": 4, "temperature": 0.0}, 1)
    with pytest.raises(RankError) as error:
        fleet.call(update_with, models[0], change)
    assert error.value.kind == "ValueError"
    with pytest.raises(RankError, match=r"version 7 .*send a full update") as error:
        fleet.call(work.run, work.EP, per_rank=[([request],), ([],)])
    assert error.value.kind == "EngineDirty"
    fleet.call(updating.load_checkpoint, models[0], 8, False)
    outcomes = fleet.call(work.run, work.TP, per_rank=[([request],), ([],)])
    assert outcomes[0].results[0].policy_version == 8
