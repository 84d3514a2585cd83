"""A group whose policy needs costs: measured at its first start, kept, used to decide and to say what static took."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from moebius.engine.config import EngineConfig, PolicyConfig
from moebius.rollout.config import RolloutConfig
from moebius.rollout.demo_assets import make_tiny_model
from moebius.rollout.group import RolloutGroup
from moebius.rollout.report_html import page
from moebius.rollout.types import Sampling


@pytest.fixture(autouse=True)
def own_ray() -> Iterator[None]:
    """Groups start Ray where there is none; other tests start it in their own way."""
    yield
    ray.shutdown()


def settings(model: Path, cache: Path, kind: str) -> RolloutConfig:
    return RolloutConfig(
        ranks=2,
        device="cpu",
        cpus_per_rank=0.5,
        engine=EngineConfig(
            model=str(model),
            dtype="float32",
            max_model_len=512,
            max_num_seqs=32,
            kv_cache_bytes=32 << 20,
            enforce_eager=True,
            policy=PolicyConfig(kind=kind, threshold=4, costs_cache=str(cache)),  # type: ignore[arg-type]
        ),
        sampling=Sampling(max_tokens=60, ignore_eos=True),
    )


def test_costs_are_measured_once_and_reports_use_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = make_tiny_model(tmp_path / "model")
    prompts = [[20 + i] * 12 for i in range(6)]
    with caplog.at_level(logging.WARNING), RolloutGroup(settings(model, tmp_path / "costs", "predictive")) as group:
        assert any("measured what the policy needs to know" in line for line in caplog.messages)
        assert group.costs is not None and "measured at start; kept in" in group.costs_from
        group.generate(prompts, 2)
        first = group.last_report
    assert first is not None and first.startup is not None
    assert all(start.calibration_s > 0 and start.import_s > 0.5 for start in first.startup)
    static = first.counterfactual
    assert static.reason is None and static.source == group.costs_from
    assert static.static_ep_s and static.static_tp_s and static.gain
    assert [e.rollout_share for e in static.end_to_end] == [0.65, 0.75, 0.85]
    assert first.sample_times is not None and len(first.sample_times.ended_s) == 12
    assert first.decisions
    caplog.clear()
    with caplog.at_level(logging.WARNING), RolloutGroup(settings(model, tmp_path / "costs", "rollout")) as group:
        assert not any("measured" in line for line in caplog.messages), "the cache has them"
        with group.open_step(expected=6) as step:
            step.submit(prompts[:3])
            step.submit(prompts[3:])
        second = group.last_report
    assert second is not None and second.startup is not None and second.startup[0].calibration_s == 0
    assert second.counterfactual.static_ep_s and second.counterfactual.best_single_s is None
    assert second.sample_times is not None and any(second.sample_times.arrived_s)
    text = page([first, second.model_copy(update={"step": 1})])
    assert "Arrivals per second" in text and "End to end" in text
