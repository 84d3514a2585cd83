"""Imports from the repository root, whose folder `kernels` has the name of a package that transformers looks for."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_python(code: str, cwd: Path, pythonpath: str | None = None) -> str:
    env = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    if pythonpath is not None:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [pythonpath, env.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_transformers_and_vllm_work_from_the_repository_root() -> None:
    pytest.importorskip("transformers")
    code = """
import importlib.util, pathlib
found = pathlib.Path(importlib.util.find_spec("kernels").origin).resolve()
assert found == pathlib.Path("kernels/__init__.py").resolve(), found  # or this test shows nothing
import transformers
from transformers.integrations import hub_kernels
from transformers.utils.import_utils import is_kernels_available
assert not is_kernels_available()
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
sizes = dict(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=8)
model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(num_experts=2, moe_intermediate_size=8, **sizes))
assert isinstance(model, Qwen3MoeForCausalLM)
import vllm
print("vllm", vllm.__version__)
"""
    assert "vllm 0.26" in run_python(code, ROOT, pythonpath=str(ROOT))


def test_packages_import_from_another_folder(tmp_path: Path) -> None:
    code = "import moebius.rollout, moebius.engine, moebius.kernels; print(moebius.kernels.__file__)"
    assert Path(run_python(code, tmp_path).strip()).resolve() == ROOT / "kernels" / "__init__.py"


def test_bare_names_are_not_importable_elsewhere(tmp_path: Path) -> None:
    code = "import importlib.util as u; print([n for n in ('kernels', 'engine', 'rollout') if u.find_spec(n)])"
    assert run_python(code, tmp_path).strip() == "[]"


def test_importing_the_service_loads_neither_vllm_nor_torch(tmp_path: Path) -> None:
    code = """
import sys
import moebius.rollout, moebius.rollout.cli, moebius.rollout.config, moebius.rollout.doctor, moebius.rollout.demo
print([name for name in ("vllm", "torch", "transformers") if name in sys.modules])
"""
    assert run_python(code, tmp_path).strip() == "[]"


def test_importing_the_group_does_not_load_vllm(tmp_path: Path) -> None:
    code = "import sys, moebius.rollout.group; print('vllm' in sys.modules)"
    assert run_python(code, tmp_path).strip() == "False"


def test_every_package_folder_is_named_in_pyproject() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = {
        init.parent.relative_to(ROOT).as_posix().replace("/", ".")
        for top in ("rollout", "engine", "kernels")
        for init in (ROOT / top).rglob("__init__.py")
    }
    assert set(settings["packages"]) == {f"moebius.{name}" for name in folders}
    # A subpackage is found below its mapped parent, so only the three top folders need a mapping.
    assert settings["package-dir"] == {f"moebius.{top}": top for top in ("rollout", "engine", "kernels")}
