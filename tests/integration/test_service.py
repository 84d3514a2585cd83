"""RolloutService over a real group: two CPU ranks and a tiny model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from moebius.engine.config import EngineConfig, PolicyConfig
from moebius.rollout.config import RolloutConfig
from moebius.rollout.demo_assets import make_tiny_model
from moebius.rollout.errors import BadInput
from moebius.rollout.group import RolloutGroup
from moebius.rollout.service import RolloutService
from moebius.rollout.service_types import ServiceSettings
from moebius.rollout.types import Sampling
from tests.integration.warm import Warm

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [13], [14, 15], [16, 17, 18, 19]]
EXACT: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Iterator[RolloutGroup]:
    model: Path = make_tiny_model(tmp_path_factory.mktemp("model"), num_layers=2)
    engine = EngineConfig(
        model=str(model),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=16,
        kv_cache_bytes=16 << 20,
        enforce_eager=True,
        policy=PolicyConfig(kind="rollout", threshold=5),
    )
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, runtime_env=warm.runtime_env)
    config = RolloutConfig(ranks=2, device="cpu", engine=engine, sampling=Sampling(max_tokens=40, seed=0))
    with RolloutGroup(config) as group:
        yield group
    ray.shutdown()


@pytest.fixture
def service(group: RolloutGroup) -> Iterator[RolloutService]:
    service = RolloutService(group, ServiceSettings(idle_s=0.3, quiet_s=0.2, max_pending=40))
    yield service
    service.close()


def test_an_announced_step(group: RolloutGroup, service: RolloutService) -> None:
    """It switches once its burst is in and few samples are left; its report is that of the whole step."""
    longer = EXACT | {"max_tokens": 90}

    async def run() -> Any:
        service.begin_step(15, step=50)
        first = await service.generate(PROMPTS[0], EXACT, n=3)
        rest = await asyncio.gather(
            *(service.generate(prompt, EXACT, n=3) for prompt in PROMPTS[1:4]),
            service.generate(PROMPTS[4], longer, n=3),
        )
        return [first, *rest], await service.end_step()

    rollouts, report = asyncio.run(run())
    assert [rollout.prompt_token_ids for rollout in rollouts] == PROMPTS
    assert [[len(s.token_ids) for s in r.samples] for r in rollouts] == [[24] * 3] * 4 + [[90] * 3]
    assert report.step == 50 and report.counts.samples == 15 and len(report.switches) == 1
    want = group.generate(PROMPTS[:1], 3, EXACT, step=50)
    assert [s.token_ids for s in rollouts[0].samples] == [s.token_ids for s in want[0].samples]


def test_streams_seeds_aborts(group: RolloutGroup, service: RolloutService) -> None:
    async def run() -> None:
        ticket = service.prepare("What is 2 + 2?", {"max_tokens": 40, "seed": 3, "logprobs": 2, "stop": ["zz"]}, n=2)
        pieces = [piece async for _, piece in service.stream([ticket])]
        again = await service.generate(
            "What is 2 + 2?", {"max_tokens": 40, "seed": 3, "logprobs": 2, "stop": ["zz"]}, n=2
        )
        for index, sample in enumerate(again.samples):
            own = [piece for piece in pieces if piece.sample_index == index]
            assert [token for piece in own for token in piece.token_ids] == sample.token_ids
            # Of another layout or batch: the last digits differ.
            assert [lp for piece in own for lp in piece.logprobs or []] == pytest.approx(sample.logprobs, abs=1e-4)
            tops = [top for piece in own for top in piece.top_logprobs or []]
            assert len(tops) == len(sample.token_ids)
            assert all(
                top[t] == pytest.approx(lp, abs=1e-4)
                for top, t, lp in zip(tops, sample.token_ids, sample.logprobs or [], strict=True)
            )
            assert "".join(piece.text or "" for piece in own) == sample.text
            assert [piece.finish_reason for piece in own[:-1]] == [None] * (len(own) - 1) and own[-1].finish_reason
            assert len(own) > 5
        long = asyncio.create_task(
            service.generate(PROMPTS[0], {"max_tokens": 240, "ignore_eos": True}, request_id="a")
        )
        await asyncio.sleep(0.3)
        with pytest.raises(BadInput, match="unfinished request"):
            await service.generate(PROMPTS[0], request_id="a")
        assert await service.abort(["a", "b"]) == 1
        [sample] = (await long).samples
        assert sample.finish_reason == "abort" and len(sample.token_ids) < 240

    asyncio.run(run())
