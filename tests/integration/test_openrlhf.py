"""OpenRLHF's own engines' maker, generator of samples and sender of weights, with the real engine behind them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from vllm import SamplingParams

from moebius.rollout.demo_assets import make_tiny_model
from moebius.rollout.errors import BadInput
from moebius.rollout.integrations.openrlhf.install import install
from moebius.rollout.integrations.openrlhf.settings import OpenRlhfSettings
from moebius.rollout.report import StepReport
from tests.integration.openrlhf_parts import Member, Trainer, empty_flash_attn

ROOT = Path(__file__).parents[2]
RANKS, PROMPTS, N, LONGEST = 2, 4, 4, 72
REWARD = """import torch

def reward_func(queries, prompts, labels):
    return {"rewards": torch.tensor([float(len(queries[0]))])}
"""


@dataclass
class Run:
    """OpenRLHF's parts around two ranks."""

    engines: list[Any]
    generator: Any
    trainer: Any
    reports: Path
    args: Any

    def samples(self, **changes: Any) -> list[Any]:
        asked: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": LONGEST, "max_len": 128}
        asked["min_new_tokens"] = 0  # at least one would change the first token's probabilities
        experiences, _, consumed, _ = self.generator.generate_samples(**asked | changes)
        assert consumed == PROMPTS
        return list(experiences)

    def new_reports(self, seen: list[Path]) -> list[StepReport]:
        files = sorted(set(self.reports.glob("*.json")) - set(seen))
        return [StepReport.model_validate_json(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> str:
    return os.pathsep.join([str(empty_flash_attn(tmp_path_factory.mktemp("stubs"))), str(ROOT), *sys.path[1:]])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, stubs: str) -> Iterator[Run]:
    from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
    from openrlhf.trainer.ray.vllm_engine import create_vllm_engines
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("openrlhf")
    model = make_tiny_model(folder / "model", num_layers=2)
    # Random weights hardly ever end a sample: many tokens count as its end, so that lengths differ.
    generation = model / "generation_config.json"
    settings = json.loads(generation.read_text())
    generation.write_text(json.dumps(settings | {"eos_token_id": [settings["eos_token_id"], *range(300, 312)]}))
    (folder / "reward.py").write_text(REWARD)
    ray.init(
        address="local", num_cpus=8, num_gpus=RANKS, include_dashboard=False, log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": stubs, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}},
    )  # fmt: skip
    install(
        OpenRlhfSettings(
            policy={"threshold": 6},
            engine={"dtype": "float32", "kv_cache_bytes": 16 << 20, "max_num_seqs": 32},
            service={"reports": str(folder / "reports"), "quiet_s": 0.1},  # far less than the longest sample takes
        )
    )
    engines = create_vllm_engines(
        1, RANKS, str(model), 7, False, True, True, 128, None, 0.5, True, "processed_logprobs",
        remote_rm_url=str(folder / "reward.py"),
    )  # fmt: skip
    args = SimpleNamespace(
        vllm=SimpleNamespace(enable_sleep=True),
        rollout=SimpleNamespace(batch_size=PROMPTS, n_samples_per_prompt=N, vllm_generate_batch_size=PROMPTS),
        algo=SimpleNamespace(
            dynamic_filtering_enable=False, advantage=SimpleNamespace(is_correction_level="token")
        ),
    )  # fmt: skip
    questions = [f"What is {i} + {i + 1}?" for i in range(PROMPTS * 8)]
    loader = [
        ("sums", questions[i : i + 2], ["1", "2"], [None, None])
        for i in range(0, len(questions), 2)
    ]  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(model)
    generator = SamplesGenerator(SimpleNamespace(args=args), loader, [], tokenizer, engines)
    yield Run(engines, generator, Trainer.remote(str(model), engines, RANKS), folder / "reports", args)
    ray.shutdown()


def check_samples(run: Run, experiences: list[Any]) -> None:
    """All of them, rewarded, with the log-probabilities that the trainer's weights give."""
    assert len(experiences) == PROMPTS * N
    for experience in experiences:
        tokens = experience.sequences[0].tolist()
        places = [i + 1 for i, on in enumerate(experience.action_mask[0].tolist()) if on]
        assert 0 < len(places) <= LONGEST and places[-1] == len(tokens) - 1
        told = experience.rollout_log_probs[0].tolist()
        want = ray.get(run.trainer.logprobs.remote(tokens, places[0]))
        assert [told[i - 1] for i in places] == pytest.approx(want, abs=2e-3)
        assert experience.rewards.item() > 0


def test_samples_and_weights(run: Run) -> None:
    """A rollout step is one step of ours with one switch, asleep before and after; then changed weights come."""
    names = ray.get(run.trainer.names.remote())
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in names), "experts are fused"
    seen: list[Path] = []
    for round_ in range(2):
        check_samples(run, run.samples())
        [report] = run.new_reports(seen)
        seen = list(run.reports.glob("*.json"))
        assert report.counts.samples == PROMPTS * N and report.counts.prompts == PROMPTS * N
        assert [switch.to for switch in report.switches] == ["TP"] and report.switches[0].live <= 6
        assert report.policy_version == round_
        ray.get(run.trainer.change.remote(1.1))
        ray.get([engine.wake_up.remote(tags=["weights"]) for engine in run.engines])  # as OpenRLHF's trainer does
        ray.get(run.trainer.broadcast.remote())
    check_samples(run, run.samples())


def test_partial_rollouts(run: Run) -> None:
    """Weights come while samples are half drawn: pause, broadcast, resume."""
    [engine] = run.engines
    ray.get(engine.wake_up.remote())
    prompts = [f"How much is {i}?" for i in range(PROMPTS)]
    refs = run.generator._dispatch_prompts_to_vllm(
        prompts, ["1"] * PROMPTS, temperature=1.0, max_new_tokens=90, min_new_tokens=90, max_len=128
    )
    while ray.get(engine.get_num_unfinished_requests.remote()) < PROMPTS * N:
        pass
    ray.get(engine.pause_generation.remote())
    ray.get(run.trainer.change.remote(1 / 1.21))
    ray.get(run.trainer.broadcast.remote())
    assert ray.get(engine.get_num_unfinished_requests.remote()) == PROMPTS * N
    assert ray.wait(refs, timeout=0)[0] == [], "nothing is drawn in a pause"
    ray.get(engine.resume_generation.remote())
    answers = [answer for answers in ray.get(refs) for answer in answers]
    assert len(answers) == PROMPTS * N
    for answer in answers:
        [(start, end)] = answer["action_ranges"]
        assert end - start == 90 == sum(logprob < 0 for logprob in answer["rollout_log_probs"])
    ray.get(engine.sleep.remote())


def test_what_fails_is_said_and_mended(run: Run) -> None:
    import torch

    [engine] = run.engines
    ray.get(engine.wake_up.remote())
    with pytest.raises(BadInput, match="the ranks have no GPUs"):
        ray.get(engine.update_weight_cuda_ipc.remote("lm_head.weight", torch.float32, [2, 2], {}, True))
    prompt = {"prompt": "1 + 1?", "label": "2", "max_length": 128, "hf_tokenizer": run.generator.tokenizer}
    sampling = SamplingParams(max_tokens=4, n=2)
    with pytest.raises(BadInput, match="ask for one sample at a time"):
        ray.get(engine.generate_responses.remote(sampling_params=sampling, **prompt))
    ray.get(run.trainer.broadcast.remote())
    check_samples(run, run.samples())


def test_rays_collectives(run: Run) -> None:
    members = [Member.remote() for _ in range(2)]
    ray.get([member.join.remote(2, i, "openrlhf") for i, member in enumerate(members)])
    sent, got = members[0].send.remote([1.0, -2.5], "openrlhf"), members[1].receive.remote(2, "openrlhf")
    assert ray.get([sent, got]) == [None, [("weight", [1.0, -2.5])]]


def test_the_command_line(stubs: str) -> None:
    """OpenRLHF's own help; and what is refused, before anything starts."""

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "moebius.rollout.integrations.openrlhf.train_ppo_ray", *words],
            env=os.environ | {"PYTHONPATH": stubs}, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    helped = command("--help", "--moebius.policy.threshold=32")
    assert helped.returncode == 0 and "--vllm.tensor_parallel_size" in helped.stdout, helped.stderr[-2000:]
    script = (ROOT / "examples" / "openrlhf" / "grpo_deepmath_qwen3_30b_a3b.sh").read_text()
    for option in set(re.findall(r"--[a-z]+(?:\.[a-z_]+)+", script)):
        assert option in helped.stdout or option.startswith("--moebius."), option
    refused = command("--vllm.num_engines", "1", "--ds.lora.rank", "8")
    assert refused.returncode == 1
    assert "two GPUs or more" in refused.stderr and "--ds.lora.rank" in refused.stderr
