"""TRL's `rollout_func` over a switch group that the training script holds: no server, no vLLM and no GPU needed.

    with RolloutGroup(config) as group:
        GRPOTrainer(..., rollout_func=GroupRollouts(group)).train()

Weights are sent whenever the trainer has made a step since the last rollout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moebius.rollout.errors import BadInput, MoebiusError

if TYPE_CHECKING:
    import torch

    from moebius.rollout.group import RolloutGroup
    from moebius.rollout.types import Rollout


class GroupRollouts:
    """A `rollout_func` for GRPOTrainer.

    With several trainer processes the first one must hold the group and the others None; models must be whole in every
    process, as under DDP.
    """

    def __init__(self, group: RolloutGroup | None, *, reports: Path | str | None = None, **update: Any) -> None:
        """`reports`: a folder for step reports. `update`: for RolloutGroup.update_weights, e.g. transport="ipc"."""
        self.group, self._update = group, update
        self._reports = None if reports is None else Path(reports)
        self._sent: int | None = None  # training step of the weights that the group has

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """One sample of each prompt in this process's part of a batch.

        TRL repeats every prompt for each of its samples, one after another; they are drawn together.

        Returns:
            prompt_ids, completion_ids, and logprobs (natural logarithm) of the completions' tokens.

        Raises BadInput for what is not supported, MoebiusError for a sample without tokens, and as
        RolloutGroup.generate, in every process.
        """
        from accelerate.utils import broadcast_object_list, gather_object

        accelerator = trainer.accelerator
        self._check(trainer)
        everything = gather_object(list(prompts)) if accelerator.num_processes > 1 else list(prompts)
        told: list[Any] = [None]
        failure: Exception | None = None
        if accelerator.is_main_process:
            try:
                if self.group is None:
                    raise BadInput("the first trainer process must hold the RolloutGroup: GroupRollouts(group)")
                self._send_weights(trainer)
                told = [self._draw(self.group, everything, trainer)]
            except Exception as error:  # noqa: BLE001  (the others wait for an answer; raised when they have it)
                failure, told = error, [f"{type(error).__name__}: {error}"]
                self._sent = None  # ranks that were lost may have lost the weights, too
        if accelerator.num_processes > 1:
            broadcast_object_list(told, from_process=0)
        if failure is not None:
            raise failure
        if isinstance(told[0], str):
            raise MoebiusError(f"the first trainer process could not draw samples: {told[0]}")
        start = accelerator.process_index * len(prompts)
        return {name: values[start : start + len(prompts)] for name, values in told[0].items()}

    def _check(self, trainer: Any) -> None:
        kind = str(getattr(trainer.accelerator, "distributed_type", "")).rpartition(".")[2]
        if kind == "FSDP" or (kind == "DEEPSPEED" and _zero_stage(trainer.accelerator) == 3):
            raise BadInput(f"rollout_func with sharded models ({kind}): use TRL's server mode, which gathers them")
        if hasattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config"):
            raise BadInput("rollout_func with adapters (PEFT): use TRL's server mode, which sends merged weights")
        if trainer.tools or trainer.environment_factories:
            raise BadInput("rollout_func with tools or environments: use TRL's server mode, where later turns come too")

    def _send_weights(self, trainer: Any) -> None:
        assert self.group is not None
        if trainer.state.global_step == self._sent:
            return
        model = trainer.accelerator.unwrap_model(trainer.model)
        self.group.update_weights(_parameters(model), self.group.policy_version + 1, **self._update)
        self._sent = trainer.state.global_step

    def _draw(self, group: RolloutGroup, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        n = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
        if len(prompts) % n or any(prompts[i] != prompts[i - i % n] for i in range(len(prompts))):
            n = 1  # another order than TRL's
        rollouts: list[Rollout] = group.generate(_token_ids(prompts[::n], trainer), n, sampling_of(trainer))
        if self._reports is not None and group.last_report is not None:
            group.last_report.write(self._reports)
        samples = [(rollout.prompt_token_ids, sample) for rollout in rollouts for sample in rollout.samples]
        for _, sample in samples:
            if not sample.token_ids:  # such as of a prompt that was given up
                why = sample.stop_reason or sample.finish_reason
                raise MoebiusError(f"a sample came without tokens, which TRL cannot train on: {why}")
        return {
            "prompt_ids": [prompt for prompt, _ in samples],
            "completion_ids": [sample.token_ids for _, sample in samples],
            "logprobs": [sample.logprobs for _, sample in samples],
        }


def sampling_of(trainer: Any) -> dict[str, Any]:
    """The trainer's sampling settings, over those of the group's configuration."""
    own = {
        "temperature": trainer.temperature,
        "top_p": trainer.top_p,
        "top_k": trainer.top_k or 0,
        "min_p": trainer.min_p or 0.0,
        "repetition_penalty": trainer.repetition_penalty,
        "max_tokens": trainer.max_completion_length,
    }
    return {**own, **(trainer.args.generation_kwargs or {}), "logprobs": 0}


def _token_ids(prompts: Sequence[Any], trainer: Any) -> list[list[int]]:
    """As TRL would render them."""
    tokenizer = trainer.processing_class
    if not prompts or isinstance(prompts[0], str):
        return [list(ids) for ids in tokenizer(text=list(prompts))["input_ids"]] if prompts else []
    return [
        list(ids)
        for ids in tokenizer.apply_chat_template(
            conversation=list(prompts), chat_template=trainer.chat_template, add_generation_prompt=True,
            tokenize=True, return_dict=True, **trainer.chat_template_kwargs,
        )["input_ids"]
    ]  # fmt: skip


def _parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        yield name.replace("_checkpoint_wrapped_module.", ""), parameter.detach()


def _zero_stage(accelerator: Any) -> int:
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return int(getattr(plugin, "zero_stage", 0) or 0)
