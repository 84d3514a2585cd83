"""Drawing tokens without the noise tensor: the CPU path, and the Triton kernel in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moebius.kernels.gumbel import gumbel_argmax
from moebius.kernels.noise import derive_seed, gumbel_noise

CHECKS = Path(__file__).with_name("gumbel_checks.py")


def draw_arguments(rows: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = torch.randn((rows, vocab), generator=torch.Generator().manual_seed(rows)) * 3
    seeds = torch.tensor([derive_seed(2, 0, i, 0) for i in range(rows)], dtype=torch.int64)
    return logits, seeds, torch.arange(rows, dtype=torch.int32) * 3


@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (1, 9), (5, 1003), (64, 4096), (0, 7)])
def test_cpu_draw_is_the_argmax_of_logits_and_noise(rows: int, vocab: int) -> None:
    logits, seeds, positions = draw_arguments(rows, vocab)
    before = logits.clone()
    wanted = (logits + gumbel_noise(seeds, positions, vocab)).argmax(dim=-1)
    for kind in (torch.int32, torch.int64):
        found = gumbel_argmax(logits, seeds, positions.to(kind))
        assert found.dtype == torch.int64
        assert torch.equal(found, wanted)
    assert torch.equal(logits, before)
    wider = torch.full((rows, vocab + 5), 1e9)
    wider[:, :vocab] = logits
    assert torch.equal(gumbel_argmax(wider[:, :vocab], seeds, positions), wanted)


def test_masked_entries_never_win() -> None:
    logits, seeds, positions = draw_arguments(200, 50)
    logits[:, 5:] = -math.inf
    found = gumbel_argmax(logits, seeds, positions)
    assert (found < 5).all()
    assert len(found.unique()) == 5
    logits[:, :4] = -math.inf
    assert (gumbel_argmax(logits, seeds, positions) == 4).all()


def test_bad_arguments_are_refused() -> None:
    logits, seeds, positions = draw_arguments(4, 8)
    with pytest.raises(ValueError, match="fp32"):
        gumbel_argmax(logits.bfloat16(), seeds, positions)
    with pytest.raises(ValueError, match="contiguous rows"):
        gumbel_argmax(logits.t().contiguous().t(), seeds, positions)
    with pytest.raises(ValueError, match="one seed and one position for each of 4 rows"):
        gumbel_argmax(logits, seeds[:3], positions)
    with pytest.raises(ValueError, match="seeds must be int64"):
        gumbel_argmax(logits, seeds.int(), positions)
    with pytest.raises(ValueError, match="on the logits' device"):
        gumbel_argmax(logits, seeds.to("meta"), positions)


def run_python(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], env=os.environ | env, capture_output=True, text=True, timeout=600, check=False
    )


def test_cpu_hosts_need_no_triton() -> None:
    code = """
import sys
sys.modules["triton"] = None  # importing it raises ImportError
import torch
from moebius.kernels.gumbel import gumbel_argmax
one = torch.ones(1, dtype=torch.int64)
print(gumbel_argmax(torch.tensor([[-torch.inf, 0.0]]), one, one).item())
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1"


def test_triton_kernel_in_the_interpreter() -> None:
    """Words bit for bit, noise, tokens, masks and ties: see `gumbel_checks.py`."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed, so there is no interpreter to run its kernels in")
    done = run_python(str(CHECKS), TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "all hold"
