"""The predictive policy on engines: all ranks know the same, exact lengths, and when samples came and ended."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moebius.engine.config import PolicyConfig
from moebius.engine.costs import CostModel, CostPoint, SwitchPoint
from moebius.engine.layout import Layout
from moebius.engine.survival import LengthEstimator, LifeTable
from moebius.engine.types import SampleKey, SampleRequest
from tests.engine import work
from tests.engine.fleet import Fleet

# TP is the faster one below eight samples, and a switch costs next to nothing.
COSTS = CostModel(
    ranks=2,
    points=[
        CostPoint(layout=layout, batch=batch, context=0, ms=ms)
        for layout, values in ((Layout.EP, (10, 10, 12)), (Layout.TP, (5, 10, 30)))
        for batch, ms in zip((1, 8, 32), values, strict=True)
    ],
    switches=[SwitchPoint(to=to, live=4, kv_tokens=100, ms=1) for to in Layout],
)
PREDICTIVE = PolicyConfig(kind="predictive", threshold=2, every=4)


def requests(lengths: list[int], samples: int, step: int = 0) -> list[SampleRequest]:
    """Sample i % samples of prompt i // samples gets exactly `lengths[i]` tokens."""
    return [
        SampleRequest(
            SampleKey(i // samples, i % samples, step),
            [20 + i // samples] * 9,
            {"temperature": 1.0, "max_tokens": n, "ignore_eos": True},
            i,
        )
        for i, n in enumerate(lengths)
    ]


def prepare(engine: Any) -> None:
    engine.policy.config, engine.policy.costs = PREDICTIVE, COSTS
    engine.policy.lengths = LengthEstimator()


def run_step(engine: Any, own: list[SampleRequest]) -> tuple[Any, Any]:
    return engine.run_step(own), learnt(engine)


def learnt(engine: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[int, list[float]], dict[int, int]]:
    lengths = engine.policy.lengths
    table = lengths._table
    return table.grid, table.deaths, table.cut, lengths._siblings, lengths._running


def run_open(engine: Any, waves: Any, late: Any) -> tuple[Any, Any]:
    return work.run_open(engine, PREDICTIVE, waves, late), learnt(engine)


def assert_exact(found: list[Any], lengths: list[int], samples: int, step: int = 0) -> None:
    grid, _, cut, siblings, running = found[0]
    wanted = LifeTable(grid)
    for length in lengths:
        wanted.add(length)
    for _, other_deaths, other_cut, other_siblings, other_running in found:
        np.testing.assert_array_equal(other_deaths, wanted.deaths)
        np.testing.assert_array_equal(other_cut, cut)
        assert (other_siblings, other_running) == (siblings, running)
    assert cut.sum() == 0
    by_prompt = {
        (step << 24) | prompt: sorted(np.log(lengths[prompt * samples : (prompt + 1) * samples]))
        for prompt in range(len(lengths) // samples)
    }
    assert {prompt: sorted(values) for prompt, values in siblings.items()} == {
        prompt: pytest.approx(values) for prompt, values in by_prompt.items()
    }
    assert set(running.values()) == {0} and set(running) == set(by_prompt)


def test_lengths_are_known_exactly_on_all_ranks(fleet: Fleet) -> None:
    """Also where more samples end in an iteration than one exchange tells of."""
    fleet.call(prepare)
    lengths = [6] * 40 + [10, 15, 20, 30, 45, 60, 61, 90]
    for step in range(2):
        answers = fleet.call(run_step, per_rank=work.split(requests(lengths, 4, step), 2))
        outcomes = [outcome for outcome, _ in answers]
        assert_exact([known for _, known in answers], lengths, 4, step)
        assert outcomes[0].stats.decisions == outcomes[1].stats.decisions != []
        assert [switch.to for switch in outcomes[0].stats.switches] == ["TP"]
    assert "too few" not in outcomes[0].stats.decisions[0].reason, "the second step should know the first one's lengths"


def test_samples_that_join_are_known_too(fleet: Fleet) -> None:
    fleet.call(prepare)
    asked = requests([12, 40, 40, 60, 9, 30, 20, 25, 50, 55, 70, 80], 2)
    waves = [[(0, part[:4]), (5, part[4:])] for (part,) in work.split(asked, 2)]
    answers = fleet.call(run_open, per_rank=[(own, []) for own in waves])
    assert_exact([known for _, known in answers], [12, 40, 40, 60, 9, 30, 20, 25, 50, 55, 70, 80], 2)
    results = [result for outcome, _ in answers for result in outcome.results]
    assert len(results) == 12
    later = {part.key for own in waves for part in own[1][1]}
    first_ends = min(result.ended_s for result in results)
    for result in results:
        assert 0 < result.arrived_s < result.ended_s and result.ended_iteration >= len(result.token_ids) - 1
        assert result.key not in later or result.arrived_s > 0
    assert first_ends > 0


def test_times_of_samples_that_were_there_from_the_beginning(fleet: Fleet) -> None:
    fleet.call(prepare)
    lengths = [5, 9, 30, 31, 60, 70]
    outcomes = fleet.call(work.run, PolicyConfig(threshold=2), per_rank=work.split(requests(lengths, 1), 2))
    for outcome in outcomes:
        assert len(outcome.stats.switches) == 1
        for result in outcome.results:
            assert result.arrived_s == 0
            iteration = outcome.stats.iterations[result.ended_iteration]
            assert abs(iteration.t - result.ended_s) < 0.5 and iteration.t <= outcome.stats.total_s
        ends = sorted((result.ended_s, len(result.token_ids)) for result in outcome.results)
        assert [length for _, length in ends] == sorted(length for _, length in ends), "short ones end first"


def test_other_policies_exchange_no_lengths(fleet: Fleet) -> None:
    fleet.call(prepare)
    fleet.call(work.run, PolicyConfig(threshold=2), per_rank=work.split(requests([5, 9, 12], 1), 2))
    assert fleet.call(what_was_exchanged, PolicyConfig(threshold=2)) == [[], []]
    told = fleet.call(what_was_exchanged, PREDICTIVE)
    assert told[0] == told[1] and len(told[0]) == 24


def what_was_exchanged(engine: Any, policy: PolicyConfig) -> list[int]:
    """The numbers about lengths of the last exchange of a step with one sample on rank 0."""
    from moebius.engine import exchange

    seen: list[list[int]] = []
    kept = exchange.Exchange.wait

    def wait(self: Any) -> Any:
        counts = kept(self)
        seen.append(counts.lengths)
        return counts

    engine.policy.config, engine.policy.costs = policy, COSTS
    exchange.Exchange.wait = wait  # type: ignore[method-assign]
    try:
        engine.run_step(requests([7], 1) if engine.rank == 0 else [])
    finally:
        exchange.Exchange.wait = kept  # type: ignore[method-assign]
    return seen[-1]
