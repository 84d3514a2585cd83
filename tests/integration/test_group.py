"""RolloutGroup with real engines: two CPU ranks and a tiny model. One group serves most tests; a few start another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from moebius.engine.config import EngineConfig, PolicyConfig
from moebius.rollout.config import RolloutConfig
from moebius.rollout.demo import load_weights
from moebius.rollout.demo_assets import make_tiny_model
from moebius.rollout.errors import BadInput, GroupNotReady, MoebiusError, RankDied
from moebius.rollout.failure_types import FailureSettings
from moebius.rollout.group import RolloutGroup
from moebius.rollout.shm import parse_ident, start_ticks
from moebius.rollout.types import LengthTrace, Rollout, Sampling
from tests.integration.warm import Warm
from tests.segments import segment_names

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [13], [14, 15]]
SHM = Path("/dev/shm")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), num_layers=2)


@pytest.fixture(scope="module", autouse=True)
def ray_with_room(warm: Warm) -> Iterator[None]:
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, runtime_env=warm.runtime_env)
    yield
    ray.shutdown()


def settings(model: Path, **changes: Any) -> RolloutConfig:
    engine = EngineConfig(
        model=str(model),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=16,
        kv_cache_bytes=16 << 20,
        enforce_eager=True,
        policy=PolicyConfig(kind="rollout", threshold=3),
    )
    fields: dict[str, Any] = {
        "ranks": 2,
        "device": "cpu",
        "engine": engine,
        "sampling": Sampling(max_tokens=90, seed=0),
    }
    return RolloutConfig(**(fields | changes))


@pytest.fixture(scope="module")
def group(model: Path, ray_with_room: None) -> Iterator[RolloutGroup]:
    with RolloutGroup(settings(model)) as group:
        yield group


def tokens(rollouts: list[Rollout]) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in rollout.samples] for rollout in rollouts]


def works(group: RolloutGroup) -> None:
    [rollout] = group.generate([[3, 4]], 1, {"max_tokens": 2, "ignore_eos": True})
    assert len(rollout.samples[0].token_ids) == 2


# ---- generate ----------------------------------------------------------------------------------------


def test_ranks_are_processes_of_their_own(group: RolloutGroup, warm: Warm) -> None:
    pids = group.pids()
    parents = [int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in pids]
    assert parents == [warm.pid] * 2 and len({*pids, warm.pid, os.getpid()}) == 4


def test_the_first_report_tells_of_the_start(model: Path) -> None:
    with RolloutGroup(settings(model)) as group:
        assert [start.rank for start in group.startup] == [0, 1]
        for start in group.startup:
            assert start.import_s > 0 and [built.layout for built in start.runtimes] == ["TP", "EP"]
            assert start.memory.overhead_ep_bytes >= start.memory.expert_spare_bytes > 0
        reports = []
        for _ in range(2):
            works(group)
            reports.append(group.last_report)
        assert [report is not None and report.startup for report in reports] == [group.startup, None]


def test_results_are_complete_and_in_order(group):
    seen: list[tuple[int, int, int, int, str]] = []
    spread = LengthTrace({(p, s): 4 + 5 * (3 * p + s) for p in range(4) for s in range(3)})
    rollouts = group.generate(PROMPTS, 3, on_progress=lambda *event: seen.append(event), lengths=spread)
    assert [r.prompt_index for r in rollouts] == [0, 1, 2, 3]
    assert [r.prompt_token_ids for r in rollouts] == PROMPTS
    samples = [sample for rollout in rollouts for sample in rollout.samples]
    assert [sample.sample_index for sample in samples] == [0, 1, 2] * 4
    assert {sample.rank for sample in samples} == {0, 1}
    assert all(sample.logprobs is not None and len(sample.logprobs) == len(sample.token_ids) for sample in samples)
    assert [len(sample.token_ids) for sample in samples] == [4 + 5 * i for i in range(12)]
    assert {sample.finish_reason for sample in samples} == {"length"}
    report = group.last_report
    assert report.counts.samples == 12
    assert len(report.switches) == 1
    total = sum(len(sample.token_ids) for sample in samples)
    assert seen[-1] == (12, 12, total, 0, "TP")
    assert [event[0] for event in seen] == sorted(event[0] for event in seen)


def test_equal_steps_are_equal_and_samples_differ(group):
    first, again, other = (tokens(group.generate(PROMPTS, 3, step=step)) for step in (5, 5, 6))
    assert first == again
    assert first != other
    assert all(len({tuple(sample) for sample in prompt}) == 3 for prompt in first)


def test_steps_count_on(group):
    group.generate([[1]], 1, {"max_tokens": 1}, step=40)
    group.generate([[1]], 1, {"max_tokens": 1})
    assert group.last_report.step == 41


def test_texts_and_messages_equal_their_token_ids(group):
    chat = [{"role": "user", "content": "2 + 2 ="}]
    rollouts = group.generate(["2 + 2 =", chat], 2, step=1)
    ids = [rollout.prompt_token_ids for rollout in rollouts]
    assert ids[0] == group.tokenizer.encode("2 + 2 =")
    assert len(ids[1]) > len(ids[0])
    assert tokens(group.generate(ids, 2, step=1)) == tokens(rollouts)


def test_captured_lengths_are_replayed(group):
    captured = tokens(group.generate(PROMPTS, 2))
    trace = group.captured_lengths
    assert isinstance(trace, LengthTrace)
    replayed = group.generate(PROMPTS, 2, {"seed": 99}, lengths=trace)
    assert [[len(s) for s in p] for p in tokens(replayed)] == [[len(s) for s in p] for p in captured]
    assert tokens(replayed) != captured


def test_no_prompts_give_no_rollouts(group):
    assert group.generate([], 4) == []
    assert group.last_report is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompts": [[1], []]}, "prompt 1 is empty"),
        ({"prompts": [[1] * 256]}, "prompt 0 has 256 tokens"),
        ({"prompts": [[1, 100_000]]}, "token id 100000 is outside"),
        ({"prompts": "a text"}, "expected a list of prompts, got str"),
        ({"n": 0}, "at least 1 sample per prompt, got 0"),
        ({"n": 1.5}, "got 1.5"),
        ({"sampling": {"temprature": 1.0}}, "did you mean 'temperature'"),
        ({"sampling": {"temperature": -1}}, "temperature"),
        ({"sampling": {"logprobs": 50}}, "logprobs"),  # found by vLLM itself
        ({"sampling": {"n": 2}}, "unknown key 'n'"),
        ({"sampling": {"stop_token_ids": [100_000]}}, "stop_token_ids: token id 100000"),
        ({"step": -1}, "step: expected an int of at least 0"),
        ({"lengths": LengthTrace({(0, 0): 400})}, "room for 255"),
        ({"lengths": LengthTrace({})}, "no prompt 0"),
    ],
)
def test_bad_input_is_refused_and_the_group_goes_on(group, arguments, words):
    with pytest.raises(BadInput, match=words):
        group.generate(**({"prompts": [[1]], "n": 1} | arguments))
    works(group)


def test_an_error_in_the_callback_ends_the_step_only(group):
    def fail(*event: Any) -> None:
        raise ZeroDivisionError("in the callback")

    with pytest.raises(ZeroDivisionError):
        group.generate(PROMPTS, 4, {"max_tokens": 200, "ignore_eos": True}, on_progress=fail)
    works(group)


def during_a_step(group: RolloutGroup, act: Callable[[], None], layout: str = "EP", **more: Any) -> list[Rollout]:
    """Runs a long step and `act`, once, when it has sampled some tokens in `layout`."""
    acted = threading.Event()

    def on_progress(done: int, total: int, tokens: int, live: int, now: str) -> None:
        if tokens and now == layout and not acted.is_set():
            acted.set()
            act()

    long = {"max_tokens": 240, "ignore_eos": True}
    rollouts = group.generate(PROMPTS, 4, long, on_progress=on_progress, **more)
    assert acted.is_set()
    return rollouts


def test_abort_of_all_returns_what_there_is(group):
    rollouts = during_a_step(group, group.abort)
    samples = [sample for rollout in rollouts for sample in rollout.samples]
    assert len(samples) == 16
    assert all(s.finish_reason == "abort" and 0 < len(s.token_ids) < 240 for s in samples)
    works(group)


def test_abort_of_some_leaves_the_others(group):
    rollouts = during_a_step(group, lambda: group.abort([(0, 1), (2, 3)]))
    ended = {(r.prompt_index, s.sample_index) for r in rollouts for s in r.samples if s.finish_reason == "abort"}
    assert ended == {(0, 1), (2, 3)}


def test_abort_after_the_switch(group):
    long = {(0, 0), (1, 1), (3, 3)}
    lengths = LengthTrace({(p, s): 240 if (p, s) in long else 5 for p in range(4) for s in range(4)})
    rollouts = during_a_step(group, lambda: group.abort([(1, 1), (3, 3)]), layout="TP", lengths=lengths)
    reasons = {(r.prompt_index, s.sample_index): s.finish_reason for r in rollouts for s in r.samples}
    assert {key for key, reason in reasons.items() if reason == "abort"} == {(1, 1), (3, 3)}
    assert len(rollouts[0].samples[0].token_ids) == 240
    works(group)


def test_abort_between_steps_does_nothing(group):
    group.abort()
    works(group)


def test_a_second_call_meanwhile_is_refused(group):
    errors: list[Exception] = []

    def intrude() -> None:
        for call in (lambda: group.generate([[1]], 1), lambda: group.update_weights({}, 1)):
            with pytest.raises(MoebiusError, match="another call is running") as error:
                call()
            errors.append(error.value)
        group.abort()

    during_a_step(group, intrude)
    assert len(errors) == 2


# ---- weights ----------------------------------------------------------------------------------------


def fused(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same weights with experts fused per layer."""
    out = {name: tensor for name, tensor in weights.items() if ".experts." not in name}
    prefixes = sorted({name.split(".experts.")[0] for name in weights if ".experts." in name})
    for prefix in prefixes:
        count = sum(f"{prefix}.experts.{e}.up_proj.weight" in weights for e in range(1000))
        names = [f"{prefix}.experts.{e}" for e in range(count)]
        gate_up = [torch.cat([weights[f"{n}.gate_proj.weight"], weights[f"{n}.up_proj.weight"]]) for n in names]
        out[f"{prefix}.experts.gate_up_proj"] = torch.stack(gate_up)
        out[f"{prefix}.experts.down_proj"] = torch.stack([weights[f"{n}.down_proj.weight"] for n in names])
    return out


def test_updates_change_outputs_stamp_samples_and_are_undone_by_old_weights(group, model):
    weights = load_weights(model)
    assert any(".experts.0." in name for name in weights), "the checkpoint holds experts one by one"
    torch.manual_seed(1)
    changed = {name: tensor + 0.05 * torch.randn_like(tensor) for name, tensor in weights.items()}
    version = group.policy_version
    before = tokens(group.generate(PROMPTS, 2, step=7))
    group.update_weights(changed, version + 1, bucket_bytes=100_000)
    after = group.generate(PROMPTS, 2, step=7)
    assert tokens(after) != before
    assert {sample.policy_version for rollout in after for sample in rollout.samples} == {version + 1}
    assert group.last_report.policy_version == version + 1
    assert group.last_report.update_weights_s > 0
    group.update_weights(iter(fused(changed).items()), version + 2)
    assert tokens(group.generate(PROMPTS, 2, step=7)) == tokens(after)
    group.update_weights(weights, version + 3)
    assert tokens(group.generate(PROMPTS, 2, step=7)) == before


def broken_stream(weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    yield from list(weights.items())[:5]
    raise ConnectionError("the trainer is gone")


def without(weights: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in weights.items() if key != name}


@pytest.mark.parametrize(
    ("spoil", "kind", "words"),
    [
        (lambda w: w | {"model.nrom.weight": torch.zeros(3)}, BadInput, "nearest known name is 'model.norm.weight'"),
        (lambda w: w | {"model.norm.weight": torch.zeros(3)}, BadInput, r"expected shape \[\d+\], got \[3\]"),
        (lambda w: without(w, "model.norm.weight"), BadInput, "missing from the update: model.norm.weight"),
        (lambda w: [*w.items(), next(iter(w.items()))], BadInput, "sent twice"),
        (lambda w: {}, BadInput, "weights are missing"),
        (lambda w: [("model.norm.weight", 3)], BadInput, "expected a name and a tensor"),
        (broken_stream, ConnectionError, "the trainer is gone"),
    ],
)
def test_a_failed_update_blocks_generate_until_a_whole_one(group, model, spoil, kind, words):
    weights = load_weights(model)
    version = group.policy_version
    with pytest.raises(kind, match=words):
        group.update_weights(spoil(weights), version + 1, bucket_bytes=100_000)
    with pytest.raises(GroupNotReady, match=f"update to policy version {version + 1} failed .*send a full update"):
        group.generate([[1]], 1)
    assert group.policy_version == version
    group.update_weights(weights, version + 1)
    works(group)


@pytest.mark.parametrize("version", [-1, "3", 1.0, None, True])
def test_a_bad_version_changes_nothing(group, model, version):
    with pytest.raises(BadInput, match="version must be an int"):
        group.update_weights(load_weights(model), version)
    works(group)


# ---- start and end ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "cuda"}, r"not enough GPU\. Asked for 2 CPU, 2 GPU on one node; .* has 8 CPU, 0 GPU"),
        ({"cpus_per_rank": 100}, r"not enough CPU\. Asked for 200 CPU on one node"),
    ],
)
def test_a_missing_resource_is_named_at_once(model, changes, words):
    started = time.monotonic()
    with pytest.raises(MoebiusError, match=words):
        RolloutGroup(settings(model, **changes))
    assert time.monotonic() - started < 10


def test_a_wrong_folder_is_found_before_anything_starts(tmp_path):
    with pytest.raises(BadInput, match=r"config\.json: not found"):
        RolloutGroup(settings(tmp_path))


def test_an_engine_that_cannot_start_says_why(model):
    tiny_kv = settings(model).engine.model_copy(update={"kv_cache_bytes": 1024})
    with pytest.raises(BadInput, match=r"rank \d failed during start-up: .*; its log is "):
        RolloutGroup(settings(model, engine=tiny_kv))


def test_a_second_group_a_killed_rank_and_a_restart(group, model):
    expected = tokens(group.generate(PROMPTS, 2, step=3))
    with RolloutGroup(settings(model, failures=FailureSettings(on_failure="raise"))) as second:
        assert tokens(second.generate(PROMPTS, 2, step=3)) == expected
        second.update_weights(load_weights(model), 1)
        pids = second.pids()
        killed: list[float] = []

        def kill() -> None:
            os.kill(pids[1], signal.SIGKILL)
            killed.append(time.monotonic())

        with pytest.raises(RankDied, match=rf"rank 1 \(pid {pids[1]}\) ended during step 12") as death:
            during_a_step(second, kill, step=12)
        assert time.monotonic() - killed[0] < 15
        assert (death.value.rank, death.value.step) == (1, 12)
        assert not any(running(pid) for pid in pids)
        with pytest.raises(GroupNotReady, match=r"ended during step 12.*restart\(\)"):
            second.generate([[1]], 1)
        # The first group has not noticed.
        assert tokens(group.generate(PROMPTS, 2, step=3)) == expected

        second.restart()
        with pytest.raises(GroupNotReady, match="holds the checkpoint's weights, not policy version 1"):
            second.generate([[1]], 1)
        second.update_weights(load_weights(model), 1)
        assert tokens(second.generate(PROMPTS, 2, step=3)) == expected
        pids = second.pids()
    second.shutdown()
    with pytest.raises(GroupNotReady, match="shut down"):
        second.generate([[1]], 1)
    assert not any(running(pid) for pid in pids)
    assert segments_of(pids) == []
    works(group)


DRIVER = """
import sys, time
from moebius.rollout.config import RolloutConfig
from moebius.rollout.group import RolloutGroup
group = RolloutGroup(RolloutConfig.model_validate_json(sys.stdin.read()))
print(*group.pids(), flush=True)
time.sleep(600)
"""


def test_after_kill_9_of_a_driver_the_next_group_starts(model):
    config = settings(model)
    before = segment_names()
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert driver.stdin is not None and driver.stdout is not None
        driver.stdin.write(config.model_dump_json())
        driver.stdin.close()
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) == 2, "the driver did not start its group"
        assert segments_of(pids), "a running group has shared memory"
    finally:
        driver.kill()
        driver.wait()
    wait_for(lambda: not any(running(pid) for pid in pids))
    with RolloutGroup(config) as group:
        assert segments_of(pids) == []
        works(group)
    assert segment_names() <= before


def segments_of(pids: list[int]) -> list[Path]:
    idents = ((path, parse_ident(path.name)) for path in SHM.iterdir())
    return [path for path, ident in idents if ident is not None and ident.pid in pids]


def running(pid: int) -> bool:
    return start_ticks(pid) is not None


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.1)
