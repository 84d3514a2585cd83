"""TRL's GRPOTrainer with rollouts of the real engine: through `rollout_func`, and in server mode."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from datasets import Dataset

from moebius.engine.config import EngineConfig, PolicyConfig
from moebius.rollout.config import RolloutConfig
from moebius.rollout.demo_assets import make_tiny_model
from moebius.rollout.errors import BadInput
from moebius.rollout.group import RolloutGroup
from moebius.rollout.integrations.trl import GroupRollouts
from moebius.rollout.report import StepReport
from moebius.rollout.server import make_app
from moebius.rollout.service import RolloutService
from moebius.rollout.service_types import ServiceSettings
from moebius.rollout.types import Sampling
from tests.http_server import serving
from tests.integration.gloo_transfer import GlooTransferEngine
from tests.integration.warm import Warm

ROOT = Path(__file__).parents[2]
STEPS, PROMPTS, N, LONGEST = 2, 3, 4, 24
# Where `make venv` puts TRL: verl, which other tests run, fails in an environment with it.
APART = Path(sys.prefix) / "trl"


@pytest.fixture(scope="module", autouse=True)
def trl() -> Iterator[None]:
    """TRL can be imported in this module's tests only."""
    sys.path.append(str(APART))
    yield
    sys.path.remove(str(APART))


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Iterator[RolloutGroup]:
    model = make_tiny_model(tmp_path_factory.mktemp("model"), num_layers=2)
    engine = EngineConfig(
        model=str(model),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=32,
        kv_cache_bytes=16 << 20,
        enforce_eager=True,
        policy=PolicyConfig(threshold=6),
    )
    # Random weights hardly ever end a sample; this makes lengths differ, and is kept beside what TRL asks for.
    sampling = Sampling(max_tokens=8, stop_token_ids=list(range(300, 340)))
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, runtime_env=warm.runtime_env)
    with RolloutGroup(RolloutConfig(ranks=2, device="cpu", engine=engine, sampling=sampling)) as group:
        yield group
    ray.shutdown()


def reward(completions: list[Any], **others: Any) -> list[float]:
    return [float(len(completion[0]["content"]) % 7) for completion in completions]


def trainer_of(group: RolloutGroup, folder: Path, rollout_func: Any = None, **settings: Any) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    questions = [{"prompt": [{"role": "user", "content": f"What is {i} + {i + 2}?"}]} for i in range(PROMPTS * STEPS)]
    config = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=PROMPTS * N,
        num_generations=N,
        max_completion_length=LONGEST,
        max_steps=STEPS,
        learning_rate=1e-3,
        beta=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        **settings,
    )
    return GRPOTrainer(
        model=group.config.engine.model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(questions),
        rollout_func=rollout_func,
    )


def logprobs(model: Any, prompt: list[int], completion: list[int]) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion])).logits[0].float().log_softmax(-1)
    return [float(logits[len(prompt) - 1 + i, token]) for i, token in enumerate(completion)]


def check_reports(folder: Path, versions: list[int]) -> None:
    reports = [StepReport.model_validate_json(file.read_text()) for file in sorted(folder.glob("*.json"))]
    assert [report.counts.samples for report in reports] == [PROMPTS * N] * STEPS
    assert [report.policy_version for report in reports] == versions
    for report in reports:
        assert [switch.to for switch in report.switches] == ["TP"] and 0 < report.switches[0].live <= 6


def test_the_example(tmp_path: Path) -> None:
    """As a user runs it; while no group of this process is up."""
    command = [sys.executable, "examples/trl/grpo_rollout_func.py", str(tmp_path)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(APART), os.environ.get("PYTHONPATH", "")])
    }
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the group has the weights of version 2" in done.stdout
    assert len(list((tmp_path / "reports").glob("step_*.json"))) == 2


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
def test_rollout_func(group: RolloutGroup, tmp_path: Path) -> None:
    """Two steps; what comes back are samples of the trainer's own weights."""
    rollouts = GroupRollouts(group, reports=tmp_path / "reports")
    drawn: list[tuple[int, int]] = []

    def watched(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        answer = rollouts(prompts, trainer)
        assert len(prompts) == PROMPTS * N == len(answer["completion_ids"])
        columns = (answer[name] for name in ("prompt_ids", "completion_ids", "logprobs"))
        for question, prompt, completion, told in zip(prompts, *columns, strict=True):
            assert question[0]["content"] in trainer.processing_class.decode(prompt)
            assert told == pytest.approx(logprobs(trainer.model, prompt, completion), abs=2e-3)
            assert 0 < len(completion) <= LONGEST
            drawn.append((trainer.state.global_step, len(completion)))
        return answer

    before = group.policy_version
    trainer = trainer_of(group, tmp_path, watched)
    trainer.train()
    assert [step for step, _ in drawn] == [0] * PROMPTS * N + [1] * PROMPTS * N
    assert len({length for _, length in drawn}) > 2, "lengths differ"
    assert group.policy_version == before + STEPS
    check_reports(tmp_path / "reports", [before + 1, before + 2])
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert len(norms) == STEPS and all(norm > 0 for norm in norms)
    trainer.tools = [print]
    with pytest.raises(BadInput, match="with tools or environments"):
        rollouts(["a"], trainer)


def test_server_mode(group: RolloutGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's own client and a script that knows nothing of us; only NCCL is replaced, by gloo."""
    from trl.generation import vllm_client

    init = vllm_client.VLLMClient.init_communicator
    monkeypatch.setattr(vllm_client, "NCCLWeightTransferEngine", GlooTransferEngine)
    monkeypatch.setattr(vllm_client.VLLMClient, "init_communicator", lambda self, device: init(self, "cuda"))
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    reports = tmp_path / "reports"
    service = RolloutService(group, ServiceSettings(idle_s=0.2, quiet_s=0.1, reports=str(reports)))
    before = group.policy_version
    with serving(make_app(service, model_name="policy")) as url:
        trainer = trainer_of(
            group, tmp_path, use_vllm=True, vllm_mode="server", vllm_server_base_url=url, vllm_server_timeout=60
        )
        client = trainer.vllm_generation.vllm_client
        answer = client.chat([[{"role": "user", "content": "2 + 2?"}]], n=2, max_tokens=3, logprobs=2)
        assert [len(ids) for ids in answer["completion_ids"]] == [len(lps) for lps in answer["logprobs"]]
        trainer.train()
        with pytest.raises(Exception, match="structured_outputs"):
            client.generate([[5, 6]], structured_outputs_regex="a+")
        assert client.model == "policy"
    steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    assert len(steps) == STEPS and all(step["grad_norm"] > 0 for step in steps)
    for step in steps:  # the engine's log-probabilities are those of the trainer's weights
        assert step["sampling/sampling_logp_difference/max"] < 2e-3, json.dumps(step)
    assert group.policy_version >= before + STEPS
    done = [StepReport.model_validate_json(file.read_text()) for file in sorted(reports.glob("*.json"))]
    drawn = [report for report in done if report.counts.samples == PROMPTS * N]
    assert len(drawn) == STEPS, "each of TRL's batches was one step"
    assert all([switch.to for switch in report.switches] == ["TP"] for report in drawn)
