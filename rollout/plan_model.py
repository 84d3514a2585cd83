"""What an iteration has to move and compute, from a model's sizes and a GPU's data sheet: the roofline of both layouts.

Bytes and operations follow from the model; how far real kernels and the host stay from the sheet does not, and is in
`Factors`, which `fit` takes from a measured sweep. Pure arithmetic.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from moebius.engine.costs import CostModel, CostPoint, largest_of, nonnegative_fit
from moebius.engine.layout import Layout, ModelShape, ShardMap
from moebius.rollout.errors import BadInput, unknown_key

ITEM = 2  # bytes of a bfloat16 number
_TILE = 16  # rows of the smallest block of grouped matrix products; every expert's last one is half empty on average


@dataclass(frozen=True, slots=True)
class Gpu:
    """Data-sheet figures; the link is NVLink in one direction."""

    name: str
    memory_gb: float
    memory_gb_s: float
    tflops: float  # bfloat16, dense
    link_gb_s: float


@dataclass(frozen=True, slots=True)
class PlanModel:
    """A model's sizes. Parameter counts are numbers, not bytes."""

    name: str
    shape: ModelShape
    top_k: int
    dense_intermediate: int
    shared_intermediate: int
    tied: bool

    @classmethod
    def from_config(cls, name: str, config: Mapping[str, Any], ranks: int) -> PlanModel:
        """From a Hugging Face config. Raises BadInput where it cannot be spread over so many ranks."""
        try:
            shape = ModelShape.from_hf_config(config, ranks)
        except ValueError as error:
            raise BadInput(f"{name}: {error}") from error
        top_k = config.get("num_experts_per_tok") or config.get("moe_topk")
        if not top_k:
            raise BadInput(f"{name}: its config has no num_experts_per_tok; add how many experts a token goes through")
        shared = int(config.get("n_shared_experts") or 0) * shape.intermediate
        return cls(
            name=name,
            shape=shape,
            top_k=int(top_k),
            dense_intermediate=int(config.get("intermediate_size") or 0),
            shared_intermediate=shared or int(config.get("shared_expert_intermediate_size") or 0),
            tied=bool(config.get("tie_word_embeddings")),
        )

    @property
    def expert(self) -> int:
        """Parameters of one routed expert."""
        return 3 * self.shape.hidden * self.shape.intermediate

    def attention(self, layout: Layout, ranks: int) -> float:
        """Parameters of one layer's attention on a rank; KV heads are replicated where ranks are more."""
        shape, parts = self.shape, 1 if layout is Layout.EP else ranks
        kv = shape.num_kv_heads if layout is Layout.EP else max(1, shape.num_kv_heads // ranks)
        return shape.hidden * shape.head_dim * (2 * shape.num_heads / parts + 2 * kv)

    def mlp(self, layout: Layout, ranks: int) -> float:
        """Parameters on a rank of all layers' dense and shared-expert parts."""
        dense = (self.shape.num_layers - len(self.shape.moe_layers)) * self.dense_intermediate
        shared = len(self.shape.moe_layers) * self.shared_intermediate
        return 3 * self.shape.hidden * (dense + shared) / (1 if layout is Layout.EP else ranks)

    def vocabulary(self, layout: Layout, ranks: int) -> float:
        """Parameters of one vocabulary matrix on a rank."""
        return self.shape.vocab * self.shape.hidden / (1 if layout is Layout.EP else ranks)

    def kv_bytes(self, layout: Layout, ranks: int) -> int:
        """Bytes of one token's KV on a rank that holds it."""
        heads = self.shape.num_kv_heads if layout is Layout.EP else max(1, self.shape.num_kv_heads // ranks)
        return 2 * heads * self.shape.head_dim * ITEM * self.shape.num_layers


@dataclass(frozen=True, slots=True)
class Work:
    """One decode iteration of the busiest rank, in ms at the data sheet's rates, and what else takes time."""

    memory: float  # weights and KV read
    compute: float  # products, MoE activations written and read, bytes between ranks: what grows with the batch
    rows: float  # requests that one rank schedules and samples
    layers: int


@dataclass(frozen=True, slots=True)
class Factors:
    """How reality differs from the sheet. 1 is the sheet's rate, larger is slower."""

    memory: float
    compute: float
    row_us: float  # per request of a rank and iteration: scheduling and sampling
    ep_layer_us: float  # floor per layer: launches, small kernels, latency of collectives
    tp_layer_us: float
    source: str
    worst_error: float = 0.0  # of the fit, as a share


# `fit` of docs/benchmarks/sweep_30b_x2.json; a test repeats it.
H200 = Factors(1.0394, 2.4039, 0.24595, 88.498, 70.097, "sweep_30b_x2.json: Qwen3-30B-A3B's shape on two H200s", 0.0295)


def work(model: PlanModel, gpu: Gpu, ranks: int, layout: Layout, batch: float, context: float) -> Work:
    """What the busiest rank does in one iteration of `batch` requests, each attending to `context` tokens."""
    shape, moe = model.shape, len(model.shape.moe_layers)
    ep = layout is Layout.EP
    rows = batch / ranks if ep else batch
    # Experts that any token goes to, if tokens choose independently and evenly.
    hit = 1.0 - (1.0 - model.top_k / shape.num_experts) ** batch
    per_rank = shape.num_experts / ranks
    routed = batch * model.top_k
    if ep:  # all wait for the rank whose experts are most in demand
        spread = largest_of(ranks)
        experts = min(per_rank, per_rank * hit + spread * math.sqrt(per_rank * hit * (1 - hit)))
        expert_rows = min(routed, routed / ranks + spread * math.sqrt(routed / ranks))
        width = float(shape.intermediate)
    else:
        experts, expert_rows, width = shape.num_experts * hit, float(routed), shape.intermediate / ranks
    expert_numbers = experts * 3 * shape.hidden * width
    dense = shape.num_layers * model.attention(layout, ranks) + model.mlp(layout, ranks)
    head = model.vocabulary(layout, ranks)
    kv = rows * context * model.kv_bytes(layout, ranks)
    memory = ITEM * (moe * expert_numbers + dense + head) + kv
    padded = expert_rows + experts * _TILE / 2
    products = 2 * (rows * (dense + head) + moe * padded * 3 * shape.hidden * width)
    activations = moe * expert_rows * (2 * shape.hidden + 3 * width) * ITEM
    hidden_bytes = batch * shape.hidden * ITEM * (ranks - 1) / ranks
    # EP: all-gather and reduce-scatter around the experts. TP: two all-reduces, each as much as both of these.
    between = hidden_bytes * (2 * moe if ep else 4 * shape.num_layers)
    compute = products / (gpu.tflops * 1e9) + activations / (gpu.memory_gb_s * 1e6) + between / (gpu.link_gb_s * 1e6)
    return Work(memory / (gpu.memory_gb_s * 1e6), compute, rows, shape.num_layers)


def iteration_ms(done: Work, factors: Factors, layout: Layout) -> float:
    """Expected milliseconds of an iteration."""
    floor = factors.ep_layer_us if layout is Layout.EP else factors.tp_layer_us
    device = factors.memory * done.memory + factors.compute * done.compute
    return device + (factors.row_us * done.rows + floor * done.layers) / 1e3


def fit(costs: CostModel, model: PlanModel, gpu: Gpu) -> Factors:
    """Factors that make the roofline meet measured iterations: least squares of relative errors, none below the sheet.

    Raises BadInput with fewer measured points than factors.
    """
    if len(costs.points) < 5:
        raise BadInput(f"five factors cannot be fitted to {len(costs.points)} measured points: measure more batches")
    rows, rest, weights = [], [], []
    for point in costs.points:
        done = work(model, gpu, costs.ranks, point.layout, point.batch, point.context)
        floors = [done.layers / 1e3 * (point.layout is layout) for layout in (Layout.EP, Layout.TP)]
        rows.append([done.memory, done.compute, done.rows / 1e3, *floors])
        rest.append(point.ms - done.memory - done.compute)
        weights.append(1.0 / point.ms)
    memory, compute, row_us, ep_us, tp_us = (float(v) for v in nonnegative_fit(rows, rest, weights))
    found = Factors(1.0 + memory, 1.0 + compute, row_us, ep_us, tp_us, costs.source)
    errors = [
        abs(iteration_ms(work(model, gpu, costs.ranks, p.layout, p.batch, p.context), found, p.layout) / p.ms - 1)
        for p in costs.points
    ]
    return Factors(found.memory, found.compute, row_us, ep_us, tp_us, costs.source, max(errors))


def expected_points(
    model: PlanModel, gpu: Gpu, ranks: int, factors: Factors, *, top: int = 4096, contexts: tuple[int, ...] = (0, 8192)
) -> list[CostPoint]:
    """The analytic curves as points of a cost model, at powers of two (and half-way between) up to `top`."""
    batches = sorted({round(2 ** (i / 2)) for i in range(2 * int(math.log2(top)) + 1)})
    return [
        CostPoint(
            layout=layout,
            batch=batch,
            context=context,
            ms=iteration_ms(work(model, gpu, ranks, layout, batch, context), factors, layout),
        )
        for layout in (Layout.EP, Layout.TP)
        for batch in batches
        for context in contexts
    ]


def expert_bytes_sent(model: PlanModel, ranks: int) -> int:
    """Bytes that each rank sends to its peers when the experts change layout."""
    return len(model.shape.moe_layers) * ShardMap(model.shape, ranks).expert_bytes_sent(ITEM)


def kv_bytes_sent(model: PlanModel, ranks: int, kv_tokens: float) -> float:
    """Bytes that each rank sends when `kv_tokens` (over all ranks, evenly spread) go from EP to TP."""
    return kv_tokens / ranks * (ranks - 1) * model.kv_bytes(Layout.TP, ranks)


def load_model(name: str, ranks: int) -> PlanModel:
    """A shipped shape (the part of a model id after the slash, any case) or a config.json, or the folder it is in."""
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        try:
            return PlanModel.from_config(name, json.loads(path.read_text(encoding="utf-8")), ranks)
        except json.JSONDecodeError as error:
            raise BadInput(f"{path}: not a model's config.json: {error}") from error
    shipped = _data()["models"]
    key = name.rsplit("/", 1)[-1].lower()
    if key not in shipped:
        raise BadInput(f"--model {name}: {unknown_key(key, shipped)} Or give the path of the model's config.json.")
    return PlanModel.from_config(name, shipped[key], ranks)


def load_gpu(name: str) -> Gpu:
    """A GPU by its short name, as h200. Raises BadInput for an unknown one."""
    known = _data()["gpus"]
    if name.lower() not in known:
        raise BadInput(f"--gpu {name}: {unknown_key(name, known)}")
    return Gpu(name.lower(), **known[name.lower()])


@cache
def _data() -> dict[str, dict[str, Any]]:
    data: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("plan_data.json").read_text(encoding="utf-8"))
    return data
