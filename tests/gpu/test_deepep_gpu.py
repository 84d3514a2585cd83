"""What the changes for deepep_v2 rest on, with vLLM's real kernels on one GPU; deep_ep itself is not needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moebius.engine import deepep_patches
from tests.unit.deepep_checks import Case, stock_experts

pytestmark = pytest.mark.gpu


def test_alignment_leaves_out_ids_of_nobody() -> None:
    """vLLM's pull request 47785 is in 0.26.0: slots of -1 are in no expert's block, with few experts and with many."""
    from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size

    for experts in (8, 128):
        ids = torch.tensor([[4, -1], [5, 7], [-1, 6], [-1, -1]], device="cuda")
        slots, _, padded = moe_align_block_size(ids, 16, experts)
        named = slots[: int(padded)]
        assert sorted(named[named < ids.numel()].tolist()) == [0, 2, 3, 5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_stock_experts_sum_stale_slots_and_ours_do_not(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    case: Any = Case(device="cuda", dtype=dtype, hidden=256, width=128)
    experts, right = stock_experts(), case.right()
    kind = type(experts)
    stock = case.run(experts, kind.apply)
    assert torch.allclose(stock[1], right[1], atol=0.05)
    assert not torch.allclose(stock[0], right[0], atol=0.05) and not torch.allclose(stock[3], right[3], atol=0.05)
    monkeypatch.setattr(kind, "moe_sum", deepep_patches._sums_what_was_written(kind.moe_sum))
    ours = case.run(experts, deepep_patches._knows_its_slots(kind.apply))
    assert torch.allclose(ours, right, atol=0.05)
