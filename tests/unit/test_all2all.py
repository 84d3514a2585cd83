"""Which all-to-all EP runs with: refusals in words, `auto` by measured costs, and the changes to vLLM it needs."""

from __future__ import annotations

import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import deepep, deepep_expected
from moebius.engine import all2all, deepep_patches
from moebius.engine.all2all import ALLGATHER, DEEPEP_LL, DEEPEP_V2, All2AllUnavailable, Machine, choose
from moebius.engine.calibrate import Grid
from moebius.engine.config import EngineConfig, EpConfig
from moebius.engine.cost_cache import cache_path, kept_costs, key_of
from moebius.engine.costs import CostModel, CostPoint
from moebius.engine.layout import Layout, ModelShape
from moebius.engine.vllm_patches import PatchError
from moebius.rollout import calibration, doctor
from moebius.rollout.bench.engines import BenchSetup
from moebius.rollout.errors import MoebiusError
from moebius.rollout.plan_model import load_gpu, load_model
from tests.unit.deepep_checks import Case, stock_experts

READY = Machine(gpus=2, nccl=23004, deep_ep="2.1.0", elastic=True, legacy=True, nvcc=True, rdma=True)
SHAPE = ModelShape(2, (0, 1), 8, 256, 64, 8, 2, 64, 512)


def config(all2all: Any = "auto", **changes: Any) -> EngineConfig:
    return EngineConfig(model="m", ep=EpConfig(all2all=all2all), **changes)


@pytest.mark.parametrize(
    ("backend", "changes", "words"),
    [
        (DEEPEP_V2, {}, None),
        (DEEPEP_LL, {}, None),
        (ALLGATHER, {"gpus": 0, "deep_ep": None, "nccl": None}, None),
        (DEEPEP_V2, {"gpus": 0}, "needs CUDA GPUs"),
        (DEEPEP_V2, {"gpus": 1}, "one is visible"),
        (DEEPEP_V2, {"blocked": ("0-1", "1-0")}, "no peer access between GPUs 0-1, 1-0"),
        (DEEPEP_V2, {"deep_ep": None}, "not installed: build it"),
        (DEEPEP_V2, {"nccl": 22809}, "NCCL 2.28.9, deep_ep needs 2.30.4 or newer: put the newer libnccl.so.2 into LD"),
        (DEEPEP_V2, {"nccl": None}, "NCCL none"),
        (DEEPEP_V2, {"import_error": "AssertionError: x"}, r"cannot be imported \(AssertionError: x\)"),
        (DEEPEP_V2, {"deep_ep": "1.2.1", "elastic": False}, "1.2.1 has no ElasticBuffer"),
        (DEEPEP_LL, {"legacy": False}, "no Buffer.*take deepep_v2"),
        (DEEPEP_LL, {"rdma": False}, "InfiniBand.*take deepep_v2"),
        (DEEPEP_V2, {"nvcc": False}, "no nvcc: set CUDA_HOME"),
    ],
)
def test_what_a_machine_lacks_is_said(backend: Any, changes: dict[str, Any], words: str | None) -> None:
    found = all2all.refusal(backend, replace(READY, **changes))
    if words is None:
        assert found is None
    else:
        assert found is not None
        with pytest.raises(ValueError, match=words):
            raise ValueError(found)


@pytest.mark.parametrize(
    ("backend", "model", "words"),
    [
        (DEEPEP_V2, {}, None),
        (ALLGATHER, {"dtype": "torch.float32", "hidden": 100, "eager": True}, None),
        (DEEPEP_V2, {"dtype": "torch.float32"}, "bfloat16 only, and the model runs in float32"),
        (DEEPEP_V2, {"hidden": 2050}, "hidden size of 2050"),
        (DEEPEP_LL, {"hidden": 2304}, "only for 2048"),
        (DEEPEP_V2, {"eager": True}, "enforce_eager: false"),
    ],
)
def test_what_a_model_lacks_is_said(backend: Any, model: dict[str, Any], words: str | None) -> None:
    given: dict[str, Any] = {"dtype": "torch.bfloat16", "hidden": 2048, "eager": False} | model
    found = all2all.model_refusal(backend, **given)
    assert (found is None) if words is None else (found is not None and words in found)


def test_a_named_backend_is_used_or_refused() -> None:
    assert choose(config(DEEPEP_V2), SHAPE, 2, machine=lambda: READY).backend == DEEPEP_V2
    assert choose(config(ALLGATHER), SHAPE, 2, machine=lambda: pytest.fail("not looked at")).backend == ALLGATHER
    with pytest.raises(All2AllUnavailable, match=r"engine\.ep\.all2all: deepep_v2 cannot be used: .*not installed"):
        choose(config(DEEPEP_V2), SHAPE, 2, machine=lambda: replace(READY, deep_ep=None))


def test_this_cpu_machine_takes_the_all_gather() -> None:
    """The real look: on a machine without GPUs nothing is imported for it."""
    if torch.cuda.is_available():
        pytest.skip("this machine has GPUs")
    choice = choose(config(), SHAPE, 2)
    assert choice.backend == ALLGATHER and "CUDA GPUs" in choice.words
    with pytest.raises(All2AllUnavailable, match="CUDA GPUs"):
        choose(config(DEEPEP_LL), SHAPE, 2)


def costs(key: dict[str, str | int], ep_ms: dict[int, float]) -> CostModel:
    points = [CostPoint(layout=Layout.EP, batch=batch, context=100.0, ms=ms) for batch, ms in ep_ms.items()]
    return CostModel(key=key, ranks=2, points=[*points, CostPoint(layout=Layout.TP, batch=1, context=100.0, ms=1.0)])


@pytest.mark.parametrize(
    ("deepep", "chosen", "words"),
    [
        (None, ALLGATHER, "auto: deepep_v2 not measured here"),
        ({1: 9.0, 64: 9.0, 512: 8.0}, DEEPEP_V2, "takes 84.9 % of"),  # slower alone, where TP runs anyway
        ({1: 1.0, 64: 10.0, 512: 9.95}, ALLGATHER, "takes 99.7 % of"),
    ],
)
def test_auto_goes_by_what_was_measured(
    tmp_path: Path, deepep: dict[int, float] | None, chosen: str, words: str
) -> None:
    wanted = config(policy={"costs_cache": str(tmp_path), "threshold": 64})
    for backend, ms in ((ALLGATHER, {1: 5.0, 64: 10.0, 512: 10.0}), (DEEPEP_V2, deepep)):
        if ms is not None:
            key = key_of(wanted, SHAPE, 2, backend)
            costs(key, ms).save(cache_path(key, tmp_path))
    choice = choose(wanted, SHAPE, 2, machine=lambda: READY)
    assert choice.backend == chosen and words in choice.words
    assert choose(wanted, SHAPE, 2, machine=Machine).backend == ALLGATHER


def test_costs_of_the_all_gather_are_kept_where_they_always_were(tmp_path: Path) -> None:
    keys = [key_of(config(), SHAPE, 2, backend) for backend in (ALLGATHER, DEEPEP_V2, DEEPEP_LL)]
    assert len({key["settings"] for key in keys}) == 3
    assert keys[0] == key_of(config(ALLGATHER), SHAPE, 2, ALLGATHER)
    cache_path(keys[1], tmp_path).write_text("{}", encoding="utf-8")
    assert kept_costs(config(policy={"costs_cache": str(tmp_path)}), SHAPE, 2, DEEPEP_V2) is None


def test_ranks_must_agree() -> None:
    assert all2all.problem_of_choices({0: ALLGATHER, 1: ALLGATHER}) is None
    problem = all2all.problem_of_choices({0: ALLGATHER, 1: DEEPEP_V2})
    assert problem is not None and "rank 1: deepep_v2" in problem


def test_environment_is_set_unless_the_user_did(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in all2all.ENVIRONMENT:
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    all2all.prepare_environment(ALLGATHER)
    assert not set(all2all.ENVIRONMENT) & set(os.environ)
    monkeypatch.setenv("EP_DISABLE_GIN", "0")
    all2all.prepare_environment(DEEPEP_V2)
    assert os.environ["EP_DISABLE_GIN"] == "0" and os.environ["EP_REUSE_NCCL_COMM"] == "0"


# ---- changes to vLLM -------------------------------------------------------------------------------------------------


CASE = Case()


def align(topk_ids: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None, None]:
    """As 0.26.0's compiled kernel: ids below 0 and beyond the last expert take no part."""
    flat = topk_ids.reshape(-1)
    return ((flat >= 0) & (flat < CASE.experts)).nonzero().squeeze(1), None, None


def gemm(a: Any, b: Any, c: Any, _sa: Any, _sb: Any, weights: Any, slots: Any, *args: Any, **_: Any) -> None:
    """As Triton's kernel: rows of `c` are written for the slots that alignment names, and for no others."""
    topk = args[3]
    out = c.view(-1, c.shape[-1])
    for slot in slots.tolist():
        expert = int(CASE.ids.reshape(-1)[slot]) - CASE.local
        row = a[slot // topk] @ b[expert].T
        out[slot] = row * (weights.reshape(-1)[slot] if weights is not None else 1.0)


def moe_sum(rows: torch.Tensor, out: torch.Tensor, ids: Any = None, expert_map: Any = None) -> None:
    """As 0.26.0's compiled kernel, whose last two arguments make it leave slots out."""
    if ids is None:
        out.copy_(rows.sum(dim=1))
        return
    assert int(ids.max()) < CASE.experts, "the kernel would read behind expert_map"
    mine = (ids >= 0) & (expert_map[ids.clamp(min=0)] >= 0)
    out.copy_(torch.where(mine[..., None], rows, torch.zeros(())).sum(dim=1))


@pytest.fixture
def experts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's TritonExperts, stock, over stand-ins for its kernels."""
    from vllm.model_executor.layers.fused_moe.experts import triton_moe

    def activation(_kind: Any, out: torch.Tensor, x: torch.Tensor, **_: Any) -> None:
        out.copy_(torch.nn.functional.silu(x[:, : CASE.width]) * x[:, CASE.width :])

    monkeypatch.setattr(triton_moe, "tl", types.SimpleNamespace(float32="float32"))  # Triton is off on CPU
    monkeypatch.setattr(triton_moe, "_prepare_expert_assignment", align)
    monkeypatch.setattr(triton_moe, "try_get_optimal_moe_config", lambda *_, **__: {"BLOCK_SIZE_M": 16})
    monkeypatch.setattr(triton_moe, "invoke_fused_moe_triton_kernel", gemm)
    monkeypatch.setattr(triton_moe, "ops", types.SimpleNamespace(moe_sum=moe_sum))
    monkeypatch.setattr("vllm._custom_ops.moe_sum", moe_sum)
    monkeypatch.setattr(triton_moe, "moe_kernel_quantize_input", lambda x, *_, **__: (x, None))
    made = stock_experts()
    made.activation = activation
    return made


def test_stock_experts_sum_stale_slots_and_ours_do_not(experts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, right = type(experts), CASE.right()
    stock = CASE.run(experts, kind.apply)
    assert torch.allclose(stock[1], right[1], atol=1e-5)  # both slots are this rank's
    assert not torch.allclose(stock[0], right[0]) and not torch.allclose(stock[2], right[2])
    assert not torch.allclose(stock[3], right[3])  # padding: sevens
    monkeypatch.setattr(kind, "moe_sum", deepep_patches._sums_what_was_written(kind.moe_sum))
    assert torch.allclose(CASE.run(experts, deepep_patches._knows_its_slots(kind.apply)), right, atol=1e-5)
    # Without an expert map, as in TP, the sum is vLLM's.
    seen = []
    monkeypatch.setattr("vllm._custom_ops.moe_sum", lambda *_: pytest.fail("TP's sum was changed"))
    monkeypatch.setattr(kind, "moe_sum", deepep_patches._sums_what_was_written(lambda *call: seen.append(call)))
    experts.moe_sum(torch.zeros(1, 1, 1), torch.zeros(1, 1))
    assert len(seen) == 1


def test_the_changes_fit_the_installed_vllm() -> None:
    for owner, name, make in deepep_patches.targets():
        assert callable(make(getattr(owner, name)))
    with pytest.raises(PatchError, match="no topk_ids"):
        deepep_patches._knows_its_slots(lambda self, other: None)


@pytest.mark.parametrize(("tokens", "power"), [(0, 1), (1, 1), (2, 2), (3, 4), (6000, 8192), (8192, 8192)])
def test_buffers_have_room_for_rounded_batches(tokens: int, power: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream rounds each dispatch up, as this does, and makes buffers for what was not rounded."""
    from vllm.distributed.device_communicators.all2all import DeepEPV2All2AllManager as Manager

    parallel = types.SimpleNamespace(distributed_timeout_seconds=600)
    monkeypatch.setattr("vllm.config.get_current_vllm_config", lambda: types.SimpleNamespace(parallel_config=parallel))
    manager: Any = types.SimpleNamespace(_device_group=None, cpu_group="group")
    given = {"num_max_tokens_per_rank": tokens, "hidden": 256, "num_topk": 2, "use_fp8_dispatch": False}
    stock = Manager._make_all2all_kwargs(manager, **given)
    ours = deepep_patches._room_for_rounded_batches(Manager._make_all2all_kwargs)(manager, **given)
    assert stock["num_max_tokens_per_rank"] == tokens and ours["num_max_tokens_per_rank"] == power
    assert ours["num_gpu_timeout_secs"] == 600 and ours["hidden"] == 256


def test_buffers_are_in_the_memory_account() -> None:
    from moebius.engine.account import _all2all

    buffers = {"a": types.SimpleNamespace(num_bytes=5), "b": types.SimpleNamespace(num_nvl_bytes=3, num_rdma_bytes=4)}
    manager = types.SimpleNamespace(handle_cache=types.SimpleNamespace(_cache=buffers))
    group = types.SimpleNamespace(device_communicator=types.SimpleNamespace(all2all_manager=manager))
    assert _all2all(types.SimpleNamespace(groups={"_EP": group})) == 12  # type: ignore[arg-type]
    assert _all2all(types.SimpleNamespace(groups={"_EP": types.SimpleNamespace()})) == 0  # type: ignore[arg-type]


def test_every_batch_is_warmed_up_before_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(deepep_patches, "example", lambda tokens, *_: (tokens, tokens, tokens))
    monkeypatch.setattr(deepep_patches, "roundtrip", lambda *_, most, **__: sizes.append(most))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    prepare = type("DeepEPV2PrepareAndFinalize", (), {})()
    prepare.buffer, prepare.num_experts, prepare.num_topk = types.SimpleNamespace(num_max_tokens_per_rank=64), 8, 2
    method = types.SimpleNamespace(moe_kernel=types.SimpleNamespace(prepare_finalize=prepare))
    layer = types.SimpleNamespace(quant_method=method, w13_weight=torch.empty(4, 16, 256))
    assert deepep_patches.warm_up([layer]) == sizes == [1, 2, 4, 8, 16, 32, 64]
    with pytest.raises(PatchError, match="no layer dispatches"):
        deepep_patches.warm_up([types.SimpleNamespace()])


# ---- around the engine -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "ok", "words"),
    [
        ("ALL2ALL||2.28.9|no|no", True, "allgather_reducescatter; deep_ep is not installed"),
        ("ALL2ALL|2.1.0|2.30.4||no InfiniBand", True, "allgather_reducescatter, deepep_v2; deep_ep 2.1.0, NCCL 2.30.4"),
        ("ALL2ALL|2.1.0|2.28.9|torch runs with NCCL 2.28.9|x", False, "is installed, but torch runs with NCCL 2.28.9"),
        ("", False, "loading deep_ep failed: exit code"),
    ],
)
def test_doctor_tells_what_ep_can_use(told: str, ok: bool, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "is_cpu_build", lambda: False)
    monkeypatch.setattr(doctor, "_ALL2ALL_PROBE", f"print({told!r})")
    found = doctor.check_all2all()
    assert found.ok is ok and words in found.detail
    monkeypatch.setattr(doctor, "is_cpu_build", lambda: True)
    assert doctor.check_all2all().ok


def test_doctor_s_probe_runs() -> None:
    done = subprocess.run([sys.executable, "-c", doctor._ALL2ALL_PROBE], capture_output=True, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("ALL2ALL|"))
    assert line.count("|") == 4


def test_calibration_measures_what_auto_chooses_from(monkeypatch: pytest.MonkeyPatch) -> None:
    class Engines:
        """One engine after another, which knows what EP it has."""

        def __init__(self, setup: Any, *_: Any) -> None:
            self.backend = setup.engine.ep.all2all

        def __enter__(self) -> Engines:
            return self

        def __exit__(self, *_: Any) -> None:
            pass

    ms = {ALLGATHER: {1: 5.0, 64: 10.0}, DEEPEP_V2: {1: 5.0, 64: 8.0}}
    monkeypatch.setattr(calibration, "Engines", Engines)
    monkeypatch.setattr(calibration, "calibrate_fleet", lambda e, _: (costs({"x": e.backend}, ms[e.backend]), ["kept"]))
    machine = [READY]
    monkeypatch.setattr(calibration, "look", lambda: machine[0])
    setup = BenchSetup(ranks=2, device="cuda", engine=config(), largest_batch=64)
    found, notes = calibration.calibrate_all(setup, Grid(), Path(), print)
    assert found.key == {"x": DEEPEP_V2} and notes[:2] == [f"{ALLGATHER}: kept", f"{DEEPEP_V2}: kept"]
    assert "takes 89.4 % of" in notes[2]
    refusing = [DEEPEP_V2]

    def measure(engines: Any, _: Any) -> Any:
        if engines.backend in refusing:  # fp32, say: the machine could, the model cannot
            raise MoebiusError(f"rank 0: engine.ep.all2all: {engines.backend} cannot run this model")
        return costs({"x": engines.backend}, ms[engines.backend]), ["kept"]

    monkeypatch.setattr(calibration, "calibrate_fleet", measure)
    found, notes = calibration.calibrate_all(setup, Grid(), Path(), print)
    assert found.key == {"x": ALLGATHER} and notes[0] == f"{ALLGATHER}: kept" and len(notes) == 2
    assert notes[1].startswith(f"{DEEPEP_V2}: could not be measured, so auto does without it: rank 0: engine.ep.")
    refusing.append(ALLGATHER)
    with pytest.raises(MoebiusError, match=ALLGATHER):
        calibration.calibrate_all(setup, Grid(), Path(), print)
    refusing.clear()
    machine[0] = Machine()
    assert calibration.calibrate_all(setup, Grid(), Path(), print)[1] == ["kept"]
    named = setup.model_copy(update={"engine": config(DEEPEP_LL)})
    assert calibration.backends(named) == [DEEPEP_LL]


# ---- benchmarks/deepep.py --------------------------------------------------------------------------------------------


def test_ratios_are_those_of_rounds_that_measured_both() -> None:
    measured = {"a": {64: [10.0, 12.0, 11.0], 8: [4.0]}, "b": {64: [8.0, 10.0, 10.0]}}
    assert deepep.compare(measured, ("a", "b")) == {
        "allgather_ms_b64": 11.0,
        "deepep_ms_b64": 10.0,
        "deepep_vs_allgather_pct_b64": pytest.approx(20.0),
    }


def test_agreement_counts_up_to_the_first_difference() -> None:
    one = {0: ([1, 2, 3, 4], [-1.0, -1.0, -1.0, -1.0]), 1: ([5, 6], [-2.0, -2.0])}
    other = {0: ([1, 2, 9, 4], [-1.5, -1.0, -7.0, -9.0]), 1: ([7, 6], [-2.0, -2.0])}
    assert deepep.agreement(one, other) == {
        "agreement": 0.25,
        "first_token_agreement": 0.5,
        "logprob_drift_mean": 0.25,
        "logprob_drift_max": 0.5,
    }
    assert deepep.agreement(one, one)["agreement"] == 1.0


def test_parts_of_the_benchmark_are_selectable(capsys: pytest.CaptureFixture[str]) -> None:
    assert deepep.parse(["--config", "x", "--parts", "step,sweep"]).parts == ["step", "sweep"]
    with pytest.raises(SystemExit):
        deepep.parse(["--config", "x", "--parts", "nothing"])
    assert "none of roundtrip" in capsys.readouterr().err


def test_expected_savings_by_hand() -> None:
    assert deepep_expected.share_sent(2, 1) == 0.5
    assert deepep_expected.share_sent(2, 8) == pytest.approx(1 - 1 / 256)
    model, gpu = load_model("qwen3-30b-a3b", 8), load_gpu("h200")
    sent = 2 * 48 * 1024 * 2048 * 2 * 7 / 8  # layers twice, rows, hidden, bytes, of other ranks
    saved = deepep_expected.saved_ms(model, gpu, 8, 1024)
    assert saved == pytest.approx((7 / 8) ** 8 * sent / (gpu.link_gb_s * 1e6))
