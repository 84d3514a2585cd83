"""`moebius plan`: memory, crossover, switch and gain of a model on so many GPUs, before any of it was run there."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from moebius.engine.costs import CostModel
from moebius.engine.layout import Layout, ShardMap
from moebius.rollout.cost_files import HostShare, expected_experts, expected_switch
from moebius.rollout.errors import BadInput
from moebius.rollout.plan_model import ITEM, Factors, Gpu, PlanModel, expected_points, expert_bytes_sent
from moebius.rollout.simulate import Limits, Trace, compare, projection

SHARES = (0.65, 0.85)  # of a training step that rollouts take (arXiv:2606.26607, section 6.3)

# The Moebius paper's own figures for Qwen3-235B-A22B on eight H200s (arXiv:2606.26607, sections 2.1, 6.3, 6.4).
PAPER = {
    "crossover_low": 128.0,
    "crossover_high": 256.0,
    "tp_lead_small_batch": 1.5,
    "ep_lead_large_batch": 1.5,
    "switch_drained_ms": 152.0,
    "gain_low": 1.16,
    "gain_high": 1.25,
    "gain_mean": 1.22,
}


@dataclass(frozen=True, slots=True)
class Memory:
    """One rank's memory in bytes, and the KV it leaves room for, in tokens over all ranks."""

    experts: float
    spare_slot: float  # of experts: what lets both layouts share the memory
    ep_rest: float  # attention, dense parts, vocabulary of EP
    tp_rest: float
    reserve: float  # graphs, communication buffers, workspace: assumed
    usable: float
    kv_bytes: float  # what is left for KV with both layouts resident
    kv_tokens: dict[Layout, int]  # over all ranks, both layouts resident
    static_kv_tokens: dict[Layout, int]  # had the engine only that layout

    @property
    def fits(self) -> bool:
        """Whether anything is left for KV."""
        return self.kv_bytes > 0


@dataclass(frozen=True, slots=True)
class Plan:
    """What to expect. Everything is computed, unless `costs.source` and `costs.expected` say otherwise."""

    model: PlanModel
    gpu: Gpu
    ranks: int
    memory: Memory
    costs: CostModel
    context: float  # mean tokens per live sample for which crossover and leads are stated
    crossover: int
    leads: dict[int, float]  # batch -> EP's time over TP's; above 1 TP is faster
    switch_drained_ms: float
    switch_at_crossover_ms: float
    reshard_bytes: float  # experts that a rank sends in a switch
    staged_layers: int  # whose experts free KV pages hold at the crossover, so that they can be sent ahead
    switch_prepared_ms: float  # at the crossover, with those staged
    rows: list[dict[str, float]] = field(default_factory=list)  # one per simulated step
    notes: list[str] = field(default_factory=list)

    @property
    def staged_share(self) -> float:
        """Of all MoE layers."""
        return self.staged_layers / len(self.model.shape.moe_layers)

    def gains(self) -> tuple[float, float, float]:
        """Least, mean and greatest gain of the predictive policy over the better static layout of each step."""
        found = [min(row["static_ep"], row["static_tp"]) / row["predictive"] for row in self.rows]
        return min(found), statistics.fmean(found), max(found)

    def numbers(self) -> dict[str, float]:
        """Flat results."""
        low, mean, high = self.gains()
        worse = [max(row["static_ep"], row["static_tp"]) / row["predictive"] for row in self.rows]
        numbers = {
            "crossover_batch": float(self.crossover),
            "expected_gain": mean,
            "reshard_gb": self.reshard_bytes / 1e9,
            "switch_ms": self.switch_drained_ms,
            "switch_drained_ms": self.switch_drained_ms,
            "switch_at_crossover_ms": self.switch_at_crossover_ms,
            "staged_layers": float(self.staged_layers),
            "staged_gb": self.reshard_bytes * self.staged_share / 1e9,
            "switch_at_crossover_prepared_ms": self.switch_prepared_ms,
            "gain_low": low,
            "gain_mean": mean,
            "gain_high": high,
            "gain_over_worse_static_high": max(worse),
        }
        numbers |= {f"ep_over_tp_batch_{batch}": lead for batch, lead in self.leads.items()}
        for share in SHARES:
            numbers[f"end_to_end_gain_at_{share * 100:.0f}_pct"] = projection(mean, share)
        memory = self.memory
        numbers |= {
            "experts_gb": memory.experts / 1e9,
            "spare_slot_gb": memory.spare_slot / 1e9,
            "other_weights_ep_gb": memory.ep_rest / 1e9,
            "other_weights_tp_gb": memory.tp_rest / 1e9,
            "kv_gb": memory.kv_bytes / 1e9,
            "kv_tokens_ep": float(memory.kv_tokens[Layout.EP]),
            "kv_tokens_tp": float(memory.kv_tokens[Layout.TP]),
            "static_kv_tokens_ep": float(memory.static_kv_tokens[Layout.EP]),
            "static_kv_tokens_tp": float(memory.static_kv_tokens[Layout.TP]),
        }
        return numbers

    def settings(self) -> dict[str, Any]:
        """What to put into a configuration's `engine`."""
        tp_tokens = self.memory.kv_tokens[Layout.TP]
        return {
            "kv_cache_bytes": int(self.memory.kv_bytes) >> 30 << 30,
            "policy": {
                "kind": "rollout",
                "threshold": min(self.crossover, max(1, int(tp_tokens / max(1, self.context)))),
            },
        }


def memory_of(model: PlanModel, gpu: Gpu, ranks: int, *, share: float = 0.9, reserve_gb: float = 6.0) -> Memory:
    """Bytes of a rank with both layouts resident: `share` of the GPU, `reserve_gb` of it neither weights nor KV."""
    moe, shape = len(model.shape.moe_layers), model.shape
    slot = model.expert * shape.num_experts / ranks * ITEM
    rest = {}
    for layout in (Layout.EP, Layout.TP):
        matrices = 1 if model.tied else 2
        rest[layout] = ITEM * (
            shape.num_layers * model.attention(layout, ranks)
            + model.mlp(layout, ranks)
            + matrices * model.vocabulary(layout, ranks)
            + moe * shape.hidden * shape.num_experts  # routers
        )
    usable, reserve = share * gpu.memory_gb * 1e9, reserve_gb * 1e9
    both = usable - reserve - (moe + 1) * slot - rest[Layout.EP] - rest[Layout.TP]
    kv = both * shape.num_layers / (shape.num_layers + 1)  # KV has a spare slot too
    copies = {Layout.EP: ranks, Layout.TP: 1}  # in EP each rank holds other tokens
    per_token = {layout: model.kv_bytes(layout, ranks) for layout in copies}
    alone = {layout: usable - reserve - moe * slot - rest[layout] for layout in copies}
    return Memory(
        experts=moe * slot,
        spare_slot=slot,
        ep_rest=rest[Layout.EP],
        tp_rest=rest[Layout.TP],
        reserve=reserve,
        usable=usable,
        kv_bytes=kv,
        kv_tokens={layout: max(0, int(kv / per_token[layout]) * n) for layout, n in copies.items()},
        static_kv_tokens={layout: max(0, int(alone[layout] / per_token[layout]) * n) for layout, n in copies.items()},
    )


def staged_layers(model: PlanModel, ranks: int, room: float) -> int:
    """The lowest layers whose experts `room` bytes of free KV pages of a rank hold; 0 where a switch is not prepared.

    As the engine has it (moebius.kernels.rooms, moebius.engine.staging): what peers send of a layer, and of the last
    one all, unless it is the model's last; fewer than a quarter of the layers are not worth it.
    """
    layers, sent = len(model.shape.moe_layers), ShardMap(model.shape, ranks).expert_bytes_sent(ITEM)
    if ranks == 1:
        return 0
    found = layers if layers * sent <= room else min(layers - 1, math.floor((room - sent / (ranks - 1)) / sent))
    return found if 4 * found >= layers else 0


def make_plan(
    model: PlanModel,
    gpu: Gpu,
    ranks: int,
    traces: Sequence[Trace],
    factors: Factors,
    *,
    costs: CostModel | None = None,
    host: HostShare | None = None,
    memory: Memory | None = None,
) -> Plan:
    """The plan for these steps. `costs`, measured on such a machine, replace the expected curves.

    Raises BadInput when the weights do not fit, or `costs` are of another number of ranks.
    """
    memory = memory or memory_of(model, gpu, ranks)
    if not memory.fits:
        need = (memory.experts + memory.spare_slot + memory.ep_rest + memory.tp_rest + memory.reserve) / 1e9
        raise BadInput(
            f"{model.name} needs {need:.0f} GB per rank on {ranks} ranks before any KV, of a {gpu.name} "
            f"{memory.usable / 1e9:.0f} GB are usable: use more GPUs"
        )
    if costs is None:
        costs = CostModel(
            ranks=ranks,
            points=expected_points(model, gpu, ranks, factors),
            switches=expected_switch(model, gpu, ranks, host),
            experts=expected_experts(model, gpu, ranks),
            source=f"expected: roofline of {gpu.name} with factors of {factors.source}",
            expected=["iterations", "context", "switch"],
        )
    elif costs.ranks != ranks:
        raise BadInput(f"the costs are of {costs.ranks} ranks, the plan is for {ranks}: leave --costs out")
    context = traces[0].prompt_tokens + statistics.median(traces[0].lengths)
    crossover = costs.threshold(context)
    low, high = max(costs.measured_range(lo)[0] for lo in Layout), min(costs.measured_range(lo)[1] for lo in Layout)
    rows = compare(traces, costs, crossover, Limits({Layout.TP: memory.kv_tokens[Layout.TP]}))
    # Half of the pages at most, and four of 16 tokens are left to each sample until the switch.
    used = crossover * (context + 64) / max(1, memory.kv_tokens[Layout.EP])
    staged = staged_layers(model, ranks, min(0.5, max(0.0, 1 - used)) * memory.kv_bytes)
    share = staged / len(model.shape.moe_layers)
    at_crossover = (Layout.TP, crossover, crossover * context)
    if costs.experts is None:
        costs = costs.model_copy(update={"experts": expected_experts(model, gpu, ranks)})
    return Plan(
        model=model,
        gpu=gpu,
        ranks=ranks,
        memory=memory,
        costs=costs,
        context=context,
        crossover=crossover,
        leads={
            batch: float(costs.ms(Layout.EP, batch, context) / costs.ms(Layout.TP, batch, context))
            for batch in (8, 32, 128, 256, 512, 1024, 2048)
            if low <= batch <= high
        },
        switch_drained_ms=float(costs.switch_ms(Layout.TP, 0, 0)),
        switch_at_crossover_ms=float(costs.switch_ms(*at_crossover)),
        reshard_bytes=expert_bytes_sent(model, ranks),
        staged_layers=staged,
        switch_prepared_ms=float(costs.switch_ms(*at_crossover, share)),
        rows=rows,
        notes=[*_notes(model, gpu, ranks, memory, costs, traces, factors), _staging_note(model, staged)],
    )


def _staging_note(model: PlanModel, staged: int) -> str:
    layers = len(model.shape.moe_layers)
    if not staged:
        return "no switch is prepared at the crossover: KV pages that are free hold fewer than a quarter of the layers"
    return f"at the crossover, free KV pages hold the experts of {staged} of {layers} layers that are sent ahead"


def _notes(
    model: PlanModel,
    gpu: Gpu,
    ranks: int,
    memory: Memory,
    costs: CostModel,
    traces: Sequence[Trace],
    factors: Factors,
) -> list[str]:
    notes = []
    if costs.expected:
        notes.append(
            f"expected, not measured here: {', '.join(costs.expected)}; efficiencies are those of {factors.source} "
            f"(met within {100 * factors.worst_error:.1f} %) and {gpu.name}'s data sheet"
        )
    measured = [part for part in ("iterations", "context", "switch") if part not in costs.expected]
    if measured:
        notes.append(f"measured: {', '.join(measured)} ({costs.source})")
    if ranks > model.shape.num_kv_heads:
        notes.append(
            f"{model.shape.num_kv_heads} KV heads on {ranks} ranks: TP holds each head "
            f"{ranks // model.shape.num_kv_heads} times, so it has room for fewer tokens than EP"
        )
    peak = max(_peak(trace) for trace in traces)
    notes.extend(
        f"the steps hold up to {peak:,} tokens of KV, {layout.value} has room for {memory.kv_tokens[layout]:,}: "
        f"samples would wait in {layout.value}, which is not simulated"
        for layout in (Layout.EP, Layout.TP)
        if peak > memory.kv_tokens[layout]
    )
    sent = expert_bytes_sent(model, ranks) / 1e9
    notes.append(f"a switch sends {sent:.1f} GB of experts per rank; its host part is assumed until it is measured")
    return notes


def _peak(trace: Trace) -> int:
    """Most tokens of KV held at once when all samples run."""
    ordered = sorted(trace.lengths)
    count = len(ordered)
    return max((count - i) * (trace.prompt_tokens + length) for i, length in enumerate(ordered))


def beside_paper(plan: Plan) -> tuple[dict[str, float], list[str]]:
    """The paper's figures beside the plan's for its setting, and where they differ."""
    low, mean, high = plan.gains()
    ours = {
        "tp_lead_small_batch": plan.leads[8],
        "ep_lead_large_batch": 1 / plan.leads[2048],
        "switch_drained_ms": plan.switch_drained_ms,
        "gain_low": low,
        "gain_high": high,
        "gain_mean": mean,
    }
    numbers = {f"paper_{name}": value for name, value in PAPER.items()}
    where = "inside" if PAPER["crossover_low"] <= plan.crossover <= PAPER["crossover_high"] else "outside"
    words = [f"crossover {plan.crossover} ({plan.context:.0f} tokens each): {where} the paper's 128 to 256"]
    for name, value in ours.items():
        off = 100 * (value / PAPER[name] - 1)
        words.append(f"{name}: {value:.3g}, the paper has {PAPER[name]:.3g} ({off:+.0f} %)")
        numbers[f"off_pct_{name}"] = off
    words.append(
        "the paper measured SGLang with DeepEP's all-to-all; the plan's floors are those of vLLM with all-gather on "
        "two GPUs, so that agreement at eight is no validation"
    )
    return numbers, words


def chart(plan: Plan) -> list[tuple[str, list[float], list[float]]]:
    """(name, batches, ms) of both curves at the plan's context."""
    top = min(plan.costs.measured_range(layout)[1] for layout in Layout)
    batches = [2.0**i for i in range(int(math.log2(top)) + 1)]
    return [
        (layout.value, batches, [float(ms) for ms in plan.costs.ms(layout, batches, plan.context)]) for layout in Layout
    ]
