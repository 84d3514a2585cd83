"""Result files, pictures, and the numbers made from measurements; no engine here."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from moebius.engine.config import EngineConfig
from moebius.rollout.bench import graphs, memory, rollout_trace, strawmen, sweep
from moebius.rollout.bench.engines import BenchSetup, Engines, EngineSpec
from moebius.rollout.bench.rank import Capacity, Series
from moebius.rollout.bench.results import Curve, Picture, Results, make_results
from moebius.rollout.bench.rollout_trace import RolloutOptions, Run
from moebius.rollout.bench.sweep import SweepOptions
from moebius.rollout.bench.switch_numbers import memory_overhead

SETUP = BenchSetup(ranks=2, device="cpu", engine=EngineConfig(model="none"), largest_batch=8)


def engines(*names: str) -> Engines:
    """What the arithmetic asks of running engines."""
    fake = SimpleNamespace(specs=[EngineSpec.parse(n) for n in names], setup=SETUP, notes=list, say=print)
    return cast(Engines, fake)


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


@pytest.mark.parametrize("kind", ["lines", "bars"])
def test_results_are_written_with_machine_versions_and_picture(tmp_path: Path, kind: Any) -> None:
    x: list[float | str] = [8.0, 16.0] if kind == "lines" else ["a", "b"]
    results = make_results(
        "thing",
        command="moebius bench thing",
        options={"a": 1},
        results={"time_ms": 1.5},
        curves=[Curve(name="one", x=x, y=[1.0, 2.0], low=[0.5, 1.5], high=[1.5, 2.5])],
        picture=Picture(kind=kind, title="t", y_label="ms"),
        notes=["[not markup]"],
    )
    path = results.write(tmp_path)
    assert is_png(tmp_path / "thing.png")
    data = json.loads(path.read_text())
    assert {"machine", "versions", "command", "date", "results", "curves"} <= data.keys()
    assert {"gpus", "gpu_count", "driver", "cpu", "cores"} <= data["machine"].keys()
    assert {"moebius", "vllm", "torch", "python", "cuda", "triton"} == data["versions"].keys()
    assert all(isinstance(value, int | float) for value in data["results"].values())
    assert Results.model_validate(data) == results
    text = StringIO()
    results.show(Console(file=text, width=100))
    assert "time_ms" in text.getvalue() and "1.5" in text.getvalue() and "[not markup]" in text.getvalue()


def test_sweep_numbers() -> None:
    measured = {
        "moebius_ep": {8: [[22.0], [11.0]], 32: [[10.0, 12.0]]},
        "stock_ep": {8: [[20.0], [10.0]], 32: [[10.0, 10.0]]},
        "moebius_tp": {8: [[8.25]], 32: [[44.0]]},
        "stock_tp": {8: [[10.0]], 32: [[40.0]]},
    }
    running = engines("moebius", "stock_tp", "stock_ep")
    results = sweep.summarise(running, SweepOptions(batches=[8, 32]), measured, [], "x")
    numbers = results.results
    # Rounds are compared with each other: 22/20 and 11/10, although medians over rounds would mix them.
    assert numbers["max_slowdown_pct_ep"] == pytest.approx(10.0)
    assert numbers["max_slowdown_pct_tp"] == pytest.approx(10.0)
    assert numbers["max_slowdown_batch_tp"] == 32
    assert 8 < numbers["crossover_batch"] < 32
    assert 8 < numbers["stock_crossover_batch"] < 32
    assert numbers["moebius_ep_32_ms"] == 11.0
    assert {curve.name for curve in results.curves} == set(measured)


def test_sweep_compares_with_every_stock_engine_of_the_layout() -> None:
    lanes = [lane.name for lane in sweep.lanes_of(engines("moebius", "stock_tp", "stock_ep+triton", "stock_mp"))]
    assert lanes == ["moebius_ep", "stock_ep+triton", "moebius_tp", "stock_tp", "stock_mp"]
    measured = {name: {8: [[10.0]]} for name in lanes}
    running = engines("moebius", "stock_tp", "stock_ep+triton", "stock_mp")
    numbers = sweep.summarise(running, SweepOptions(batches=[8]), measured, [], "x").results
    assert {"max_slowdown_pct_tp", "max_slowdown_pct_ep_vs_stock_ep+triton"} <= numbers.keys()


def test_batches_that_do_not_fit_are_refused_in_words() -> None:
    capacity = Capacity({"EP": 10, "TP": 20}, 16, 8, 64, 100, 500)
    assert sweep.refusal(8, 50, "EP", 2, capacity) == "16 KV pages, there are 10 (engine.kv_cache_bytes)"
    assert sweep.refusal(4, 50, "EP", 2, capacity) is None
    assert "max_num_seqs" in (sweep.refusal(16, 20, "TP", 2, capacity) or "")
    assert sweep.refusal(16, 15, "EP", 2, capacity) is None
    assert "max_model_len" in (sweep.refusal(1, 200, "TP", 2, capacity) or "")


def test_output_tokens_outlast_the_prefill_of_all_requests() -> None:
    options = SweepOptions(context=100, iterations=20, settle=2)
    assert sweep.output_tokens(10, options, [60, 500]) == 20 + 20 + 2 + 4  # 1000 tokens at 50 per iteration
    assert sweep.output_tokens(60, options, [60]) == 26  # refused elsewhere


def series(seconds: float, iterations: list[tuple[int, float]], layout: str = "EP", **more: Any) -> Series:
    """One rank's run: two prefill iterations of 100 ms at the first live count, then `iterations` of (live, ms)."""
    live = [iterations[0][0]] * 2 + [count for count, _ in iterations]
    ms = [100.0, 100.0, *(value for _, value in iterations)]
    ends = [sum(ms[: i + 1]) / 1e3 for i in range(len(ms))]
    tokens = [0, 1, *live[2:]]
    return Series(ends, tokens, live, [layout] * len(ms), live[0], seconds, **more)


def static_runs() -> dict[str, list[Run]]:
    ep = series(0.5, [(4, 10.0)] * 10 + [(1, 8.0)] * 20)  # 100 + 160 ms of decoding, 240 of prefills and the like
    tp = series(0.6, [(4, 20.0)] * 10 + [(1, 4.0)] * 20, "TP")  # 200 + 80
    return {"static_ep": [Run(0.5, [ep])], "static_tp": [Run(0.6, [tp])]}


def test_ideal_of_the_same_run_by_hand() -> None:
    runs = static_runs()
    ideal = rollout_trace._ideal(runs)
    assert ideal["ideal_s"] == pytest.approx(0.240 + 0.100 + 0.080)
    assert ideal["best_single_switch_s"] == pytest.approx(ideal["ideal_s"])
    assert ideal["best_threshold"] == 1
    assert ideal["ideal_ratio"] == pytest.approx(0.5 / 0.42)
    runs["switched"] = [Run(0.46, [])]
    gains = rollout_trace._gains(runs, ideal)
    assert gains["ideal_gain_realised_pct"] == pytest.approx(100 * 0.04 / 0.08)
    assert gains["ratio_vs_better_static"] == pytest.approx(0.5 / 0.46)
    assert "ratio_vs_better_stock" not in gains
    runs["stock_ep"] = [Run(0.48, [])]
    gains = rollout_trace._gains(runs, ideal)
    assert gains["ratio_vs_better_static"] == gains["ratio_vs_better_stock"] == pytest.approx(0.48 / 0.46)
    assert gains["ratio_vs_better_own_static"] == pytest.approx(0.5 / 0.46)


def test_switch_numbers_are_the_slowest_ranks() -> None:
    phases = {"export": 1.0, "reshard": 30.0, "kv": 5.0, "activate": 0.5}
    slower = phases | {"export": 3.0}
    ranks = [
        series(1.0, [(1, 1.0)], switches=[{"live": 7, "pause_ms": sum(p.values()), "phases_ms": p, "iteration": 3}])
        for p in (phases, slower)
    ]
    notes: list[str] = []
    numbers = rollout_trace._switches([Run(1.0, ranks), Run(1.0, [series(1.0, [(1, 1.0)])])], notes)
    assert numbers["switch_ms"] == 38.5
    assert numbers["switch_python_ms"] == 3.5
    assert numbers["activate_ms"] == 0.5
    assert numbers["live_at_switch"] == 7
    assert len(notes) == 1


def test_rollout_results_are_written(tmp_path: Path) -> None:
    runs = static_runs()
    results = rollout_trace._summarise(
        engines("moebius"), RolloutOptions(), [30, 10, 10, 10], runs, 0, {"moebius": 2.0, "stock_ep": 3.0}, [], "x"
    )
    assert results.results["static_ep_s"] == 0.5
    assert (results.results["weight_update_s"], results.results["stock_reload_s"]) == (2.0, 3.0)
    assert any("no run with a switch" in note for note in results.notes)
    results.write(tmp_path)
    assert is_png(tmp_path / "rollout.png")


def test_curves_of_a_sweep_choose_a_trace(tmp_path: Path) -> None:
    measured = {"moebius_ep": {8: [[8.0]], 64: [[10.0]]}, "moebius_tp": {8: [[4.0]], 64: [[14.0]]}}
    running = engines("moebius")
    path = sweep.summarise(running, SweepOptions(batches=[8, 64]), measured, [], "x").write(tmp_path)
    curves = rollout_trace.curves_of_sweep(path)
    assert curves == {"EP": [(8, 8.0), (64, 10.0)], "TP": [(8, 4.0), (64, 14.0)]}
    options = RolloutOptions(trace="long-tail", requests=64, body=50, sweep=curves)
    lengths = rollout_trace.make_lengths(options, lambda lengths: True)
    assert len(lengths) == 64 and max(lengths) >= 90


def test_memory_and_strawmen_and_graphs_numbers(tmp_path: Path) -> None:
    parts = dict.fromkeys(memory.PARTS, 10.0)
    figures = {"moebius": parts | {"driver_used": 84.0}, "stock_ep": parts | {"driver_used": 80.0}, "stock_tp": parts}
    figures["stock_tp"] = parts | {"driver_used": 82.0}
    found = memory.summarise(SETUP, figures, 140.0, "x")
    assert found.results["moebius_over_ep_driver_used_gib"] == 4.0
    assert found.results["moebius_over_ep_pct"] == pytest.approx(5.0)
    assert found.results["memory_overhead_pct"] == pytest.approx(100 * 2 / 140)
    path = found.write(tmp_path)
    assert memory_overhead(path) == found.results["memory_overhead_pct"], "as `bench switch --memory-json` reads it"
    shared = "moebius:attention_weights=shared"
    both = memory.summarise(SETUP, figures | {shared: parts | {"driver_used": 83.4}}, 140.0, "x").results
    assert both[f"{shared}_memory_overhead_pct"] == pytest.approx(1.0)
    assert both["memory_overhead_pct"] == found.results["memory_overhead_pct"]
    measured = {f"{what}_{layout}_s": 2.0 for what in ("restart", "host_copy", "capture") for layout in ("ep", "tp")}
    measured |= {"switch_ms": 100.0, "switch_reshard_ms": 40.0, "return_ms": 50.0, "live_at_switch": 64}
    straw = strawmen.summarise(SETUP, measured, {}, "x")
    assert straw.results["restart_tp_over_ours"] == pytest.approx(20.0)
    assert straw.results["host_reload_ep_s"] == 4.0
    assert straw.results["recapture_tp_s"] == pytest.approx(2.04)
    straw.write(tmp_path)
    assert is_png(tmp_path / "memory.png") and is_png(tmp_path / "strawmen.png")
    lanes = {"moebius_ep": 2.0, "moebius+eager_ep": 6.0, "moebius_tp": 2.0, "moebius+eager_tp": 8.0}
    swept = sweep.summarise(
        engines("moebius", "moebius+eager"), SweepOptions(), {n: {8: [[v]]} for n, v in lanes.items()}, [], "x"
    )
    graphs.add_ratios(swept)
    assert swept.results["eager_over_graphs_tp_8"] == swept.results["eager_over_graphs_tp_max"] == 4.0
