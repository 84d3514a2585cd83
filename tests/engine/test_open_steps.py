"""Requests join a running step, in either layout and while it idles: tokens as if each had been alone."""

from __future__ import annotations

import pytest

from moebius.engine.config import PolicyConfig
from moebius.engine.types import SampleKey, SampleRequest
from tests.engine import stock_engine, work
from tests.engine.fleet import Fleet

REQUESTS = work.rich_requests(12)


@pytest.fixture(scope="module")
def reference(plain_engines: list[Fleet]) -> dict:
    return plain_engines[0].call(stock_engine.plain_run, REQUESTS)[0]


@pytest.mark.parametrize("switches", [[], [0], [4], [4, 12, 20, 28]], ids=str)
def test_requests_that_come_during_the_step(fleet: Fleet, reference: dict, switches: list[int]) -> None:
    """Waves at different moments on the two ranks; the last requests come when all ranks idle."""
    first = [REQUESTS[0:4], REQUESTS[12:13]]
    waves = [[(0, first[0]), (6, REQUESTS[4:8]), (15, REQUESTS[8:10])], [(0, first[1]), (7, REQUESTS[13:20])]]
    late = [REQUESTS[10:12], REQUESTS[20:24]]
    per_rank = [(switches, waves[rank], late[rank]) for rank in range(2)]
    outcomes = fleet.call(work.run_open, per_rank=per_rank)
    work.assert_same(work.collect(outcomes), reference)
    assert [o.stats.admitted for o in outcomes] == [12, 12]
    assert {s.to for s in outcomes[0].stats.switches} == (
        {"TP", "EP"} if len(switches) > 1 else {"TP"} if switches else set()
    )


@pytest.mark.parametrize("switches", [[], [0]], ids=str)
def test_refused_request_comes_back_with_the_reason(fleet: Fleet, switches: list[int]) -> None:
    good = SampleRequest(SampleKey(0, 0), [5, 6, 7], {"max_tokens": 30, "temperature": 0.0, "ignore_eos": True}, 1)
    bad = SampleRequest(SampleKey(1, 3), [5, 6], {"max_tokens": 4, "temperature": -2.0}, 1)
    fine = SampleRequest(SampleKey(2, 0), [5, 6], {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}, 1)
    outcomes = fleet.call(
        work.run_open, per_rank=[(switches, [(0, [good]), (5, [bad, fine])], []), (switches, [(0, [])], [])]
    )
    results = {r.key: r for r in outcomes[0].results}
    assert results[bad.key].finish_reason == "error" and "temperature" in str(results[bad.key].stop_reason)
    assert len(results[good.key].token_ids) == 30 and len(results[fine.key].token_ids) == 4
    assert not outcomes[1].results


INTERACTIVE = PolicyConfig(kind="interactive", threshold=6, threshold_low=5, window=2, cooldown_s=0.0)


def test_interactive_policy_follows_the_load(fleet: Fleet, reference: dict) -> None:
    """Few requests: TP. A burst: EP. Its tail: TP again, and the next step begins there."""
    fleet.call(work.run, work.EP, per_rank=[([],), ([],)])  # begins in EP, whatever ran before
    waves = [[(0, REQUESTS[0:2]), (9, REQUESTS[2:14])], [(0, REQUESTS[14:16]), (9, REQUESTS[16:24])]]
    outcomes = fleet.call(work.run_open, per_rank=[(INTERACTIVE, waves[rank], []) for rank in range(2)])
    work.assert_same(work.collect(outcomes), reference)
    for outcome in outcomes:
        assert [s.to for s in outcome.stats.switches][:3] == ["TP", "EP", "TP"]
    decisions = outcomes[0].stats.decisions
    assert [d.target for d in decisions if d.outcome == "switched"][:3] == ["TP", "EP", "TP"]
    assert all({"live", "t_h", "t_l"} <= d.inputs.keys() for d in decisions if d.target)
    assert [d.inputs for d in decisions] == [d.inputs for d in outcomes[1].stats.decisions], (
        "ranks saw different numbers"
    )

    few = REQUESTS[:3]
    outcomes = fleet.call(work.run, INTERACTIVE, per_rank=work.split(few, 2))
    work.assert_same(work.collect(outcomes), {r.key: reference[r.key] for r in few})
    assert not outcomes[0].stats.switches and {i.layout for i in outcomes[0].stats.iterations} == {"TP"}
    outcomes = fleet.call(work.run, work.EP, per_rank=work.split(REQUESTS, 2))
    work.assert_same(work.collect(outcomes), reference)


def submit_without_a_step(engine: object) -> None:
    engine.inbox.submit([])  # type: ignore[attr-defined]


def test_submitting_without_an_open_step_is_an_error(fleet: Fleet) -> None:
    with pytest.raises(AssertionError, match="no step is open"):
        fleet.call(submit_without_a_step)
