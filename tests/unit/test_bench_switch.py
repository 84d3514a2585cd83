"""Numbers of `moebius bench switch` by hand, its plans and policy, and the overlapped mover against the plain one."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from moebius.engine.layout import Layout
from moebius.engine.policy import Observation
from moebius.rollout.bench import switch, switch_numbers
from moebius.rollout.bench.mover import ALL_TO_ALL, CEILING, OVERLAPPED
from moebius.rollout.bench.rank import Capacity
from moebius.rollout.bench.results import make_results
from moebius.rollout.bench.switch import SwitchOptions
from moebius.rollout.bench.switch_numbers import Movers, Speed
from moebius.rollout.bench.switch_rank import Alternating, LiveRun, Shapes, copied_bytes
from moebius.rollout.errors import BadInput, MoebiusError

SHAPES = Shapes(
    2, 48, 128, 2048, 768, 2, 48, 4, 16, 16 * 256 * 2, "cuda", "direct, copy engine", None, [(0, 2), (2, 4)]
)
CAPACITY = Capacity({"EP": 27_000, "TP": 54_000}, 16, 1024, 8192, 8192, 151_936)
SENT = 14_495_514_624  # bytes of experts that leave a rank: half of 64 experts of 3 * 768 * 2048 bf16, 48 layers


def record(to: str, pause: float, use: float, fill: int = 135_000, **more: Any) -> dict[str, Any]:
    phases = {"drain": 9.0, "export": 2.0, "wait": pause - 2.0} | more.pop("phases", {})
    return {
        "to": to, "pause_ms": pause, "phases_ms": phases, "device_ms": {"experts": 38.0}, "kv_use_before": use,
        "kv_tokens": fill + 100, "fill": fill, "expert_bytes": SENT, "iteration": 7, "prepared": False,
        "staged_layers": 0,
    } | more  # fmt: skip


def movers(**times: float) -> Movers:
    """Milliseconds of experts by mover, EP->TP, and a fifth more on the way back; KV takes a third."""
    speeds = [Speed(name=CEILING, what="contiguous", ms=1.0, gb_per_s=400.0, share=1.0)]
    names = {"direct": "direct, copy engine", "plain": ALL_TO_ALL, "overlapped": OVERLAPPED}
    for name, ms in ((names[short], ms) for short, ms in times.items()):
        for what, factor in (("experts", 1.0), ("KV", 1 / 3)):
            if name == OVERLAPPED and what == "KV":
                continue
            for direction, more in (("EP->TP", 1.0), ("TP->EP", 1.2)):
                share = 40.0 / (ms * more)
                row = Speed(name=name, what=f"{what} {direction}", ms=ms * factor * more, gb_per_s=1.0, share=share)
                speeds.append(row)
    return Movers(speeds=speeds, layers=48, kv_layers=48, tokens=512 * 1024)


def test_mover_numbers_are_the_worse_directions_against_the_better_nccl() -> None:
    notes: list[str] = []
    numbers = switch_numbers.mover_numbers(movers(direct=40.0, plain=80.0, overlapped=60.0), SHAPES.mover, notes)
    assert numbers["ceiling_gbps"] == 400.0
    assert (numbers["reshard_ep_tp_ms"], numbers["reshard_tp_ep_ms"]) == (40.0, 48.0)
    assert (numbers["reshard_ep_tp_pct"], numbers["reshard_tp_ep_pct"]) == (100.0, pytest.approx(100 / 1.2))
    assert numbers["reshard_nccl_ratio"] == pytest.approx(1.5)
    assert numbers["kv_512k_ms_per_layer"] == pytest.approx(16.0 / 48)
    assert numbers["kv_nccl_ratio"] == pytest.approx(2.0)
    assert numbers["kv_pct"] == pytest.approx(100 / 1.2)
    assert not notes
    assert switch_numbers.mover_numbers(movers(plain=80.0), SHAPES.mover, notes)["reshard_nccl_ratio"] == 1.0
    assert "move by direct, copy engine; the movers' numbers are of all to all" in notes[0]


def test_live_numbers_and_bins_by_hand() -> None:
    switches = [
        record("TP", 90.0, 0.12), record("EP", 100.0, 0.13), record("TP", 94.0, 0.14), record("EP", 104.0, 0.15),
        record("TP", 200.0, 0.999, fill=800_000), record("TP", 60.0, 0.04, fill=35_000),
    ]  # fmt: skip
    notes: list[str] = []
    numbers, curves = switch_numbers.live_numbers(switches, 256, SHAPES, notes)
    assert numbers["switch_live256_ms"] == 97.0
    assert (numbers["switch_live256_ep_tp_ms"], numbers["switch_live256_tp_ep_ms"]) == (92.0, 102.0)
    assert numbers["switch_live256_drain_ms"] == 9.0
    assert numbers["switch_live256_kv_tokens"] == 135_100
    assert numbers["live_switches"] == 6
    assert numbers["switch_to_tp_90_100_pct_ms"] == 200.0
    assert numbers["switch_to_ep_10_20_pct_ms"] == 102.0
    assert "commit_pause_live256_ms" not in numbers and not notes
    assert [curve.name for curve in curves] == ["drain (before the pause)", "export", "wait"]
    assert curves[2].x == ["to TP, 0-10 %", "to TP, 10-20 %", "to TP, 90-100 %", "to EP, 10-20 %"]
    assert curves[2].y == [58.0, 90.0, 198.0, 100.0]


def test_prepared_switches_are_counted_apart_and_wrong_bytes_are_told() -> None:
    prepared = record("TP", 30.0, 0.1, expert_bytes=5, prepared=True, staged_layers=48)
    half = record("TP", 50.0, 0.1, prepared=True, staged_layers=24, device_ms={"experts": 19.0})
    elsewhere = record("TP", 99.0, 0.1, fill=35_000, prepared=True, staged_layers=24)
    switches = [record("TP", 90.0, 0.1), prepared, half, elsewhere]
    notes: list[str] = []
    numbers, curves = switch_numbers.live_numbers(switches, 256, SHAPES, notes)
    assert numbers["switch_live256_ms"] == 90.0
    assert numbers["commit_pause_live256_ms"] == numbers["switch_to_tp_prepared_10_20_pct_ms"] == 30.0
    assert (numbers["commit_pause_24_layers_ms"], numbers["commit_experts_24_layers_ms"]) == (50.0, 19.0)
    assert numbers["commit_pause_48_layers_ms"] == 30.0
    assert curves[0].x == ["to TP, 10-20 %", "to TP 24 layers ahead, 10-20 %", "to TP prepared, 10-20 %"]
    assert notes == [f"switches sent [5] bytes of experts, by the formula it is {SENT}"]


def test_a_preparation_is_compared_with_the_iterations_before_it() -> None:
    plain, slow = ("EP", 256, 10.0), ("EP", 256, 15.0)
    run = [("EP", 30, 99.0), plain, plain, plain, slow, plain, ("TP", 256, 7.0), ("EP", 256, 11.0), slow]
    assert switch_numbers.prepare_numbers(run, [4], 3, 256) == [(25.0, 20.0)], "two are left before the switch"
    assert switch_numbers.prepare_numbers(run, [4, 8], 1, 256) == [(15.0, 10.0), (15.0, 11.0)]
    assert switch_numbers.prepare_numbers(run, [1], 1, 256) == [], "nothing whole comes before it"


def test_bytes_and_the_profilers_count() -> None:
    notes: list[str] = []
    layer = 64 * 3 * 768 * 2048 * 2
    exact = [{"Memcpy PtoP": layer, "Memcpy DtoD": layer}] * 2
    numbers = switch_numbers.bytes_moved(SHAPES, 512 * 1024, exact, notes)
    assert numbers["profiled_over_counted"] == 1.0 and not notes
    assert numbers["bytes_experts_direct_link_sent_gb"] == pytest.approx(14.4955, rel=1e-4)
    assert numbers["bytes_experts_direct_staging_gb"] == 0.0
    assert numbers["bytes_kv_direct_link_sent_gb"] == pytest.approx(512 * 1024 * 98_304 / 4 / 1e9)
    short = [{"Memcpy PtoP": layer}, {"Memcpy PtoP": 2 * layer}]
    assert switch_numbers.bytes_moved(SHAPES, 16, short, notes)["profiled_over_counted"] == 0.5
    assert "the profiler saw copies of" in notes[0]
    assert "profiled_over_counted" not in switch_numbers.bytes_moved(SHAPES, 16, [{}, {}], notes)
    events = [
        {"cat": "gpu_memcpy", "name": "Memcpy PtoP", "args": {"bytes": 5}},
        {"cat": "gpu_memcpy", "name": "Memcpy PtoP", "args": {"bytes": 6}},
        {"cat": "kernel", "name": "k", "args": {}},
    ]
    assert copied_bytes({"traceEvents": events}) == {"Memcpy PtoP": 11}


def test_soak_numbers_are_the_worst_ranks() -> None:
    def held(a: int, b: int) -> dict[str, Any]:
        one = {"device_bytes": 0, "torch_bytes": 0, "rss_bytes": 0}
        return {"switches": 0, "ranks": [one | {"fds": a}, one | {"fds": b}]}

    numbers = switch_numbers.soak_numbers([1.0, 1.0, 3.0, 5.0], [held(10, 12), held(50, 50), held(10, 14)])
    assert numbers["soak_fd_delta"] == 2 and numbers["soak_device_bytes_delta"] == 0
    assert numbers["soak_switches"] == 4
    assert (numbers["soak_pause_first_quarter_ms"], numbers["soak_pause_last_quarter_ms"]) == (1.0, 5.0)


def test_a_fill_has_about_its_tokens_when_the_first_switch_comes() -> None:
    for fill in (35_000, 135_000, 270_000):
        plan = switch.plan_fill(fill, SwitchOptions(), 2, CAPACITY)
        assert isinstance(plan, switch.Plan)
        prefills = plan.iterations[0] - 5
        assert 128 * plan.prompt <= prefills * (8192 - 128)
        assert plan.length > plan.iterations[-1] and len(plan.iterations) == 4
        held = 256 * (plan.prompt + prefills / 2 + 5)
        assert abs(held - fill) <= 256
        prepared = switch.plan_fill(fill, SwitchOptions(), 2, CAPACITY, prepare=8)
        assert isinstance(prepared, switch.Plan)
        gaps = [b - a for a, b in itertools.pairwise(prepared.iterations)]
        assert gaps == [16] * 3 and [b - a for a, b in itertools.pairwise(plan.iterations)] == [6] * 3
        assert prepared.prompt == plan.prompt - 16
    too_much = switch.plan_fill(3_000_000, SwitchOptions(), 2, CAPACITY)
    assert isinstance(too_much, str) and "max_model_len" in too_much
    assert "KV pages" in str(switch.plan_fill(1_500_000, SwitchOptions(), 2, CAPACITY))


def test_the_policy_alternates_and_gives_a_refused_switch_up() -> None:
    policy = Alternating([3, 5, 7])
    for _ in range(2):  # steps are alike
        policy.begin_step()
        layout, seen = Layout.EP, []
        for iteration in range(12):
            target = policy.decide(Observation(iteration, 4, layout)).target
            if target is None:
                continue
            seen.append((iteration, target.value))
            if iteration == 5:
                policy.cancelled(iteration)
            else:
                policy.switched()
                layout = target
        assert seen == [(3, "TP"), (5, "EP"), (7, "EP")]
    policy.begin_step()
    assert policy.decide(Observation(9, 0, Layout.EP)).target is None, "nothing is live"


def test_only_switches_to_tp_are_prepared() -> None:
    policy = Alternating([5, 9, 20], prepare=3)
    policy.begin_step()

    def expects(iteration: int, layout: Layout) -> bool:
        return policy.expects_tp(Observation(iteration, 4, layout))

    assert [expects(i, Layout.EP) for i in (1, 2, 4)] == [False, True, True]
    for iteration, layout in ((5, Layout.EP), (9, Layout.TP)):
        assert policy.decide(Observation(iteration, 4, layout)).target is not layout
        policy.switched()
        assert not expects(iteration + 1, Layout.TP)
    assert [expects(i, Layout.EP) for i in (16, 17)] == [False, True]
    policy.decide(Observation(20, 4, Layout.EP))
    policy.switched()
    assert not expects(30, Layout.EP), "no switch is left"
    never = Alternating([5])
    never.begin_step()
    assert not never.expects_tp(Observation(4, 4, Layout.EP))


def test_every_request_must_end_once_with_its_length() -> None:
    def run(*ended: tuple[int, int, str]) -> LiveRun:
        return LiveRun([], [], list(ended), [], [])

    switch.check_ends([run((0, 5, "length")), run((1, 6, "length"))], [5, 6])
    for wrong, words in (
        ([run((0, 5, "length")), run()], "1 ended"),
        ([run((0, 5, "length"), (0, 5, "length")), run((1, 6, "length"))], "lost or doubled"),
        ([run((0, 5, "length")), run((1, 5, "length"))], "request 1 ended with 5 tokens of 6"),
        ([run((0, 5, "stop")), run((1, 6, "length"))], "request 0 ended with 5 tokens of 5 .stop"),
    ):
        with pytest.raises(MoebiusError, match=words):
            switch.check_ends(wrong, [5, 6])


def test_switches_are_the_slowest_ranks() -> None:
    runs = [LiveRun([record("TP", pause, 0.1, phases={"export": export})], [], [], [], [])
            for pause, export in ((20.0, 3.0), (30.0, 1.0))]  # fmt: skip
    (merged,) = switch.slowest(runs)
    assert merged["pause_ms"] == 30.0
    assert merged["phases_ms"] == {"drain": 9.0, "export": 3.0, "wait": 28.0}


def test_files_of_movers_and_memory(tmp_path: Path) -> None:
    shape = {"layers": 8, "kv_heads": 4, "page_tokens": 16, "pages": 4096}
    speeds = [speed.model_dump() for speed in movers(direct=40.0).speeds]
    (tmp_path / "m.json").write_text(json.dumps({"gpus": "x", "ranks": 2, "shape": shape, "speeds": speeds}))
    found = Movers.load(tmp_path / "m.json")
    assert (found.layers, found.kv_layers, found.tokens) == (8, 8, 4096 * 16 * 2)
    shape["kv_heads"] = 1  # replicated: TP has pages for half as much
    (tmp_path / "m.json").write_text(json.dumps({"gpus": "x", "ranks": 2, "shape": shape, "speeds": speeds}))
    assert Movers.load(tmp_path / "m.json").tokens == 4096 * 16
    (tmp_path / "m.json").write_text("{}")
    with pytest.raises(BadInput, match="not a file of"):
        Movers.load(tmp_path / "m.json")
    with pytest.raises(BadInput, match="cannot be read"):
        Movers.load(tmp_path / "none.json")
    path = make_results("memory", command="x", options={}, results={"memory_overhead_pct": 1.5}).write(tmp_path)
    assert switch_numbers.memory_overhead(path) == 1.5
    with pytest.raises(BadInput, match="no memory_overhead_pct"):
        switch_numbers.memory_overhead(tmp_path / "m.json")
