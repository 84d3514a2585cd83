"""The arithmetic of the drafts' benchmark, and the small model it is measured with."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import pytest
import torch

from benchmarks.arithmetic_model import LONGEST, TINY, VOCAB, WHOLE, all_experts, answer, batches, make_model, problem
from benchmarks.tail_results import best_length, even_acceptance, expected, results_of
from benchmarks.tail_spec import Clock, Run


def test_break_even_is_where_the_best_length_is_as_fast_as_none() -> None:
    """Half as much again for an iteration: one drafted token pays from 0.5, two from 0.37 (1 + a + a * a = 1.5)."""
    assert even_acceptance(10.0, {1: 15.0}) == 0.5
    assert even_acceptance(10.0, {1: 15.0, 2: 15.0}) == pytest.approx(0.37)
    assert even_acceptance(10.0, {1: 9.0}) == 0 and even_acceptance(10.0, {1: 25.0}) is None
    assert expected(0.5, 2) == 1.75
    assert best_length(0.9, {"1": 15.0, "3": 15.0}) == 3 and best_length(0.3, {"1": 11.0, "3": 15.0}) == 1


def step(seconds: float, tokens: int, each: float | None = None) -> dict[str, object]:
    return {"tail_s": seconds, "tail_tokens": tokens, "tokens_per_iteration": each, "tokens_sha": "a"}


def test_results_by_name() -> None:
    entry = {"plain_ms": [10.0, 10.0], "ms": {"1": 15.0}, "even_acceptance": 0.5, "zero_ms": 10.1, "forced": {}}
    entry["forced"] = {"0.8": {"speed": 1.3}}
    found = results_of(
        {
            "trained": {
                "off": [step(6.0, 100), step(4.0, 100), step(9.0, 10)],
                "siblings": [step(2.0, 100, 3.0), step(3.0, 50, 4.0)],
                "ngram": [step(3.0, 100, 2.0)],
            },
            "zero": {"8": {"off_ms": [4.0, 4.0, 9.0], "ms": [4.1, 4.0, 4.08]}, "64": {"off_ms": [5.0], "ms": [4.9]}},
            "shape": {"batches": {"8": entry, "64": entry}},
        }
    )
    assert found["tail_speedup_trained"] == 2 and found["tail_speedup_trained_by_mode"] == {"siblings": 2, "ngram": 2}
    assert found["tail_speedup_per_token_trained_by_mode"]["siblings"] == pytest.approx((10 / 200) / (5 / 150))
    assert found["tokens_per_iteration_trained"] == 3.5 and found["same_samples_in_all_modes"]
    assert found["zero_acceptance_slowdown_pct"] == 2 and found["break_even_acceptance_b64"] == 0.5
    assert found["speed_by_forced_acceptance_and_batch"]["0.8"] == {"8": 1.3, "64": 1.3}
    assert found["zero_acceptance_slowdown_pct_shape_by_batch"] == {"8": 1, "64": 1}
    assert results_of({}) == {}


def test_a_part_that_is_run_alone_keeps_the_others(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    kept = {"zero": {"8": {"off_ms": [4.0], "ms": [4.1]}}, "command": "first"}
    out.write_text(json.dumps(kept), encoding="utf-8")
    chosen = argparse.Namespace(
        device="cpu", out=out, parts=["shape"], ranks=2, prompts=1, n=1, threshold=1, shape="s", model=Path("m")
    )
    run = Run(chosen)
    run.found["shape"] = {"memory": {}}
    assert run.write()["zero_acceptance_slowdown_pct"] == 2.5
    written = json.loads(out.read_text(encoding="utf-8"))
    assert written["command"].startswith("first && python -m benchmarks.tail_spec") and "shape" in written
    chosen.parts = ["trained", "zero", "shape"]
    assert Run(chosen).found == {}
    assert Clock(0).is_over() and not Clock(60).is_over()


def test_all_experts_at_once_are_one_after_the_other() -> None:
    torch.manual_seed(0)
    experts = make_model(tiny=True).model.layers[0].mlp.experts
    x, weights = torch.randn(20, TINY["hidden_size"]), torch.rand(20, 2)
    chosen = torch.stack([torch.randperm(TINY["num_experts"])[:2] for _ in range(20)])
    with torch.no_grad():
        for parameter in experts.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        torch.testing.assert_close(
            all_experts(experts, x, chosen, weights), type(experts).forward(experts, x, chosen, weights)
        )


def test_two_ranks_can_split_the_model_and_files_are_small() -> None:
    for shape in (WHOLE, TINY):
        assert all(shape[name] % 2 == 0 for name in ("num_experts", "num_key_value_heads", "moe_intermediate_size"))
    experts = WHOLE["num_experts"] * 3 * WHOLE["hidden_size"] * WHOLE["moe_intermediate_size"]
    heads = 2 * (WHOLE["num_attention_heads"] + WHOLE["num_key_value_heads"]) * WHOLE["head_dim"] * WHOLE["hidden_size"]
    whole = WHOLE["num_hidden_layers"] * (experts + heads) + 2 * VOCAB * WHOLE["hidden_size"]
    assert 2 * whole < 30e6, "bytes in bf16"


def test_answers_are_right_and_questions_are_not_learnt() -> None:
    class Letters:
        bos_token_id, eos_token_id = 1, 2

        def encode(self, text: str) -> list[int]:
            return [ord(letter) for letter in text]

    r = random.Random(0)
    for _ in range(50):
        a, b, c = problem(r)
        text = answer(a, b, c, r)
        assert text.endswith(f"The answer is {a * b + c}.") and f"{a * b} + {c} = {a * b + c}." in text
    ids, labels = next(batches(Letters(), r, 2, LONGEST))
    assert ids.shape == labels.shape == (2, LONGEST)
    told = labels != -100
    assert torch.equal(ids[told], labels[told]) and not told[:, 0].any() and told.float().mean() > 0.8
