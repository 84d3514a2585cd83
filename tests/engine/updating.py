"""Weight updates of an engine under test, from checkpoint folders."""

from __future__ import annotations

from typing import Any


def load_checkpoint(engine: Any, directory: str, version: int, fused: bool) -> None:
    """A full weight update from a checkpoint directory, in several calls, per expert or fused."""
    from safetensors.torch import load_file

    from moebius.engine.weights import ExpectedWeights

    tensors = load_file(f"{directory}/model.safetensors")
    if fused:
        tensors = fuse(tensors, ExpectedWeights.from_model(directory))
    engine.begin_update(version)
    items = list(tensors.items())
    for start in range(0, len(items), 7):
        engine.update_tensors(items[start : start + 7])
    engine.commit_update()


def fuse(tensors: dict[str, Any], expected: Any) -> dict[str, Any]:
    """Per-expert tensors stacked into the fused names a transformers 5 module uses."""
    import torch

    fused = {}
    for name in expected.shapes:
        parts = [tensors[part] for part in expected.parts_of(name)]
        if parts == [tensors.get(name)] or len(parts) == 1:
            fused[name] = parts[0]
        elif "gate_up" in name:
            fused[name] = torch.stack([torch.cat(parts[i : i + 2]) for i in range(0, len(parts), 2)])
        else:
            fused[name] = torch.stack(parts)
    return fused


def read_checkpoint(directory: str, trouble: str | None) -> Any:
    """A weight source; `trouble`: what goes wrong with it."""
    from safetensors.torch import load_file

    items = list(load_file(f"{directory}/model.safetensors").items())
    for start in range(0, len(items), 7):
        if trouble == "raises" and start >= 14:
            raise OSError("the trainer is gone")
        if not (trouble == "short" and start == 7):
            yield items[start : start + 7]
        if trouble == "shape" and start == 7:
            yield [(items[0][0], items[0][1][:-1])]
    read_checkpoint.read_to_the_end = True  # type: ignore[attr-defined]


def pull(engine: Any, version: int, mode: str, directory: str, trouble: str | None) -> Any:
    read_checkpoint.read_to_the_end = False  # type: ignore[attr-defined]
    return engine.pull_update(version, read_checkpoint, (directory, trouble), mode)


def was_read_to_the_end(engine: Any) -> bool:
    return read_checkpoint.read_to_the_end  # type: ignore[attr-defined]
