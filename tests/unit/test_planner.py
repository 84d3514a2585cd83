"""The planner: sizes by hand, the fit to the measured sweep, and what it says about other machines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moebius.engine.costs import CostModel
from moebius.engine.layout import Layout
from moebius.rollout.cli import app
from moebius.rollout.cost_files import HostShare, expected_kv_ns, expected_switch, load_costs
from moebius.rollout.errors import BadInput
from moebius.rollout.plan_model import (
    H200,
    Factors,
    expert_bytes_sent,
    fit,
    iteration_ms,
    kv_bytes_sent,
    load_gpu,
    load_model,
    work,
)
from moebius.rollout.planner import make_plan, memory_of, staged_layers
from moebius.rollout.simulate import Trace

EP, TP = Layout.EP, Layout.TP
ROOT = Path(__file__).parents[2]
SWEEP = ROOT / "docs" / "benchmarks" / "sweep_30b_x2.json"
SHEET = Factors(1.0, 1.0, 0.0, 0.0, 0.0, "the data sheet")
runner = CliRunner()


def test_sizes_of_the_235b_on_eight() -> None:
    model = load_model("Qwen/Qwen3-235B-A22B", 8)
    assert model.expert == 3 * 4096 * 1536
    # q, o: 4096 x 8192 each; k, v: 4096 x 512 each.
    assert model.attention(EP, 8) == 2 * 4096 * 8192 + 2 * 4096 * 512
    # An eighth of the query heads, and one of four KV heads (each is on two ranks).
    assert model.attention(TP, 8) == 2 * 4096 * 1024 + 2 * 4096 * 128
    assert model.kv_bytes(EP, 8) == 2 * 4 * 128 * 2 * 94 == 192_512
    assert model.kv_bytes(TP, 8) == 48_128
    assert expert_bytes_sent(model, 8) == 94 * 16 * model.expert * 2 * 7 // 8
    # Of 80 tokens a rank holds 10 and sends its peers' head of each to seven of them.
    assert kv_bytes_sent(model, 8, 80) == 10 * 7 * 48_128


def test_shipped_shapes_are_those_of_the_configurations() -> None:
    for name, folder in (("qwen3-30b-a3b", "qwen3-30b-a3b"), ("qwen3-235b-a22b", "qwen3-235b-a22b")):
        from_folder = load_model(str(ROOT / "configs" / "shapes" / folder), 2)
        assert load_model(name, 2).shape == from_folder.shape
        assert load_model(name, 2).top_k == from_folder.top_k


def test_memory_adds_up() -> None:
    model, gpu = load_model("qwen3-235b-a22b", 8), load_gpu("h200")
    memory = memory_of(model, gpu, 8, share=0.9, reserve_gb=6)
    assert memory.experts == 94 * 16 * model.expert * 2
    total = memory.experts + memory.spare_slot + memory.ep_rest + memory.tp_rest + memory.reserve
    assert total + memory.kv_bytes * 95 / 94 == pytest.approx(0.9 * 141e9)
    # Two ranks share each KV head in TP, so it holds half of what EP does.
    assert memory.kv_tokens[TP] == pytest.approx(memory.kv_tokens[EP] / 2, rel=1e-4)
    assert memory.static_kv_tokens[EP] > memory.kv_tokens[EP]


def test_layers_that_free_pages_hold() -> None:
    """Qwen3-235B-A22B on eight ranks: a layer's peers send 528 MB, and what a rank keeps is a seventh of that."""
    model = load_model("qwen3-235b-a22b", 8)
    sent = expert_bytes_sent(model, 8) / 94
    assert [staged_layers(model, 8, n * sent) for n in (94, 93.9, 40.2, 40.1, 24.2, 23)] == [94, 93, 40, 39, 24, 0]
    assert staged_layers(model, 1, 1e15) == 0


def test_a_prepared_switch_pauses_less(tmp_path: Path) -> None:
    plan = make_plan(load_model("qwen3-235b-a22b", 8), load_gpu("h200"), 8, [Trace((200,) * 64)], H200)
    numbers = plan.numbers()
    assert 24 <= numbers["staged_layers"] < 94
    assert numbers["staged_gb"] == pytest.approx(numbers["reshard_gb"] * numbers["staged_layers"] / 94)
    saved = numbers["switch_at_crossover_ms"] - numbers["switch_at_crossover_prepared_ms"]
    # So much less goes over the link, which takes longer than the copies beside it.
    assert saved == pytest.approx(numbers["staged_gb"] / 450 / 0.83 * 1e3)
    assert any(f"of {plan.staged_layers} of 94 layers" in note for note in plan.notes)


def test_a_model_that_does_not_fit_is_refused() -> None:
    model, gpu = load_model("qwen3-235b-a22b", 2), load_gpu("h100")
    with pytest.raises(BadInput, match="use more GPUs"):
        make_plan(model, gpu, 2, [Trace((5,))], H200)


def test_work_of_one_token_by_hand() -> None:
    model, gpu = load_model("mixtral-8x7b", 1), load_gpu("h200")
    done = work(model, gpu, 1, EP, 1, 0)
    dense = 32 * 4096 * 128 * (2 * 32 + 2 * 8) + 32000 * 4096
    experts = 32 * 2 * 3 * 4096 * 14336  # two of eight per token
    assert done.memory == pytest.approx(2 * (dense + experts) / 4.8e9)
    assert iteration_ms(done, SHEET, EP) == pytest.approx(done.memory + done.compute)
    alone = work(model, gpu, 1, TP, 1, 0)
    assert alone.memory == pytest.approx(done.memory), "on one rank the layouts are the same"


def test_both_layouts_have_their_side() -> None:
    model, gpu = load_model("qwen3-235b-a22b", 8), load_gpu("h200")
    assert iteration_ms(work(model, gpu, 8, TP, 4, 500), SHEET, TP) < iteration_ms(
        work(model, gpu, 8, EP, 4, 500), SHEET, EP
    )
    assert iteration_ms(work(model, gpu, 8, TP, 2048, 500), SHEET, TP) > iteration_ms(
        work(model, gpu, 8, EP, 2048, 500), SHEET, EP
    )


def measured() -> CostModel:
    return load_costs(SWEEP, model=load_model("qwen3-30b-a3b", 2), gpu=load_gpu("h200"))


def test_the_shipped_factors_are_the_fit_of_the_published_sweep() -> None:
    found = fit(measured(), load_model("qwen3-30b-a3b", 2), load_gpu("h200"))
    for name in ("memory", "compute", "row_us", "ep_layer_us", "tp_layer_us", "worst_error"):
        assert getattr(H200, name) == pytest.approx(getattr(found, name), rel=2e-3), name
    assert found.worst_error < 0.05, "five factors describe thirteen measured points"


def test_the_fit_recovers_factors_from_its_own_curves() -> None:
    model, gpu = load_model("qwen3-30b-a3b", 2), load_gpu("h200")
    true = Factors(1.3, 1.7, 12.0, 80.0, 60.0, "")
    points = [
        point.model_copy(
            update={
                "ms": iteration_ms(work(model, gpu, 2, point.layout, point.batch, point.context), true, point.layout)
            }
        )
        for point in measured().points
    ]
    found = fit(measured().model_copy(update={"points": points}), model, gpu)
    assert (found.memory, found.compute, found.row_us) == pytest.approx((1.3, 1.7, 12.0), rel=1e-3)
    assert (found.ep_layer_us, found.tp_layer_us) == pytest.approx((80, 60), rel=1e-3)


def test_some_of_the_batches_predict_the_others() -> None:
    """The form of the model, not only its fit: batches that were left out are met within 10 %."""
    model, gpu, costs = load_model("qwen3-30b-a3b", 2), load_gpu("h200"), measured()
    kept = [point for point in costs.points if point.batch in (8, 128, 1024)]
    found = fit(costs.model_copy(update={"points": kept}), model, gpu)
    for point in costs.points:
        ms = iteration_ms(work(model, gpu, 2, point.layout, point.batch, point.context), found, point.layout)
        assert ms == pytest.approx(point.ms, rel=0.10), (point.layout, point.batch)


def test_expected_switch_is_bytes_over_the_link() -> None:
    model, gpu = load_model("qwen3-30b-a3b", 2), load_gpu("h200")
    costs = measured().model_copy(update={"switches": expected_switch(model, gpu, 2, HostShare(10, 0))})
    experts = 48 * 64 * model.expert * 2 / 2 / (450e9 * 0.83) * 1e3
    assert float(costs.switch_ms(TP, 0, 0)) == pytest.approx(10 + experts)
    kv = 500_000 / 2 * 2 * 2 * 128 * 2 * 48 / (450e9 * 0.80) * 1e3
    assert float(costs.switch_ms(TP, 500, 500_000)) == pytest.approx(10 + experts + kv)
    # 98,304 bytes per token at 4.8 TB/s; in EP every rank reads half of the tokens.
    assert expected_kv_ns(model, gpu, 2)[EP] == pytest.approx(98_304 / 2 / 4800)


def test_measured_costs_replace_expected_ones() -> None:
    model, gpu, costs = load_model("qwen3-30b-a3b", 2), load_gpu("h200"), measured()
    plan = make_plan(model, gpu, 2, [Trace((50, 60, 400), 10)], H200, costs=costs)
    assert plan.crossover == costs.threshold(70)
    assert any(note.startswith("measured: iterations") for note in plan.notes)
    with pytest.raises(BadInput, match="costs are of 2 ranks"):
        make_plan(load_model("qwen3-30b-a3b", 4), gpu, 4, [Trace((5,))], H200, costs=costs)


def test_command_stands_beside_the_paper(tmp_path: Path) -> None:
    arguments = ["plan", "--model", "Qwen/Qwen3-235B-A22B", "--gpus", "8", "--steps", "2", "--out", str(tmp_path)]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "plan.json").read_text())
    numbers = written["results"]
    assert numbers["paper_switch_drained_ms"] == 152
    assert 1 < numbers["gain_low"] <= numbers["gain_mean"] <= numbers["gain_high"]
    assert numbers["ep_over_tp_batch_8"] > 1 > numbers["ep_over_tp_batch_2048"]
    assert any("expected, not measured" in note for note in written["notes"])
    assert any("each head 2 times" in note for note in written["notes"])
    assert (tmp_path / "plan.png").stat().st_size > 5000


def test_other_models_have_no_paper_beside_them(tmp_path: Path) -> None:
    arguments = ["plan", "--model", "qwen3-30b-a3b", "--gpus", "2", "--steps", "1", "--requests", "64"]
    sweep = ["--calibration", str(SWEEP), "--calibration-model", "qwen3-30b-a3b"]
    result = runner.invoke(app, [*arguments, *sweep, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "plan.json").read_text())
    assert not any(name.startswith("paper") for name in written["results"])
    assert written["options"]["factors"]["row_us"] == pytest.approx(H200.row_us, rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "qwen3-30b-a3c", "--gpus", "2"], "did you mean 'qwen3-30b-a3b'"),
        (["--model", "qwen3-30b-a3b", "--gpus", "3"], "cannot be split evenly"),
        (["--model", "qwen3-30b-a3b", "--gpus", "2", "--gpu", "h300"], "did you mean"),
        (["--model", "qwen3-30b-a3b", "--gpus", "2", "--calibration", "x.json"], "--calibration-model"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], words: str) -> None:
    result = runner.invoke(app, ["plan", *arguments])
    assert result.exit_code == 2 and words in result.output
