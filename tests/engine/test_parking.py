"""Samples that a step leaves unfinished go on in the next one as if nothing had happened, whenever that is."""

from __future__ import annotations

import pytest

from moebius.engine.config import PolicyConfig
from moebius.engine.types import SampleKey, SampleRequest, StepOutcome
from tests.engine import stock_engine, work
from tests.engine.fleet import Fleet, RankError
from tests.engine.layouts import check_layouts

REQUESTS = work.rich_requests(12)  # 24 samples of all kinds; their prompts take more than one iteration to prefill
LATER = [
    SampleRequest(SampleKey(r.key.prompt, r.key.sample, 1), r.prompt_token_ids, r.sampling, r.seed)
    for r in work.rich_requests(4, seed=9, step=1)
]


@pytest.fixture(scope="module")
def reference(plain_engines: list[Fleet]) -> dict:
    return plain_engines[0].call(stock_engine.plain_run, REQUESTS)[0]


@pytest.fixture(scope="module")
def later(plain_engines: list[Fleet]) -> dict:
    found = plain_engines[0].call(stock_engine.plain_run, LATER)[0]
    return {SampleKey(key.prompt, key.sample, 1): value for key, value in found.items()}


def check_accounts(outcomes: list[StepOutcome], before: set[SampleKey]) -> set[SampleKey]:
    """Every sample that went in came out or is parked, once; returns what is parked."""
    parked = [key for outcome in outcomes for key in outcome.parked]
    ended = [r.key for outcome in outcomes for r in outcome.results]
    assert len(parked) == len(set(parked)) and len(ended) == len(set(ended))
    assert set(parked) | set(ended) == before and not set(parked) & set(ended)
    assert [o.stats.parked for o in outcomes] == [len(o.parked) for o in outcomes]
    return set(parked)


# Iterations to switch at, and the one after which to park: at once (nothing computed), in the middle of prefill, with
# all and with some live in EP, in TP, and after a return to EP that moved requests to another rank.
MOMENTS = {
    "EP, at once": ([], 0),
    "EP, mid prefill": ([], 1),
    "EP, mid decode": ([], 12),
    "EP, half live": ([], 30),
    "TP, mid prefill": ([1], 2),
    "TP, half live": ([6], 25),
    "EP again": ([5, 9], 14),
}


@pytest.mark.parametrize("keep_kv", [False, True], ids=["KV dropped", "KV kept"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_resumed_samples_equal_undisturbed_ones(
    fleet: Fleet, reference: dict, later: dict, moment: str, keep_kv: bool
) -> None:
    switches, park_at = MOMENTS[moment]
    parts = [(switches, park_at, part, [], keep_kv) for (part,) in work.split(REQUESTS, 2, "skew")]
    first = fleet.call(work.run_and_park, per_rank=parts)
    parked = check_accounts(first, set(reference))
    assert 0 < len(parked) <= 24 and (moment not in ("EP, half live", "TP, half live") or len(parked) < 24)
    pages = fleet.call(work.pages_in_use)
    assert all(tp == 0 and (keep_kv or ep == 0) for ep, tp in pages)
    assert not keep_kv or park_at == 0 or sum(ep for ep, _ in pages) > 0
    # Parked once more, with new samples beside them; then to the end, with a switch.
    parts = [([3], 8, part, [], keep_kv) for (part,) in work.split(LATER, 2)]
    second = fleet.call(work.run_and_park, per_rank=parts)
    still = check_accounts(second, parked | set(later))
    assert {o.stats.iterations[0].layout for o in second} == {"EP"}
    third = fleet.call(work.run_and_park, per_rank=[([4], None, [], [], keep_kv)] * 2)
    assert not check_accounts(third, still)
    work.assert_same(work.collect([*first, *second, *third]), reference | later)
    assert [o.stats.resumed for o in second] == [o.stats.parked for o in first]
    for result in (r for o in [*first, *second, *third] for r in o.results):
        assert sum(count for _, count in result.versions) == len(result.token_ids) and len(result.versions) == 1
    assert check_layouts(first, second, third).keys() == {"EP", "TP"}
    assert fleet.call(work.pages_in_use) == [(0, 0)] * 2


def park_all(fleet: Fleet, keep_kv: bool = False) -> dict[SampleKey, int]:
    """A step that is parked in the middle; returns what is parked, and where."""
    parts = [([], 12, part, [], keep_kv) for (part,) in work.split(REQUESTS, 2)]
    outcomes = fleet.call(work.run_and_park, per_rank=parts)
    return {key: rank for rank, outcome in enumerate(outcomes) for key in outcome.parked}


@pytest.mark.parametrize("keep_kv", [False, True], ids=["KV dropped", "KV kept"])
def test_parked_samples_can_be_ended(fleet: Fleet, reference: dict, keep_kv: bool) -> None:
    """Between steps, and in the step that goes on with them; the tokens they have are those they would have had."""
    where = park_all(fleet, keep_kv)
    first, second = sorted(where)[:4], sorted(where)[4:8]
    ended = fleet.call(work.abort_parked, first)
    assert {r.key: rank for rank, results in enumerate(ended) for r in results} == {k: where[k] for k in first}
    outcomes = fleet.call(work.run_aborting, second, 1, per_rank=[([],)] * 2)
    results = {r.key: r for part in [*ended, *(o.results for o in outcomes)] for r in part}
    assert set(results) == set(where)
    for key, result in results.items():
        count = len(result.token_ids)
        if key in first or key in second:
            assert result.finish_reason == "abort" and 0 < count < len(reference[key][0])
        assert result.token_ids == reference[key][0][:count] and sum(n for _, n in result.versions) == count
        assert result.layouts == [("EP", count)]
        assert result.logprobs is not None and len(result.logprobs) == count
    assert fleet.call(work.pages_in_use) == [(0, 0)] * 2
    park_all(fleet, keep_kv)
    assert sum(map(len, fleet.call(work.abort_parked, None))) == len(where)
    assert fleet.call(work.run, work.EP, per_rank=[([],)] * 2)[0].results == []
    assert fleet.call(work.pages_in_use) == [(0, 0)] * 2


def test_a_step_that_is_refused_leaves_them_parked(fleet: Fleet, reference: dict) -> None:
    where = park_all(fleet)
    bad = SampleRequest(SampleKey(1, 3), [5, 6], {"max_tokens": 4, "temperature": -2.0}, 1)
    twice = next(r for r in REQUESTS if r.key in where)
    for wrong, words in ((bad, "temperature"), (twice, "unfinished already")):
        with pytest.raises(RankError, match=words) as error:
            fleet.call(
                work.run, work.EP, per_rank=[([wrong],), ([],)] if where.get(wrong.key) == 0 else [([],), ([wrong],)]
            )
        assert error.value.kind == "RequestRefused"
    outcomes = fleet.call(work.run, work.TP, per_rank=[([],)] * 2)
    got = work.collect(outcomes)
    work.assert_same(got, {key: reference[key] for key in where})


def test_a_policy_that_keeps_its_layout_begins_in_ep_all_the_same(fleet: Fleet, reference: dict) -> None:
    """The interactive policy ends a step in TP, and would begin the next one there."""
    stay = PolicyConfig(kind="interactive", threshold=1000, threshold_low=900, window=1, cooldown_s=0.0)
    parts = [(stay, 12, part) for (part,) in work.split(REQUESTS, 2)]
    first = fleet.call(work.run_and_park, per_rank=parts)
    assert first[0].stats.iterations[-1].layout == "TP" and sum(len(o.parked) for o in first) > 8
    second = fleet.call(work.run, stay, per_rank=[([],)] * 2)
    assert [s.to for s in second[0].stats.switches][:1] == ["TP"], "it began in EP"
    work.assert_same(work.collect([*first, *second]), reference)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_a_callback_ends_the_step_on_all_ranks(fleet: Fleet, reference: dict, rank: int) -> None:
    kept, fleet.timeout_s = fleet.timeout_s, 60
    with pytest.raises(RankError, match=r"ZeroDivisionError: of the caller|on another rank") as error:
        fleet.call(work.run_failing, rank, per_rank=work.split(REQUESTS, 2))
    assert error.value.kind == "CallbackFailed"
    few = REQUESTS[:4]
    outcomes = fleet.call(work.run, work.EP, per_rank=work.split(few, 2))
    fleet.timeout_s = kept
    work.assert_same(work.collect(outcomes), {r.key: reference[r.key] for r in few})
