"""Slots of the unified buffer: aliasing between layouts, never between a layer's source and its target."""

from __future__ import annotations

import itertools

import pytest
import torch

from moebius.engine.layout import Layout
from moebius.engine.memory import ALIGNMENT, HostBacking, SlotSizes, UnifiedBuffer

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


def test_host_memory_goes_back_and_comes_again_where_it_was() -> None:
    # Large against what else the process may take or give back meanwhile.
    sizes = SlotSizes(expert_layers=1, expert_bytes=64 << 20, kv_layers=2, kv_bytes=64 << 20)
    buffer = UnifiedBuffer(sizes, torch.device("cpu"))
    where = buffer.storage.data_ptr()
    buffer.storage.fill_(7)
    before = resident()
    assert buffer.release(["kv"]) == sizes.kv_region
    assert before - resident() > 0.95 * sizes.kv_region
    assert buffer.release(["kv"]) == 0, "it is away already"
    assert (buffer.expert_slot(Layout.EP, 0) == 7).all(), "the other region stays"
    buffer.kv_slot(Layout.EP, 0).fill_(9)  # nobody should
    assert buffer.restore() == sizes.kv_region
    assert not buffer.kv_slot(Layout.EP, 0).any()
    assert buffer.storage.data_ptr() == where
    buffer.storage.fill_(7)
    full = resident()
    assert abs(full - before) < 0.05 * sizes.total_bytes
    assert buffer.release() == sizes.total_bytes and full - resident() > 0.95 * sizes.total_bytes


def resident() -> int:
    """Bytes."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def test_regions_that_do_not_end_at_pages() -> None:
    with pytest.raises(ValueError, match="pages have"):
        HostBacking(1 << 20).release(5, 4096)
