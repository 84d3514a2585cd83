"""A weight session is for those who know its secret, and nothing that comes from a network is run."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moebius.engine.backing import loads
from moebius.kernels.peers import Export
from moebius.rollout.errors import MoebiusError
from moebius.rollout.transports import broadcast
from moebius.rollout.transports.broadcast import Broadcaster
from moebius.rollout.transports.secret import NCCL_ID_BYTES, listening_store, nccl_id, seal, unseal


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_messages_are_written_with_the_secret_and_for_their_key() -> None:
    sealed = seal("s", "1/0", {"nbytes": 3}).encode()
    assert unseal("s", "1/0", sealed) == {"nbytes": 3}
    for secret, key, told in [("t", "1/0", sealed), ("s", "1/1", sealed), ("s", "1/0", sealed.replace(b"3", b"4"))]:
        with pytest.raises(ValueError, match="not written with its secret"):
            unseal(secret, key, told)
    with pytest.raises(ValueError, match="not written with its secret"):
        unseal("s", "1/0", b"\xff\xfe")


def test_a_store_listens_on_its_address_alone() -> None:
    store = listening_store("127.0.0.1", timedelta(seconds=5))
    port = f":{store.port:04X}"
    rows = [line.split() for file in ("tcp", "tcp6") for line in Path(f"/proc/net/{file}").read_text().splitlines()[1:]]
    assert [row[1] for row in rows if row[1].endswith(port) and row[3] == "0A"] == [f"0100007F{port}"]
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=5))
    client.set("a", "b")
    assert store.get("a") == b"b"


def test_a_member_without_the_secret_gets_nothing() -> None:
    sender = Broadcaster(1, "gloo", timeout_s=20)
    _, [args] = sender.offer({"a": torch.ones(4)})
    host, port, secret, *rest = args
    assert secret not in str(sender._link.server.list_keys())
    found: list[Any] = []

    def intrude() -> None:
        try:
            found.extend(broadcast.receive(host, port, "guessed", *rest))
        except ValueError as error:
            found.append(error)

    thread = threading.Thread(target=intrude)
    thread.start()
    thread.join(30)
    with pytest.raises(MoebiusError, match="not written with its secret"):
        sender.close()
    assert len(found) == 1 and isinstance(found[0], ValueError)


def test_what_somebody_else_writes_into_the_store_is_refused() -> None:
    with Broadcaster(1, "gloo", timeout_s=20) as sender:
        _, [args] = sender.offer({"a": torch.ones(4)})
        stream = broadcast.receive(*args)
        [[(name, tensor)]] = [next(stream)]
        assert name == "a" and tensor.sum() == 4
        sender.wait()
        store = dist.TCPStore(args[0], args[1], is_master=False, timeout=timedelta(seconds=5))
        store.set(f"{args[-1]}/2", '{"nbytes": 4, "entries": []}')
        with pytest.raises(ValueError, match="not written with its secret"):
            next(stream)


def test_nccl_ids_as_vllm_sends_them() -> None:
    wrapper = pytest.importorskip("vllm.distributed.device_communicators.pynccl_wrapper")
    found = wrapper.ncclUniqueId()
    for i in range(NCCL_ID_BYTES):
        found.internal[i] = i
    assert nccl_id(pickle.dumps(found)) == bytes(range(NCCL_ID_BYTES))


def test_other_pickles_are_not_run(tmp_path: Path) -> None:
    for sent in [pickle.dumps(Evil(tmp_path / "made")), pickle.dumps(b"x"), pickle.dumps({}), b"broken", b""]:
        with pytest.raises(ValueError, match="something else than an NCCL id"):
            nccl_id(sent)
    with pytest.raises(pickle.UnpicklingError, match="nothing that ranks tell each other"):
        loads(pickle.dumps(Evil(tmp_path / "made")))
    assert not (tmp_path / "made").exists()
    told = (Export("host", "gpu", 3), [1, "two", None], {"a": b"b"})
    assert loads(pickle.dumps(told)) == told


def test_importing_the_transports_takes_no_vllm() -> None:
    modules = "moebius.rollout.transports.secret, moebius.rollout.transports.ray_collective"
    code = f"import {modules}, sys; print('vllm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
