"""Weights from a checkpoint folder that every rank can read, for trainers that save what they train."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SOURCE = f"{__name__}:read"
BATCH_BYTES = 256 << 20  # handed on at once


def read(folder: str) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """All tensors of the safetensors files in `folder`, mapped into memory and not copied.

    `pull_update(version, files.SOURCE, [(folder,)] * ranks)`. Raises ValueError where there are none.
    """
    from safetensors import safe_open

    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder}: no *.safetensors files in it; give the folder of a saved checkpoint")
    batch, nbytes = [], 0
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (it is no mapping)
                batch.append((name, tensors.get_tensor(name)))
                nbytes += batch[-1][1].numel() * batch[-1][1].element_size()
                if nbytes >= BATCH_BYTES:
                    yield batch
                    batch, nbytes = [], 0
            if batch:
                yield batch
                batch, nbytes = [], 0
