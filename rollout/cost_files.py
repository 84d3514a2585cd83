"""Costs from files: what `moebius calibrate` wrote, or a sweep of `moebius bench` completed by expected parts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moebius.engine.costs import CostModel, CostPoint, ExpertMs, SwitchPoint
from moebius.engine.layout import Layout
from moebius.rollout.errors import BadInput
from moebius.rollout.plan_model import Gpu, PlanModel, expert_bytes_sent, kv_bytes_sent

# Shares of the link's data-sheet rate that direct peer writes reached between two H200s (experts, pages of KV).
EXPERT_RATE, KV_RATE = 0.83, 0.80
# Share of the memory's data-sheet rate that local copies of staged experts reached on a H200, reads and writes counted:
# 58 GB in 14.7 ms (docs/benchmarks/switch_30b_x2.json).
LOCAL_RATE = 0.82
_FULL_KV = 1_000_000  # tokens at which an expected switch gets its second point


@dataclass(frozen=True, slots=True)
class HostShare:
    """The part of a switch that moves no bytes. Assumed until measured."""

    fixed_ms: float = 15.0
    request_ms: float = 0.1


def expected_switch(model: PlanModel, gpu: Gpu, ranks: int, host: HostShare | None = None) -> list[SwitchPoint]:
    """Points of a switch in either direction: bytes at measured shares of the link's rate, and the host's part."""
    host = host or HostShare()
    experts = expected_experts(model, gpu, ranks).link
    kv = kv_bytes_sent(model, ranks, _FULL_KV) / (gpu.link_gb_s * KV_RATE * 1e6)
    fixed = host.fixed_ms + experts
    return [
        SwitchPoint(to=to, live=live, kv_tokens=tokens, ms=fixed + host.request_ms * live + kv * tokens / _FULL_KV)
        for to in (Layout.EP, Layout.TP)
        for live, tokens in ((0, 0), (1000, 0), (0, _FULL_KV))
    ]


def expected_experts(model: PlanModel, gpu: Gpu, ranks: int) -> ExpertMs:
    """Bytes at measured shares of the link's and of the memory's rate; a copy within a rank reads and writes."""
    sent = expert_bytes_sent(model, ranks)
    return ExpertMs(
        link=sent / (gpu.link_gb_s * EXPERT_RATE * 1e6),
        local=2 * sent * ranks / (ranks - 1) / (gpu.memory_gb_s * LOCAL_RATE * 1e6),
    )


def expected_kv_ns(model: PlanModel, gpu: Gpu, ranks: int) -> dict[Layout, float]:
    """Nanoseconds that one KV token of the global batch adds to an iteration, at the data sheet's memory rate."""
    share = {Layout.EP: 1 / ranks, Layout.TP: 1.0}
    return {layout: part * model.kv_bytes(layout, ranks) / gpu.memory_gb_s for layout, part in share.items()}


def load_costs(
    path: str | Path, *, model: PlanModel | None = None, gpu: Gpu | None = None, host: HostShare | None = None
) -> CostModel:
    """Costs from either kind of file. A sweep lacks contexts and switches: those are expected ones of `model`, `gpu`.

    Raises BadInput for another file, and for a sweep without a model and a GPU to complete it by.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BadInput(f"{path}: not valid JSON: {error}") from error
    if not isinstance(data, dict) or data.get("benchmark") != "sweep":
        try:
            costs = CostModel.load(path)
        except ValueError as error:
            raise BadInput(str(error)) from error
        if costs.switches or model is None or gpu is None:
            return costs
        return _completed(costs, model, gpu, host)
    costs = from_sweep(data, Path(path).name)
    if model is None or gpu is None:
        raise BadInput(
            f"{path} is a sweep, which holds no switch: name its model and GPU, to complete it by expected ones"
        )
    return _completed(costs, model, gpu, host)


def _completed(costs: CostModel, model: PlanModel, gpu: Gpu, host: HostShare | None) -> CostModel:
    update: dict[str, Any] = {}
    if not costs.switches:
        update |= {
            "switches": expected_switch(model, gpu, costs.ranks, host),
            "experts": expected_experts(model, gpu, costs.ranks),
        }
    if len({point.context for point in costs.points}) == 1 and not costs.kv_ns_per_token:
        update["kv_ns_per_token"] = expected_kv_ns(model, gpu, costs.ranks)
    names = {"switches": "switch", "kv_ns_per_token": "context"}
    expected = [*costs.expected, *(name for key, name in names.items() if key in update)]
    return costs.model_copy(update=update | {"expected": expected})


def from_sweep(data: dict[str, Any], source: str) -> CostModel:
    """Our own engine's curves of a `bench sweep`, without a switch. Raises BadInput when one is missing."""
    try:
        options = data["options"]
        # Requests decode `iterations` tokens while they are measured, after those that are left out.
        context = options["context"] + options["settle"] + options["iterations"] / 2
        ranks = options["setup"]["ranks"]
        curves = {curve["name"]: zip(curve["x"], curve["y"], strict=True) for curve in data["curves"]}
        points = [
            CostPoint(layout=layout, batch=round(float(x)), context=context, ms=y)
            for layout in (Layout.EP, Layout.TP)
            for x, y in curves[f"moebius_{layout.value.lower()}"]
        ]
        key = {name: str(value) for name, value in data["versions"].items()} | {
            "gpu": ", ".join(sorted(set(data["machine"]["gpus"]))) or "cpu"
        }
        return CostModel(ranks=ranks, points=points, key=dict(key), source=source)
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(
            f"{source}: a sweep with our engine in both layouts is needed (`moebius bench sweep`), found: {error!r}"
        ) from error


def ranks_in(path: str | Path) -> int:
    """Ranks that a file of either kind was measured on. Raises BadInput for another file."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        return int(data["options"]["setup"]["ranks"] if "benchmark" in data else data["ranks"])
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path}: neither costs of `moebius calibrate` nor a sweep of `moebius bench`") from error
