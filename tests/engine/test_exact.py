"""Tokens, reasons and logprobs do not depend on the layout, on a switch, or on where it falls."""

from __future__ import annotations

import pytest

from moebius.engine.config import PolicyConfig
from tests.engine import stock_engine, updating, work
from tests.engine.fleet import Fleet

POLICIES = {
    "static EP": work.EP,
    "static TP, switched before any token": work.TP,
    "mid prefill": PolicyConfig(kind="scheduled", at_iteration=1),
    "mid decode": PolicyConfig(kind="scheduled", at_iteration=9),
    "half live": PolicyConfig(threshold=12),
    "one live": PolicyConfig(threshold=1),
}
REQUESTS = work.rich_requests(12)  # 24 samples; their prompts take more than one iteration to prefill


@pytest.fixture(scope="module")
def reference(plain_engines: list[Fleet]) -> dict:
    return plain_engines[0].call(stock_engine.plain_run, REQUESTS)[0]


def test_reference_covers_every_way_to_finish(reference: dict) -> None:
    """The workload is only worth comparing if it meets stop strings, stop ids, length and text."""
    stops = [type(r[2]) for r in reference.values() if r[1] == "stop"]
    assert str in stops, "no stop string was met"
    assert int in stops, "no stop token id was met"
    assert any(r[1] == "length" for r in reference.values())
    assert all(r[3] is not None and len(r[4]) == len(r[0]) for r in reference.values())


@pytest.mark.parametrize("name", POLICIES)
def test_with_prefix_cache(fleet: Fleet, reference: dict, name: str) -> None:
    outcomes = fleet.call(work.run, POLICIES[name], per_rank=work.split(REQUESTS, 2, "skew"))
    work.assert_same(work.collect(outcomes), reference)
    switches = outcomes[0].stats.switches
    assert len(switches) == (name != "static EP")
    if name in ("mid decode", "half live", "mid prefill"):
        assert all(outcome.stats.switches[0].kv_bytes > 0 for outcome in outcomes)
        assert min(switches[0].live_by_rank) > 0


@pytest.mark.parametrize("name", ["mid prefill", "half live"])
def test_without_prefix_cache(fleet_without_cache: Fleet, reference: dict, name: str) -> None:
    outcomes = fleet_without_cache.call(work.run, POLICIES[name], per_rank=work.split(REQUESTS, 2, "round"))
    work.assert_same(work.collect(outcomes), reference)


def test_all_requests_on_one_rank(fleet: Fleet, reference: dict) -> None:
    outcomes = fleet.call(work.run, POLICIES["half live"], per_rank=work.split(REQUESTS, 2, "first"))
    work.assert_same(work.collect(outcomes), reference)
    assert outcomes[0].stats.switches[0].live_by_rank[1] == 0


def test_live_kv_arrives_whole_and_nothing_else_is_read(fleet: Fleet, reference: dict) -> None:
    results = fleet.call(work.run_checking_kv, POLICIES["mid decode"], per_rank=work.split(REQUESTS, 2, "skew"))
    work.assert_same(work.collect([outcome for outcome, _ in results]), reference)
    assert all(compared > 0 for _, compared in results)


def test_expert_bytes_survive_the_round_trip(fleet: Fleet) -> None:
    fleet.call(work.run, work.EP, per_rank=[([],), ([],)])  # experts stand in EP layout
    for before, after in fleet.call(work.round_trip_hashes):
        assert before == after
        assert len(set(before)) == len(before), "layers should differ, else the comparison says little"


def test_three_steps_with_updates_between(fleet: Fleet, plain_engines: list[Fleet], models: list[str]) -> None:
    """Each step equals a fresh engine of its weights, fused and per-expert names alike; addresses never change."""
    where = fleet.call(work.addresses)
    for step, index in enumerate([1, 2, 0]):
        fleet.call(updating.load_checkpoint, models[index], step + 1, step % 2 == 0)
        requests = work.rich_requests(6, seed=step, step=step)
        want = plain_engines[index].call(stock_engine.plain_run, requests)[0]
        outcomes = fleet.call(work.run, PolicyConfig(threshold=6), per_rank=work.split(requests, 2))
        work.assert_same(work.collect(outcomes), want)
        assert {r.policy_version for o in outcomes for r in o.results} == {step + 1}
        assert 0 < outcomes[0].stats.switches[0].live <= 6
    assert fleet.call(work.addresses) == where


def test_rerun_repeats_and_samples_differ(fleet: Fleet) -> None:
    requests = [r for r in work.rich_requests(8, samples=3) if r.sampling["temperature"] > 0]
    first, second = (
        work.collect(fleet.call(work.run, PolicyConfig(threshold=5), per_rank=work.split(requests, 2, rule)))
        for rule in ("round", "skew")
    )
    work.assert_same(first, second)
    by_prompt: dict[int, set] = {}
    for key, result in first.items():
        by_prompt.setdefault(key.prompt, set()).add(tuple(result[0]))
    assert all(len(tokens) == 3 for tokens in by_prompt.values())


def test_samples_of_one_prompt_are_independent_across_ranks(fleet: Fleet) -> None:
    """First tokens of one prompt sampled on both ranks: chi-square of independence between paired samples.

    Tokens are reduced to 4 classes; 9 degrees of freedom, statistic below 36 with probability 0.99996 when independent.
    """
    from moebius.engine.types import SampleKey, SampleRequest
    from moebius.kernels.noise import derive_seed

    count = 256
    sampling = {"temperature": 1.0, "max_tokens": 1}
    requests = [SampleRequest(SampleKey(0, s), [7, 8, 9], sampling, derive_seed(3, 0, 0, s)) for s in range(count)]
    got = work.collect(fleet.call(work.run, work.EP, per_rank=work.split(requests, 2)))
    tokens = [got[SampleKey(0, s)][0][0] % 4 for s in range(count)]
    table = [[0] * 4 for _ in range(4)]
    for left, right in zip(tokens[::2], tokens[1::2], strict=True):  # rank 0, rank 1
        table[left][right] += 1
    rows, columns, total = [sum(r) for r in table], [sum(c) for c in zip(*table, strict=True)], count // 2
    chi2 = sum(
        (table[i][j] - rows[i] * columns[j] / total) ** 2 / (rows[i] * columns[j] / total)
        for i in range(4)
        for j in range(4)
        if rows[i] * columns[j]
    )
    assert chi2 < 36
    assert len({got[SampleKey(0, s)][0][0] for s in range(count)}) > 30
