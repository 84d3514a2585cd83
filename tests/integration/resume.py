"""A job that is killed in one step and stopped in another, against one that nobody disturbed."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

from moebius.rollout.shards import finished_steps, read_shard, shard_path
from tests.integration.ray_head import RayHead, arguments, job_pid

CONFIG = "configs/deepmath_tiny_cpu.yaml"
STEPS = 4


def experiment(head: RayHead, folder: Path) -> dict[str, Any]:
    """Runs both and returns what came of it; asserts on the way that each job ended as it should."""
    disturbed, quiet = folder / "disturbed", folder / "quiet"
    common = arguments(engine__model=folder / "model", job__progress_s=0.3, job__steps=STEPS)

    killed = head.submit("--config", CONFIG, *common, "--out", str(disturbed))
    head.wait_for_log(killed, "step 1:")
    os.kill(job_pid(disturbed), signal.SIGKILL)
    assert head.wait(killed) == "FAILED"
    after_kill = finished_steps(disturbed)

    stopped = head.submit("--config", CONFIG, *common, "--out", str(disturbed))
    head.wait_for_log(stopped, f"step {after_kill[-1] + 2}:")
    head.client.stop_job(stopped)
    assert head.wait(stopped) == "STOPPED"
    words = "stopped by SIGTERM"
    deadline = time.monotonic() + 30
    while words not in head.logs(stopped):  # the log may be a moment late
        assert time.monotonic() < deadline, head.logs(stopped)
        time.sleep(0.2)
    after_stop = finished_steps(disturbed)

    # The last one as a user of `moebius` would send it; it waits and shows the log.
    done = head.run(
        "moebius",
        "rollout",
        "--config",
        CONFIG,
        "--submit",
        "--address",
        head.dashboard,
        "--out",
        str(disturbed),
        *common,
    )
    assert done.returncode == 0, done.stdout + done.stderr

    undisturbed = head.submit("--config", CONFIG, *common, "--out", str(quiet))
    assert head.wait(undisturbed) == "SUCCEEDED", head.logs(undisturbed)
    return {
        "steps_after_kill": after_kill,
        "steps_after_stop": after_stop,
        "log_of_last": done.stdout,
        **outcome(disturbed, quiet),
    }


def outcome(disturbed: Path, quiet: Path) -> dict[str, Any]:
    """Compares the shards of two finished jobs.

    Log-probabilities may differ by rounding only: a step that is done again finds another prefix cache.
    """
    present = finished_steps(disturbed)
    rows = [row for step in present for row in read_shard(shard_path(disturbed, step))]
    expected = [row for step in range(STEPS) for row in read_shard(shard_path(quiet, step))]
    keys = Counter((row["step"], row["prompt_index"], row["sample_index"]) for row in rows)
    drift = 0.0
    equal = len(rows) == len(expected)
    for a, b in zip(rows, expected, strict=False):
        equal &= {k: v for k, v in a.items() if k != "logprobs"} == {k: v for k, v in b.items() if k != "logprobs"}
        drift = max([drift, *(abs(x - y) for x, y in zip(a["logprobs"], b["logprobs"], strict=False))])
    return {
        "steps_expected": STEPS,
        "steps_present": len(present),
        "duplicate_rows": sum(keys.values()) - len(keys),
        "rows": len(rows),
        "outputs_equal": equal and drift < 1e-4,
        "largest_logprob_difference": drift,
    }
