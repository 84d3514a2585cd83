"""Drafts in TP on GPUs, with CUDA graphs: tokens are those without drafts, ahead, drafting and in between."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from moebius.engine.config import PolicyConfig, TailConfig
from moebius.rollout.demo_assets import make_tiny_model
from tests.engine import drafting, work
from tests.engine.fleet import Fleet, sharing_gpus

pytestmark = pytest.mark.gpu

REQUESTS = work.rich_requests(12)
MID = PolicyConfig(kind="scheduled", at_iteration=9)


@pytest.fixture(scope="module")
def gpu_drafts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    model: Path = tmp_path_factory.mktemp("gpu") / "model"
    make_tiny_model(model)
    settings = work.config(
        str(model),
        attention_backend="TRITON_ATTN",
        custom_all_reduce=not sharing_gpus(2),
        tail=TailConfig(speculation="siblings", draft_tokens=4, adaptive=False, draft_memory_tokens=1 << 16),
    )
    fleet = Fleet(2, work.make_engine, settings, timeout_s=500)
    fleet.call(drafting.wait_for_texts, True)
    yield fleet
    fleet.close()


@pytest.fixture(scope="module")
def reference(gpu_drafts: Fleet) -> dict:
    return work.collect(gpu_drafts.call(work.run, work.EP, per_rank=work.split(REQUESTS, 2, "skew")))


def test_graphs_of_both_kinds(gpu_drafts: Fleet) -> None:
    """As many decode graphs as an engine without drafts has, and one per size with drafts."""
    for decode, mixed, piecewise in gpu_drafts.call(drafting.graphs):
        assert decode == [1, 2, 4, 8, 16, 24, 32]
        assert mixed[-1] == 32 * 5 and 8 in mixed
        assert all(size > mixed[-1] for size in piecewise)


@pytest.mark.parametrize("kind", ["right", "wrong", "both"])
def test_whatever_is_drafted(gpu_drafts: Fleet, reference: dict, kind: str) -> None:
    truth = {request.key: [*request.prompt_token_ids, *reference[request.key][0]] for request in REQUESTS}
    outcomes = gpu_drafts.call(drafting.run_guessing, kind, truth, MID, per_rank=work.split(REQUESTS, 2, "round"))
    work.assert_same(work.collect(outcomes), reference)
    found = outcomes[0].stats.drafts
    assert found is not None and found.drafted > 0


@pytest.mark.parametrize("every", [1, 3, 8])
def test_between_ahead_and_drafting(gpu_drafts: Fleet, reference: dict, every: int) -> None:
    for switches in (work.TP, MID, [3, 7, 10, 13, 16]):
        outcomes = gpu_drafts.call(drafting.run_flipping, every, switches, per_rank=work.split(REQUESTS, 2, "skew"))
        work.assert_same(work.collect(outcomes), reference)
