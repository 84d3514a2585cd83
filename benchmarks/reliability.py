"""Kills ranks at named moments of rollout steps, and lets a group run for long; says what was lost and what was left.

    python -m benchmarks.reliability kills --count 10     # from the repository root; on CPU; goes on where it stopped
    python -m benchmarks.reliability soak --minutes 30

Writes docs/benchmarks/reliability.json, each command its own part. A model of random weights on two CPU ranks, fp32:
its tokens must equal those of an undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ray
import torch

from benchmarks.processes import Usage, descendants, segments
from moebius.engine import phases
from moebius.engine.config import EngineConfig, PolicyConfig
from moebius.rollout.config import RolloutConfig
from moebius.rollout.demo import load_weights
from moebius.rollout.demo_assets import make_tiny_model
from moebius.rollout.errors import RankDied
from moebius.rollout.failure_types import FailureSettings
from moebius.rollout.group import RolloutGroup
from moebius.rollout.report import installed_versions
from moebius.rollout.shm import start_ticks
from moebius.rollout.types import LengthTrace, Rollout, Sampling
from tests.integration.faults import arm, read_note

RESULTS = Path(__file__).parents[1] / "docs" / "benchmarks" / "reliability.json"
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [13], [14, 15], [16, 17, 18, 19]]
N = 2
LENGTHS = LengthTrace({(p, s): 8 + 6 * (N * p + s) for p in range(len(PROMPTS)) for s in range(N)})
TO_TP, TO_EP = 14, 30  # iterations before which a step switches
DEADLINE_S = 180.0  # of a step, with its recovery; the machine may be shared
SAMPLE_S = 15.0  # between two looks at memory in the soak
EXIT_S = 10.0  # for processes of lost ranks to be gone
CASES: list[tuple[str, int]] = [  # phase, and which time that it begins
    (phases.IDLE, 1),
    (phases.ADMISSION, 1),
    (phases.PREFILL, 1),
    (phases.decode("EP"), 3),
    (phases.decode("EP"), 12),
    *((phases.switch("TP", phase), 1) for phase in phases.SWITCH_PHASES["TP"]),
    (phases.decode("TP"), 1),
    (phases.decode("TP"), 9),
    *((phases.switch("EP", phase), 1) for phase in phases.SWITCH_PHASES["EP"]),
    (phases.decode("EP"), 20),
    (phases.UPDATE, 1),
    (phases.UPDATE, 3),
    (phases.SLEEP, 1),
    (phases.WAKE, 1),
]  # fmt: skip


def settings(model: Path) -> RolloutConfig:
    """Two CPU ranks that switch there and back in every step, and keep their weights for restarts."""
    return RolloutConfig(
        ranks=2,
        device="cpu",
        engine=EngineConfig(
            model=str(model), dtype="float32", max_model_len=256, max_num_seqs=16, kv_cache_bytes=16 << 20,
            enforce_eager=True,
            policy=PolicyConfig(kind="scheduled", at_iteration=TO_TP, back_at_iteration=TO_EP),
        ),
        sampling=Sampling(max_tokens=90, seed=0),
        failures=FailureSettings(keep_weights="host", step_deadline_s=DEADLINE_S),
    )  # fmt: skip


@contextmanager
def started() -> Iterator[tuple[RolloutGroup, dict[str, torch.Tensor]]]:
    """A group with weights that are not the checkpoint's, and these weights."""
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model", num_layers=2)
        with RolloutGroup(settings(model)) as group:
            torch.manual_seed(1)
            weights = {k: v + 0.05 * torch.randn_like(v) for k, v in load_weights(model).items()}
            group.update_weights(weights, 1)
            yield group, weights
            pids = descendants(os.getpid())
    ray.shutdown()
    gone(pids)


def gone(pids: list[int]) -> None:
    """See that these processes end, and that they leave no shared memory."""
    deadline = time.monotonic() + EXIT_S
    while (left := [pid for pid in pids if start_ticks(pid) is not None]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, f"processes {left} are still there"
    assert not (names := segments(pids)), f"they have left {names} in shared memory"


def generate(group: RolloutGroup, step: int) -> list[Rollout]:
    return group.generate(PROMPTS, N, step=step, lengths=LENGTHS)


def tokens(rollouts: list[Rollout]) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in rollout.samples] for rollout in rollouts]


# ---- kills ----------------------------------------------------------------------------------------------------------


def kill_once(
    group: RolloutGroup, weights: dict[str, torch.Tensor], case: tuple[str, int], rank: int, step: int, want: Any
) -> dict[str, Any]:
    """One step, with one rank killed in it or before it; what came of it. Raises AssertionError if not all is well."""
    phase, times = case
    pids, losses = [pid for own in group.pids() for pid in [own, *descendants(own)]], len(group.losses)
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder) / "note"
        begun = time.monotonic()
        if phase == phases.IDLE:
            os.kill(group.pids()[rank], signal.SIGKILL)
            at, hit = time.monotonic(), group.phases()[rank]
        else:
            arm(group, rank, phase, note, times)
        provoke(group, weights, phase)
        rollouts = generate(group, step)
        seconds = time.monotonic() - begun
        if phase != phases.IDLE:
            at, hit = read_note(note)
    assert hit == phase, f"hit {hit} instead of {phase}"
    assert len(group.losses) == losses + 1, "one loss, and one only"
    loss = group.losses[-1]
    assert (loss.rank, loss.phase) == (rank, phase), f"told of rank {loss.rank} in {loss.phase}"
    assert tokens(rollouts) == want, "tokens differ from those of an undisturbed step"
    assert seconds < DEADLINE_S
    gone(pids)
    return {
        "phase": phase,
        "rank": rank,
        "seen_s": round(loss.seen_at - at, 3),
        "recovery_s": round(loss.seen_at + loss.seconds - at, 3),
        "replayed": loss.replayed,
        "submitted": len(PROMPTS),
        "returned": len(rollouts),
    }


def provoke(group: RolloutGroup, weights: dict[str, torch.Tensor], phase: str) -> None:
    """Bring the group into a phase that lies between two steps."""
    if phase == phases.UPDATE:
        try:
            group.update_weights(weights, group.policy_version + 1, bucket_bytes=100_000)
        except RankDied:  # as it says, the update has to be sent again
            group.update_weights(weights, group.policy_version + 1)
    elif phase in (phases.SLEEP, phases.WAKE):
        group.sleep(keep_weights=True)
        group.wake_up()


def kills(count: int, seconds: float) -> dict[str, Any]:
    """So many more of the 40 kills, as far as time allows."""
    done: list[dict[str, Any]] = load().get("cases", [])
    begun = time.monotonic()
    with started() as (group, weights):
        step = len(done)
        while step < 40 and count > 0 and time.monotonic() - begun < seconds:
            want = tokens(generate(group, step))
            case = CASES[step % len(CASES)]
            done.append(kill_once(group, weights, case, (step + step // len(CASES)) % 2, step, want))
            print(step, done[-1], flush=True)
            write(summary(done))
            step, count = step + 1, count - 1
    return summary(done)


def summary(done: list[dict[str, Any]]) -> dict[str, Any]:
    """Results of the kills so far."""
    return {
        "kills": len(done),
        "phases_hit": sorted({case["phase"] for case in done}),
        "prompts_submitted": sum(case["submitted"] for case in done),
        "prompts_returned": sum(case["returned"] for case in done),
        "max_seen_s": max(case["seen_s"] for case in done),
        "max_recovery_s": max(case["recovery_s"] for case in done),
        "cases": done,
    }


# ---- soak -----------------------------------------------------------------------------------------------------------


def soak(minutes: float) -> dict[str, Any]:
    """Steps with two switches each, an update before every fifth, until time is over; no kills.

    `soak_rss_*` is the driver's and the ranks' resident memory without shared pages: reading updates from Ray's object
    store maps ever other parts of it.
    """
    with started() as (group, weights):
        want = tokens(generate(group, 0))
        for _ in range(10):  # caches fill, allocators settle
            generate(group, 0)
            group.update_weights(weights, group.policy_version + 1)
        pids = [os.getpid(), *group.pids()]
        first = [Usage.of(pid) for pid in pids]
        shared = segments(descendants(os.getpid()))
        begun, steps, switches, updates = time.monotonic(), 0, 0, 0
        series: list[list[float]] = []
        while time.monotonic() - begun < 60 * minutes:
            assert tokens(generate(group, 0)) == want, f"tokens of step {steps} differ"
            assert group.last_report is not None
            switches += len(group.last_report.switches)
            steps += 1
            if steps % 5 == 0:
                group.update_weights(weights, group.policy_version + 1)
                updates += 1
            if time.monotonic() - begun >= SAMPLE_S * len(series):
                use = Usage.of(pids[1])
                series.append([round(time.monotonic() - begun), use.rss >> 20, use.shared >> 20])
        last = [Usage.of(pid) for pid in pids]
        took = time.monotonic() - begun
        assert not group.losses
        now = segments(descendants(os.getpid()))
        assert len(now) == len(shared), f"shared memory: {sorted(shared)} at first, {sorted(now)} in the end"
    grown = [100 * (end.rss / start.rss - 1) for start, end in zip(first, last, strict=True)]
    return {
        "soak_minutes": round(took / 60, 2),
        "soak_steps": steps,
        "soak_switches": switches,
        "soak_updates": updates,
        "soak_rss_delta_pct": round(max(grown), 2),
        "soak_rss_counts": "resident memory without shared pages",
        "soak_rss_mb": {name: [u.rss >> 20 for u in use] for name, use in (("first", first), ("last", last))},
        "soak_rank_0": {"columns": ["seconds", "own MB", "shared MB"], "rows": series},
        "soak_fd_delta": max(end.fds - start.fds for start, end in zip(first, last, strict=True)),
    }


# ---- results --------------------------------------------------------------------------------------------------------


def load() -> dict[str, Any]:
    """The results so far."""
    if not RESULTS.is_file():
        return {}
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))["results"]
    return results


def write(part: dict[str, Any]) -> None:
    """Put a part's results into the file, beside those of other parts."""
    whole = {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPU cores, no GPU used",
        "versions": installed_versions(),
        "command": "python -m benchmarks.reliability kills; python -m benchmarks.reliability soak",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "what": f"a tiny model on 2 CPU ranks, fp32: kills of a rank, one per step of {len(PROMPTS)} prompts x {N} "
        "samples; soak: such steps without kills, with switches to TP and back",
        "results": load() | part,
    }
    RESULTS.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parts = parser.add_subparsers(dest="part", required=True)
    killing = parts.add_parser("kills", help="kill ranks, 40 times in all")
    killing.add_argument("--count", type=int, default=40, help="at most so many now")
    killing.add_argument("--seconds", type=float, default=3600, help="begin none after so long")
    soaking = parts.add_parser("soak", help="run steps for long")
    soaking.add_argument("--minutes", type=float, default=30)
    given = parser.parse_args()
    write(kills(given.count, given.seconds) if given.part == "kills" else soak(given.minutes))
    print(json.dumps({k: v for k, v in load().items() if k != "cases"}, indent=1))


if __name__ == "__main__":
    main()
