"""Anything at any moment: waves of requests, aborts, refusals, repeated keys and switches both ways, in one open step.

Whatever happens, every sample comes back once per request, with the tokens of a stock engine or (aborted) their
beginning, and nothing is left behind: a plain step that follows is right, and no page is in use after it.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from moebius.engine.config import PolicyConfig
from moebius.engine.types import SampleKey, SampleRequest
from moebius.kernels.noise import derive_seed
from tests.engine import stock_engine, updating, work
from tests.engine.fleet import Fleet, RankError

EXAMPLES = 60
QUIET_S = 0.05  # without an iteration for so long, the next wave is handed in
BUSY_S = 0.6  # likewise while requests are unanswered: on a busy machine an iteration may take longer than that


def _pool(count: int = 48) -> list[SampleRequest]:
    """Distinct requests of all sampling kinds and of 1 to 12 tokens; many prompts begin alike."""
    r = random.Random(7)
    common = [r.randrange(3, 512) for _ in range(48)]
    requests = []
    for i in range(count):
        longest = 1 + i % 12
        sampling = work.rich_sampling(i // 2, longest)
        if "min_tokens" in sampling:
            sampling["min_tokens"] = min(sampling["min_tokens"], longest)
        prompt = common[: r.choice([0, 16, 33, 48])] + [r.randrange(3, 512) for _ in range(r.randrange(1, 40))]
        requests.append(SampleRequest(SampleKey(i, 0), prompt, sampling, derive_seed(3, 0, i, 0)))
    return requests


POOL = _pool()
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 5, "logprobs": 0}
INVALID: list[tuple[list[int], dict[str, Any]]] = [
    ([5, 6], GREEDY | {"temperature": -1.0}),
    ([5, 6], GREEDY | {"top_k": -7}),
    ([5, 6], GREEDY | {"nonsense": 1}),
    ([], GREEDY),
    ([5] * 600, GREEDY),
    ([5, 10**6], GREEDY),
]
MOMENTS = ["before", "switch", "late", *map(str, range(1, 20))]


@dataclass
class Plan:
    """What happens on one rank."""

    first: list[SampleRequest] = field(default_factory=list)  # with the step
    waves: list[tuple[int, list[SampleRequest]]] = field(default_factory=list)  # after so many iterations
    # moment -> keys (None: all); a moment is "before", "switch", "late" or the number of an iteration
    aborts: dict[str, list[SampleKey] | None] = field(default_factory=dict)
    threads: bool = False  # each request of a wave from a thread of its own

    @property
    def requests(self) -> list[SampleRequest]:
        return self.first + [request for _, wave in self.waves for request in wave]


class Storm:
    """One open step on one rank, driven by a plan."""

    def __init__(self, engine: Any, plan: Plan) -> None:
        self.engine, self.plan = engine, plan
        self.waves = sorted(plan.waves, key=lambda wave: wave[0])
        self.iteration, self.seen_at, self.lock, self.over = 0, time.monotonic(), threading.Lock(), threading.Event()
        self.handed_in, self.results = len(plan.first), list[Any]()

    def on_iteration(self, done: int, live: int, layout: str, tokens: int) -> None:
        self.iteration += 1
        self.seen_at = time.monotonic()
        self.hand_in(self.iteration)
        self.abort(str(self.iteration))

    def hand_in(self, until: int) -> None:
        with self.lock:
            while self.waves and self.waves[0][0] <= until:
                self.submit(self.waves.pop(0)[1])

    def submit(self, wave: list[SampleRequest]) -> None:
        self.handed_in += len(wave)
        if not self.plan.threads:
            return self.engine.inbox.submit(wave)
        threads = [threading.Thread(target=self.engine.inbox.submit, args=([request],)) for request in wave]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return None

    def abort(self, moment: str) -> None:
        if moment in self.plan.aborts:
            self.engine.abort(self.plan.aborts[moment])

    def watch(self) -> None:
        """Hand in what no iteration brings about, and close the step in the end."""
        while not self.over.wait(QUIET_S / 5):
            answered = len(self.results) >= self.handed_in
            if time.monotonic() - self.seen_at < (QUIET_S if answered else BUSY_S):
                continue
            self.seen_at = time.monotonic()
            with self.lock:
                if not self.waves:
                    self.abort("late")
                    self.engine.inbox.close()
                    return
                self.submit(self.waves.pop(0)[1])

    def run(self) -> Any:
        engine, migrate = self.engine, self.engine.switcher._migrate

        def aborting_migrate(*args: Any) -> Any:
            self.abort("switch")
            return migrate(*args)

        engine.switcher._migrate = aborting_migrate
        engine.inbox.open()
        self.abort("before")
        watcher = threading.Thread(target=self.watch)
        watcher.start()
        try:
            outcome = engine.run_step(self.plan.first, on_iteration=self.on_iteration, on_results=self.results.extend)
        finally:
            self.over.set()
            watcher.join()
            engine.inbox.close()
            del engine.switcher._migrate
        outcome.results = self.results
        return outcome


def run_storm(engine: Any, switches: list[int] | PolicyConfig, plan: Plan) -> Any:
    kept, kept_config = engine.policy, engine.policy.config
    if isinstance(switches, PolicyConfig):
        engine.policy.config = switches
    else:
        engine.policy = work.Alternating(switches)
    try:
        return Storm(engine, plan).run()
    finally:
        engine.policy = kept
        engine.policy.config = kept_config


def left_behind(engine: Any) -> list[str]:
    """What a step must not leave on this rank."""
    found = []
    for runtime in (engine.pair.ep, engine.pair.tp):
        scheduler, runner = runtime.scheduler, runtime.runner
        counts = {
            "pages": runtime.usable_pages - runtime.free_pages,
            "requests": len(scheduler.requests),
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting) + len(scheduler.skipped_waiting),
            "in the runner": len(runner.requests) + runner.input_batch.num_reqs,
            "queued batches": len(runtime.core.batch_queue or ()),
            "unflushed": len(scheduler.finished_req_ids),
        }
        found += [f"{runtime.layout.value}: {count} {name}" for name, count in counts.items() if count]
    processor = engine.pair.front.output_processor
    if processor.request_states or any(processor.external_req_ids.values()):
        found.append(f"front: {list(processor.request_states)} {dict(processor.external_req_ids)}")
    taken = engine.inbox.take()
    return found + ([f"inbox: {taken}"] if taken.requests or taken.is_open else [])


@st.composite
def plans(draw: st.DrawFn) -> list[Plan]:
    """A plan per rank. Sample numbers are unique but for repeated keys."""
    numbers = iter(range(1, 10_000))
    out = [Plan(threads=draw(st.booleans())) for _ in range(2)]
    given_out: list[SampleRequest] = []

    def one() -> SampleRequest:
        kind = draw(st.integers(0, 19))
        if kind == 0:
            prompt, sampling = draw(st.sampled_from(INVALID))
            return SampleRequest(SampleKey(1000, next(numbers)), prompt, sampling, 1)
        if kind == 1 and given_out:
            return draw(st.sampled_from(given_out))  # its key once more
        asked = draw(st.sampled_from(POOL))
        key = SampleKey(asked.key.prompt, next(numbers))
        given_out.append(SampleRequest(key, asked.prompt_token_ids, asked.sampling, asked.seed))
        return given_out[-1]

    for plan in out:
        for at in draw(st.lists(st.integers(0, 24), max_size=5)):
            plan.waves.append((at, [one() for _ in range(draw(st.integers(1, 5)))]))
        keys = [request.key for request in plan.requests if request.key.prompt != 1000]
        for moment in draw(st.lists(st.sampled_from(MOMENTS), max_size=4)):
            if keys:
                plan.aborts[moment] = draw(st.lists(st.sampled_from(keys), min_size=1, max_size=3))
        if draw(st.integers(0, 9)) == 0:
            plan.aborts[draw(st.sampled_from(["switch", "4", "9"]))] = None
        first = [one() for _ in range(draw(st.integers(0, 3)))]
        plan.first = list({r.key: r for r in first if r.key.prompt != 1000}.values())
    return out


interactive = st.builds(
    PolicyConfig,
    kind=st.just("interactive"),
    threshold=st.integers(2, 6),
    window=st.integers(1, 3),
    cooldown_s=st.sampled_from([0.0, 0.05]),
)
switches = st.one_of(st.lists(st.integers(0, 24), max_size=6), interactive)


@pytest.fixture(scope="module")
def reference(models: list[str]) -> dict[int, Any]:
    """By prompt number: what the stock engine makes of the pool's requests, one at a time."""
    plain = Fleet(1, stock_engine.PlainEngine, work.config(models[0]))
    try:
        got = plain.call(stock_engine.plain_run, POOL)[0]
    finally:
        plain.close()
    return {key.prompt: value for key, value in got.items()}


@pytest.fixture(scope="module")
def storm_fleet(models: list[str]) -> Iterator[Fleet]:
    """As `fleet`, but a hang is noticed early, and no other test suffers from it."""
    fleet = Fleet(2, work.make_engine, work.config(models[0], enable_prefix_caching=True))
    fleet.timeout_s = 60
    yield fleet
    fleet.close()


def check(outcomes: list[Any], plan: list[Plan], reference: dict[int, Any]) -> None:
    submitted: dict[SampleKey, int] = {}
    for request in (request for part in plan for request in part.requests):
        submitted[request.key] = submitted.get(request.key, 0) + 1
    results: dict[SampleKey, list[Any]] = {}
    for result in (result for outcome in outcomes for result in outcome.results):
        results.setdefault(result.key, []).append(result)
    assert {key: len(found) for key, found in results.items()} == submitted
    all_aborted = any(keys is None for part in plan for keys in part.aborts.values())
    may_abort = {key for part in plan for keys in part.aborts.values() for key in keys or ()}
    for key, found in results.items():
        if key.prompt == 1000:
            assert [result.finish_reason for result in found] == ["error"] * len(found)
            continue
        errors = [result for result in found if result.finish_reason == "error"]
        assert all("unfinished already" in str(result.stop_reason) for result in errors)
        assert len(errors) < len(found)
        for result in (result for result in found if result.finish_reason != "error"):
            tokens, finish, stop, text, logprobs = reference[key.prompt]
            count = len(result.token_ids)
            if result.finish_reason == "abort":
                assert all_aborted or key in may_abort
                assert result.token_ids == tokens[:count], key
            else:
                assert (result.token_ids, result.finish_reason, result.stop_reason) == (tokens, finish, stop), key
                assert result.text == text, key
            differences = [abs(a - b) for a, b in zip(result.logprobs, logprobs[:count], strict=True)]
            assert max(differences, default=0.0) < 2e-3, key


def plain_step(fleet: Fleet, policy: PolicyConfig, reference: dict[int, Any]) -> None:
    """A step as if nothing had been before, and nothing in use after it."""
    requests = POOL[5:12]
    got = work.collect(fleet.call(work.run, policy, per_rank=work.split(requests, 2)))
    work.assert_same(got, {request.key: reference[request.key.prompt] for request in requests})
    assert fleet.call(left_behind) == [[], []]


def test_storm(storm_fleet: Fleet, reference: dict[int, Any]) -> None:
    ran, seen = 0, {"TP": 0, "EP": 0, "abort": 0, "error": 0}

    @settings(
        max_examples=EXAMPLES, deadline=None, derandomize=True, database=None,
        phases=[Phase.generate],  # a step that broke off leaves an engine that can shrink nothing
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(switches, plans(), st.sampled_from([work.EP, work.TP]))
    def run(when: list[int] | PolicyConfig, plan: list[Plan], after: PolicyConfig) -> None:
        nonlocal ran
        outcomes = storm_fleet.call(run_storm, when, per_rank=[(part,) for part in plan])
        check(outcomes, plan, reference)
        assert storm_fleet.call(left_behind) == [[], []]
        if ran % 3 == 0:
            plain_step(storm_fleet, after, reference)
        ran += 1
        for switch in outcomes[0].stats.switches:
            seen[switch.to] += 1
        for result in (result for outcome in outcomes for result in outcome.results):
            if result.finish_reason in seen:
                seen[result.finish_reason] += 1

    run()
    assert ran >= EXAMPLES and all(seen.values()), seen


def abort_together(engine: Any, aborts: list[SampleKey], requests: list[SampleRequest]) -> tuple[Any, list[int]]:
    """Abort some in TP at once, then go on to EP. Returns also TP's free pages in the order they are given out."""
    outcome = None

    def on_iteration(done: int, live: int, layout: str, tokens: int) -> None:
        if layout == "TP":
            engine.abort(aborts)

    kept, engine.policy = engine.policy, work.Alternating([0, 6, 10])
    try:
        outcome = engine.run_step(requests, on_iteration=on_iteration)
    finally:
        engine.policy = kept
    pool = engine.pair.tp.scheduler.kv_cache_manager.block_pool
    return outcome, [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]


def test_pages_of_aborted_requests_are_freed_in_one_order(storm_fleet: Fleet) -> None:
    """vLLM takes several aborts in the order of a set, which differs between processes: pages would get other ids."""
    sampling = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True, "logprobs": 0}
    requests = [SampleRequest(SampleKey(p, 0), POOL[p].prompt_token_ids, sampling, 1) for p in range(16)]
    want = work.collect(storm_fleet.call(work.run, work.EP, per_rank=work.split(requests, 2)))
    aborted = [request.key for request in requests[:12]]
    got = storm_fleet.call(abort_together, aborted, per_rank=work.split(requests, 2))
    assert got[0][1] == got[1][1], "TP ranks give out pages in different orders"
    results = work.collect([outcome for outcome, _ in got])
    assert [result[1] for key, result in sorted(results.items()) if key in aborted] == ["abort"] * 12
    work.assert_same(
        {key: result for key, result in results.items() if key not in aborted},
        {key: result for key, result in want.items() if key not in aborted},
    )


def test_request_with_penalties_joins_one_with_min_tokens(storm_fleet: Fleet, reference: dict[int, Any]) -> None:
    """With asynchronous scheduling output ids are placeholders until a request needs them; their number must stay."""
    stops, joins = POOL[44], POOL[4]
    tokens, reason, *_ = reference[44]
    assert "min_tokens" in stops.sampling and reason == "stop" and len(tokens) == stops.sampling["min_tokens"] + 1
    assert "frequency_penalty" in joins.sampling
    for at in (1, 2, 3):
        plans = [Plan(first=[stops], waves=[(at, [joins])]), Plan()]
        check(storm_fleet.call(run_storm, [], per_rank=[(plan,) for plan in plans]), plans, reference)


REFUSED: dict[str, tuple[list[int], dict[str, Any]]] = {
    "seed": ([5, 6], {"seed": 3}),
    "negative token": ([5, -1], {}),
    "outside the vocabulary": ([5, 6], {"stop_token_ids": [10**6], "min_tokens": 2}),
    "wrong kind": ([5, 6], {"bad_words": [3]}),
    "structured_outputs": ([5, 6], {"structured_outputs": {"regex": "a+"}}),
}


def test_what_vllm_would_fail_on_in_a_pass_is_refused(storm_fleet: Fleet) -> None:
    """An error on one rank in the middle of a pass would leave the other waiting."""
    bad = [SampleRequest(SampleKey(0, i), ids, GREEDY | more, 1) for i, (ids, more) in enumerate(REFUSED.values())]
    plans = [Plan(waves=[(0, bad)]), Plan(first=POOL[5:7])]
    for layout in ([], [0]):
        outcomes = storm_fleet.call(run_storm, layout, per_rank=[(plan,) for plan in plans])
        for reason, result in zip(REFUSED, outcomes[0].results, strict=True):
            assert result.finish_reason == "error" and reason in str(result.stop_reason)
        assert len(outcomes[1].results) + len(outcomes[0].results) == len(bad) + 2


@pytest.mark.parametrize("layout", [[], [0]], ids=["EP", "TP"])
def test_key_that_is_given_again(storm_fleet: Fleet, reference: dict[int, Any], layout: list[int]) -> None:
    """Twice in a wave, again while it runs (refused each time), after its end, and on both ranks at once."""
    first, other = POOL[11], POOL[35]  # 12 tokens each
    waves = [(0, [first, first]), (2, [first, first]), (99, [first])]
    plans = [Plan(waves=waves), Plan(first=[other], waves=[(1, [first])])]
    outcomes = storm_fleet.call(run_storm, layout, per_rank=[(plan,) for plan in plans])
    check(outcomes, plans, reference)
    results = [result for outcome in outcomes for result in outcome.results if result.key == first.key]
    assert [result.finish_reason for result in results].count("error") == 3
    assert storm_fleet.call(left_behind) == [[], []]


def test_predictive_policy_without_costs_is_refused_and_the_engine_goes_on(
    storm_fleet: Fleet, reference: dict[int, Any]
) -> None:
    with pytest.raises(RankError, match="needs calibrated costs") as error:
        storm_fleet.call(work.run, PolicyConfig(kind="predictive"), per_rank=work.split(POOL[:4], 2))
    assert error.value.kind == "PolicyRefused"
    assert storm_fleet.call(left_behind) == [[], []]
    plain_step(storm_fleet, work.TP, reference)


def refuse_with_full_inbox(engine: Any, policy: PolicyConfig, plan: Plan) -> None:
    """A step that is refused when requests have been handed in for it already."""
    engine.inbox.open()
    engine.inbox.submit(plan.waves[0][1])
    work.run(engine, policy, plan.first)


def test_refused_at_the_start_of_a_step_in_tp(storm_fleet: Fleet, reference: dict[int, Any]) -> None:
    stay = PolicyConfig(kind="interactive", threshold=100, window=1, cooldown_s=0.0)
    for rank in (0, 1):
        storm_fleet.call(work.run, stay, per_rank=work.split(POOL[:4], 2))  # ends in TP
        prompt, sampling = INVALID[rank]
        parts = [POOL[0:2], POOL[2:4]]
        parts[rank] = [*parts[rank], SampleRequest(SampleKey(1000, 0), prompt, sampling, 1)]
        plans = [Plan(first=part, waves=[(0, POOL[20:22])]) for part in parts]
        with pytest.raises(RankError, match="prompt 1000, sample 0") as error:
            storm_fleet.call(refuse_with_full_inbox, stay, per_rank=[(plan,) for plan in plans])
        assert error.value.kind == "RequestRefused"
        assert storm_fleet.call(left_behind) == [[], []]
        plain_step(storm_fleet, stay, reference)
    plain_step(storm_fleet, work.EP, reference)


@pytest.mark.parametrize("end_in", ["EP", "TP"])
def test_weights_change_after_an_interactive_step(
    storm_fleet: Fleet, models: list[str], reference: dict[int, Any], end_in: str
) -> None:
    """There and back again: tokens are the first model's only if every expert was written to its place twice."""
    policy = PolicyConfig(kind="interactive", threshold=0 if end_in == "EP" else 100, window=1, cooldown_s=0.0)
    before = work.collect(storm_fleet.call(work.run, policy, per_rank=work.split(POOL[:8], 2)))
    storm_fleet.call(updating.load_checkpoint, models[1], 1, False)
    other = work.collect(storm_fleet.call(work.run, policy, per_rank=work.split(POOL[:8], 2)))
    assert {key: result[0] for key, result in other.items()} != {key: result[0] for key, result in before.items()}
    storm_fleet.call(updating.load_checkpoint, models[0], 2, True)
    plain_step(storm_fleet, policy, reference)
