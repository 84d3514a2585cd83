"""Ray workers for tests, forked from a process that has imported vLLM: importing takes longer than the rest of a start.

Ray is told to start another program than Python for its workers (`warm_launcher.py`). That hands what Ray asks for to
the process with the imports, which forks, and the child goes on as Ray's worker. Such a worker has a process id of its
own, which Ray and the tests know it by, its own environment and log, and it ends as any other does. Tests that run what
users type have workers as users have them.
"""

from __future__ import annotations

import array
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engine.fleet import ENVIRONMENT, IMPORTS

ROOT = Path(__file__).parents[2]
LAUNCHER = Path(__file__).with_name("warm_launcher.py")
START_S = 120.0
STREAMS = 3  # standard input, output, error


@dataclass(frozen=True, slots=True)
class Warm:
    """The process with the imports, and the runtime environment that `ray.init` takes."""

    pid: int
    runtime_env: dict[str, Any]


@contextmanager
def warm_workers() -> Iterator[Warm]:
    """Start the process; it ends with the block, or with this process."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and not k.startswith("RAY_")} | ENVIRONMENT
    with tempfile.TemporaryDirectory(prefix="mwarm", dir="/tmp") as folder:
        address = f"{folder}/socket"
        command = [sys.executable, "-m", __name__, address]
        with subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, start_new_session=True
        ) as process:  # the end of the block closes its input
            deadline = time.monotonic() + START_S
            while not os.path.exists(address):
                assert process.poll() is None and time.monotonic() < deadline, "the process for workers did not start"
                time.sleep(0.05)
            yield Warm(process.pid, {"py_executable": f"{sys.executable} -IS {LAUNCHER} {address}"})


def serve(address: str) -> None:
    """Fork a worker for each connection, until standard input ends."""
    # Ray reads a worker's environment when it is imported, which is therefore left to the worker.
    sys.modules["ray"] = None  # type: ignore[assignment]
    for name in IMPORTS:
        importlib.import_module(name)
    del sys.modules["ray"]
    gc.collect()
    gc.freeze()  # what is imported is never garbage
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for workers: Ray sees their connections end
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{address}.new")
        listener.listen(64)
        os.rename(f"{address}.new", address)
        while True:
            ready, _, _ = select.select([listener, 0], [], [])
            if 0 in ready:
                return
            connection, _ = listener.accept()
            with connection:
                try:
                    asked, streams = _receive(connection)
                except (ConnectionError, ValueError):
                    continue  # Ray ended the launcher
                pid = os.fork()
                if pid == 0:
                    listener.close()
                    connection.close()
                    _become(asked, streams)
                for fd in streams:
                    os.close(fd)
                with suppress(ConnectionError):
                    connection.sendall(str(pid).encode())


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """What to run, and the streams to run it with."""
    streams = array.array("i")
    text, ancillary, *_ = connection.recvmsg(1 << 16, socket.CMSG_LEN(STREAMS * streams.itemsize))
    for _, _, data in ancillary:
        streams.frombytes(data)
    while part := connection.recv(1 << 16):
        text += part
    return json.loads(text), list(streams)


def _become(asked: dict[str, Any], streams: list[int]) -> None:
    """Run the program as `python program arguments...` would, and end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    status: Any = 0
    try:
        for number, fd in enumerate(streams):
            os.dup2(fd, number)
            os.close(fd)
        os.chdir(asked["folder"])
        os.environ.clear()
        os.environ.update(asked["environment"])
        sys.argv = asked["arguments"]
        folders = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        sys.path[:1] = [str(Path(sys.argv[0]).parent), *folders]
        importlib.reload(sys.modules["vllm.v1.executor.ray_utils"])  # it found no Ray
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        status = end.code or 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    finally:
        os._exit(status if isinstance(status, int) else 1)


if __name__ == "__main__":
    serve(sys.argv[1])
