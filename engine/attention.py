"""One set of attention projections for both layouts: TP's are views of EP's, which has all heads.

The output projection of a TP rank is a run of columns of EP's, a view with EP's row stride, as matrix products take it.
Its query, key and value heads are three runs of rows, which a product wants as one. Therefore EP's rows of a few heads
change places when a switch goes to TP, so that the rank's own lie together, and change back on the way to EP: within a
rank's own memory, in two launches per layer, without a copy of anything and without any rank needing another's. The
paper keeps one layout's weights too and rebuilds EP's by an all-gather (arXiv:2606.26607, section 3.1).

So attention has a *form*, EP's or TP's, as experts have a layout they stand in. Only EP's matrices are loaded.
"""

from __future__ import annotations

from typing import Any

import torch

from moebius.engine.dense import DenseWeights
from moebius.engine.layout import Layout

QKV, OUT = ".qkv_proj", ".o_proj"


class AttentionError(RuntimeError):
    """The model's attention is not of the kind that two layouts can share."""


def head_moves(heads: int, kv_heads: int, ranks: int, rank: int) -> tuple[int, int, list[tuple[int, int]]]:
    """How one rank's heads come to lie together in a matrix of `heads` query, then `kv_heads` key, then value heads.

    Returns (first, count, moves): after head `moves[i][0]` has been replaced by what was head `moves[i][1]`, for all i
    at once, heads first .. first + count - 1 are the rank's query heads, its key heads, its value heads. The second
    entries are the same heads as the first ones, in another order. Heads are replicated where `ranks > kv_heads`.
    """
    share, kv_share = heads // ranks, max(1, kv_heads // ranks)
    first_kv = rank * kv_heads // ranks
    first = rank * share
    wanted = [heads + part * kv_heads + first_kv + i for part in (0, 1) for i in range(kv_share)]
    order = list(range(heads + 2 * kv_heads))  # order[i]: which head is to stand at i
    for place, head in enumerate(wanted, start=first + share):
        at = order.index(head)
        order[place], order[at] = order[at], order[place]
    return first, share + len(wanted), [(i, head) for i, head in enumerate(order) if i != head]


class SharedAttention:
    """The projections of one rank. `form` is the layout whose products are right at present."""

    def __init__(self, dense: DenseWeights) -> None:
        self.form = Layout.EP
        self._dense = dense
        self._whole: dict[str, torch.Tensor] = {}  # by the layer's name; made with TP, which is built first
        self._bound: dict[Layout, set[str]] = {layout: set() for layout in Layout}
        self._heads: dict[str, torch.Tensor] = {}  # the same memory as [heads, bytes of one]
        self._moves: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}  # by shape: places, what comes there
        self._shape: dict[str, tuple[int, ...]] = {}
        self._scratch: torch.Tensor | None = None

    @staticmethod
    def takes(layer: Any) -> bool:
        """Whether the layer is a query-key-value or an output projection of attention."""
        name = str(getattr(layer, "prefix", ""))
        return (name.endswith(QKV) and hasattr(layer, "total_num_kv_heads")) or (
            name.endswith(OUT) and hasattr(layer, "input_size_per_partition")
        )

    def bind(self, layer: Any, meta: torch.Tensor, layout: Layout, device: torch.device) -> torch.Tensor:
        """The memory of the layer's weight, whose shape and type are those of `meta`.

        Raises AttentionError where the two layouts cannot share it.
        """
        name = layer.prefix
        if layout is Layout.EP:
            whole = self._whole.get(name)
            if whole is None or whole.shape != meta.shape or whole.dtype != meta.dtype:
                raise AttentionError(f"{name}: EP's weight is {list(meta.shape)}, not what TP's is a part of; {_HELP}")
            self._bound[Layout.EP].add(name)
            return whole
        ranks, rank = layer.tp_size, layer.tp_rank
        rows, columns = meta.shape
        if name.endswith(OUT):
            whole = self._make(name, (rows, columns * ranks), meta, device)
            view = whole[:, rank * columns : (rank + 1) * columns]
        else:
            view = self._bind_heads(layer, meta, ranks, rank, device)
        self._bound[Layout.TP].add(name)
        return view

    def _bind_heads(self, layer: Any, meta: torch.Tensor, ranks: int, rank: int, device: torch.device) -> torch.Tensor:
        heads, kv_heads, size = layer.total_num_heads, layer.total_num_kv_heads, layer.head_size
        if getattr(layer, "v_head_size", size) != size or (ranks % kv_heads and kv_heads % ranks):
            raise AttentionError(f"{layer.prefix}: heads of different sizes, or {kv_heads} on {ranks} ranks; {_HELP}")
        total, width = heads + 2 * kv_heads, meta.shape[1]
        first, count, moves = head_moves(heads, kv_heads, ranks, rank)
        if count * size != meta.shape[0]:
            raise AttentionError(f"{layer.prefix}: {meta.shape[0]} rows on a rank, {count} heads of {size}; {_HELP}")
        whole = self._make(layer.prefix, (total * size, width), meta, device)
        key = (heads, kv_heads, size, width)
        if key not in self._moves:
            places, sources = zip(*moves, strict=True) if moves else ((), ())
            self._moves[key] = (
                torch.tensor(places, dtype=torch.long, device=device),
                torch.tensor(sources, dtype=torch.long, device=device),
            )
            needed = len(moves) * size * width
            if self._scratch is None or self._scratch.numel() < needed:
                self._scratch = torch.empty(needed, dtype=meta.dtype, device=device)
        self._shape[layer.prefix] = key
        self._heads[layer.prefix] = whole.view(total, size * width)
        return whole[first * size : (first + count) * size]

    def _make(self, name: str, shape: tuple[int, int], meta: torch.Tensor, device: torch.device) -> torch.Tensor:
        # Zeros: TP warms up on them before EP's weights are loaded.
        self._whole[name] = self._dense.zeros(shape, meta.dtype, device)
        return self._whole[name]

    def check(self, layers: int) -> None:
        """Raise AttentionError unless both layouts have both projections of so many layers here."""
        for layout, names in self._bound.items():
            found = [sum(name.endswith(kind) for name in names) for kind in (QKV, OUT)]
            if found != [layers, layers]:
                raise AttentionError(
                    f"{layout.value} has {found[0]} qkv_proj and {found[1]} o_proj in {layers} layers; {_HELP}"
                )

    @torch.inference_mode()
    def to(self, layout: Layout) -> None:
        """Bring the heads into the form of `layout`, in order with the current stream; nothing to do if they are."""
        if layout is self.form:
            return
        for name, heads in self._heads.items():
            places, sources = self._moves[self._shape[name]]
            if layout is Layout.EP:
                places, sources = sources, places
            assert self._scratch is not None
            held = self._scratch[: len(places) * heads.shape[1]].view(len(places), heads.shape[1])
            torch.index_select(heads, 0, sources, out=held)
            heads.index_copy_(0, places, held)
        self.form = layout


_HELP = "set engine.attention_weights: both"
