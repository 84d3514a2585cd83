"""Drafts in TP change how many iterations a sample takes, and nothing else: tokens, reasons, text, logprobs, routes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from moebius.engine.config import PolicyConfig, TailConfig
from moebius.engine.types import DraftStats, StepOutcome
from tests.engine import drafting, stock_engine, work
from tests.engine.fleet import Fleet
from tests.engine.test_routed_experts import check as check_routes
from tests.engine.test_steady import plain_requests

REQUESTS = work.rich_requests(12)  # 24 samples of all kinds of sampling
ROUTED = work.rich_requests(10, seed=5)  # those that `check_routes` knows
WIDTH = 4
MID = PolicyConfig(kind="scheduled", at_iteration=9)


@pytest.fixture(scope="module")
def reference(plain_engines: list[Fleet]) -> dict:
    return plain_engines[0].call(stock_engine.plain_run, REQUESTS)[0]


@pytest.fixture(scope="module")
def truth(reference: dict) -> dict:
    return {request.key: [*request.prompt_token_ids, *reference[request.key][0]] for request in REQUESTS}


@pytest.fixture(scope="module")
def drafting_fleet(models: list[str]) -> Iterator[Fleet]:
    """Two ranks with drafts in TP, as many as there are; prefix caching; EP scheduled asynchronously."""
    tail = TailConfig(speculation="siblings", draft_tokens=WIDTH, adaptive=False, draft_memory_tokens=1 << 16)
    fleet = Fleet(2, work.make_engine, work.config(models[0], tail=tail, enable_prefix_caching=True))
    fleet.call(drafting.wait_for_texts, True)
    yield fleet
    fleet.close()


@pytest.fixture(scope="module")
def routing_fleet(models: list[str]) -> Iterator[Fleet]:
    """Two ranks with adaptive drafts, without prefix caching, that record routes; little room for tokens."""
    tail = TailConfig(speculation="suffix", draft_tokens=WIDTH, draft_memory_tokens=1 << 16)
    settings = work.config(models[0], tail=tail, routed_experts=True, async_scheduling=False, max_num_batched_tokens=64)
    fleet = Fleet(2, work.make_engine, settings)
    fleet.call(drafting.wait_for_texts, True)
    fleet.call(drafting.force, True)  # lengths are adaptive, drafting is not
    yield fleet
    fleet.close()


def drafts_of(outcomes: list[StepOutcome]) -> DraftStats:
    """The draft figures of a step, which all ranks must have alike."""
    first = outcomes[0].stats.drafts
    assert first is not None
    assert all(outcome.stats.drafts == first for outcome in outcomes)
    mine = [r for outcome in outcomes for r in outcome.results]
    assert sum(r.drafted for r in mine) == first.drafted
    assert sum(r.accepted for r in mine) == sum(first.accepted)
    assert all(right <= tried for right, tried in zip(first.accepted, first.verified, strict=True))
    return first


def test_only_tp_has_drafts(drafting_fleet: Fleet, routing_fleet: Fleet) -> None:
    for ep, tp in drafting_fleet.call(drafting.speculation_of_runtimes):
        assert ep == (0, True, 256)
        assert tp == (WIDTH, True, 256), "scheduled ahead while it does not draft"
    for ep, tp in routing_fleet.call(drafting.speculation_of_runtimes):
        assert ep == (0, False, 64)
        assert tp == (WIDTH, False, 32 * (1 + WIDTH)), "all samples with all their drafts fit one iteration"


POLICIES = {
    "TP from the start": work.TP,
    "mid prefill": PolicyConfig(kind="scheduled", at_iteration=1),
    "mid decode": MID,
    "half live": PolicyConfig(threshold=12),
    "one live": PolicyConfig(threshold=1),
}


@pytest.mark.parametrize("mode", ["ngram", "suffix", "siblings"])
@pytest.mark.parametrize("name", POLICIES)
def test_tokens_as_without_drafts(drafting_fleet: Fleet, reference: dict, mode: str, name: str) -> None:
    drafting_fleet.call(drafting.set_mode, mode)
    outcomes = drafting_fleet.call(work.run, POLICIES[name], per_rank=work.split(REQUESTS, 2, "skew"))
    work.assert_same(work.collect(outcomes), reference)
    found = drafts_of(outcomes)
    assert found.mode == mode
    if name != "one live":
        assert found.drafted > 0


@pytest.mark.parametrize("iterations", [[1, 2, 3, 30], [6, 14, 22], [0, 5, 6, 9, 12]], ids=str)
def test_there_and_back(drafting_fleet: Fleet, reference: dict, iterations: list[int]) -> None:
    drafting_fleet.call(drafting.set_mode, "siblings")
    outcomes = drafting_fleet.call(work.run_alternating, iterations, per_rank=work.split(REQUESTS, 2, "first"))
    work.assert_same(work.collect(outcomes), reference)
    assert len(outcomes[0].stats.switches) == len(iterations)
    assert drafts_of(outcomes).tokens > 0


@pytest.mark.parametrize("kind", ["right", "wrong", "both"])
def test_whatever_is_drafted(drafting_fleet: Fleet, reference: dict, truth: dict, kind: str) -> None:
    """With the truth for a draft a sample gets more than two tokens an iteration; with anything but it just one."""
    outcomes = drafting_fleet.call(drafting.run_guessing, kind, truth, MID, per_rank=work.split(REQUESTS, 2, "round"))
    work.assert_same(work.collect(outcomes), reference)
    found = drafts_of(outcomes)
    each = found.tokens / found.rows
    if kind == "right":
        assert found.accepted == found.verified and each > 2
        assert found.iterations < 30, "of about 50 that the longest sample takes without drafts"
    elif kind == "wrong":
        assert sum(found.accepted) == 0 and found.drafted > 0 and each == 1
    else:
        assert 1 < each < 1 + WIDTH and 0 < sum(found.accepted) < sum(found.verified)


@pytest.mark.parametrize(
    ("every", "switches"),
    [(2, work.TP), (3, MID), (8, work.TP), (1, [3, 7, 10, 13, 16])],
    ids=["every 2nd", "every 3rd", "every 8th", "every one, five switches"],
)
def test_between_ahead_and_drafting(drafting_fleet: Fleet, reference: dict, every: int, switches: object) -> None:
    """With all sorts of sampling, also such as need the tokens that were sampled ahead."""
    drafting_fleet.call(drafting.set_mode, "siblings")
    outcomes = drafting_fleet.call(drafting.run_flipping, every, switches, per_rank=work.split(REQUESTS, 2, "skew"))
    work.assert_same(work.collect(outcomes), reference)
    found = drafts_of(outcomes)
    if not isinstance(switches, list):
        assert found.changes >= 4 and found.ahead > 3 and found.with_drafts > 3
    if switches is work.TP:  # tokens of a draft behind a stop string have been sampled, too
        assert 0 <= found.tokens - sum(len(result[0]) for result in reference.values()) < 10


def test_between_both_with_requests_that_nobody_reads(drafting_fleet: Fleet, plain_engines: list[Fleet]) -> None:
    """Iterations ahead in which a front sees no tokens, and drafting in between."""
    quiet = [replace(r, sampling=r.sampling | {"detokenize": False}) for r in plain_requests()]
    found = plain_engines[0].call(stock_engine.plain_run, quiet)[0]
    wanted = {key: (*value[:3], None, value[4]) for key, value in found.items()}
    texts = {request.key: [*request.prompt_token_ids, *found[request.key][0]] for request in quiet}
    before = drafting_fleet.call(drafting.steady_iterations)[0]
    for switches in (work.TP, [4, 9, 15, 22, 30]):
        parts = [(part, texts) for (part,) in work.split(quiet, 2, "skew")]
        outcomes = drafting_fleet.call(drafting.run_flipping, 5, switches, per_rank=parts)
        work.assert_same(work.collect(outcomes), wanted)
        stats = outcomes[0].stats
        assert sum(i.tokens for i in stats.iterations) == sum(len(value[0]) for value in wanted.values())
        assert drafts_of(outcomes).with_drafts > 3
    assert drafting_fleet.call(drafting.steady_iterations)[0] > before + 10


@pytest.mark.parametrize("kind", ["right", "wrong"])
def test_drafting_begins_only_if_guesses_come_true(
    drafting_fleet: Fleet, reference: dict, truth: dict, kind: str
) -> None:
    outcomes = drafting_fleet.call(drafting.run_choosing, kind, truth, per_rank=work.split(REQUESTS, 2, "round"))
    work.assert_same(work.collect(outcomes), reference)
    found = drafts_of(outcomes)
    if kind == "right":
        assert found.changes == 1 and found.drafted > 0 and found.ahead > WIDTH
    else:
        assert found.changes == found.drafted == found.with_drafts == 0 and found.ahead == found.iterations


def test_true_drafts_over_several_switches(drafting_fleet: Fleet, reference: dict, truth: dict) -> None:
    outcomes = drafting_fleet.call(
        drafting.run_guessing, "both", truth, [3, 7, 10, 13, 16], per_rank=work.split(REQUESTS, 2, "skew")
    )
    work.assert_same(work.collect(outcomes), reference)
    assert len(outcomes[0].stats.switches) == 5


def test_later_steps_draft_from_earlier_samples(drafting_fleet: Fleet, reference: dict) -> None:
    """The second time all texts are known: greedy samples are found again, token by token."""
    drafting_fleet.call(drafting.set_mode, "siblings")
    steps = []
    for _ in range(2):
        outcomes = drafting_fleet.call(work.run, MID, per_rank=work.split(REQUESTS, 2, "skew"))
        work.assert_same(work.collect(outcomes), reference)
        steps.append(drafts_of(outcomes))
    first, second = steps
    assert second.tokens / second.rows > first.tokens / first.rows
    assert second.tokens / second.rows > 2, "each sample has been seen in the step before"
    held = drafting_fleet.call(drafting.library)
    assert all(tokens <= 1 << 16 and scopes <= 12 for tokens, scopes in held)
    assert sum(tokens for tokens, _ in held) == 2 * sum(len(result[0]) for result in reference.values())


def test_parked_in_the_tail(drafting_fleet: Fleet, reference: dict) -> None:
    parts = [([6], 12, part, [], True) for (part,) in work.split(REQUESTS, 2, "skew")]
    first = drafting_fleet.call(work.run_and_park, per_rank=parts)
    assert sum(outcome.stats.parked for outcome in first) > 0
    second = drafting_fleet.call(work.run, MID, per_rank=[([],), ([],)])
    work.assert_same(work.collect([*first, *second]), reference)


def test_requests_that_join_the_tail(drafting_fleet: Fleet, reference: dict) -> None:
    early, late = REQUESTS[:16], REQUESTS[16:]
    args = [
        ([4], [(0, part), (9, more)], [])
        for (part,), (more,) in zip(work.split(early, 2), work.split(late, 2), strict=True)
    ]
    outcomes = drafting_fleet.call(work.run_open, per_rank=args)
    work.assert_same(work.collect(outcomes), reference)
    assert drafts_of(outcomes).drafted > 0


def test_pages_for_drafts_are_counted(drafting_fleet: Fleet, fleet: Fleet) -> None:
    """The capacity check asks for at most one page more per request than without drafts, and for some more in all."""
    plain, drafts = (f.call(drafting.demand, per_rank=work.split(REQUESTS, 2))[0] for f in (fleet, drafting_fleet))
    assert drafts[1:] == plain[1:]
    assert plain[0] < drafts[0] <= plain[0] + plain[2]


@pytest.mark.parametrize("policy", [work.TP, MID, PolicyConfig(threshold=12)], ids=["TP", "mid decode", "half live"])
def test_routes_are_those_of_accepted_tokens(routing_fleet: Fleet, models: list[str], policy: PolicyConfig) -> None:
    outcomes = routing_fleet.call(work.run, policy, per_rank=work.split(ROUTED, 2, "skew"))
    check_routes(models[0], outcomes)
    assert drafts_of(outcomes).drafted > 0


def test_adaptive_without_prefix_cache(routing_fleet: Fleet, reference: dict) -> None:
    """With little room for tokens, so that prompts and drafts compete for it."""
    for iterations in ([3], [6, 14, 22]):
        outcomes = routing_fleet.call(work.run_alternating, iterations, per_rank=work.split(REQUESTS, 2, "round"))
        work.assert_same(work.collect(outcomes), reference)
        drafts_of(outcomes)


def test_lengths_by_measured_costs(drafting_fleet: Fleet, reference: dict) -> None:
    """While costs are measured nothing is drafted or remembered; with them the report knows what was saved."""
    answers = drafting_fleet.call(drafting.step_by_costs, per_rank=work.split(REQUESTS, 2, "round"))
    outcomes = [outcome for _, _, outcome, _ in answers]
    work.assert_same(work.collect(outcomes), reference)
    assert all(before == after for before, after, *_ in answers)
    assert answers[0][3] == answers[1][3], "ranks would decide differently"
    assert drafts_of(outcomes).plain_s is not None


def test_texts_that_cannot_be_put_together_end_drafts_on_all_ranks(routing_fleet: Fleet, reference: dict) -> None:
    """The last test with these engines: drafts stay off."""
    routing_fleet.call(drafting.fail_once, 1)
    for _ in range(2):
        outcomes = routing_fleet.call(work.run, MID, per_rank=work.split(REQUESTS, 2, "round"))
        work.assert_same(work.collect(outcomes), reference)
        found = drafts_of(outcomes)
        assert found.drafted == 0 and found.ahead == found.iterations > 0
        assert found.problem is not None and "1 rank(s)" in found.problem
