"""Writes expert weights of an update straight into the EP slots.

vLLM's own loader compares every checkpoint name with every entry of its expert mapping (thousands of string operations
per tensor) and visits experts of other ranks; here one tensor is one strided copy.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

_EXPERTS = re.compile(
    r"layers\.(?P<layer>\d+)\..*\.experts\.(?:(?P<expert>\d+)\.)?(?P<proj>\w+_proj|w[123])(?:\.weight)?$"
)


class ExpertWriter:
    """Knows where each expert tensor of a checkpoint lives on this rank.

    Args:
        w13: per MoE layer, [experts here, 2I, H]: gate rows, then up rows.
        w2: per MoE layer, [experts here, H, I].
        layers: number in the checkpoint of each MoE layer.
        first: the first expert this rank holds.
    """

    def __init__(
        self, w13: Sequence[torch.Tensor], w2: Sequence[torch.Tensor], layers: Sequence[int], first: int
    ) -> None:
        self._slots = {layer: pair for layer, *pair in zip(layers, w13, w2, strict=True)}
        self._first = first

    @torch.inference_mode()
    def write(self, name: str, tensor: torch.Tensor) -> bool:
        """Copy what this rank holds of `tensor` to its place; False if `name` is no expert weight.

        `tensor` is [I, H] (gate_proj, up_proj) or [H, I] (down_proj) of one expert, or the fused [E, 2I, H]
        (gate_up_proj) or [E, H, I] (down_proj) of all; w1, w3 and w2 are other names of gate, up and down. Names and
        shapes must have been checked before.
        """
        match = _EXPERTS.search(name)
        if match is None:
            return False
        w13, w2 = self._slots[int(match["layer"])]
        proj, held = match["proj"], w13.shape[0]
        if match["expert"] is None:
            target = w2 if proj == "down_proj" else w13
            target.copy_(tensor[self._first : self._first + held])
            return True
        row = int(match["expert"]) - self._first
        if 0 <= row < held:
            width = w13.shape[1] // 2
            match proj:
                case "down_proj" | "w2":
                    w2[row].copy_(tensor)
                case "gate_proj" | "w1":
                    w13[row, :width].copy_(tensor)
                case "up_proj" | "w3":
                    w13[row, width:].copy_(tensor)
        return True
