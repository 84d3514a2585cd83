"""Two ranks on GPUs: tokens do not depend on the layout or on a switch, with CUDA graphs in both layouts.

With one GPU the ranks share it: everything but peer memory (the custom all-reduce) is then the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from moebius.engine.config import PolicyConfig
from moebius.rollout.demo_assets import make_tiny_model
from tests.engine import work
from tests.engine.fleet import Fleet, sharing_gpus

pytestmark = pytest.mark.gpu

REQUESTS = work.rich_requests(12)
POLICIES = {
    "static TP": work.TP,
    "mid prefill": PolicyConfig(kind="scheduled", at_iteration=1),
    "mid decode": PolicyConfig(kind="scheduled", at_iteration=9),
    "half live": PolicyConfig(threshold=12),
    "one live": PolicyConfig(threshold=1),
}


@pytest.fixture(scope="module", params=["collective", "direct", "direct, shared attention"])
def gpu_fleet(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    model: Path = tmp_path_factory.mktemp("gpu") / "model"
    make_tiny_model(model)
    settings = work.config(
        str(model),
        attention_backend="TRITON_ATTN",
        enable_prefix_caching=True,
        custom_all_reduce=not sharing_gpus(2),
        mover=request.param.split(",")[0],
        attention_weights="shared" if "shared" in request.param else "both",
    )
    fleet = Fleet(2, work.make_engine, settings, timeout_s=500)
    yield fleet
    fleet.close()


@pytest.fixture(scope="module")
def reference(gpu_fleet: Fleet) -> dict:
    return work.collect(gpu_fleet.call(work.run, work.EP, per_rank=work.split(REQUESTS, 2, "skew")))


@pytest.mark.parametrize("name", POLICIES)
def test_same_tokens(gpu_fleet: Fleet, reference: dict, name: str) -> None:
    outcomes = gpu_fleet.call(work.run, POLICIES[name], per_rank=work.split(REQUESTS, 2, "skew"))
    work.assert_same(work.collect(outcomes), reference)
    assert len(outcomes[0].stats.switches) == 1


def test_live_kv_arrives_whole(gpu_fleet: Fleet, reference: dict) -> None:
    results = gpu_fleet.call(work.run_checking_kv, POLICIES["mid decode"], per_rank=work.split(REQUESTS, 2, "round"))
    work.assert_same(work.collect([outcome for outcome, _ in results]), reference)
    assert all(compared > 0 for _, compared in results)


def test_expert_bytes_survive_the_round_trip(gpu_fleet: Fleet) -> None:
    gpu_fleet.call(work.run, work.EP, per_rank=[([],), ([],)])
    for before, after in gpu_fleet.call(work.round_trip_hashes):
        assert before == after


def test_there_and_back(gpu_fleet: Fleet, reference: dict) -> None:
    outcomes = gpu_fleet.call(work.run_alternating, [5, 12, 20], per_rank=work.split(REQUESTS, 2, "skew"))
    work.assert_same(work.collect(outcomes), reference)
    assert [s.to for s in outcomes[0].stats.switches] == ["TP", "EP", "TP"]


def test_requests_that_nobody_reads_along(gpu_fleet: Fleet) -> None:
    """Without text nothing is done for a request until it ends; switches, other fronts and logprobs included."""
    requests = [replace(r, sampling=r.sampling | {"detokenize": False}) for r in REQUESTS if not r.sampling.get("stop")]
    want = work.collect(gpu_fleet.call(work.run, work.EP, per_rank=work.split(requests, 2, "skew")))
    outcomes = gpu_fleet.call(work.run_alternating, [5, 12, 20], per_rank=work.split(requests, 2, "skew"))
    work.assert_same(work.collect(outcomes), want)
    assert all(text is None and len(logprobs) == len(tokens) for tokens, _, _, text, logprobs in want.values())
