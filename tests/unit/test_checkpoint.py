"""Checks of a model folder before a group is started for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from moebius.engine.config import EngineConfig
from moebius.rollout.checkpoint import check_model
from moebius.rollout.errors import BadInput

MOE = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 64,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    save_file({"a": torch.ones(8)}, tmp_path / "model.safetensors")
    return tmp_path


def check(folder: Path | str, ranks: int = 2, **engine: Any) -> Path:
    return check_model(EngineConfig(model=str(folder), **engine), ranks)


def test_a_whole_folder_passes(folder):
    assert check(folder) == folder.resolve()


def test_relative_paths_become_absolute(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    assert check(folder.name) == folder.resolve()


@pytest.mark.parametrize("model", ["./nowhere", "/no/such/folder", "nowhere", "some-org/model-that-nobody-has"])
def test_a_missing_folder(model, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(BadInput, match="no such folder"):
        check(model)


def test_a_file_instead_of_a_folder(folder):
    with pytest.raises(BadInput, match="a file, expected the folder"):
        check(folder / "config.json")


@pytest.mark.parametrize(
    ("text", "words"),
    [(None, "not found"), ("{", "cannot be read as JSON"), ("[]", "expected a JSON object, got list")],
)
def test_a_bad_config(folder, text, words):
    path = folder / "config.json"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(BadInput, match=f"config.json: {words}"):
        check(folder)


def test_dense_models_and_odd_rank_counts(folder):
    with pytest.raises(BadInput, match=r"config.json: .*3"):
        check(folder, ranks=3)
    dense = {key: value for key, value in MOE.items() if "experts" not in key}
    (folder / "config.json").write_text(json.dumps(dense | {"model_type": "qwen3"}))
    with pytest.raises(BadInput, match="not a mixture-of-experts model"):
        check(folder)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "not a safetensors file"),
        (b"\x04\0\0\0\0\0\0\0abcd", "header is damaged"),
        (b"\x02\0\0\0\0\0\0\0[]", "header is damaged"),
    ],
)
def test_files_that_are_no_safetensors(folder, content, words):
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(BadInput, match=f"model.safetensors: .*{words}"):
        check(folder)


def test_a_cut_file_is_named(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BadInput, match=r"model.safetensors: \d+ bytes, its header tells of \d+"):
        check(folder)


def test_no_weights_unless_dummy(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(BadInput, match="load_format"):
        check(folder)
    check(folder, load_format="dummy")
    (folder / "pytorch_model.bin").write_bytes(b"x")
    check(folder)
    with pytest.raises(BadInput, match="load_format"):
        check(folder, load_format="safetensors")


def test_a_shard_named_by_the_index_is_missing(folder):
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadInput, match=r"first model-2\.safetensors"):
        check(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(BadInput, match="no 'weight_map'"):
        check(folder)


def test_the_absent_model_of_the_demo_is_told_how_to_make(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match="runs/demo/model: no such folder; `make demo` makes"):
        check("runs/demo/model")
