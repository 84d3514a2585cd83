"""The process that Ray workers of tests are forked from outlives launchers that Ray ends."""

from __future__ import annotations

import array
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration import warm

# The process without what takes long to import.
SERVE = """
import json, sys
from tests.integration import warm
sys.modules["vllm.v1.executor.ray_utils"] = json
warm.IMPORTS = ()
warm.serve(sys.argv[1])
"""


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("sends", [False, True], ids=["before it asks", "before the answer"])
def test_a_launcher_may_be_ended(tmp_path: Path, sends: bool) -> None:
    address, program, done = (tmp_path / name for name in ("socket", "program.py", "done"))
    program.write_text("import sys; open(sys.argv[1], 'w').close()")
    command = [sys.executable, "-c", SERVE, str(address)]
    with subprocess.Popen(command, cwd=warm.ROOT, stdin=subprocess.PIPE) as process:
        wait_for(address, process)
        with socket.socket(socket.AF_UNIX) as launcher:
            launcher.connect(str(address))
            if sends:
                asked = {"arguments": [str(program), str(done)], "environment": {}, "folder": str(tmp_path)}
                streams = array.array("i", [0, 1, 2]).tobytes()
                launcher.sendmsg([json.dumps(asked).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
        again = [sys.executable, "-IS", str(warm.LAUNCHER), str(address), str(program), str(done) + "2"]
        subprocess.run(again, check=True, timeout=60)
        wait_for(tmp_path / "done2", process)
        assert process.poll() is None
