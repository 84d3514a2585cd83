"""Changes to vLLM: only to the version they were written for, once, and seen to hold."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import types

import pytest
import torch

from moebius.engine import vllm_patches
from moebius.engine.layout import Layout
from moebius.engine.memory import SlotSizes, UnifiedBuffer
from moebius.engine.vllm_patches import PatchError


@pytest.mark.parametrize("found", ["0.25.1", "0.26.1", "1.0.0"])
def test_another_version_is_refused(found: str) -> None:
    with pytest.raises(PatchError, match=rf"vLLM {found} is installed.*0\.26\.0"):
        vllm_patches.require_version(found)


def test_no_vllm_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(PatchError, match="not installed"):
        vllm_patches.require_version()


def test_missing_place_is_an_error() -> None:
    owner = types.SimpleNamespace(__name__="Owner")
    with pytest.raises(PatchError, match=r"Owner\.gone"):
        vllm_patches._replace(owner, "gone", lambda original: original)


def test_a_place_is_changed_once() -> None:
    owner = types.SimpleNamespace(__name__="Owner", place=lambda: 1)
    for _ in range(2):
        vllm_patches._replace(owner, "place", lambda original: lambda: original() + 1)
    assert owner.place() == 2


def test_check_names_every_place_and_is_idempotent() -> None:
    """In a process of its own: the changes are global."""
    code = "from moebius.engine import vllm_patches as p; a = p.check(); assert a == p.check(); print(*a)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for place in ("create_weights", "_allocate_kv_cache_tensors", "make_group_name", "all_gatherv", "swap_states"):
        assert place in done.stdout


class Batch:
    """The part of vLLM's InputBatch that the corrections touch."""

    def __init__(self, rows: list[list[bool]]) -> None:
        self.allowed_token_ids_mask_cpu_tensor: torch.Tensor | None = torch.tensor(rows)

    def add_request(self, request: types.SimpleNamespace) -> int:
        return request.index


def test_new_request_does_not_inherit_a_mask() -> None:
    batch = Batch([[True, False], [True, True]])
    add = vllm_patches._fresh_allowed_ids_row(Batch.add_request)
    plain = types.SimpleNamespace(index=1, sampling_params=types.SimpleNamespace(allowed_token_ids=None))
    assert add(batch, plain) == 1
    restricted = types.SimpleNamespace(index=0, sampling_params=types.SimpleNamespace(allowed_token_ids=[1]))
    add(batch, restricted)
    assert batch.allowed_token_ids_mask_cpu_tensor is not None
    assert batch.allowed_token_ids_mask_cpu_tensor.tolist() == [[True, False], [False, False]]


def test_swapped_requests_keep_their_masks() -> None:
    batch = Batch([[True, False], [False, True]])

    def upstream(self: Batch, i1: int, i2: int) -> None:
        mask = self.allowed_token_ids_mask_cpu_tensor
        assert mask is not None
        mask[i1], mask[i2] = mask[i2], mask[i1]  # both rows end up alike

    vllm_patches._swapped_allowed_ids_rows(upstream)(batch, 0, 1)
    assert batch.allowed_token_ids_mask_cpu_tensor is not None
    assert batch.allowed_token_ids_mask_cpu_tensor.tolist() == [[False, True], [True, False]]


class Experts(torch.nn.Module):
    layer_name = "model.layers.0.mlp.experts"


def create_expert_weights(gate_and_up: bool, has_bias: bool, slot_bytes: int) -> Experts:
    """vLLM's own method, through the change, into one slot of `slot_bytes`: 2 experts, hidden 8, width 4, fp32."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    create = vllm_patches._expert_parameters_in_slots(UnquantizedFusedMoEMethod.create_weights)
    method = types.SimpleNamespace(moe=types.SimpleNamespace(is_act_and_mul=gate_and_up, has_bias=has_bias))
    layer = Experts()
    buffer = UnifiedBuffer(SlotSizes(1, slot_bytes, 1, 64), torch.device("cpu"))
    with vllm_patches.binding(buffer, Layout.EP) as bound:
        create(method, layer, 2, 8, 4, torch.float32)
    assert bound.expert_modules == [layer]
    assert all(buffer.owns(parameter) for parameter in layer.parameters())
    return layer


def test_experts_that_a_switch_cannot_move_are_refused() -> None:
    slot_bytes = 2 * 3 * 8 * 4 * 4
    assert create_expert_weights(True, False, slot_bytes).w2_weight.shape == (2, 8, 4)
    with pytest.raises(PatchError, match=r"w13_bias, w2_bias besides.*without biases"):
        create_expert_weights(True, True, slot_bytes)
    with pytest.raises(PatchError, match=f"take 512 bytes, their slot has {slot_bytes}"):
        create_expert_weights(False, False, slot_bytes)  # no gate projection
