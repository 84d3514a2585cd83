"""What an engine tells of its start and its memory, and the traces it leaves: with real engines."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from moebius.engine.account import MemoryAccount
from moebius.engine.config import PolicyConfig, ProfileConfig
from moebius.engine.startup import PHASES, Startup
from tests.engine import work
from tests.engine.fleet import Fleet

MOVES = {"quiesce", "decide", "export", "gather", "reshard", "import", "kv", "activate"}


def start_and_memory(engine: Any) -> tuple[Startup, MemoryAccount]:
    return engine.startup, engine.memory_account()


def sizes(engine: Any) -> dict[str, int]:
    """Bytes counted in another way: by names of the parameters, and of the whole buffer."""
    runtimes = {"EP": engine.pair.ep, "TP": engine.pair.tp}
    attention = {
        layout: sum(p.numel() * p.element_size() for n, p in runtime.runner.model.named_parameters() if "_proj" in n)
        for layout, runtime in runtimes.items()
    }
    return attention | {"buffer": engine.pair.buffer.storage.numel()}


def run_profiled(engine: Any, folder: str, policy: PolicyConfig, requests: list[Any]) -> Any:
    from moebius.engine.profile import SwitchProfiler

    off, engine.profiler = engine.profiler, SwitchProfiler(ProfileConfig(folder=folder, after=3), engine.rank)
    try:
        return work.run(engine, policy, requests)
    finally:
        engine.profiler = off


def test_start_is_told_by_phase(fleet: Fleet) -> None:
    for rank, (start, _) in enumerate(fleet.call(start_and_memory)):
        assert start.rank == rank
        assert [built.layout for built in start.runtimes] == ["TP", "EP"]
        assert 0 < start.config_s + start.buffer_s + sum(built.total_s for built in start.runtimes) <= start.total_s
        for built in start.runtimes:
            parts = [getattr(built, field) for field in (*PHASES.values(), "capture_s", "other_s")]
            assert abs(sum(parts) - built.total_s) < 1e-3
            # On CPU nothing is captured; every other phase takes some time.
            assert built.capture_s == 0 and all(getattr(built, field) > 0 for field in PHASES.values())


def test_the_vocabulary_is_there_once(fleet: Fleet) -> None:
    """TP's rows of the embedding and of the output head are a part of EP's."""
    for _, account in fleet.call(start_and_memory):
        for kind in ("embeddings", "lm_head"):
            held = account.parameter_bytes[kind]
            assert held.tp == 0 and held.ep == held.shared > 0


def test_memory_adds_up(fleet: Fleet) -> None:
    for (_, account), counted in zip(fleet.call(start_and_memory), fleet.call(sizes), strict=True):
        slots = account.expert_bytes + account.expert_spare_bytes + account.kv_bytes + account.kv_spare_bytes
        assert slots == counted["buffer"]
        attention = account.parameter_bytes["attention"]
        scales = 4096  # bytes at most: the scalars that vLLM keeps beside the projections
        assert 0 <= attention.ep + attention.shared - counted["EP"] < scales
        assert 0 <= attention.tp + attention.shared - counted["TP"] < scales
        assert attention.tp < scales, "TP's projections are views of EP's in this fleet"
        assert counted["TP"] < counted["EP"]
        assert {"embeddings", "norms", "router"} <= set(account.parameter_bytes)
        assert account.overhead("EP") >= account.expert_spare_bytes + account.kv_spare_bytes + attention.tp
        assert account.device == "cpu" and 0 < account.used_bytes < account.device_bytes


def test_traces_of_both_ranks_hold_the_switch(fleet: Fleet, tmp_path: Path) -> None:
    requests = work.rich_requests(6, seed=7)
    policy = PolicyConfig(threshold=6)
    per_rank = [(str(tmp_path), policy, part) for (part,) in work.split(requests, 2)]
    outcomes = fleet.call(run_profiled, per_rank=per_rank)
    (record,) = outcomes[0].stats.switches
    for rank in range(2):
        text = gzip.decompress((tmp_path / f"step_0000_rank_{rank}.json.gz").read_bytes())
        names = [str(event.get("name", "")) for event in json.loads(text)["traceEvents"]]
        assert {name.removeprefix("switch: ") for name in names if name.startswith("switch: ")} >= MOVES
        assert any(name.startswith(f"EP iteration {record.iteration}, ") for name in names)
        assert sum(name.startswith("TP iteration ") for name in names) == 2
        assert any(name.startswith("aten::") for name in names)
