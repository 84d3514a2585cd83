"""Steps that leave samples unfinished, on Ray with real engines: what goes on later is what it would have been."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from safetensors.torch import load_file

from moebius.engine.config import EngineConfig, PolicyConfig
from moebius.engine.types import SampleKey
from moebius.rollout.budget import Budget
from moebius.rollout.config import RolloutConfig
from moebius.rollout.demo_assets import make_tiny_model
from moebius.rollout.errors import BadInput, GroupNotReady, MoebiusError
from moebius.rollout.group import RolloutGroup
from moebius.rollout.types import Rollout, Sampling
from tests.integration.warm import Warm

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [13], [14, 15], [16, 17, 18, 19], [20, 21]]
LONG: dict[str, Any] = {"max_tokens": 120, "ignore_eos": True, "seed": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), num_layers=2)


@pytest.fixture(scope="module")
def group(model: Path, warm: Warm) -> Iterator[RolloutGroup]:
    engine = EngineConfig(
        model=str(model),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=16,
        kv_cache_bytes=16 << 20,
        enforce_eager=True,
        policy=PolicyConfig(kind="rollout", threshold=3),
    )
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, runtime_env=warm.runtime_env)
    config = RolloutConfig(ranks=2, device="cpu", engine=engine, sampling=Sampling(max_tokens=40, seed=0))
    with RolloutGroup(config) as group:
        yield group
    ray.shutdown()


@pytest.fixture(scope="module")
def want(group: RolloutGroup) -> dict[tuple[int, int, int], list[int]]:
    """Tokens of steps 50 and 51, undisturbed."""
    return tokens([*group.generate(PROMPTS, 2, LONG, step=50), *group.generate(PROMPTS, 2, LONG, step=51)])


def tokens(rollouts: list[Rollout]) -> dict[tuple[int, int, int], list[int]]:
    return {(r.step, r.prompt_index, s.sample_index): s.token_ids for r in rollouts for s in r.samples}


def wait_for(group: RolloutGroup, step: Any, count: int) -> None:
    """Until so many tokens were sampled in an open step."""
    deadline = time.monotonic() + 60
    while sum(progress.tokens for progress in step.progress()) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_parked_samples_go_on_in_the_next_step(group: RolloutGroup, want: dict) -> None:
    with group.open_step(step=50) as step:
        step.submit(PROMPTS[:4], 2, LONG)
        [short] = step.submit([PROMPTS[4]], 2, {"max_tokens": 2, "ignore_eos": True})
        step.wait(short, timeout_s=60)
        wait_for(group, step, 80)
        step.submit(PROMPTS[5:], 2, LONG)  # may not have begun
        step.park()
        assert {key for key, _ in step.finished()} == {SampleKey(4, 0, 50), SampleKey(4, 1, 50)}
        with pytest.raises(GroupNotReady, match="parked"):
            step.wait(0)
    assert [r.prompt_index for r in step.close()] == [4]
    assert sorted(group.parked) == [(p, s, 50) for p in (0, 1, 2, 3, 5) for s in range(2)]
    assert all(not r.samples for r in group.incomplete)
    with pytest.raises(BadInput, match="step 50 has parked samples"):
        group.generate(PROMPTS, 1, LONG, step=50)
    again = group.generate(PROMPTS, 2, LONG, step=51)
    assert [r.step for r in again] == [51] * 6 + [50] * 5 and not group.parked
    assert [r.prompt_token_ids for r in again[6:]] == [PROMPTS[p] for p in (0, 1, 2, 3, 5)]
    got = tokens(again)
    assert got == {key: want[key] for key in got}
    report = group.last_report
    assert report is not None and report.counts.samples == 22 and report.counts.prompts == 11
    assert {s.versions[0][1] for r in again for s in r.samples} == {120}


def test_versions_over_a_weight_update(group: RolloutGroup, model: Path) -> None:
    step = group.open_step(step=60)
    step.submit(PROMPTS, 1, LONG)
    wait_for(group, step, 60)
    step.park()
    before = group.policy_version
    group.update_weights(load_file(model / "model.safetensors"), before + 1)
    step = group.open_step(step=61)
    step.submit(PROMPTS[:1], 1, {"max_tokens": 3, "ignore_eos": True})
    step.close()
    found = dict(step.finished())
    for key, sample in found.items():
        (old, first), (new, second) = sample.versions if key.step == 60 else [(before, 1), *sample.versions]
        assert (old, new) == (before, before + 1) == (before, sample.policy_version)
        assert first > 0 and (first if key.step == 60 else 0) + second == len(sample.token_ids)
    assert len(found) == 7


def test_a_share_of_the_groups_and_the_rest_later(group: RolloutGroup, want: dict) -> None:
    short = {"max_tokens": 6, "ignore_eos": True, "seed": 4}
    trace = group.generate(PROMPTS, 2, short, step=70)
    lengths = group.captured_lengths
    assert lengths is not None
    for sample in range(2):  # two of six prompts are long
        lengths.lengths[(1, sample)] = lengths.lengths[(4, sample)] = 200
    first = group.generate(PROMPTS, 2, LONG, step=71, lengths=lengths, budget=Budget(fraction=0.6))
    done = {r.prompt_index for r in first}
    assert done == {0, 2, 3, 5}, "both long ones are parked"
    assert {key.prompt for key in group.parked} == {1, 4}
    second = group.generate([], 1)
    assert [(r.step, r.prompt_index) for r in second] == [(71, 1), (71, 4)]
    assert {len(s.token_ids) for r in second for s in r.samples} == {200}
    assert len(trace) == 6 and not group.parked


def test_the_first_groups_only(group: RolloutGroup) -> None:
    """Over-sampling: of six prompts the first two, then what was complete besides, and the rest never."""
    found = group.generate(PROMPTS, 2, LONG, budget={"groups": 2, "rest": "abort"})
    assert len(found) == 2 and {s.finish_reason for r in found for s in r.samples} == {"length"}
    assert not group.parked and not group.backlog
    parked = group.generate(PROMPTS, 2, {"max_tokens": 4, "ignore_eos": True}, budget={"groups": 2})
    rest = group.generate(PROMPTS[:1], 1, {"max_tokens": 4})
    assert len(parked) == 2 and len(rest) == 5
    assert group.last_report is not None and {r.step for r in rest} == {parked[0].step, parked[0].step + 1}


def test_tokens_and_seconds(group: RolloutGroup) -> None:
    assert group.generate(PROMPTS, 2, LONG | {"max_tokens": 240}, budget={"tokens": 100}) == []
    assert len(group.parked) == 12
    assert group.generate([], 1, budget={"seconds": 0.01}) == [] and len(group.parked) == 12
    ended = group.abort_parked([group.parked[0], SampleKey(99, 0, 1)])
    assert len(ended) == 1 and len(group.parked) == 11
    key, sample = ended[0]
    assert sample.finish_reason == "abort" and 0 < len(sample.token_ids) < 240 and key.prompt == 0
    assert len(group.abort_parked()) == 11 and not group.parked and group.abort_parked() == []
    after = group.generate(PROMPTS, 1, {"max_tokens": 2})
    assert [len(r.samples) for r in after] == [1] * 6 and not group.parked, "a step after a parked one is whole"
    with pytest.raises(BadInput, match="needs tokens, seconds"):
        group.generate(PROMPTS, 1, budget={})


def test_streamed_rollouts_come_when_they_are_whole(group: RolloutGroup, want: dict) -> None:
    seen: list[Any] = []
    stream = group.stream(PROMPTS, 2, LONG, step=51, on_progress=lambda *now: seen.append(now))
    with pytest.raises(MoebiusError, match="another call is running"):
        group.generate(PROMPTS, 1)
    found = list(stream)
    assert tokens(found) == {key: value for key, value in want.items() if key[0] == 51}
    assert group.last_report is not None and group.last_report.counts.samples == 12
    assert seen and seen[0][1] == 12
    with group.stream(PROMPTS, 2, LONG | {"max_tokens": 200}) as stream:
        next(stream)
    again = group.generate(PROMPTS, 1, {"max_tokens": 2})
    assert [len(r.samples) for r in again] == [1] * 6, "the group serves again"


def test_parked_samples_survive_the_loss_of_the_ranks(group: RolloutGroup, model: Path, want: dict) -> None:
    step = group.open_step(step=50)
    step.submit(PROMPTS, 2, LONG)
    wait_for(group, step, 60)
    step.park()
    group.restart()
    assert len(group.parked) == 12
    group.update_weights(load_file(model / "model.safetensors"), group.policy_version)
    found = group.generate([], 1)
    assert tokens(found) == {key: value for key, value in want.items() if key[0] == 50}
