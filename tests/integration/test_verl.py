"""Unmodified verl 0.9.1 trains a tiny model on two ranks with our rollouts and the real engine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROMPTS, N, STEPS = 4, 4, 2  # as examples/verl/smoke.sh has them
TIMEOUT_S = 420
OURS = "actor_rollout_ref.rollout.engine_kwargs.moebius"
PARTS = ("burst", "switch", "tail")
UPDATE = ["wake_up", "update_weights", "updated", "clear_kv_cache", "set_global_steps", "wake_up"]
METRIC = re.compile(r"(?<= - )([\w./@-]+):(?:np\.\w+\()?(-?[\d.]+(?:e[+-]?\d+)?|nan)\)?")


@dataclass
class Run:
    """What one run of verl left behind."""

    steps: dict[int, dict[str, float]]  # metrics by training step
    calls: list[dict[str, Any]]  # of the trainer, in order
    output: str

    def named(self, *names: str) -> list[dict[str, Any]]:
        return [call for call in self.calls if call["call"] in names]

    def order(self, *left_out: str) -> list[str]:
        """Names of calls, a run of equal ones once."""
        return [name for name, _ in groupby(call["call"] for call in self.calls if call["call"] not in left_out)]


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    """Ray's sockets need a short path."""
    folder = Path(tempfile.mkdtemp(prefix="vray", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("verl"))


def prepare(folder: Path, layers: int = 2) -> Path:
    command = [sys.executable, "examples/verl/prepare.py", "smoke", str(folder), "--layers", str(layers)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


def train(data: Path, ray_folder: Path, tmp_path: Path, *settings: str, **variables: str) -> Run:
    """The smoke test as users run it, with some settings changed."""
    calls = tmp_path / "calls.jsonl"
    command = ["bash", "examples/verl/smoke.sh", str(data), f"+{OURS}.calls={calls}", *settings]
    command += [f"+ray_kwargs.ray_init._temp_dir={ray_folder}"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "VERL_"))}
    environment |= variables | {"PYTHON": sys.executable}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        pytest.fail(f"verl did not end within {TIMEOUT_S} s:\n{output[-6000:]}")
    assert process.returncode == 0, output[-6000:]
    steps = {}
    for line in output.splitlines():
        if (found := re.search(r"\bstep:(\d+) - ", line)) is not None:
            steps[int(found[1])] = {name: float(value) for name, value in METRIC.findall(line)}
    return Run(steps, [json.loads(line) for line in calls.read_text().splitlines()], output)


def check_weights(run: Run) -> None:
    """Every update reached both ranks whole and alike, and changed something."""
    received = run.named("received")
    assert len(received) == 2 * len(run.named("updated"))
    sums = [{call["sum"] for call in pair} for pair in zip(received[::2], received[1::2], strict=True)]
    assert all(len(pair) == 1 for pair in sums), "the ranks got different weights"
    assert len(set.union(*sums)) == len(sums), "an update brought the weights that were there"
    assert {call["rank"] for call in received} == {0, 1}


def check_metrics(run: Run, threshold: int = 6, *, counts: bool = True, ahead: bool = False) -> None:
    """Rollout and actor agree, and every step had a burst, a switch and a tail.

    Where batches are drawn `ahead`, verl takes the weights away in the middle of a step, and a training step may find
    all of its own samples there already: then one step must have had all three.
    """
    assert sorted(run.steps) == list(range(1, STEPS + 1)), run.output[-3000:]
    for metrics in run.steps.values():
        assert metrics["training/rollout_actor_probs_pearson_corr"] > 0.98
        assert metrics["actor/grad_norm"] > 0
    drawing = [metrics for metrics in run.steps.values() if "timing_s/gen/burst" in metrics]
    switched = [metrics for metrics in drawing if all(metrics[f"timing_s/gen/{part}"] > 0 for part in PARTS)]
    assert len(switched) >= (1 if ahead else STEPS), drawing
    for metrics in switched:
        parts = [metrics[f"timing_s/gen/{part}"] for part in PARTS]
        if counts:
            assert metrics["moebius/switches"] >= 1
            assert 0 < metrics["moebius/live_at_switch"] <= threshold
            assert metrics["moebius/tail_share"] == pytest.approx(parts[2] / sum(parts), abs=1e-3)


def test_sync_with_validation(data: Path, ray_folder: Path, tmp_path: Path) -> None:
    rollout = "actor_rollout_ref.rollout"
    run = train(
        data, ray_folder, tmp_path, "trainer.test_freq=2", f"{rollout}.val_kwargs.n=1",
        f"{rollout}.enable_rollout_routing_replay=True", f"{rollout}.moe_load_balance_metrics_interval=1",
    )  # fmt: skip
    check_metrics(run, threshold=6)
    check_weights(run)
    for metrics in run.steps.values():
        # verl has counted the experts of all output tokens but each trajectory's last: 2 layers, 2 experts a token.
        assert metrics["rollout/moe/routed_expert_assignments"] == 4 * (metrics["moebius/tokens"] - PROMPTS * N)
        # Only other weights could make probabilities differ by more than the trainer's kernels do.
        assert metrics["training/rollout_probs_diff_max"] < 2e-3
        assert sum(metrics[f"timing_s/gen/{part}"] for part in PARTS) < metrics["timing_s/gen"]
    step = ["begin_step", "generate", "sleep", *UPDATE]
    assert run.order("received", "generated") == ["launch", "sleep", *UPDATE, *step * STEPS, "begin_step", "generate"]
    assert [call["tags"] for call in run.named("wake_up")] == [["weights"], ["kv_cache"]] * (STEPS + 1)
    assert [call["expected"] for call in run.named("begin_step")] == [PROMPTS * N] * STEPS + [PROMPTS]
    answers = run.named("generated")
    assert [call["global_steps"] for call in answers] == [0] * PROMPTS * N + [1] * PROMPTS * N + [2] * PROMPTS
    assert all(call["stop"] == "completed" for call in answers)
    layouts = [dict(part.split(":") for part in call["layouts"].split()) for call in answers]  # at most one switch
    assert [sum(map(int, parts.values())) for parts in layouts] == [call["tokens"] for call in answers]
    in_tp = [call["tp_tokens"] for call in answers]
    assert [int(parts.get("TP", 0)) for parts in layouts] == in_tp and any(in_tp)
    assert all(call["sampling"]["temperature"] == 0 for call in run.named("generate")[-PROMPTS:])
    assert "val-core" in run.output


def test_colocate_async_with_partial_rollouts(ray_folder: Path, tmp_path: Path) -> None:
    """Long samples, three batches ahead: something runs at the end of each step, is cut off and goes on in the next."""
    folder = prepare(tmp_path / "data", layers=12)  # slow enough for verl, which looks every two seconds
    generation = folder / "model" / "generation_config.json"
    generation.write_text(json.dumps(json.loads(generation.read_text()) | {"eos_token_id": [2, 300, 301]}))
    run = train(
        folder, ray_folder, tmp_path,
        "trainer.v1.trainer_mode=colocate_async", "trainer.v1.colocate_async.num_warmup_batches=3",
        # Small steps: tokens of older weights are compared with those of now, and only the engine is to be judged.
        "data.max_response_length=400", "actor_rollout_ref.actor.optim.lr=1e-5", f"{OURS}.policy.threshold=30",
        f"{OURS}.engine.kv_cache_bytes=268435456",
    )  # fmt: skip
    check_metrics(run, threshold=30, ahead=True)
    check_weights(run)
    end = ["abort_all_requests", "sleep", *UPDATE, "resume_generation"]
    assert run.order("received", "generated", "generate", "begin_step") == ["launch", "sleep", *UPDATE, *end * STEPS]
    assert sum(call["expected"] for call in run.named("begin_step")) == PROMPTS * N * (3 + STEPS)
    # Whoever had asked when a step was cut off had an answer before the weights changed.
    names = [call["call"] for call in run.calls]
    for cut, update in zip(positions(names, "abort_all_requests"), positions(names, "update_weights")[1:], strict=True):
        assert names[:cut].count("generate") <= names[:update].count("generated")
    aborted = [call for call in run.named("generated") if call["stop"] == "aborted"]
    assert aborted
    assert sum(call["tokens"] for call in aborted) > 0
    # They were asked for again, with the tokens they had behind the prompt, and went on under the next weights.
    first_update = positions(names, "updated")[1]
    again = [call for call in run.calls[first_update:] if call["call"] == "generate" and call["prompt"] > 64]
    assert again
    assert {call["global_steps"] for call in run.calls[first_update:] if call["call"] == "generated"} & {1, 2}


def test_v0_trainer_with_two_turns(data: Path, ray_folder: Path, tmp_path: Path) -> None:
    loops = tmp_path / "loops.yaml"
    loops.write_text("- name: two_turns\n  _target_: tests.integration.verl_agent.TwoTurns\n")
    rollout = "actor_rollout_ref.rollout"
    manager = "moebius.rollout.integrations.verl.agent_loop.AgentLoopManager"
    run = train(
        data, ray_folder, tmp_path, "trainer.use_v1=False", f"+{rollout}.agent.agent_loop_manager_class={manager}",
        f"{rollout}.agent.agent_loop_config_path={loops}", f"{rollout}.agent.default_agent_loop=two_turns",
    )  # fmt: skip
    check_metrics(run, counts=False)
    check_weights(run)
    step = ["begin_step", "generate", "sleep", *UPDATE]
    assert run.order("received", "generated") == ["launch", "sleep", *UPDATE, *step * STEPS]
    assert all(call["multi_turn"] for call in run.named("begin_step"))
    assert len(run.named("generated")) == 2 * PROMPTS * N * STEPS


def test_separate_async(data: Path, ray_folder: Path, tmp_path: Path) -> None:
    """Rollouts on devices of their own; weights come through a checkpoint engine, and the group never sleeps whole."""
    rollout = "actor_rollout_ref.rollout"
    run = train(
        data, ray_folder, tmp_path,
        "trainer.v1.trainer_mode=separate_async", "trainer.v1.separate_async.parameter_sync_step=1",
        "actor_rollout_ref.hybrid_engine=False", f"{rollout}.nnodes=1", f"{rollout}.n_gpus_per_node=2",
        f"{rollout}.checkpoint_engine.backend=store",
        f"{rollout}.checkpoint_engine.custom_backend_module=tests.integration.verl_store",
        f"+{OURS}.policy.kind=interactive", f"+{OURS}.policy.cooldown_s=0.1", f"+{OURS}.policy.window=2",
        "actor_rollout_ref.actor.optim.lr=1e-4", "ray_kwargs.ray_init.num_gpus=4",
        VERL_LOGGING_LEVEL="WARNING",  # without hybrid replicas verl 0.9.1 fails where it logs that
    )  # fmt: skip
    assert sorted(run.steps) == list(range(1, STEPS + 1)), run.output[-3000:]
    assert all(metrics["training/rollout_actor_probs_pearson_corr"] > 0.98 for metrics in run.steps.values())
    check_weights(run)
    update = ["update_weights", "updated", "clear_kv_cache", "set_global_steps", "resume_kv_cache", "resume_generation"]
    control = run.order("received", "generated", "generate")
    assert control == ["launch", *["abort_all_requests", "release_kv_cache", *update] * (STEPS + 1)]


def positions(names: list[str], wanted: str) -> list[int]:
    return [i for i, name in enumerate(names) if name == wanted]
