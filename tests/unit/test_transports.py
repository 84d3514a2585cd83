"""Weights over a broadcast group, from files, and the buckets that all transports use."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from moebius.rollout.errors import BadInput, MoebiusError
from moebius.rollout.transports import broadcast, files
from moebius.rollout.transports.broadcast import Broadcaster
from moebius.rollout.weights import Entry, packed, plan
from moebius.rollout.worker import _calling

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b": torch.randn(5, 7).to(torch.bfloat16),
    "empty": torch.empty(0, 3),
    "strided": torch.arange(20.0).view(4, 5).t(),
    "scalar": torch.tensor(3, dtype=torch.int64),
}


def received(offer: tuple[str, list[Any]]) -> list[dict[str, torch.Tensor] | Exception]:
    """What each rank gets, one thread per rank; views are copied before the next bucket overwrites them."""
    source, args = offer
    found: list[Any] = [None] * len(args)

    def rank(index: int) -> None:
        try:
            buckets = [{n: t.clone() for n, t in ts} for ts in _calling(source)(*args[index])]
            found[index] = {name: tensor for bucket in buckets for name, tensor in bucket.items()}
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(len(args))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_broadcasts_bring_every_byte_to_every_rank_update_after_update() -> None:
    with Broadcaster(2, "gloo", bucket_bytes=64, timeout_s=60) as sender:
        for round_ in range(3):
            tensors = {name: tensor + round_ for name, tensor in TENSORS.items()}
            for got in received(sender.offer(iter(tensors.items()))):
                assert isinstance(got, dict) and list(got) == list(tensors)
                for name, tensor in tensors.items():
                    assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor)
    assert len({member for _, member in broadcast._members}) == 2, "connections are kept"


def test_a_trainer_that_fails_says_so_to_the_ranks_and_can_go_on() -> None:
    def broken() -> Any:
        yield "a", TENSORS["a"]
        raise ZeroDivisionError("half way")

    with Broadcaster(1, "gloo", bucket_bytes=1, timeout_s=60) as sender:
        [got] = received(sender.offer(broken()))
        assert isinstance(got, ValueError) and "half way" in str(got)
        with pytest.raises(MoebiusError, match="weights were not sent: half way"):
            sender.wait()
        [got] = received(sender.offer(TENSORS))
        assert isinstance(got, dict) and len(got) == len(TENSORS)


def test_an_offer_that_nobody_reads_is_given_up_at_once_and_the_next_one_arrives() -> None:
    """As when `pull_update` was refused: its ranks never asked."""
    begun = time.monotonic()

    def update() -> None:
        with Broadcaster(1, "gloo", timeout_s=600) as sender:
            sender.offer(TENSORS)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        update()
    with Broadcaster(2, "gloo", timeout_s=600) as sender:
        _, args = sender.offer(TENSORS)
        alone: list[Any] = []
        reader = threading.Thread(target=lambda: alone.append(received((broadcast.SOURCE, args[:1]))))  # the other died
        reader.start()
        time.sleep(0.1)
        sender.cancel()
        reader.join(20)
        assert isinstance(alone[0][0], Exception), "who reads is not left waiting"
        sender.cancel()
        for got in received(sender.offer(TENSORS)):
            assert isinstance(got, dict) and len(got) == len(TENSORS)
    assert time.monotonic() - begun < 30


def test_a_rank_that_was_started_again_joins_again_and_nothing_piles_up() -> None:
    with Broadcaster(2, "gloo", timeout_s=60) as sender:
        kept = []
        for round_ in range(4):
            if round_ == 2:
                broadcast._members.pop(next(key for key in broadcast._members if key[1] == 1))
            offer = sender.offer(TENSORS)
            assert all(isinstance(got, dict) and len(got) == len(TENSORS) for got in received(offer))
            sender.wait()
            kept.append(len([key for key in sender._link.server.list_keys() if "group" not in key]))
        assert len(set(kept)) == 1 and sender._link._generation == 2


def test_files(tmp_path: Any) -> None:
    save_file({"a": TENSORS["a"]}, tmp_path / "model-1.safetensors")
    save_file({"b": TENSORS["b"]}, tmp_path / "model-2.safetensors")
    got = {name: tensor for batch in files.read(str(tmp_path)) for name, tensor in batch}
    assert list(got) == ["a", "b"] and torch.equal(got["b"], TENSORS["b"])
    with pytest.raises(ValueError, match=r"no \*\.safetensors files"):
        next(files.read(str(tmp_path / "nowhere")))


@pytest.mark.parametrize(
    "source", ["", "moebius.rollout.nothing:f", "moebius.rollout.transports.files:nothing", "json"]
)
def test_sources_that_are_none(source: str) -> None:
    with pytest.raises(ValueError, match="name an importable function as module:function"):
        _calling(source)()
    assert _calling("json:dumps")([1]) == "[1]"


def test_unknown_transports_and_dtypes() -> None:
    with pytest.raises(BadInput, match="'host' or 'ipc'"):
        packed({}, 1, "pigeon")  # type: ignore[arg-type]
    if not torch.cuda.is_available():
        with pytest.raises(BadInput, match="needs CUDA"):
            next(packed(TENSORS, 1, "ipc"))
    entries, nbytes = plan(TENSORS.items())
    assert [Entry.from_json(json.loads(json.dumps(e.to_json()))) for e in entries] == entries and nbytes % 64 == 0
    with pytest.raises(ValueError, match="unknown dtype 'float33'"):
        Entry.from_json(["x", "float33", [1], 0, 4])
