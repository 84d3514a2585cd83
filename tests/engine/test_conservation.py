"""Every (prompt, sample) comes back exactly once, whatever the workload, the moment of the switch and the aborts."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moebius.engine.config import PolicyConfig
from moebius.engine.types import SampleKey, SampleRequest
from moebius.kernels.noise import derive_seed
from tests.engine import work
from tests.engine.fleet import Fleet

WORKLOADS = 200

policies = st.one_of(
    st.builds(
        PolicyConfig, kind=st.just("rollout"), threshold=st.integers(0, 9), cooldown_iterations=st.integers(1, 3)
    ),
    st.builds(PolicyConfig, kind=st.just("scheduled"), at_iteration=st.integers(0, 8)),
    st.sampled_from([work.EP, work.TP]),
)
samples = st.tuples(
    st.integers(0, 4),  # which prompt
    st.integers(1, 9),  # max_tokens
    st.booleans(),  # greedy
    st.integers(0, 1),  # rank
)
moments = st.sampled_from(["before", "switch", "1", "2", "3", "5"])


@st.composite
def workloads(draw: st.DrawFn) -> tuple[PolicyConfig, dict[str, list[SampleKey]], list[list[SampleRequest]]]:
    lengths = draw(st.lists(st.integers(1, 40), min_size=5, max_size=5))
    parts: list[list[SampleRequest]] = [[], []]
    keys: list[SampleKey] = []
    for number, (prompt, max_tokens, greedy, rank) in enumerate(draw(st.lists(samples, max_size=8))):
        key = SampleKey(prompt, number)
        sampling: dict[str, Any] = {"temperature": 0.0 if greedy else 1.0, "max_tokens": max_tokens}
        tokens = [3 + (prompt * 37 + i * i) % 250 for i in range(lengths[prompt])]
        parts[rank].append(SampleRequest(key, tokens, sampling, derive_seed(1, 2, prompt, number)))
        keys.append(key)
    aborts: dict[str, list[SampleKey]] = {}
    if keys:
        for moment, key in draw(st.lists(st.tuples(moments, st.sampled_from(keys)), max_size=4)):
            aborts.setdefault(moment, []).append(key)
    return draw(policies), aborts, parts


def check(outcomes: list[Any], aborts: dict[str, list[SampleKey]], parts: list[list[SampleRequest]]) -> None:
    got = work.collect(outcomes)
    requests = {r.key: r for part in parts for r in part}
    assert sorted(got) == sorted(requests)
    may_abort = {key for keys in aborts.values() for key in keys}
    for key, (tokens, reason, *_) in got.items():
        limit = requests[key].sampling["max_tokens"]
        assert len(tokens) <= limit
        match reason:
            case "abort":
                assert key in may_abort
            case "length":
                assert len(tokens) == limit
            case _:
                assert reason == "stop"
        if key in aborts.get("before", []):
            assert reason == "abort"
    for outcome, part in zip(outcomes, parts, strict=True):
        assert {r.key for r in outcome.results} == {r.key for r in part}, "results come from the rank that was asked"
        assert outcome.stats.admitted == len(part)
    assert [len(o.stats.switches) for o in outcomes] in ([0, 0], [1, 1])


def test_conservation(fleet: Fleet) -> None:
    ran = 0

    @settings(
        max_examples=WORKLOADS, deadline=None, derandomize=True, database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )  # fmt: skip
    @given(workloads())
    def run(workload: tuple[PolicyConfig, dict[str, list[SampleKey]], list[list[SampleRequest]]]) -> None:
        nonlocal ran
        policy, aborts, parts = workload
        outcomes = fleet.call(work.run_with_aborts, policy, aborts, per_rank=[(part,) for part in parts])
        check(outcomes, aborts, parts)
        ran += 1

    run()
    assert ran >= WORKLOADS
