"""Groups on GPUs that their caller holds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from moebius.rollout import placement
from moebius.rollout.config import RolloutConfig
from moebius.rollout.errors import BadInput, MoebiusError, validate

A, B = 28 * "aa", 28 * "bb"  # ids of nodes


def config(**place: object) -> RolloutConfig:
    fields = {"ranks": 2, "engine": {"model": "m"}, "sampling": {"max_tokens": 1}, "place": place}
    return validate(RolloutConfig, fields, "settings")


def test_devices_decide_where_a_group_runs() -> None:
    assert placement.resolve_device(config(devices=["4", "5"])) == "cuda"
    assert placement.resolve_device(config()) == "cpu"


@pytest.mark.parametrize("devices", [["0"], ["0", "0"], ["0", "1", "2"]])
def test_each_rank_needs_a_device_of_its_own(devices: list[str]) -> None:
    with pytest.raises(BadInput, match="2 ranks need as many different GPUs"):
        config(devices=devices)


def test_cuda_without_devices() -> None:
    with pytest.raises(BadInput, match="name the GPU of each rank"):
        validate(RolloutConfig, {"ranks": 2, "engine": {"model": "m"}, "device": "cuda", "place": {}}, "settings")


def test_a_node_by_name_or_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [{"NodeID": A, "Alive": True}, {"NodeID": B, "Alive": False}]
    fake = SimpleNamespace(nodes=lambda: nodes, get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: A))
    monkeypatch.setattr(placement, "ray", fake)
    for wanted in (A, None):
        found = placement.on_node(wanted)
        assert (found.node_id, found.soft) == (A, False)
    with pytest.raises(MoebiusError, match=f"has no node '{B}'; it has {A}"):
        placement.on_node(B)
