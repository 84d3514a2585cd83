"""Who owns what in each layout: pure arithmetic, no torch and no communication."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from moebius.engine.families import refusal

_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


class Layout(StrEnum):
    """How one model's weights, requests and KV are spread over the ranks."""

    EP = "EP"  # attention data-parallel, experts split by expert
    TP = "TP"  # everything split inside each matrix, every rank sees every request


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a mixture-of-experts model that decide what a switch moves. Counts, not bytes."""

    num_layers: int
    moe_layers: tuple[int, ...]  # indices of the layers with routed experts, ascending
    num_experts: int
    hidden: int
    intermediate: int  # of one routed expert
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any] | Any, ranks: int) -> ModelShape:
        """Read a Hugging Face `config.json` (a mapping, or a config object with `to_dict`).

        Raises ValueError, saying what is in the way, if the model has no routed experts, keeps state that a switch
        does not move, or cannot be spread over `ranks` ranks in both layouts.
        """
        values = _as_mapping(config)
        experts = next((int(values[key]) for key in _EXPERT_KEYS if values.get(key)), 0)
        if experts <= 0:
            raise ValueError(
                f"{_name(values)} is not a mixture-of-experts model: its config has none of {', '.join(_EXPERT_KEYS)}. "
                "Only models with routed experts have an EP layout; choose an MoE checkpoint."
            )
        if reason := refusal(values):
            raise ValueError(f"{_name(values)} {reason}")
        layers, hidden, heads = (
            _need(values, key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")
        )
        shape = cls(
            num_layers=layers,
            moe_layers=_moe_layers(values, layers),
            num_experts=experts,
            hidden=hidden,
            intermediate=int(values.get("moe_intermediate_size") or _need(values, "intermediate_size")),
            num_heads=heads,
            num_kv_heads=int(values.get("num_key_value_heads") or heads),
            head_dim=int(values.get("head_dim") or hidden // heads),
            vocab=_need(values, "vocab_size"),
        )
        if not shape.moe_layers:
            raise ValueError(f"{_name(values)} names {experts} experts but its config makes every layer dense.")
        shape.check(ranks)
        _check_dense(values, shape, ranks)
        return shape

    def check(self, ranks: int) -> None:
        """Raise ValueError if the model cannot be spread over `ranks` ranks in both layouts."""
        if ranks < 1:
            raise ValueError(f"a switch group needs at least one rank, got {ranks}")
        for count, what in (
            (self.num_experts, "experts"),
            (self.num_heads, "attention heads"),
            (self.intermediate, "columns of an expert (the moe intermediate size)"),
        ):
            if count % ranks:
                raise ValueError(
                    f"{count} {what} cannot be split evenly over {ranks} ranks ({count} % {ranks} = {count % ranks}). "
                    f"Use a number of ranks that divides {count}."
                )
        if self.num_kv_heads % ranks and ranks % self.num_kv_heads:
            raise ValueError(
                f"{self.num_kv_heads} KV heads can be neither split over nor replicated evenly on {ranks} ranks. "
                f"Use a number of ranks that divides {self.num_kv_heads} or is a multiple of it."
            )


@dataclass(frozen=True, slots=True)
class ShardMap:
    """Which part of the experts and of the KV cache each of `ranks` ranks holds in each layout.

    Raises ValueError at construction if the shape cannot be spread over that many ranks.
    """

    shape: ModelShape
    ranks: int

    def __post_init__(self) -> None:
        self.shape.check(self.ranks)

    @property
    def experts_per_rank(self) -> int:
        """Whole experts on a rank in EP."""
        return self.shape.num_experts // self.ranks

    @property
    def intermediate_per_rank(self) -> int:
        """Columns of every expert on a rank in TP."""
        return self.shape.intermediate // self.ranks

    @property
    def kv_heads_per_rank(self) -> int:
        """KV heads on a rank in TP; at least one, so heads are replicated when there are more ranks than heads."""
        return max(1, self.shape.num_kv_heads // self.ranks)

    @property
    def kv_replicas(self) -> int:
        """How many TP ranks hold a copy of the same KV head."""
        return max(1, self.ranks // self.shape.num_kv_heads)

    def ep_experts(self, rank: int) -> range:
        """Experts of `rank` in EP."""
        self._check_rank(rank)
        return range(rank * self.experts_per_rank, (rank + 1) * self.experts_per_rank)

    def expert_owner(self, expert: int) -> int:
        """The rank that holds `expert` in EP."""
        if not 0 <= expert < self.shape.num_experts:
            raise ValueError(f"expert {expert} is outside 0..{self.shape.num_experts - 1}")
        return expert // self.experts_per_rank

    def tp_intermediate(self, rank: int) -> slice:
        """Columns of every expert on `rank` in TP (of gate, of up, and of the input of the down projection)."""
        self._check_rank(rank)
        return slice(rank * self.intermediate_per_rank, (rank + 1) * self.intermediate_per_rank)

    def tp_heads(self, rank: int) -> range:
        """Query heads of `rank` in TP."""
        self._check_rank(rank)
        per_rank = self.shape.num_heads // self.ranks
        return range(rank * per_rank, (rank + 1) * per_rank)

    def tp_kv_heads(self, rank: int) -> range:
        """KV heads of `rank` in TP. With more ranks than heads, rank r holds head r * heads // ranks."""
        self._check_rank(rank)
        first = rank * self.shape.num_kv_heads // self.ranks
        return range(first, first + self.kv_heads_per_rank)

    @property
    def tp_pages_per_ep_page(self) -> int:
        """How many TP pages fit into the bytes of one EP page: the ranks, or the KV heads where those are fewer."""
        return self.shape.num_kv_heads // self.kv_heads_per_rank

    def kv_page_bytes(self, layout: Layout, page_size: int, itemsize: int) -> int:
        """Bytes of one page of one layer (K and V of `page_size` tokens) on a rank."""
        heads = self.shape.num_kv_heads if layout is Layout.EP else self.kv_heads_per_rank
        return heads * page_size * 2 * self.shape.head_dim * itemsize

    def kv_pages(self, layout: Layout, slot_bytes: int, page_size: int, itemsize: int) -> int:
        """Whole pages that a KV slot of `slot_bytes` holds. TP bytes come in multiples of the EP page's count."""
        ep_pages = slot_bytes // self.kv_page_bytes(Layout.EP, page_size, itemsize)
        return ep_pages if layout is Layout.EP else ep_pages * self.tp_pages_per_ep_page

    def expert_slot_bytes(self, itemsize: int) -> int:
        """Bytes of one layer's experts on a rank; the same in both layouts."""
        return self.experts_per_rank * 3 * self.shape.intermediate * self.shape.hidden * itemsize

    def expert_bytes_sent(self, itemsize: int) -> int:
        """Bytes of one layer's experts that a rank sends to its peers in a reshard, in either direction."""
        return self.expert_slot_bytes(itemsize) // self.ranks * (self.ranks - 1)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} is outside 0..{self.ranks - 1}")


def distribute(costs: Sequence[float], ranks: int) -> list[int]:
    """Spread samples over ranks: the longest first, each to the least loaded rank. Returns the rank of each sample.

    Graham's longest-processing-time rule: the fullest rank carries at most 4/3 of the best possible. Ties go to the
    sample named first, the rank with fewer samples (so costs of 0 spread too), then the lower rank; the answer is the
    same on every rank. Raises ValueError for `ranks` < 1 and for costs that are negative or not finite.
    """
    if ranks < 1:
        raise ValueError(f"cannot spread samples over {ranks} ranks")
    for index, cost in enumerate(costs):
        if not (math.isfinite(cost) and cost >= 0):
            raise ValueError(f"the cost of sample {index} is {cost}; costs must be finite and at least 0")
    chosen = [0] * len(costs)
    loads: list[tuple[float, int, int]] = [(0.0, 0, rank) for rank in range(ranks)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, count, rank = loads[0]
        chosen[index] = rank
        heapq.heapreplace(loads, (load + costs[index], count + 1, rank))
    return chosen


def place(costs: Sequence[float], owners: Sequence[int], ranks: int, slack: float = 0.05) -> list[int]:
    """Spread running requests over ranks, leaving them where they are as far as the balance allows.

    Longest first, each to the rank that owns it while that rank's load stays within (1 + slack) of the mean, else to
    the least loaded rank (ties: the lower rank). Moving a request costs its new owner a pass over all its tokens for
    detokenization, so few should move. The same on every rank. Raises ValueError as `distribute`.
    """
    distribute(costs, ranks)  # only for its checks
    limit = (1.0 + slack) * sum(costs) / ranks
    loads = [0.0] * ranks
    chosen = list(owners)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = owners[index]
        if loads[rank] + costs[index] > limit:
            rank = loads.index(min(loads))
        loads[rank] += costs[index]
        chosen[index] = rank
    return chosen


def _as_mapping(config: Mapping[str, Any] | Any) -> Mapping[str, Any]:
    values = config if isinstance(config, Mapping) else config.to_dict()
    inner = values.get("text_config")  # multimodal wrappers keep the language model one level down
    return inner if isinstance(inner, Mapping) and "num_hidden_layers" not in values else values


def _name(values: Mapping[str, Any]) -> str:
    return f"model type {values.get('model_type', 'unknown')!r}"


def _need(values: Mapping[str, Any], key: str) -> int:
    value = values.get(key)
    if not isinstance(value, int) or value <= 0:
        raise ValueError(f"{_name(values)}: config.json needs a positive integer {key!r}, found {value!r}")
    return value


def _check_dense(values: Mapping[str, Any], shape: ModelShape, ranks: int) -> None:
    """Dense layers and shared experts are split over TP ranks as well."""
    widths = {"shared_expert_intermediate_size": values.get("shared_expert_intermediate_size")}
    if len(shape.moe_layers) < shape.num_layers:
        widths["intermediate_size"] = values.get("intermediate_size")
    for key, width in widths.items():
        if width and int(width) % ranks:
            raise ValueError(f"{key} {width} cannot be split evenly over {ranks} ranks; use a number that divides it.")


def _moe_layers(values: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Indices of the layers with routed experts, by the rules that Hugging Face model families use."""
    dense = set(values.get("mlp_only_layers") or ())  # Qwen
    steps = [int(values.get(key) or 1) for key in ("decoder_sparse_step", "interleave_moe_layer_step")]  # Qwen, Llama 4
    first = int(values.get("first_k_dense_replace") or 0)  # DeepSeek, GLM
    frequency = values.get("moe_layer_freq") or 1  # DeepSeek (a number) and its descendants (one flag per layer)
    if isinstance(frequency, Sequence) and len(frequency) != layers:
        raise ValueError(f"{_name(values)}: moe_layer_freq has {len(frequency)} entries for {layers} layers")

    def sparse(layer: int) -> bool:
        by_frequency = bool(frequency[layer]) if isinstance(frequency, Sequence) else layer % int(frequency) == 0
        return layer >= first and layer not in dense and not any((layer + 1) % s for s in steps) and by_frequency

    return tuple(layer for layer in range(layers) if sparse(layer))
