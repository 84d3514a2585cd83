"""A complete loop of generate, reward and weight update with a tiny model on CPU, as a trainer would run it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from moebius.engine.config import EngineConfig, PolicyConfig
from moebius.rollout.config import RolloutConfig
from moebius.rollout.datasets import load_questions
from moebius.rollout.demo_assets import make_questions, make_tiny_model, math_reward
from moebius.rollout.errors import BadInput, MoebiusError
from moebius.rollout.output import RunFolder, StepProgress, step_line
from moebius.rollout.types import Rollout, Sampling

if TYPE_CHECKING:
    import torch

    from moebius.rollout.report_types import StepReport

__all__ = ["demo_config", "make_questions", "make_tiny_model", "math_reward", "perturb", "run_demo"]

_EOS_ID = 2
# Untrained weights end a sample about once in 512 tokens. This bias on end-of-sequence ends about one in 40, so that
# output lengths spread as they do in practice: most samples are short and a few run long.
_EOS_BIAS = 2.5


def demo_config(model: str | Path, *, ranks: int = 2, threshold: int = 16, max_tokens: int = 192) -> RolloutConfig:
    """Settings for the tiny model on CPU: fp32, and a switch to TP when `threshold` samples are left."""
    return RolloutConfig(
        ranks=ranks,
        device="cpu",
        engine=EngineConfig(
            model=str(model),
            dtype="float32",
            max_model_len=512,
            max_num_seqs=64,
            kv_cache_bytes=64 << 20,
            enforce_eager=True,
            policy=PolicyConfig(kind="rollout", threshold=threshold),
        ),
        sampling=Sampling(max_tokens=max_tokens, seed=0, logit_bias={_EOS_ID: _EOS_BIAS}),
    )


def run_demo(
    out_dir: str | Path,
    *,
    steps: int = 3,
    prompts: int = 16,
    n: int = 8,
    ranks: int = 2,
    threshold: int = 32,
    max_tokens: int = 320,
    console: Console | None = None,
) -> Path:
    """Run `steps` rounds of generate, reward and weight update, and return the path of the HTML report.

    Writes into `out_dir`: the model, questions.jsonl, rollouts.jsonl, step_NNNN.json, report.html and step.svg.

    Raises:
        BadInput: a size is out of range.
        MoebiusError: the group did not start or a step failed.
    """
    if min(steps, prompts, n) < 1:
        raise BadInput(f"steps, prompts and n must be at least 1, got {steps}, {prompts} and {n}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers.utils import logging as transformers_logging

    from moebius.rollout.group import RolloutGroup
    from moebius.rollout.report_picture import picture

    transformers_logging.disable_progress_bar()
    console = console or Console()
    run = RunFolder(out_dir)
    model = make_tiny_model(run.path / "model")
    questions = load_questions(make_questions(run.path / "questions.jsonl", prompts))
    answers = [question.answer for question in questions]
    weights = load_weights(model)

    console.print(f"starting {ranks} ranks, each with an EP and a TP runtime of the tiny model ...")
    with RolloutGroup(demo_config(model, ranks=ranks, threshold=threshold, max_tokens=max_tokens)) as group:
        for step in range(steps):
            with StepProgress(console, f"step {step}", prompts * n) as progress:
                rollouts = group.generate(
                    [question.prompt for question in questions], n, step=step, on_progress=progress.update
                )
            _check_versions(rollouts, version=step)
            rewards = [[math_reward(s.text or "", answers[r.prompt_index]) for s in r.samples] for r in rollouts]
            mean = sum(map(sum, rewards)) / (prompts * n)
            report = run.add(group.last_report, rollouts, answers)
            _check_switched(report)
            console.print(step_line(report, f"reward {mean:.3f}"), highlight=False, soft_wrap=True)
            if step + 1 < steps:
                perturb(weights, advantages(rewards), seed=step)
                group.update_weights(weights.items(), version=step + 1)
    page, drawn = run.path / "report.html", run.path / "step.svg"
    drawn.write_text(picture(report), encoding="utf-8")
    console.print(f"report: {page}; its last step as a picture: {drawn}", highlight=False, soft_wrap=True)
    return page


def load_weights(model: str | Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint folder by name, on CPU."""
    from safetensors.torch import load_file

    weights: dict[str, torch.Tensor] = {}
    for path in sorted(Path(model).glob("*.safetensors")):
        weights.update(load_file(path))
    return weights


def advantages(rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    """Each sample's reward less the mean of its group (the samples of one prompt)."""
    return [[reward - sum(group) / len(group) for reward in group] for group in rewards]


def perturb(weights: dict[str, torch.Tensor], group_advantages: Iterable[Iterable[float]], *, seed: int) -> list[str]:
    """Add Gaussian noise to a few tensors, in place, and return their names.

    It stands in for a training step: it changes attention, expert and output weights the way an optimizer would, by a
    step whose size grows with the spread of the advantages, but it follows no gradient and learns nothing. The standard
    deviation is the tensor's own times (0.01 + 0.1 * root mean square advantage).
    """
    import torch

    flat = [advantage for group in group_advantages for advantage in group]
    spread = (sum(a * a for a in flat) / max(1, len(flat))) ** 0.5
    generator = torch.Generator().manual_seed(seed)
    kinds = ("q_proj.weight", "experts.0.gate_proj.weight", "experts.0.down_proj.weight", "lm_head.weight")
    names = [name for name in sorted(weights) if name.endswith(kinds)]
    for name in names:
        tensor = weights[name]
        noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        tensor.add_(noise, alpha=float(tensor.std()) * (0.01 + 0.1 * spread))
    return names


def _check_switched(report: StepReport) -> None:
    """A demo of switching in which nothing switched in mid-decode would show nothing: say so instead."""
    good = [
        s for s in report.switches if s.live * 10 >= report.counts.samples and min(s.live_by_rank) > 0 and s.kv_bytes
    ]
    if len(good) != 1:
        why = [c.reason for c in report.cancelled] or [
            f"{s.live} live, {s.kv_bytes} bytes of KV" for s in report.switches
        ]
        raise MoebiusError(
            f"step {report.step} should switch once, with a tenth of its {report.counts.samples} samples live on all "
            f"ranks: {'; '.join(why) or 'it never did'}. Choose a larger --threshold or more samples"
        )


def _check_versions(rollouts: Sequence[Rollout], version: int) -> None:
    seen = {sample.policy_version for rollout in rollouts for sample in rollout.samples}
    if seen != {version}:
        raise MoebiusError(f"samples of weights version {sorted(seen)} came back in the step of version {version}")
