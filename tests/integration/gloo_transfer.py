"""In place of vLLM's NCCLWeightTransferEngine at a TRL trainer's side, where there are no GPUs: the same over gloo."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from moebius.rollout.transports import trainer as transport


class GlooTransferEngine:
    """All but the bytes' way is as on GPUs."""

    @staticmethod
    def trainer_init(info: dict[str, Any]) -> Any:
        own = transport.open_trainer(info["master_port"], info["world_size"], info["master_address"])
        return SimpleNamespace(own=own, group=SimpleNamespace(store=None, socket=None))

    @staticmethod
    def trainer_send_weights(iterator: Iterator[tuple[str, torch.Tensor]], trainer_args: Any) -> None:
        assert trainer_args.packed
        transport.send(trainer_args.group.own, iterator, packed=True)
