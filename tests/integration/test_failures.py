"""Ranks that die: the group comes back with its weights, and nothing is lost, drawn otherwise, or left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from benchmarks.processes import Usage, segments
from moebius.engine import phases
from moebius.engine.config import EngineConfig, PolicyConfig
from moebius.rollout.config import RolloutConfig
from moebius.rollout.demo import load_weights
from moebius.rollout.demo_assets import make_tiny_model
from moebius.rollout.errors import RankDied
from moebius.rollout.failure_types import FailureSettings, Loss
from moebius.rollout.group import RolloutGroup
from moebius.rollout.shm import start_ticks
from moebius.rollout.types import LengthTrace, Rollout, Sampling
from tests.integration.faults import POISON, arm, read_note
from tests.integration.warm import Warm
from tests.segments import segment_names

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [13], [14, 15], [16, 17, 18, 19]]
LENGTHS = LengthTrace({(p, s): 6 + 7 * (2 * p + s) for p in range(5) for s in range(2)})
SEEN_S = 5.0  # from a rank's death until the group knows of it
SILENT_S = 15.0  # until a rank that has stopped counts as dead
BACK_S = 90.0  # until it samples again, on a busy machine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), num_layers=2)


@pytest.fixture(scope="module")
def before() -> set[str]:
    return segment_names()


@pytest.fixture(scope="module")
def group(model: Path, before: set[str], warm: Warm) -> Iterator[RolloutGroup]:
    engine = EngineConfig(
        model=str(model),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=16,
        kv_cache_bytes=16 << 20,
        enforce_eager=True,
        policy=PolicyConfig(kind="rollout", threshold=3),
    )
    config = RolloutConfig(
        ranks=2,
        device="cpu",
        engine=engine,
        sampling=Sampling(max_tokens=90, seed=0),
        failures=FailureSettings(keep_weights="host", step_deadline_s=BACK_S, silent_s=SILENT_S),
    )
    ray.init(
        address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, runtime_env=warm.runtime_env,
        # With the first report, else ten seconds after its start, a process opens a connection that stays.
        _system_config={"metrics_report_interval_ms": 1000},
    )  # fmt: skip
    with RolloutGroup(config) as group:
        torch.manual_seed(1)
        changed = {name: tensor + 0.05 * torch.randn_like(tensor) for name, tensor in load_weights(model).items()}
        group.update_weights(changed, 7)
        yield group
    left = {name for name in segment_names() - before if name.startswith("moebius-")}
    ray.shutdown()
    assert not left


@pytest.fixture(scope="module")
def want(group: RolloutGroup) -> Any:
    """Tokens of step 3, undisturbed."""
    return tokens(group.generate(PROMPTS, 2, step=3, lengths=LENGTHS))


def tokens(rollouts: list[Rollout]) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in rollout.samples] for rollout in rollouts]


def killed(
    group: RolloutGroup,
    rank: int,
    phase: str,
    note: Path,
    act: Callable[[], Any],
    times: int = 1,
    signum: int = signal.SIGKILL,
) -> tuple[Any, Loss]:
    """What `act` returns though `rank` is killed in `phase`; sees that it was, and how long all took."""
    losses, old = len(group.losses), group.pids()
    arm(group, rank, phase, note, times, signum)
    found = act()
    at, hit = read_note(note)
    assert hit == phase
    assert len(group.losses) == losses + 1
    loss = group.losses[-1]
    assert (loss.rank, loss.phase) == (rank, phase)
    seen_s = SEEN_S + (SILENT_S if signum == signal.SIGSTOP else 0)
    assert loss.seen_at - at < seen_s and loss.seconds < BACK_S
    assert not [pid for pid in old if start_ticks(pid) is not None], "all ranks are new"
    return found, loss


def test_a_hundred_switches_leave_nothing(group: RolloutGroup) -> None:
    """Fifty to TP with live requests, fifty back between steps: file descriptors and shared memory stay as they are."""
    short = LengthTrace({(p, s): 14 if p == 4 else 2 + p for p in range(5) for s in range(2)})

    def steps(count: int) -> list[Usage]:
        for _ in range(count):
            group.generate(PROMPTS, 2, lengths=short)
            assert group.last_report is not None and len(group.last_report.switches) == 1
        return [Usage.of(pid) for pid in [os.getpid(), *group.pids()]]

    before, shared = steps(5), segments(group.pids())
    after = steps(50)
    assert [use.fds for use in after[1:]] == [use.fds for use in before[1:]] and after[0].fds <= before[0].fds + 2
    assert segments(group.pids()) == shared
    assert all(end.rss - start.rss < 48 << 20 for start, end in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("rank", "phase", "times", "signum"),
    [
        (0, phases.decode("EP"), 12, signal.SIGSTOP),  # it is there, and answers nothing
        (1, phases.switch("TP", "kv"), 1, signal.SIGKILL),
        (0, phases.decode("TP"), 9, signal.SIGKILL),
    ],
)
def test_a_rank_dies_within_a_step(
    group: RolloutGroup, want: Any, tmp_path: Path, rank: int, phase: str, times: int, signum: int
) -> None:
    def act() -> list[Rollout]:
        return group.generate(PROMPTS, 2, step=3, lengths=LENGTHS)

    found, loss = killed(group, rank, phase, tmp_path / "note", act, times, signum)
    assert tokens(found) == want
    assert {s.finish_reason for r in found for s in r.samples} == {"length"}
    assert {s.policy_version for r in found for s in r.samples} == {7}, "with the weights that were committed"
    report = group.last_report
    assert report is not None and report.counts.samples == 10
    assert (report.sample_times is None) == (loss.replayed < 10), "times of what ended before are of another run"
    assert [(entry.rank, entry.phase) for entry in report.losses] == [(rank, phase)]
    assert 0 < loss.replayed <= 10 and (loss.replayed < 10 or phase != phases.decode("TP"))
    assert f"rank {rank}" in loss.why and phase in loss.why


def test_a_rank_dies_between_steps_and_the_next_is_a_stream(group: RolloutGroup, want: Any) -> None:
    os.kill(group.pids()[1], signal.SIGKILL)
    with group.stream(PROMPTS, 2, step=3, lengths=LENGTHS) as stream:
        found = sorted(stream, key=lambda r: r.prompt_index)
    assert tokens(found) == want
    assert (group.losses[-1].rank, group.losses[-1].phase) == (1, phases.IDLE)


def test_parked_samples_and_one_rank_less_asleep(group: RolloutGroup, want: Any, tmp_path: Path) -> None:
    """Samples of step 3 are parked; then a rank dies on its way to sleep."""
    with group.stream(PROMPTS, 2, step=3, lengths=LENGTHS, budget={"groups": 5}):
        pass  # left at once, which parks
    report, _ = killed(group, 0, phases.SLEEP, tmp_path / "note", lambda: group.sleep(keep_weights=True))
    assert report.nbytes > 0
    group.wake_up()
    assert len(group.parked) == 10
    assert tokens(group.generate([], 1)) == want


def test_a_rank_dies_in_a_weight_update(group: RolloutGroup, model: Path, want: Any, tmp_path: Path) -> None:
    """The update has to be sent again; until then the old weights serve."""

    def act() -> None:
        with pytest.raises(RankDied, match="in weight update; the ranks were started again and hold policy version 7"):
            group.update_weights(load_weights(model), 8, bucket_bytes=100_000)

    killed(group, 1, phases.UPDATE, tmp_path / "note", act, times=3)
    assert group.policy_version == 7
    assert tokens(group.generate(PROMPTS, 2, step=3, lengths=LENGTHS)) == want


def test_a_prompt_that_kills_is_given_up_and_no_other(group: RolloutGroup, want: Any) -> None:
    prompts = [*PROMPTS[:3], [99, 3], *PROMPTS[3:]]
    poisoned: list[float] = []

    def again() -> None:
        group.on_ranks(POISON, [(99,), (99,)])
        poisoned.append(time.monotonic())

    group.on_restart = again
    again()
    losses = len(group.losses)
    found = group.generate(prompts, 1, {"max_tokens": 6, "ignore_eos": True}, step=3)
    group.on_restart = None
    assert [s.finish_reason for r in found for s in r.samples] == ["length"] * 3 + ["failed"] + ["length"] * 2
    assert "given up" in str(found[3].samples[0].stop_reason) and found[3].samples[0].token_ids == []
    assert len(group.losses) == losses + 3 == losses + len(poisoned) - 1
    assert [loss.given_up for loss in group.losses[losses:]] == [(), (), ((3, 3),)]
    assert all(loss.phase == phases.ADMISSION for loss in group.losses[losses:])
    report = group.last_report
    assert report is not None and report.counts.finish_reasons["failed"] == 1
    assert report.losses[-1].given_up == [[3, 3]]
