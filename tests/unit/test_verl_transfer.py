"""Weights from verl's own sender through shared memory, read to the end, given up, or not read at all."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest
import torch

from moebius.rollout.integrations.verl import transfer


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl without devices, as with VERL_PLATFORM=cpu."""
    import verl.plugin.platform.platform_manager as manager

    from moebius.rollout.integrations.verl import cpu_platform

    monkeypatch.setattr(torch.distributed, "init_process_group", torch.distributed.init_process_group)
    monkeypatch.setattr(manager.PlatformRegistry, "_platforms", dict(manager.PlatformRegistry._platforms))
    monkeypatch.setattr(manager, "_current_platform", None)
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    cpu_platform.register()


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s.sock"


def weights(count: int = 12) -> list[tuple[str, torch.Tensor]]:
    """Of several dtypes and sizes; together more than a bucket of 1 MB."""
    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return [(f"w{i}", torch.randn(97, 1000 + i, generator=generator).to(dtypes[i % 3])) for i in range(count)]


class Sending(threading.Thread):
    """A trainer process's part, in a thread."""

    def __init__(self, address: str, pairs: list[tuple[str, torch.Tensor]]) -> None:
        super().__init__(daemon=True)
        self.address, self.pairs = address, pairs
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            sender = transfer.sender(self.address, 1, True)
            asyncio.run(sender.async_send_weights(iter(self.pairs)))
        except BaseException as error:
            self.error = error

    def ended(self) -> bool:
        self.join(20)
        return not self.is_alive() and self.error is None


def test_every_tensor_arrives_as_it_was_sent(address: str, tmp_path: Path) -> None:
    sending = Sending(address, weights())
    calls = tmp_path / "calls.jsonl"
    buckets = list(transfer.receive(address, True, str(calls)))
    assert sending.ended()
    assert len(buckets) > 2
    got = [pair for bucket in buckets for pair in bucket]
    assert [name for name, _ in got] == [name for name, _ in weights()]
    for (_, tensor), (_, sent) in zip(got, weights(), strict=True):
        assert tensor.dtype == sent.dtype
        assert torch.equal(tensor, sent)
    [line] = [json.loads(text) for text in calls.read_text().splitlines()]
    assert (line["call"], line["tensors"]) == ("received", 12)
    assert line["bytes"] == sum(tensor.nbytes for _, tensor in weights())
    assert line["sum"] == pytest.approx(sum(float(tensor.double().abs().sum()) for _, tensor in weights()))


@pytest.mark.parametrize("after", [1, 2])
def test_a_reader_that_gives_up_lets_the_sender_finish(address: str, after: int) -> None:
    sending = Sending(address, weights())
    reading = transfer.receive(address, True)
    for _ in range(after):
        next(reading)
    reading.close()  # type: ignore[attr-defined]  # a generator
    assert sending.ended()


def test_one_bucket_given_up(address: str) -> None:
    sending = Sending(address, weights(2))
    reading = transfer.receive(address, True)
    next(reading)
    reading.close()  # type: ignore[attr-defined]
    assert sending.ended()


def test_what_nobody_reads_is_acknowledged(address: str) -> None:
    sending = Sending(address, weights())
    assert transfer.drain(address, 10)
    assert sending.ended()


def test_nobody_sends(address: str) -> None:
    assert not transfer.drain(address, 0.1)


def test_silence_ends_in_words(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "SILENT_S", 0.2)
    with pytest.raises(TimeoutError, match="no weights came"):
        list(transfer.receive(address, True))
    sending = Sending(address, weights())
    sending.join(20)
    assert isinstance(sending.error, TimeoutError)
    assert "has not read weights" in str(sending.error)


def test_addresses_differ_by_job_replica_and_rank() -> None:
    found = {transfer.socket_address(job, replica, rank) for job in "ab" for replica in (0, 1) for rank in (0, 1)}
    assert len(found) == 8
