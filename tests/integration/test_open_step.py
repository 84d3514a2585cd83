"""Steps that take prompts while they run, on Ray with real engines: the samples are those of `generate`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from moebius.engine.config import EngineConfig, PolicyConfig
from moebius.rollout.config import RolloutConfig
from moebius.rollout.demo_assets import make_tiny_model
from moebius.rollout.errors import BadInput, GroupNotReady, MoebiusError, RankDied
from moebius.rollout.group import RolloutGroup
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


def test_samples_are_those_of_generate(group: RolloutGroup) -> None:
    """A switch comes when the burst is in, not before, though few samples are live at first."""
    longer = EXACT | {"max_tokens": 90}
    want = group.generate(PROMPTS, 3, EXACT, step=7)[:4] + group.generate(PROMPTS, 3, longer, step=7)[4:]
    with group.open_step(step=7, expected=15) as step:
        assert step.submit(PROMPTS[:1], 3, EXACT) == [0]
        first = step.wait(0, timeout_s=60)
        assert first.samples == sorted(first.samples, key=lambda s: s.sample_index) and len(first.samples) == 3
        assert step.submit(PROMPTS[1:4], 3, EXACT) == [1, 2, 3]
        with pytest.raises(BadInput, match="vocabulary"):
            step.submit([[10**6]], 1)
        assert step.submit(PROMPTS[4:], 3, longer) == [4], "a refused prompt takes no number"
        for prompt in range(1, 4):
            step.wait(prompt, timeout_s=60)
    got = step.close()
    assert [[s.token_ids for s in r.samples] for r in got] == [[s.token_ids for s in r.samples] for r in want]
    assert [r.prompt_token_ids for r in got] == PROMPTS
    report = group.last_report
    assert report is not None and report.step == 7 and report.counts.samples == 15
    assert [s.live for s in report.switches] in ([5], [4], [3]), "only the last prompt's samples are the tail"
    assert {s.rank for r in got for s in r.samples} == {0, 1}


def test_completed_abort_and_errors(group: RolloutGroup) -> None:
    with group.open_step() as step:
        step.submit(PROMPTS[:3], 2, {"max_tokens": 200, "ignore_eos": True})
        [late] = step.submit([PROMPTS[3]], 1, {"max_tokens": 3, "ignore_eos": True})
        with pytest.raises(MoebiusError, match="another call is running"):
            group.generate(PROMPTS, 1)
        with pytest.raises(BadInput, match="not submitted"):
            step.wait(9)
        with pytest.raises(TimeoutError, match="unfinished"):
            step.wait(0, timeout_s=0.0)
        assert len(step.wait(late).samples[0].token_ids) == 3
        step.abort([0])
        assert {s.finish_reason for s in step.wait(0, timeout_s=60).samples} == {"abort"}
        step.abort()
    rollouts = step.close()
    reasons = {s.finish_reason for r in rollouts[:3] for s in r.samples}
    assert reasons <= {"abort", "length"} and len(rollouts) == 4
    with pytest.raises(GroupNotReady, match="closed"):
        step.submit(PROMPTS)
    assert len(group.generate(PROMPTS, 1, {"max_tokens": 2})) == len(PROMPTS)


def test_nothing_submitted(group: RolloutGroup) -> None:
    with group.open_step() as step:
        assert step.completed() == []
    assert step.close() == []
    assert len(group.generate(PROMPTS, 1, {"max_tokens": 2})) == len(PROMPTS)


def test_an_error_of_the_caller_ends_the_step(group: RolloutGroup) -> None:
    def broken() -> None:
        with group.open_step() as step:
            step.submit(PROMPTS, 2, {"max_tokens": 200, "ignore_eos": True})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()
    assert len(group.generate(PROMPTS, 1, {"max_tokens": 2})) == len(PROMPTS)


def test_a_rank_that_dies(group: RolloutGroup) -> None:
    step = group.open_step(replay=False)
    step.submit(PROMPTS, 2, {"max_tokens": 200, "ignore_eos": True})
    os.kill(group.pids()[1], signal.SIGKILL)
    with pytest.raises(RankDied, match="rank 1"):
        step.wait(0, timeout_s=120)
    with pytest.raises(GroupNotReady, match="restart"):
        group.generate(PROMPTS, 1)
    group.restart()
    assert len(group.generate(PROMPTS, 1, {"max_tokens": 2})) == len(PROMPTS)
