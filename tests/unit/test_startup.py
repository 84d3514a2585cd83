"""The clock of a start, the account of memory, and how both are reported."""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebius.engine.account import Held, MemoryAccount, covered, kind_of, split, table
from moebius.engine.startup import PHASES, RuntimeStartup, Startup, StartupClock, StartupError
from moebius.engine.types import StepOutcome, StepStats
from moebius.rollout.report import StepReport, build_report
from moebius.rollout.report_html import page
from moebius.rollout.report_startup import rank_start, startup_line

GB = 10**9


def nap(seconds: float = 0.02) -> None:
    time.sleep(seconds)


class Runner:
    def capture_model(self) -> int:
        nap()
        return 3 * GB


class Worker:
    """Has vLLM's worker methods; each takes a while."""

    def init_device(self) -> None:
        nap()

    def load_model(self) -> None:
        nap()

    def determine_available_memory(self) -> int:
        nap()
        return 5

    def initialize_from_config(self, config: str) -> str:
        nap()
        return config

    def compile_or_warm_up_model(self) -> SimpleNamespace:
        nap()
        Runner().capture_model()
        return SimpleNamespace(language_model=1.5, encoder=0.0)


class CPUWorker(Worker):
    """Overrides one method and calls its base, as a subclass may."""

    def load_model(self) -> None:
        nap()
        super().load_model()


@pytest.fixture
def stand_in(monkeypatch):
    """vLLM's modules with the classes above in them."""
    modules = {
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: True)},
        "vllm.v1.worker.gpu_model_runner": {"GPUModelRunner": Runner},
        "vllm.v1.worker.gpu_worker": {"Worker": Worker},
        "vllm.v1.worker.cpu_worker": {"CPUWorker": CPUWorker},
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
        for parent in (name.rsplit(".", i)[0] for i in range(1, name.count(".") + 1)):
            monkeypatch.setitem(sys.modules, parent, sys.modules.get(parent) or ModuleType(parent))


def run_phases(worker: Worker) -> None:
    worker.init_device()
    worker.load_model()
    assert worker.determine_available_memory() == 5
    assert worker.initialize_from_config("c") == "c"
    worker.compile_or_warm_up_model()


def test_phases_are_timed_and_add_up(stand_in):
    before = {owner: dict(vars(owner)) for owner in (Worker, CPUWorker, Runner)}
    clock = StartupClock()
    with clock.part("config"):
        nap()
    with clock.part("buffer"):
        nap()
    for layout in ("TP", "EP"):
        with clock.runtime(layout):
            run_phases(CPUWorker())
            nap()
    for owner, attributes in before.items():
        assert {k: v for k, v in vars(owner).items() if k in attributes} == attributes, "methods were not restored"
    start = clock.report(rank=1)
    assert [built.layout for built in start.runtimes] == ["TP", "EP"] and start.rank == 1
    for built in start.runtimes:
        parts = [getattr(built, field) for field in (*PHASES.values(), "capture_s", "other_s")]
        assert all(part >= 0.019 for part in parts)
        assert sum(parts) == pytest.approx(built.total_s, abs=1e-6)
        assert 0.039 <= built.load_s < 0.075, "the base's part was counted twice"
        assert (built.graph_bytes, built.compile_s, built.grown_bytes) == (3 * GB, 1.5, 0)
    parts = [start.config_s, start.buffer_s, start.other_s, *(built.total_s for built in start.runtimes)]
    assert sum(parts) == pytest.approx(start.total_s, abs=1e-6)


def test_methods_are_restored_after_a_failed_start(stand_in):
    original = Worker.load_model

    def fail() -> None:
        with StartupClock().runtime("EP"):
            assert Worker.load_model is not original
            raise OSError("no such checkpoint")

    with pytest.raises(OSError, match="no such checkpoint"):
        fail()
    assert Worker.load_model is original


def test_another_vllm_is_refused(stand_in, monkeypatch):
    monkeypatch.delattr(Worker, "initialize_from_config")
    with pytest.raises(StartupError, match="initialize_from_config"), StartupClock().runtime("EP"):
        pass


# ---- memory ----------------------------------------------------------------------------------------------------------


@given(
    ep=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=9),
    tp=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=9),
)
def test_intervals_count_each_byte_once(ep, tp):
    a, b = ([(first, first + size) for first, size in intervals] for intervals in (ep, tp))
    held_a, held_b = ({byte for first, end in x for byte in range(first, end)} for x in (a, b))
    assert covered(a) == len(held_a)
    assert split(a, b) == Held(len(held_a - held_b), len(held_b - held_a), len(held_a & held_b))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.embed_tokens.weight", "embeddings"),
        ("lm_head.weight", "lm_head"),
        ("model.layers.3.self_attn.qkv_proj.weight", "attention"),
        ("model.layers.3.self_attn.q_norm.weight", "norms"),
        ("model.layers.3.post_attention_layernorm.weight", "norms"),
        ("model.layers.3.self_attn.rotary_emb.cos_sin_cache", "rotary"),
        ("model.layers.3.mlp.gate.weight", "router"),
        ("model.layers.3.mlp.gate_up_proj.weight", "other"),
    ],
)
def test_kinds_by_name(name, kind):
    assert kind_of(name) == kind


def account(rank: int = 0, **changes) -> MemoryAccount:
    fields = {
        "rank": rank,
        "device": "cuda",
        "device_bytes": 100 * GB,
        "used_bytes": 60 * GB,
        "torch_allocated_bytes": 50 * GB,
        "torch_reserved_bytes": 55 * GB,
        "expert_bytes": 24 * GB,
        "expert_spare_bytes": 1 * GB,
        "kv_bytes": 16 * GB,
        "kv_spare_bytes": 2 * GB,
        "parameter_bytes": {"attention": Held(4 * GB, 2 * GB, 0), "embeddings": Held(0, 0, 1 * GB)},
        "workspace_bytes": Held(1 * GB, 0, 0),
        "graph_bytes": Held(2 * GB, 3 * GB, 0),
    }
    return MemoryAccount(**(fields | changes))


def test_account_adds_up():
    a = account()
    assert a.attributed == 56 * GB and a.rest_bytes == 4 * GB
    assert a.overhead("EP") == (1 + 2 + 2 + 3) * GB  # spare slots, TP's attention and graphs
    assert a.overhead("TP") == (1 + 2 + 4 + 1 + 2) * GB
    assert a.overhead_share("EP") == 0.08
    assert sum(nbytes for name, nbytes in a.rows() if not name.startswith("overhead")) == a.used_bytes
    lines = table(a).splitlines()
    assert any(line.split() == ["attention,", "EP", "4.000", "GB", "4.00", "%"] for line in lines)


# ---- reports ---------------------------------------------------------------------------------------------------------


def starts():
    result = []
    for rank in range(2):
        runtimes = [
            RuntimeStartup("TP", 1.0, 20.0, 30.0 + rank, 0.5, 2.0, 5.0, 1.0, 59.5 + rank, 25.0, GB, 8 * GB),
            RuntimeStartup("EP", 0.2, 10.0, 8.0, 0.5, 2.0, 9.0, 1.0, 30.7, 6.0, 2 * GB, 5 * GB),
        ]
        total = 1.5 + sum(built.total_s for built in runtimes)
        result.append(rank_start(Startup(rank, 12.0, 0.5, 0.75, 0.25, total, runtimes), account(rank)))
    return result


def test_one_line():
    line = startup_line(starts())
    assert line.startswith("ready after 104.7 s: import 12.0, buffer 0.8, TP 60.5 (load 20.0, profile 31.0, ")
    assert "EP 30.7 (" in line and line.endswith("8.00 GB (8.0 %) over static EP, 10.00 GB (10.0 %) over static TP")


def report(step: int, startup=None) -> StepReport:
    given = {"policy_version": 0, "model": "m", "device": "cuda", "prompt_tokens": [], "created": datetime.now(UTC)}
    return build_report([StepOutcome([], StepStats(rank, 2)) for rank in range(2)], step=step, startup=startup, **given)


def test_report_keeps_it_and_the_page_shows_it(tmp_path):
    first, second = report(0, starts()), report(1)
    loaded = StepReport.load(first.write(tmp_path))
    assert loaded == first and loaded.startup is not None
    memory = loaded.startup[1].memory
    assert memory.account() == account(1)
    assert (memory.rest_bytes, memory.overhead_ep_bytes) == (4 * GB, 8 * GB)
    text = page([second, first])
    assert "<h2>Start</h2>" in text and "overhead over static EP" in text and "8.000 (8.0 %)" in text
    assert "<h2>Start</h2>" not in page([second])
