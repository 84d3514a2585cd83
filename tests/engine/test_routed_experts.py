"""Which experts every token went to, as returned by a step, are those that the model itself takes for these tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest

from moebius.engine.config import PolicyConfig
from moebius.engine.types import SampleResult, StepOutcome
from tests.engine import work
from tests.engine.fleet import Fleet

REQUESTS = work.rich_requests(10, seed=5)  # prompts take more than one iteration to prefill
PROMPTS = {request.key: request.prompt_token_ids for request in REQUESTS}


@pytest.fixture(scope="module")
def fleet(models: list[str]) -> Iterator[Fleet]:
    fleet = Fleet(2, work.make_engine, work.config(models[0], routed_experts=True, enable_prefix_caching=True))
    yield fleet
    fleet.close()


@cache
def reference(model: str, tokens: tuple[int, ...]) -> np.ndarray:
    """Experts by transformers' own forward pass, sorted: [tokens, layers, experts per token]."""
    import torch

    module = _model(model)
    with torch.no_grad():
        logits = module(torch.tensor([list(tokens)]), output_router_logits=True).router_logits
    chosen = [layer.view(len(tokens), -1).topk(module.config.num_experts_per_tok).indices for layer in logits]
    return torch.stack(chosen, dim=1).sort(dim=-1).values.numpy()


@cache
def _model(path: str):  # type: ignore[no-untyped-def]
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def check(model: str, outcomes: list[StepOutcome]) -> None:
    results: list[SampleResult] = [result for outcome in outcomes for result in outcome.results]
    assert len(results) == len(REQUESTS)
    for result in results:
        tokens = (*PROMPTS[result.key], *result.token_ids)[:-1]  # nothing has been computed from the last one
        want = reference(model, tuple(tokens))
        got = np.sort(np.asarray(result.routed_experts), axis=-1)
        assert got.shape == want.shape, (result.key, result.finish_reason)
        wrong = np.argwhere((got != want).any(axis=(1, 2))).ravel().tolist()
        assert not wrong, f"{result.key}: tokens {wrong[:10]} of {len(tokens)}, prompt {len(PROMPTS[result.key])}"


@pytest.mark.parametrize(
    "policy",
    [
        work.EP,
        work.TP,
        PolicyConfig(kind="scheduled", at_iteration=1),
        PolicyConfig(kind="scheduled", at_iteration=9),
        PolicyConfig(threshold=6),
        PolicyConfig(kind="scheduled", at_iteration=1, back_at_iteration=3),
        PolicyConfig(kind="scheduled", at_iteration=4, back_at_iteration=12),
    ],
    ids=["EP", "TP", "mid prefill", "mid decode", "tail", "there and back mid prefill", "there and back"],
)
def test_a_step(fleet: Fleet, models: list[str], policy: PolicyConfig) -> None:
    outcomes = fleet.call(work.run, policy, per_rank=work.split(REQUESTS, 2, "skew"))
    check(models[0], outcomes)


def test_with_cached_prefixes(fleet: Fleet, models: list[str]) -> None:
    for _ in range(2):
        outcomes = fleet.call(work.run, PolicyConfig(threshold=6), per_rank=work.split(REQUESTS, 2, "round"))
        check(models[0], outcomes)
