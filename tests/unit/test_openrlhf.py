"""OpenRLHF's options and calls: what they become, what is refused, and when a step's burst is over."""

from __future__ import annotations

import asyncio
import runpy
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from moebius.rollout.config import Place
from moebius.rollout.demo_assets import make_tiny_model
from moebius.rollout.errors import BadInput, MoebiusError
from moebius.rollout.integrations.openrlhf import install as install_module
from moebius.rollout.integrations.openrlhf import transfer
from moebius.rollout.integrations.openrlhf.actor import RolloutActor, output_of
from moebius.rollout.integrations.openrlhf.burst import Burst
from moebius.rollout.integrations.openrlhf.install import install
from moebius.rollout.integrations.openrlhf.settings import (
    OpenRlhfSettings,
    group_config,
    refusals,
    sampling_of,
    split_options,
)
from moebius.rollout.types import Rollout, Sample

ROOT = Path(__file__).parents[2]
GOOD = ["--vllm.num_engines", "1", "--vllm.tensor_parallel_size", "2"]


def engine(**changes: Any) -> dict[str, Any]:
    """Arguments of an engine as `create_vllm_engines` gives them."""
    fields = {
        "model": "m", "enforce_eager": True, "tensor_parallel_size": 2, "seed": 42, "max_model_len": 512,
        "enable_prefix_caching": True, "dtype": "bfloat16", "trust_remote_code": True, "full_determinism": False,
        "gpu_memory_utilization": 0.5, "enable_sleep_mode": True, "logprobs_mode": "processed_logprobs",
        "max_logprobs": 1, "worker_extension_cls": "w", "distributed_executor_backend": "ray",
    }  # fmt: skip
    return fields | changes


# ---- options --------------------------------------------------------------------------------------------------------


def test_options_are_told_apart() -> None:
    settings, others = split_options(
        ["--train.seed", "3", "--moebius.policy.threshold=32", "--moebius.engine.max_num_seqs", "64", "--x"]
    )
    assert others == ["--train.seed", "3", "--x"]
    assert settings.policy.threshold == 32 and settings.engine == {"max_num_seqs": 64}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--moebius.policy.treshold=3"], "did you mean 'threshold'"),
        (["--moebius.polcy.threshold=3"], "did you mean 'policy'"),
        (["--moebius.policy.threshold"], "give a value"),
        (["--moebius.policy.threshold", "--train.seed"], "give a value"),
        (["--moebius.policy=3", "--moebius.policy.threshold=3"], "leave one of the two out"),
        (["--moebius.policy.threshold=[3"], "not a value"),
        (["--moebius.engine.model=m"], "set --actor.model_name_or_path instead"),
    ],
)
def test_wrong_options(argv: list[str], words: str) -> None:
    with pytest.raises(BadInput, match=words.replace("[", r"\[")):
        split_options(argv)


def test_nothing_is_refused_by_default() -> None:
    assert refusals([*GOOD, "--actor.model_name_or_path", "m"]) == []


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--vllm.num_engines", "1"], "two GPUs or more"),
        (["--vllm.tensor_parallel_size", "2"], "--vllm.num_engines"),
        ([*GOOD, "--ds.lora.rank", "8"], "--ds.lora.rank"),
        ([*GOOD, "--ds.load_in_4bit"], "quantised"),
        ([*GOOD, "--data.max_images_per_prompt", "1"], "images"),
        ([*GOOD, "--train.full_determinism_enable"], "every batch"),
        ([*GOOD, "--vllm.sync_with_ray", "--vllm.sync_backend", "gloo"], "use nccl"),
    ],
)
def test_what_cannot_be_done_is_refused(argv: list[str], words: str) -> None:
    [problem] = refusals(argv)
    assert words in problem


def test_a_groups_settings() -> None:
    settings = OpenRlhfSettings(policy={"threshold": 9}, engine={"dtype": "float32", "kv_cache_bytes": 1 << 20})
    config = group_config(settings, engine(), Place(node="n"), device_bytes=None)
    own = config.engine
    assert (config.ranks, config.device, own.seed, own.max_model_len, own.dtype) == (2, "cpu", 42, 512, "float32")
    assert own.policy.threshold == 9 and own.kv_cache_bytes == 1 << 20 and own.logprobs_mode == "processed_logprobs"
    for changes in ({"tensor_parallel_size": 1}, {"limit_mm_per_prompt": {"image": 1}}, {"full_determinism": True}):
        with pytest.raises(BadInput, match="cannot do what is asked for"):
            group_config(settings, engine(**changes), Place(node="n"), device_bytes=None)


def test_kv_memory_follows_from_the_share(tmp_path: Any) -> None:
    model = str(make_tiny_model(tmp_path / "model"))
    place = Place(node="n", devices=["0", "1"])
    small, large = (
        group_config(
            OpenRlhfSettings(), engine(model=model, gpu_memory_utilization=share), place, device_bytes=141 << 30
        ).engine.kv_cache_bytes
        for share in (0.3, 0.6)
    )
    assert 0 < small < large < 0.6 * (141 << 30)
    with pytest.raises(BadInput, match=r"--vllm\.gpu_memory_utilization=0\.01"):
        group_config(
            OpenRlhfSettings(), engine(model=model, gpu_memory_utilization=0.01), place, device_bytes=141 << 30
        )


def test_sampling_parameters() -> None:
    asked = SamplingParams(temperature=0.7, top_k=5, max_tokens=None, min_tokens=1, stop="x", logprobs=1, seed=3)
    own = sampling_of(asked, prompt_tokens=100, limit=128)
    assert (own.temperature, own.top_k, own.max_tokens, own.min_tokens, own.stop) == (0.7, 5, 28, 1, ["x"])
    assert (own.logprobs, own.seed) == (1, 3)
    assert sampling_of(SamplingParams(max_tokens=99), 100, 128).max_tokens == 28
    for wrong, words in (
        (SamplingParams(n=2), "one sample at a time"),
        (SamplingParams(prompt_logprobs=1), "prompt_logprobs cannot"),
    ):
        with pytest.raises(BadInput, match=words):
            sampling_of(wrong, 1, 128)
    with pytest.raises(BadInput, match="leaves no room"):
        sampling_of(SamplingParams(), 128, 128)


def test_another_openrlhf_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install_module, "version", lambda name: "0.9.0")
    with pytest.raises(MoebiusError, match=r"works with OpenRLHF 0\.11\.2, but 0\.9\.0"):
        install()


def test_the_examples_rewards() -> None:
    scores = runpy.run_path(str(ROOT / "examples" / "openrlhf" / "reward.py"))["reward_func"](
        ["What is 6 * 7? \\boxed{42}", "And 2 * 3? \\boxed{5}"], ["What is 6 * 7?", "And 2 * 3?"], ["42", "6"]
    )
    assert scores["rewards"].tolist() == scores["scores"].tolist() == [1.0, 0.0]


# ---- weights --------------------------------------------------------------------------------------------------------


def test_handles_of_this_ranks_gpu_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"uuid-{device}"))

    def rebuild(*arguments: Any) -> torch.Tensor:
        assert arguments == (*"abcdef", 1, "h"), "the device is this process's number"
        return torch.ones(3)

    handles = {"uuid-0": (None, ()), "uuid-1": (rebuild, (*"abcdef", 7, "h"))}
    [[(name, tensor)]] = transfer.read(handles, "w")
    assert name == "w" and tensor.tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="no process of the trainer holds 'w'"):
        list(transfer.read({"uuid-0": (rebuild, ())}, "w"))


# ---- requests -------------------------------------------------------------------------------------------------------


def test_answers_are_vllms() -> None:
    sample = Sample(0, [7, 8], [-0.5, -1.5], [{7: -0.5}, {9: -0.2}], "ab", "length", None, 5, 0)
    [output] = output_of("r", Rollout(0, [1, 2], [sample])).outputs
    assert (output.token_ids, output.text, output.finish_reason) == ([7, 8], "ab", "length")
    assert [sorted((t, lp.logprob) for t, lp in place.items()) for place in output.logprobs] == [
        [(7, -0.5)],
        [(8, -1.5), (9, -0.2)],
    ]
    assert (
        output_of("r", Rollout(0, [1], [Sample(0, [7], None, None, "", "stop", 7, 5, 0)])).outputs[0].logprobs is None
    )
    refused = Sample(0, [], [], None, "", "abort", "too long", 5, 0)
    with pytest.raises(BadInput, match="the engine refuses the request: too long"):
        output_of("r", Rollout(0, [1], [refused]))


def test_a_burst_is_in_when_no_call_comes_any_more() -> None:
    async def main() -> None:
        told: list[Any] = []
        filled = asyncio.Event()
        burst = Burst(told.append, filled.set, quiet_s=0.2, threshold=2, turns=False)
        burst.came(4)
        await asyncio.sleep(0.05)
        burst.came(4)
        last = time.monotonic()
        await filled.wait()
        assert time.monotonic() - last > 0.19, "the second call puts it off"
        assert told == [4, 4] and burst.unfinished == 8

    asyncio.run(main())


def test_turns_keep_a_burst_going() -> None:
    async def main() -> None:
        told: list[Any] = []
        burst = Burst(told.append, lambda: told.append("filled"), quiet_s=0.01, threshold=2, turns=True)
        burst.came(4)
        await asyncio.sleep(0.03)
        burst.ended()
        assert told == [4], "three may come back"
        burst.ended()
        assert told == [4, "filled"]

    asyncio.run(main())


class Service:
    """Answers each request with its last prompt token + 1, and notes what is asked of it."""

    def __init__(self) -> None:
        self.group = SimpleNamespace(max_model_len=64, policy_version=3)
        self.asked: list[Any] = []

    async def generate(self, prompt: list[int], sampling: Any, request_id: str) -> Rollout:
        self.asked.append(("generate", prompt))
        await asyncio.sleep(0.01)
        return Rollout(0, prompt, [Sample(0, [prompt[-1] + 1], [-0.5], None, "t", "stop", None, 3, 0)])

    def stats(self) -> Any:
        return SimpleNamespace(blocked=None)

    def begin_step(self, expected: int, *, hold: bool) -> None:
        self.asked.append(("begin_step", expected, hold))

    def filled(self) -> None:
        self.asked.append("filled")

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            self.asked.append((name, *args, *kwargs.items()))
            return SimpleNamespace(version=4, seconds=0.1)

        return call


def make(executor: Any, *, turns: bool) -> tuple[RolloutActor, Service]:
    actor = object.__new__(RolloutActor)
    service: Any = Service()
    actor.config = SimpleNamespace(ranks=2)  # type: ignore[assignment]
    actor._service, actor.executor = service, executor
    actor._ray_group, actor._updating, actor._requests, actor._ending = None, False, 0, None
    actor._burst = Burst(actor._announce, service.filled, quiet_s=0.05, threshold=1, turns=turns)
    return actor, service


class Tokenizer:
    """A token per character."""

    def __call__(self, text: str, **how: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([[ord(c) for c in text]])}

    def decode(self, ids: list[int], **how: Any) -> str:
        return "".join(map(chr, ids))


def test_agents_of_several_turns() -> None:
    """OpenRLHF's own executor, two turns each; the steps of two rounds are announced and ended one after the other."""
    from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

    class Agent(AgentInstanceBase):
        def __init__(self) -> None:
            self.turns = 0

        async def step(self, state_dict: dict[str, Any], **others: Any) -> dict[str, Any]:
            self.turns += 1
            return {"rewards": torch.tensor(1.0), "environment_feedback": "+", "done": self.turns == 2}

    async def main() -> None:
        actor, service = make(MultiTurnAgentExecutor(Agent), turns=True)
        asked = {"label": "", "max_length": 32, "hf_tokenizer": Tokenizer(), "num_samples": 2}
        for _ in range(2):
            answers = await asyncio.gather(
                *[
                    actor.generate_responses(prompt=p, sampling_params=SamplingParams(logprobs=1), **asked)
                    for p in ("a", "x")
                ]
            )
            assert [answer["observation_tokens"] for one in answers for answer in one] == (
                [[97, 98, 43, 44, 43]] * 2 + [[120, 121, 43, 44, 43]] * 2
            )
            assert actor.get_num_unfinished_requests() == 0
        await asyncio.sleep(0.1)
        steps = [call for call in service.asked if call[0] in ("begin_step", "end_step")]
        assert steps == [("begin_step", 2, True)] * 2 + [("end_step",)] + [("begin_step", 2, True)] * 2 + [
            ("end_step",)
        ]

    asyncio.run(main())


def test_a_failed_trajectory_leaves_no_step_open() -> None:
    """Its call fails at once, while its other trajectory is still being drawn."""

    class Executor:
        calls = 0

        async def execute(self, **asked: Any) -> dict[str, Any]:
            self.calls += 1
            if self.calls == 1:
                raise ValueError("of the agent")
            await asyncio.sleep(0.02)
            return {}

    async def main() -> None:
        actor, service = make(Executor(), turns=False)
        with pytest.raises(ValueError, match="of the agent"):
            await actor.generate_responses("a", "", SamplingParams(), 9, None, num_samples=2)
        assert actor.get_num_unfinished_requests() == 1 and ("end_step",) not in service.asked
        await asyncio.sleep(0.1)
        assert actor.get_num_unfinished_requests() == 0 and ("end_step",) in service.asked

    asyncio.run(main())


def test_an_update_is_one_from_the_first_tensor_to_the_last() -> None:
    async def main() -> None:
        actor, service = make(None, turns=False)
        await actor.init_process_group("host", 5, 1, 3, "g", "nccl", False)
        await actor.reset_prefix_cache()
        await actor.update_weight("a", torch.bfloat16, (2, 3))
        await actor.reset_prefix_cache()  # nothing to do: the end of the update does it
        await actor.update_weight("b", torch.bfloat16, (2,), empty_cache=True)
        await actor.update_weight_cuda_ipc("a", torch.bfloat16, (2,), {"uuid": "handle"}, empty_cache=True)
        names = [call[0] for call in service.asked]
        assert names == [
            "on_ranks", "clear_kv_cache", "begin_update", "pull_tensors", "pull_tensors", "commit_update",
            "begin_update", "pull_tensors", "commit_update",
        ]  # fmt: skip
        assert service.asked[0][2] == [("nccl", "host", 5, 1, 3), ("nccl", "host", 5, 2, 3)]
        assert service.asked[3][2] == [("nccl", ["a"], ["bfloat16"], [[2, 3]], False, 1 << 30)] * 2
        assert service.asked[7][1:] == (transfer.READ, [({"uuid": "handle"}, "a")] * 2)

    asyncio.run(main())
