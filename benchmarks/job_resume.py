"""Kills and stops a rollout job on a cluster of its own, resumes it, and compares it with an undisturbed one.

    python -m benchmarks.job_resume            # from the repository root; on CPU, some minutes

Writes docs/benchmarks/job_resume.json.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from moebius.rollout.report import installed_versions
from tests.integration.ray_head import ROOT, RayHead
from tests.integration.resume import CONFIG, experiment


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, RayHead() as head:
        results = experiment(head, Path(folder))
    results.pop("log_of_last")
    written = {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPU cores, no GPU used",
        "versions": installed_versions(),
        "command": "python -m benchmarks.job_resume",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "what": f"job of {CONFIG}: SIGKILL in step 1, resubmitted, `ray job stop` in a later step, resubmitted",
        "results": results,
    }
    path = ROOT / "docs" / "benchmarks" / "job_resume.json"
    path.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(written, indent=1))


if __name__ == "__main__":
    main()
