"""Names and shapes of a full weight update, checked tensor by tensor. No vLLM here.

Trainers send MoE weights in one of two ways, and both are accepted, also mixed within one update:

* per expert, as in checkpoints: `...mlp.experts.3.gate_proj.weight` [I, H], `up_proj` [I, H], `down_proj` [H, I];
* fused, as in transformers 5 modules: `...mlp.experts.gate_up_proj` [E, 2I, H], `down_proj` [E, H, I], where the
  first I rows of `gate_up_proj` are the gate.

Both end up as per-expert names of the checkpoint, the ones vLLM's loaders know. Mixtral's checkpoints name the block
and its matrices otherwise (`block_sparse_moe.experts.3.w1.weight`) than the modules of transformers 5 do; both names
are accepted. E experts, I expert width, H hidden size.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

import torch

Shape = tuple[int, ...]

_PER_EXPERT = re.compile(r"^(?P<prefix>.*\.experts)\.(?P<expert>\d+)\.(?P<proj>gate_proj|up_proj|down_proj)\.weight$")
_FUSED = re.compile(r"^(?P<prefix>.*\.experts)\.(?P<proj>gate_up_proj|down_proj)$")
# By model type: what the modules of transformers 5 call it, and what the family's checkpoints (and vLLM) call it.
_CHECKPOINT_NAMES: dict[str, tuple[tuple[str, str], ...]] = {
    "mixtral": (
        (".mlp.", ".block_sparse_moe."),
        (".gate_proj.weight", ".w1.weight"),
        (".up_proj.weight", ".w3.weight"),
        (".down_proj.weight", ".w2.weight"),
    ),
}
_LISTED = 8  # names spelled out in an error before it says "and N more"


class ExpectedWeights:
    """What a full update of one model consists of.

    Args:
        shapes: names and shapes of the model's state dict, expert weights fused as described above.
        optional: names that may be left out because they share storage with another one (a tied `lm_head.weight`).
            They are checked when sent, and produce no tensors.
        renames: pairs of a part of a name above and its other spelling in checkpoints.

    Raises:
        ValueError: the expert weights have a layout other than the one above.
    """

    def __init__(
        self,
        shapes: Mapping[str, Shape],
        optional: frozenset[str] = frozenset(),
        renames: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self.shapes: dict[str, Shape] = {name: tuple(shape) for name, shape in shapes.items()}
        self.optional = optional
        self._renames = renames
        # per MoE block: (E, I, H)
        self._blocks: dict[str, tuple[int, int, int]] = {}
        for name in self.shapes:
            if ".experts." in name:
                self._add_block(name)

    @classmethod
    def from_model(cls, model: str) -> ExpectedWeights:
        """From a checkpoint directory (or model id): reads `config.json` only, allocates nothing."""
        from transformers import AutoConfig

        return cls.from_hf_config(AutoConfig.from_pretrained(model))

    @classmethod
    def from_hf_config(cls, config: Any) -> ExpectedWeights:
        """From a transformers config: the module is built on the meta device, so no memory is used.

        Raises ValueError as the constructor, and if the module has no expert weights by any known name.
        """
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config)
        shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        tied: frozenset[str] = frozenset()
        if getattr(config, "tie_word_embeddings", False):
            tied = frozenset(getattr(module, "_tied_weights_keys", None) or ()) & frozenset(shapes)
        expected = cls(shapes, tied, _CHECKPOINT_NAMES.get(config.model_type, ()))
        if not expected._blocks:
            raise ValueError(
                f"model type {config.model_type!r}: none of its weights is named ...experts.gate_up_proj, so its "
                "experts cannot be updated"
            )
        return expected

    def parts_of(self, name: str) -> list[str]:
        """Checkpoint names that the known name `name` stands for; one, except for a fused expert weight."""
        name = self._module_name(name)
        match = self._fused(name)
        if match is None:
            return [self._checkpoint_name(name)]
        experts = range(self._blocks[match["prefix"]][0])
        projections = ("gate_proj", "up_proj") if match["proj"] == "gate_up_proj" else ("down_proj",)
        return [self._checkpoint_name(f"{match['prefix']}.{e}.{proj}.weight") for e in experts for proj in projections]

    def shape_of(self, name: str) -> Shape:
        """Shape of `name`, fused or per expert.

        Raises:
            ValueError: the model has no such weight; the message names the nearest known one.
        """
        known = self._module_name(name)
        if known in self.shapes:
            return self.shapes[known]
        match = _PER_EXPERT.match(known)
        if match and match["prefix"] in self._blocks:
            experts, width, hidden = self._blocks[match["prefix"]]
            if int(match["expert"]) >= experts:
                raise ValueError(f"weight {name!r}: the model has experts 0 to {experts - 1} only")
            return (hidden, width) if match["proj"] == "down_proj" else (width, hidden)
        raise ValueError(f"weight {name!r} is not part of this model{self._hint(known)}")

    def normalise(self, name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Check one tensor and return it under its checkpoint names, per expert, as views: nothing is copied.

        Raises:
            ValueError: unknown name, wrong shape, or a dtype that is not floating point.
        """
        expected = self.shape_of(name)
        if tuple(tensor.shape) != expected:
            raise ValueError(f"weight {name!r}: expected shape {list(expected)}, got {list(tensor.shape)}")
        if not tensor.is_floating_point():
            raise ValueError(f"weight {name!r}: expected a floating-point tensor, got {tensor.dtype}")
        if self._module_name(name) in self.optional:
            return []
        parts = self.parts_of(name)
        if self._fused(self._module_name(name)) is None:
            return [(parts[0], tensor)]
        rows = expected[1] // 2 if name.endswith("gate_up_proj") else expected[1]
        views = [piece for expert in tensor.unbind(0) for piece in expert.split(rows, dim=0)]
        return list(zip(parts, views, strict=True))

    def _module_name(self, name: str) -> str:
        for module, checkpoint in self._renames:
            name = name.replace(checkpoint, module)
        return name

    def _checkpoint_name(self, name: str) -> str:
        for module, checkpoint in self._renames:
            name = name.replace(module, checkpoint)
        return name

    def _fused(self, name: str) -> re.Match[str] | None:
        match = _FUSED.match(name)
        return match if match and match["prefix"] in self._blocks else None

    def _add_block(self, name: str) -> None:
        match = _FUSED.match(name)
        if not match:
            raise ValueError(
                f"expert weight {name!r} is not supported: only gate_up_proj and down_proj without bias are"
            )
        prefix = match["prefix"]
        gate_up = self.shapes.get(f"{prefix}.gate_up_proj", ())
        down = self.shapes.get(f"{prefix}.down_proj", ())
        if len(gate_up) == 3 and len(down) == 3:
            experts, hidden, width = down
            if gate_up == (experts, 2 * width, hidden):
                self._blocks[prefix] = (experts, width, hidden)
                return
        raise ValueError(
            f"expert weights under {prefix!r} have an unsupported layout: gate_up_proj {list(gate_up)} and down_proj "
            f"{list(down)}, expected [E, 2I, H] and [E, H, I]"
        )

    def _hint(self, name: str) -> str:
        known = list(self.shapes)
        if re.search(r"\.experts\.\d+\.", name):
            known = [f"{prefix}.{proj}.weight" for prefix in self._blocks for proj in _expert_paths(name)]
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        return f"; the nearest known name is {nearest[0]!r}" if nearest else ""


def _expert_paths(name: str) -> list[str]:
    match = re.search(r"\.experts\.(\d+)\.", name)
    expert = match[1] if match else "0"
    return [f"{expert}.{proj}" for proj in ("gate_proj", "up_proj", "down_proj")]


class WeightSession:
    """One update from begin to commit: remembers what has arrived."""

    def __init__(self, expected: ExpectedWeights) -> None:
        self.expected = expected
        self._seen: set[str] = set()

    def accept(self, name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Check one tensor, note its arrival and return it under checkpoint names (views; empty for a tied copy).

        Raises:
            ValueError: unknown name, wrong shape or dtype, or (a part of) it has arrived before. Nothing is noted then.
        """
        pieces = self.expected.normalise(name, tensor)
        arrived = [part for part, _ in pieces] or [name]
        repeated = [part for part in arrived if part in self._seen]
        if repeated:
            also = "" if repeated == [name] else f" (as {repeated[0]!r})"
            raise ValueError(f"weight {name!r} was sent twice in one update{also}")
        self._seen.update(arrived)
        return pieces

    def missing(self) -> list[str]:
        """Names that have not arrived: a fused name where all its parts are missing, else the missing parts."""
        names: list[str] = []
        for name in self.expected.shapes:
            if name in self.expected.optional:
                continue
            parts = self.expected.parts_of(name)
            absent = [part for part in parts if part not in self._seen]
            names.extend([name] if len(absent) == len(parts) else absent)
        return names

    def finish(self) -> None:
        """Check that the update is complete.

        Raises:
            ValueError: weights are missing; the message lists them.
        """
        names = self.missing()
        if names:
            more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            raise ValueError(f"{len(names)} weights are missing from the update: {', '.join(names[:_LISTED])}{more}")
