"""The search of benchmarks/tune_moe.py, with made-up costs, and the tables it made; measuring needs a GPU."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from moebius.engine.startup import moe_config_folder

ROOT = Path(__file__).parents[2]
BEST = {
    "BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 16, "num_warps": 8, "num_stages": 4,
}  # fmt: skip
START = {
    "BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1, "num_warps": 4, "num_stages": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def tune() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tune_moe", ROOT / "benchmarks" / "tune_moe.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def distance(tune: ModuleType, config: dict[str, int]) -> float:
    """Microseconds that grow with the steps between `config` and BEST."""
    steps = (abs(values.index(config[k]) - values.index(BEST[k])) for k, values in tune.SPACE.items())
    return 100.0 + 10.0 * sum(steps)


def test_descends_to_the_best_in_few_measurements(tune):
    found = tune.search(64, [START], lambda c: (distance(tune, c), ""), lambda c: True, lambda: 1.0)
    assert found.config == BEST and found.us == 100.0 and found.complete
    assert found.baseline == START and found.baseline_us == distance(tune, START)
    whole = len(list(itertools.product(*tune.SPACE.values())))
    assert found.tried < whole / 10


def test_a_good_seed_is_used(tune):
    found = tune.search(64, [START, BEST], lambda c: (distance(tune, c), ""), lambda c: True, lambda: 1.0)
    assert found.config == BEST and found.tried <= 2 + 2 * len(tune.SPACE)


def test_refused_candidates_are_never_chosen(tune):
    def cost(config):
        if config["num_warps"] == 8:
            return None, "other output"
        return distance(tune, config), ""

    found = tune.search(64, [START], cost, lambda c: c["num_stages"] < 4, lambda: 1.0)
    assert found.config == BEST | {"num_warps": 4, "num_stages": 3}
    assert found.refused["other output"] > 0


def test_time_is_kept_and_the_baseline_always_measured(tune):
    left = iter([1.0, 1.0, 0.0])
    found = tune.search(64, [START], lambda c: (distance(tune, c), ""), lambda c: True, lambda: next(left))
    assert not found.complete and found.tried == 3
    found = tune.search(64, [START, BEST], lambda c: (distance(tune, c), ""), lambda c: True, lambda: 0.0)
    assert found.config == START and found.tried == 1
    with pytest.raises(RuntimeError, match="cannot be measured"):
        tune.search(64, [START], lambda c: (None, "OutOfResources"), lambda c: True, lambda: 1.0)


def test_small_gains_do_not_count(tune):
    def cost(config):
        return (100.0 if config == START else 99.5), ""

    assert tune.search(1, [START], cost, lambda c: True, lambda: 1.0).config == START


def test_tiles_must_fit_into_shared_memory(tune):
    hopper = 232448  # bytes a block may use on H100 and H200
    assert tune.fits(START, hopper, 2)
    assert not tune.fits(BEST | {"BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 256}, hopper, 2)


def test_neighbours_differ_in_one_entry(tune):
    for config in (START, BEST, START | {"GROUP_SIZE_M": 8}):  # 8 is in vLLM's files and not in SPACE
        for other in tune.neighbours(config):
            assert sum(other[k] != config[k] for k in config) == 1
            assert list(other) == list(tune.SPACE)
    assert {c["GROUP_SIZE_M"] for c in tune.neighbours(START | {"GROUP_SIZE_M": 8})} == {1, 8, 16}


def test_files_are_what_vllm_reads(tune, tmp_path):
    found = [tune.Found(64, BEST, 80.0, START, 100.0, tried=9), tune.Found(8, START, 50.0, START, 50.0, tried=5)]
    name = "E=64,N=768,device_name=NVIDIA_H200.json"
    path = tune.write(tmp_path / "new", name, found, {"triton": "3.6.0", "device": "NVIDIA H200"})
    data = json.loads(path.read_text())
    assert path.name == name and data.pop("triton_version") == "3.6.0"
    assert data == {"8": START, "64": BEST}
    side = json.loads((path.parent / "E=64,N=768,device_name=NVIDIA_H200.provenance.json").read_text())
    assert side["device"] == "NVIDIA H200" and [r["gain"] for r in side["results"]] == [1.25, 1.0]


def test_vllm_finds_the_file(tune, tmp_path, monkeypatch):
    fused_moe = pytest.importorskip("vllm.model_executor.layers.fused_moe.fused_moe")
    monkeypatch.setattr(fused_moe, "get_device_name_as_file_name", lambda: "NVIDIA_H200")
    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", str(tmp_path))
    name = fused_moe.get_config_file_name(61, 767, None)
    tune.write(tmp_path, name, [tune.Found(8, START, 1.0, START, 1.0)], {"triton": "3.6.0"})
    fused_moe.get_moe_configs.cache_clear()
    try:
        assert fused_moe.get_moe_configs(61, 767, None) == {8: START}
    finally:
        fused_moe.get_moe_configs.cache_clear()


SHIPPED = sorted(path for path in moe_config_folder().glob("E=*.json") if "provenance" not in path.name)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_tables(tune, path, monkeypatch):
    """vLLM takes each for the shape in its name, and it is what its provenance says was measured and faster."""
    fused_moe = pytest.importorskip("vllm.model_executor.layers.fused_moe.fused_moe")
    side = json.loads(path.with_name(path.stem + ".provenance.json").read_text())
    problem = side["problem"]
    monkeypatch.setattr(fused_moe, "get_device_name_as_file_name", lambda: side["device"].replace(" ", "_"))
    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", str(path.parent))
    assert fused_moe.get_config_file_name(problem["experts"], problem["intermediate"], None) == path.name
    fused_moe.get_moe_configs.cache_clear()
    try:
        taken = fused_moe.get_moe_configs(problem["experts"], problem["intermediate"], None)
    finally:
        fused_moe.get_moe_configs.cache_clear()
    assert taken == {r["tokens"]: r["config"] for r in side["results"]}
    assert sorted(taken) == sorted(tune.TOKENS)
    for r in side["results"]:
        assert r["us"] <= r["baseline_us"] and (r["config"] == r["baseline"]) == (r["us"] == r["baseline_us"])
        assert tune.fits(r["config"], 227 << 10, 2), "more shared memory than an H200 has"


def test_both_layouts_of_the_shapes_have_a_table(tune, monkeypatch):
    """On H200, the machine of the benchmarks: ours, or one that vLLM ships."""
    fused_moe = pytest.importorskip("vllm.model_executor.layers.fused_moe.fused_moe")
    monkeypatch.setattr(fused_moe, "get_device_name_as_file_name", lambda: "NVIDIA_H200")
    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", str(moe_config_folder()))
    fused_moe.get_moe_configs.cache_clear()
    for shape, ranks in (("qwen3-30b-a3b", 2), ("qwen3-30b-a3b", 8), ("qwen3-235b-a22b", 8)):
        for layout in ("EP", "TP"):
            p = tune.from_model(ROOT / "configs" / "shapes" / shape, ranks, layout, "bfloat16")
            assert fused_moe.get_moe_configs(p.experts, p.intermediate, None), (shape, ranks, layout)
    fused_moe.get_moe_configs.cache_clear()


@pytest.mark.parametrize(
    ("layout", "ranks", "want"),
    [("EP", 2, (64, 128, 768)), ("TP", 2, (128, 128, 384)), ("EP", 8, (16, 128, 768)), ("TP", 8, (128, 128, 96))],
)
def test_problem_of_a_model(tune, layout, ranks, want):
    p = tune.from_model(ROOT / "configs" / "shapes" / "qwen3-30b-a3b", ranks, layout, "bfloat16")
    assert (p.experts, p.global_experts, p.intermediate) == want and (p.hidden, p.topk) == (2048, 8)


def test_command_line_says_what_is_missing(tune, capsys):
    with pytest.raises(SystemExit):
        tune.parse(["--experts", "64"])
    assert "--intermediate" in capsys.readouterr().err
