"""Weight updates: all ranks or none, with the old weights serving on where they can, and while samples are parked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moebius.engine.config import PolicyConfig
from moebius.engine.types import SampleKey, SampleRequest
from tests.engine import stock_engine, updating, work
from tests.engine.fleet import Fleet, RankError

REQUESTS = work.rich_requests(6)
POLICY = PolicyConfig(threshold=6)


@pytest.fixture(scope="module", autouse=True)
def _weights_as_before(fleet: Fleet, models: list[str]) -> Iterator[None]:
    """Other modules use the same engines."""
    yield
    fleet.call(updating.load_checkpoint, models[0], 99, False)


@pytest.fixture(scope="module")
def wants(plain_engines: list[Fleet]) -> list[dict]:
    return [engine.call(stock_engine.plain_run, REQUESTS)[0] for engine in plain_engines]


def tokens(fleet: Fleet) -> dict:
    return work.collect(fleet.call(work.run, POLICY, per_rank=work.split(REQUESTS, 2)))


def test_staged_and_in_place_updates_equal_fresh_engines(fleet: Fleet, wants: list[dict], models: list[str]) -> None:
    where = fleet.call(work.addresses)
    for version, (index, mode) in enumerate([(1, "staged"), (2, "in_place"), (0, "staged"), (1, "in_place")], 20):
        stats = fleet.call(updating.pull, version, mode, models[index], None)
        work.assert_same(tokens(fleet), wants[index])
        assert all((s.version, s.mode) == (version, mode) and s.seconds > 0 for s in stats)
        assert stats[0].nbytes == stats[1].nbytes > 100_000
    assert fleet.call(work.addresses) == where


@pytest.mark.parametrize("trouble", ["raises", "short", "shape"])
@pytest.mark.parametrize("mode", ["staged", "in_place"])
def test_a_rank_that_fails_stops_the_update_on_all(
    fleet: Fleet, wants: list[dict], models: list[str], mode: str, trouble: str
) -> None:
    """Trouble on rank 1 only. Sources are read to their end, since a sender may wait for all readers."""
    fleet.call(updating.pull, 30, "in_place", models[0], None)
    words = {"raises": "rank 1: OSError: the trainer is gone", "short": "missing", "shape": "rank 1: .*expected shape"}
    with pytest.raises(RankError, match=words[trouble]) as error:
        fleet.call(updating.pull, 31, mode, models[1], per_rank=[(None,), (trouble,)])
    assert error.value.kind == "ValueError"
    assert fleet.call(updating.was_read_to_the_end) == [True, trouble != "raises"]
    if mode == "staged":
        work.assert_same(tokens(fleet), wants[0])
    else:
        with pytest.raises(RankError, match=r"version 31 .*send a full update"):
            tokens(fleet)
    fleet.call(updating.pull, 32, mode, models[1], None)
    work.assert_same(tokens(fleet), wants[1])


def test_pages_from_before_an_update_are_never_found_again(
    fleet: Fleet, plain_engines: list[Fleet], models: list[str]
) -> None:
    """Parked samples hold pages over an update. New requests with the same prompts, and with those samples' whole texts
    as prompts, must not read them."""
    fleet.call(updating.pull, 40, "in_place", models[0], None)
    sampling = {"temperature": 0.0, "max_tokens": 70, "ignore_eos": True, "logprobs": 0}
    first = [SampleRequest(SampleKey(p, 0), [9 + p] * 3 + list(range(10, 80)), sampling, 1) for p in range(4)]
    parts = [([], 20, part, [], True) for (part,) in work.split(first, 2)]
    outcomes = fleet.call(work.run_and_park, per_rank=parts)
    assert sum(len(o.parked) for o in outcomes) == 4
    fleet.call(updating.pull, 41, "staged", models[1], None)
    same = [SampleRequest(SampleKey(r.key.prompt, 0, 1), r.prompt_token_ids, sampling, 1) for r in first]
    got = work.collect(fleet.call(work.run, work.EP, per_rank=work.split(same, 2)))
    want = plain_engines[1].call(stock_engine.plain_run, same)[0]
    old = {key: value for key, value in got.items() if key.step == 0}
    assert len(old) == 4
    work.assert_same(
        {k: v for k, v in got.items() if k.step == 1}, {SampleKey(k.prompt, 0, 1): v for k, v in want.items()}
    )
    # Their first pages anew, with the tokens in which old and new pages meet; then all of their tokens as prompts.
    for step, (cut, tokens) in enumerate([(10, 1), (70, 8)], 2):
        texts = [
            SampleRequest(
                SampleKey(r.key.prompt, 0, step),
                r.prompt_token_ids + old[r.key][0][:cut],
                sampling | {"max_tokens": tokens},
                1,
            )
            for r in first
        ]
        got = work.collect(fleet.call(work.run, work.EP, per_rank=work.split(texts, 2)))
        want = plain_engines[1].call(stock_engine.plain_run, texts)[0]
        work.assert_same(got, {SampleKey(k.prompt, 0, step): v for k, v in want.items()})


def test_tokens_carry_the_version_they_were_sampled_under(fleet: Fleet, models: list[str]) -> None:
    """Over two updates, with switches that move samples to another rank's front in between."""
    sampling = {"temperature": 1.0, "max_tokens": 60, "ignore_eos": True}
    requests = [SampleRequest(SampleKey(p, 0), [5 + p] * 20, sampling, 100 + p) for p in range(6)]
    ended, parts = [], work.split(requests, 2, "first")
    for version, switches in ((50, [2]), (51, [2, 6]), (52, [3])):
        fleet.call(updating.pull, version, "in_place", models[version % 3], None)
        park_at = None if version == 52 else 10
        ended += fleet.call(work.run_and_park, per_rank=[(switches, park_at, part) for (part,) in parts])
        parts = [([],)] * 2
    results = [r for outcome in ended for r in outcome.results]
    assert len(results) == 6
    for result in results:
        assert [version for version, _ in result.versions] == [50, 51, 52] and result.policy_version == 52
        assert sum(count for _, count in result.versions) == 60
        assert all(count >= 8 for _, count in result.versions)
