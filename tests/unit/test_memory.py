"""Slots of the unified buffer: aliasing between layouts, never between a layer's source and its target."""

from __future__ import annotations

import itertools

import pytest
import torch

from moebius.engine.layout import Layout
from moebius.engine.memory import ALIGNMENT, SlotSizes, UnifiedBuffer

SIZES = SlotSizes(expert_layers=3, expert_bytes=5000, kv_layers=4, kv_bytes=ALIGNMENT)


@pytest.fixture
def buffer() -> UnifiedBuffer:
    return UnifiedBuffer(SIZES, torch.device("cpu"))


@pytest.mark.parametrize("kind", ["expert_slot", "kv_slot"])
def test_tp_layer_i_is_slot_i_and_ep_layer_i_is_slot_i_plus_1(buffer: UnifiedBuffer, kind: str) -> None:
    slot = getattr(buffer, kind)
    layers = SIZES.expert_layers if kind == "expert_slot" else SIZES.kv_layers
    for layer in range(layers - 1):
        assert slot(Layout.EP, layer).data_ptr() == slot(Layout.TP, layer + 1).data_ptr()
    starts = [slot(Layout.TP, i).data_ptr() for i in range(layers)] + [slot(Layout.EP, layers - 1).data_ptr()]
    size = slot(Layout.TP, 0).numel()
    assert all(b - a >= size for a, b in itertools.pairwise(starts)), "slots overlap"


def test_experts_and_kv_are_apart_and_inside(buffer: UnifiedBuffer) -> None:
    last_expert, first_kv = buffer.expert_slot(Layout.EP, 2), buffer.kv_slot(Layout.TP, 0)
    assert last_expert.data_ptr() + last_expert.numel() <= first_kv.data_ptr()
    assert buffer.owns(last_expert)
    assert buffer.owns(buffer.kv_slot(Layout.EP, 3))
    assert not buffer.owns(torch.zeros(8))
    assert buffer.storage.numel() == SIZES.total_bytes


def test_starts_without_nan(buffer: UnifiedBuffer) -> None:
    assert not buffer.storage.any()


@pytest.mark.parametrize("ordinal", [-1, 3])
def test_layer_out_of_range(buffer: UnifiedBuffer, ordinal: int) -> None:
    with pytest.raises(IndexError, match="of 3"):
        buffer.expert_slot(Layout.EP, ordinal)
