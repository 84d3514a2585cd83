"""Iterations scheduled by `engine.steady`: tokens, state and counts as vLLM's own code gives them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from moebius.engine.types import SampleKey, SampleRequest, StepOutcome
from moebius.kernels.noise import derive_seed
from moebius.rollout.demo import make_tiny_model
from tests.engine import stock_engine, work
from tests.engine.fleet import Fleet


def plain_requests(count: int = 20, seed: int = 0) -> list[SampleRequest]:
    """Without text: nothing is to be done for most of them until they end; some want logprobs or have penalties."""
    draw = random.Random(seed)
    requests = []
    for i in range(count):
        sampling: dict[str, Any] = {"temperature": 1.0, "max_tokens": draw.randint(1, 70), "ignore_eos": i % 3 > 0}
        sampling |= [{}, {"logprobs": 0}, {"stop_token_ids": list(range(40, 60))}, {"repetition_penalty": 1.2}][i % 4]
        sampling |= {"min_tokens": min(9, sampling["max_tokens"])} if i % 5 == 0 else {}
        prompt = [draw.randrange(3, 250) for _ in range(draw.choice([1, 15, 16, 17, 40, 90]))]
        requests.append(SampleRequest(SampleKey(i, 0), prompt, sampling, derive_seed(seed, 0, i, 0)))
    return requests


REQUESTS = plain_requests()


def taken(engine: Any) -> tuple[int, int]:
    return tuple(runtime.steady.taken for runtime in (engine.pair.ep, engine.pair.tp))


def run_checked(engine: Any, iterations: list[int], requests: list[SampleRequest]) -> tuple[StepOutcome, int]:
    """One step in which every steady iteration is compared with what vLLM's `schedule` makes of the same state."""
    import copy

    compared = 0
    originals = []
    for runtime in (engine.pair.ep, engine.pair.tp):
        steady = runtime.steady
        originals.append((steady, steady._steady))

        def checked(steady: Any = steady, original: Any = steady._steady) -> Any:
            nonlocal compared
            # The block pool must stay one object within the copy, and tensors and threads cannot be copied.
            scheduler = steady.scheduler
            hidden = (
                "schedule",
                "update_from_output",
                "vllm_config",
                "structured_output_manager",
                "kv_event_publisher",
            )
            memo = {id(scheduler.__dict__[name]): scheduler.__dict__[name] for name in hidden}
            twin = copy.deepcopy(scheduler, memo)
            del twin.schedule, twin.update_from_output
            output = original()
            if output is None:
                return None
            want = twin.schedule(False)
            for name in ("num_scheduled_tokens", "total_num_scheduled_tokens", "finished_req_ids"):
                assert getattr(output, name) == getattr(want, name), name
            assert output.num_common_prefix_blocks == want.num_common_prefix_blocks
            assert vars(output.scheduled_cached_reqs) == vars(want.scheduled_cached_reqs)
            assert not want.scheduled_new_reqs
            assert state(scheduler) == state(twin)
            compared += 1
            return output

        steady._steady = checked
    try:
        return work.run_alternating(engine, iterations, requests), compared
    finally:
        for steady, original in originals:
            steady._steady = original


def state(scheduler: Any) -> dict[str, Any]:
    """What later iterations depend on."""
    pool = scheduler.kv_cache_manager.block_pool
    (pages,) = scheduler.kv_cache_manager.coordinator.single_type_managers
    names = ("num_computed_tokens", "num_in_flight_tokens", "num_output_placeholders", "is_prefill_chunk", "status")
    return {
        "requests": {
            request.request_id: [getattr(request, name) for name in names] for request in scheduler.requests.values()
        },
        "running": [request.request_id for request in scheduler.running],
        "pages": {name: [block.block_id for block in blocks] for name, blocks in pages.req_to_blocks.items()},
        "cached": dict(pages.num_cached_block),
        "free": pool.get_num_free_blocks(),
        "hashes": {block.block_id: block.block_hash for block in pool.blocks},
        "step": scheduler.current_step,
        "before": set(scheduler.prev_step_scheduled_req_ids),
    }


@pytest.fixture(scope="module")
def mute(models: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two ranks of a model without a tokenizer, with prefix caching and so few pages that requests are preempted."""
    root = tmp_path_factory.mktemp("mute")
    make_tiny_model(root / "model", seed=0)
    for path in Path(root / "model").glob("*token*"):
        path.unlink()
    few = work.config(str(root / "model"), enable_prefix_caching=True, kv_cache_bytes=3 << 20)
    fleet = Fleet(2, work.make_engine, few)
    yield fleet
    fleet.close()


@pytest.fixture(scope="module")
def reference(plain_engines: list[Fleet]) -> dict:
    found = plain_engines[0].call(stock_engine.plain_run, REQUESTS)[0]
    return {key: (*value[:3], None, value[4]) for key, value in found.items()}  # the fleet has no text


def test_most_iterations_are_taken_and_tokens_are_the_same(mute: Fleet, reference: dict) -> None:
    before = mute.call(taken)[0]
    outcomes = mute.call(work.run_alternating, [12, 24, 36], per_rank=work.split(REQUESTS, 2, "skew"))
    work.assert_same(work.collect(outcomes), reference)
    stats = outcomes[0].stats
    after = mute.call(taken)[0]
    assert after[0] > before[0] and after[1] > before[1], "both layouts have steady iterations"
    assert sum(after) - sum(before) > len(stats.iterations) / 3
    for outcome in outcomes:
        assert sum(i.tokens for i in stats.iterations) == sum(len(r.token_ids) for o in outcomes for r in o.results)
        assert len(outcome.stats.switches) == 3


def test_state_is_what_vllm_makes_of_it(mute: Fleet, reference: dict) -> None:
    results = mute.call(run_checked, [10, 20], per_rank=work.split(REQUESTS, 2, "round"))
    work.assert_same(work.collect([outcome for outcome, _ in results]), reference)
    assert all(compared > 20 for _, compared in results)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    iterations=st.lists(st.integers(0, 60), max_size=4),
    parks=st.lists(st.integers(2, 30), max_size=2),
    keep=st.booleans(),
    split=st.sampled_from(["round", "first", "skew"]),
)
def test_parked_and_resumed(
    mute: Fleet, reference: dict, iterations: list[int], parks: list[int], keep: bool, split: str
) -> None:
    """Quiet requests whose tokens no front has seen survive switches to other ranks, parking and preemption."""
    outcomes = []
    requests = work.split(REQUESTS, 2, split)
    for park in [*parks, None]:
        outcomes += mute.call(work.run_and_park, iterations, park, per_rank=[(part, [], keep) for (part,) in requests])
        requests = [([],), ([],)]
    work.assert_same(work.collect(outcomes), reference)


def test_aborted_ones_keep_their_tokens(mute: Fleet, reference: dict) -> None:
    keys = [SampleKey(i, 0) for i in range(0, 20, 3)]
    results = mute.call(work.run_aborting, keys, 15, per_rank=work.split(REQUESTS, 2, "round"))
    ended = work.collect(results)
    assert sorted(ended) == sorted(reference)
    aborted = [key for key in ended if ended[key][1] == "abort"]
    assert aborted and set(aborted) <= set(keys)
    for key, value in ended.items():
        assert value[0] == reference[key][0][: len(value[0])]
        if key in aborted:
            assert len(value[0]) > 5, "tokens that no front had looked at"
