"""Checks a model folder before any process is started for it: seconds instead of a failed start of the whole group."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from moebius.engine.config import EngineConfig
from moebius.engine.layout import ModelShape
from moebius.rollout.errors import BadInput

_INDEX = "model.safetensors.index.json"
_MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors format


def check_model(config: EngineConfig, ranks: int) -> Path:
    """The folder of `config.model`, after checking its config.json and, unless weights are dummies, their files.

    A model id is looked up in the local Hugging Face cache. Raises BadInput naming the file and the fault.
    """
    folder = _folder(config.model)
    path = folder / "config.json"
    hf_config = _read_json(path) | config.hf_overrides
    try:
        ModelShape.from_hf_config(hf_config, ranks)
    except ValueError as error:
        raise BadInput(f"{path}: {error}") from error
    if config.load_format != "dummy":
        _check_weights(folder, only_safetensors=config.load_format == "safetensors")
    return folder


def _folder(model: str) -> Path:
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if folder.exists():
        raise BadInput(f"engine.model={model}: a file, expected the folder that holds config.json")
    is_id = model.count("/") == 1 and model[0] not in "./~" and not folder.parent.is_dir()
    if not is_id:
        demo = "; `make demo` makes the demo's model" if Path(model).parts[-2:] == ("demo", "model") else ""
        raise BadInput(f"engine.model={model}: no such folder{demo}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, FileNotFoundError) as error:
        raise BadInput(
            f"engine.model={model}: no such folder, and no such model in the local Hugging Face cache; "
            f"give a folder, or fetch it with `hf download {model}`"
        ) from error


def _check_weights(folder: Path, *, only_safetensors: bool) -> None:
    files = sorted(folder.glob("*.safetensors"))
    index = folder / _INDEX
    if index.exists():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise BadInput(f"{index}: has no 'weight_map'; fetch the checkpoint again")
        files = [folder / name for name in sorted(set(weight_map.values()))]
        absent = [file.name for file in files if not file.exists()]
        if absent:
            raise BadInput(f"{folder}: {len(absent)} weight files named by {_INDEX} are missing, first {absent[0]}")
    if not files:
        if not only_safetensors and any(folder.glob("*.bin")):
            return
        raise BadInput(f'{folder}: no *.safetensors files; set engine.load_format="dummy" to run with random weights')
    for file in files:
        _check_safetensors(file)


def _check_safetensors(path: Path) -> None:
    """The header is readable and the file as long as it says (format: 8-byte length, JSON header, data)."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise BadInput(f"{path}: not a safetensors file ({size} bytes); fetch it again (a Git LFS pointer?)")
        try:
            header = json.loads(file.read(length))
            end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise BadInput(f"{path}: its safetensors header is damaged ({error}); fetch it again") from error
    if size != 8 + length + end:
        raise BadInput(f"{path}: {size} bytes, its header tells of {8 + length + end}; fetch it again (cut off?)")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"{path}: not found; engine.model must be the folder of a Hugging Face checkpoint") from None
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise BadInput(f"{path}: expected a JSON object, got {type(data).__name__}")
    return data
