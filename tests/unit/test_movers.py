"""The collective mover against the reference plan, in real gloo processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("mover_rank.py")
LIMIT_S = 100.0


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_collective_mover_equals_the_plan(ranks: int, tmp_path: Path) -> None:
    logs = [tmp_path / f"rank{rank}.log" for rank in range(ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = []
    for rank, log in enumerate(logs):
        command = [sys.executable, str(PROGRAM), str(rank), str(ranks), str(tmp_path / "store")]
        with log.open("w") as out:
            processes.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment))
    deadline = time.monotonic() + LIMIT_S
    try:
        # One failed rank leaves its peers waiting in a collective, so stop at the first.
        while any(p.poll() is None for p in processes) and not any(p.poll() for p in processes):
            assert time.monotonic() < deadline, f"ranks still running after {LIMIT_S:.0f} s"
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    failed = [f"rank {r}:\n{logs[r].read_text()}" for r, p in enumerate(processes) if p.returncode > 0]
    assert not failed, "\n".join(failed)
    assert [p.returncode for p in processes] == [0] * ranks
