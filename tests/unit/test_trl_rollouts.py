"""TRL's `rollout_func` over a stand-in for a group: one process, and two that share its samples."""

from __future__ import annotations

import multiprocessing
import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from moebius.rollout.errors import BadInput, MoebiusError
from moebius.rollout.integrations.trl.rollouts import GroupRollouts
from moebius.rollout.types import Rollout, Sample

N = 2


class Group:
    """Answers with prompt and sample index."""

    policy_version, last_report = 0, None

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def update_weights(self, tensors: Any, version: int, **how: Any) -> None:
        self.asked.append(("update", dict(tensors), how))
        self.policy_version = version

    def generate(self, prompts: list[list[int]], n: int, sampling: dict[str, Any]) -> list[Rollout]:
        self.asked.append(("generate", prompts, n, sampling))
        return [
            Rollout(i, ids, [Sample(s, [ids[0], s], [-0.5, -1.0], None, "", "stop", None, 0, 0) for s in range(n)])
            for i, ids in enumerate(prompts)
        ]


class Model:
    training = True

    def __init__(self) -> None:
        self._modules: dict[str, Any] = {}  # accelerate looks at them

    def named_parameters(self) -> list[tuple[str, Any]]:
        return [("layer._checkpoint_wrapped_module.w", SimpleNamespace(detach=lambda: 1.0))]


def trainer_of(accelerator: Any) -> Any:
    return SimpleNamespace(
        accelerator=accelerator, model=Model(), state=SimpleNamespace(global_step=0), tools=None,
        environment_factories=None, num_generations=N, num_generations_eval=1, temperature=0.7, top_p=1.0, top_k=None,
        min_p=None, repetition_penalty=1.0, max_completion_length=9, chat_template=None, chat_template_kwargs={},
        args=SimpleNamespace(generation_kwargs={"presence_penalty": 0.5}),
        processing_class=lambda text: {"input_ids": [[ord(c) for c in one] for one in text]},
    )  # fmt: skip


def single(kind: str = "NO", **more: Any) -> Any:
    return SimpleNamespace(
        num_processes=1, process_index=0, is_main_process=True, unwrap_model=lambda model: model,
        distributed_type=f"DistributedType.{kind}", **more,
    )  # fmt: skip


def test_samples_of_a_prompt_are_drawn_together() -> None:
    group: Any = Group()
    rollouts, trainer = GroupRollouts(group, transport="ipc"), trainer_of(single())
    answer = rollouts(["a", "a", "b", "b"], trainer)
    assert answer["prompt_ids"] == [[97], [97], [98], [98]]
    assert answer["completion_ids"] == [[97, 0], [97, 1], [98, 0], [98, 1]]
    assert answer["logprobs"] == [[-0.5, -1.0]] * 4
    update, (_, prompts, n, sampling) = group.asked
    assert update == ("update", {"layer.w": 1.0}, {"transport": "ipc"})
    assert (prompts, n) == ([[97], [98]], N)
    assert sampling == {
        "temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "max_tokens": 9,
        "presence_penalty": 0.5, "logprobs": 0,
    }  # fmt: skip
    rollouts(["a", "b"], trainer)  # another order than TRL's: sample by sample, and no update without a training step
    assert group.asked[2:] == [("generate", [[97], [98]], 1, sampling)]
    trainer.state.global_step, trainer.model.training = 1, False
    assert rollouts(["a"], trainer)["completion_ids"] == [[97, 0]]
    assert [asked[0] for asked in group.asked[3:]] == ["update", "generate"]


@pytest.mark.parametrize(
    ("trainer", "words"),
    [
        (trainer_of(single("FSDP")), "sharded models"),
        (
            trainer_of(single("DEEPSPEED", state=SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=3)))),
            "shar",
        ),
        (trainer_of(single()), "must hold the RolloutGroup"),
    ],
)
def test_what_is_refused(trainer: Any, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        GroupRollouts(None)(["a"], trainer)


def test_a_sample_without_tokens_is_refused() -> None:
    class Failing(Group):
        def generate(self, prompts: list[list[int]], n: int, sampling: dict[str, Any]) -> list[Rollout]:
            empty = Sample(1, [], [], None, "", "failed", "given up, since ranks were lost", 0, 0)
            return [Rollout(0, prompts[0], [Sample(0, [5], [-0.5], None, "", "stop", None, 0, 0), empty])]

    group: Any = Failing()
    rollouts, trainer = GroupRollouts(group), trainer_of(single())
    for _ in range(2):
        with pytest.raises(MoebiusError, match=r"without tokens.*given up, since ranks were lost"):
            rollouts(["a", "a"], trainer)
    assert len(group.asked) == 2, "weights are sent again after a failure: ranks may have been started anew"


def test_an_error_of_the_first_process_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []

    def broadcast(values: list[Any], from_process: int) -> None:
        if sent:
            values[:] = sent
        else:
            sent[:] = values

    monkeypatch.setattr("accelerate.utils.gather_object", lambda prompts: prompts * 2)
    monkeypatch.setattr("accelerate.utils.broadcast_object_list", broadcast)
    first, second = single(), single()
    first.num_processes = second.num_processes = 2
    second.process_index, second.is_main_process = 1, False
    with pytest.raises(BadInput, match="must hold the RolloutGroup"):
        GroupRollouts(None)(["a"], trainer_of(first))
    assert sent, "the second process would wait for ever"
    with pytest.raises(MoebiusError, match="could not draw samples: BadInput: the first trainer process must hold"):
        GroupRollouts(None)(["a"], trainer_of(second))


def part(rank: int, port: int, answers: Any) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "1",
    }  # fmt: skip
    from accelerate import Accelerator

    group: Any = None if rank else Group()
    answers.put((rank, GroupRollouts(group)(["ab"[rank]] * N, trainer_of(Accelerator(cpu=True)))))


def test_two_trainer_processes_share_a_group() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = [context.Process(target=part, args=(rank, port, answers)) for rank in range(2)]
    for process in processes:
        process.start()
    found = dict(answers.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(30)
    assert found[0]["completion_ids"] == [[97, 0], [97, 1]] and found[0]["prompt_ids"] == [[97]] * 2
    assert found[1]["completion_ids"] == [[98, 0], [98, 1]] and found[1]["logprobs"] == [[-0.5, -1.0]] * 2
