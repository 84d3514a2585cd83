"""Engines that stay up between benchmarks: a process that takes jobs from a folder.

`<folder>/jobs/<id>.json` holds {"command", "options", "line"}; its answer is `<folder>/done/<id>.json` with {"ok",
"results" or "error"}. Files are written under another name first, so that none is read half.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from moebius.rollout.bench.engines import BenchSetup, Engines
from moebius.rollout.bench.fleet import FleetError
from moebius.rollout.bench.graphs import run_graphs
from moebius.rollout.bench.kernels import KernelsOptions, run_kernels
from moebius.rollout.bench.policies import PoliciesOptions, run_policies
from moebius.rollout.bench.results import Results
from moebius.rollout.bench.rollout_trace import RolloutOptions, run_rollout
from moebius.rollout.bench.serving import ServingOptions, run_serving
from moebius.rollout.bench.sweep import SweepOptions, run_sweep
from moebius.rollout.bench.switch import SwitchOptions, run_switch
from moebius.rollout.errors import BadInput, MoebiusError, validate
from moebius.rollout.shm import make_ident, owner_alive, parse_ident

POLL_S = 0.2
STOP_S = 60.0  # for engines to close
STATE = "daemon.json"
COMMANDS: dict[str, tuple[type[Any], Callable[..., Results]]] = {
    "sweep": (SweepOptions, run_sweep),
    "rollout": (RolloutOptions, run_rollout),
    "graphs": (SweepOptions, run_graphs),
    "switch": (SwitchOptions, run_switch),
    "kernels": (KernelsOptions, run_kernels),
    "serving": (ServingOptions, run_serving),
    "policies": (PoliciesOptions, run_policies),
}


def execute(engines: Engines, command: str, options: dict[str, Any], line: str) -> Results:
    """Run a benchmark on running engines. Raises BadInput for an unknown one or wrong options."""
    if command not in COMMANDS:
        raise BadInput(f"'{command}' does not run on engines that stay up; these do: {', '.join(COMMANDS)}")
    model, function = COMMANDS[command]
    results = function(engines, validate(model, options, f"options of {command}"), line)
    assert isinstance(results, Results)
    return results


def serve(folder: Path, setup: BenchSetup, names: Sequence[str]) -> None:
    """Start the engines, then run jobs until told to stop or a signal ends it. Returns when all is closed."""
    if running(folder):
        raise BadInput(f"{folder}: engines run there already; `moebius bench down --dir {folder}` ends them")
    for part in ("jobs", "done"):
        (folder / part).mkdir(parents=True, exist_ok=True)
        for old in (folder / part).glob("*.json"):
            old.unlink()

    def end(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, end)
    state: dict[str, Any] = {"owner": str(make_ident()), "engines": list(names), "ready": False}
    state["setup"] = setup.model_dump(mode="json")
    _write(folder / STATE, state)
    try:
        with Engines(setup, names, folder / "logs", _say) as engines:
            _write(folder / STATE, state | {"ready": True})
            _say(f"ready: {', '.join(names)}; waiting for jobs in {folder / 'jobs'}")
            while _next_job(folder, engines):
                pass
    finally:
        (folder / STATE).unlink(missing_ok=True)


def _next_job(folder: Path, engines: Engines) -> bool:
    """Run the oldest job, or wait a moment; False when the job says stop."""
    waiting = sorted((folder / "jobs").glob("*.json"))
    if not waiting:
        time.sleep(POLL_S)
        return True
    path = waiting[0]
    job = json.loads(path.read_text(encoding="utf-8"))
    path.unlink()
    if job["command"] == "stop":
        _write(folder / "done" / path.name, {"ok": True, "results": None})
        return False
    _say(f"job {path.stem}: {job['line']}")
    try:
        results = execute(engines, job["command"], job["options"], job["line"])
        answer: dict[str, Any] = {"ok": True, "results": results.model_dump(mode="json")}
    except FleetError as error:
        answer = {"ok": False, "error": f"{error}; its engine is started again"}
    except MoebiusError as error:
        answer = {"ok": False, "error": str(error)}
    except Exception as error:  # noqa: BLE001  (the engines took minutes to start, and are still whole)
        traceback.print_exc()
        answer = {"ok": False, "error": f"{type(error).__name__}: {error}; the trace is in the output of `bench up`"}
    _write(folder / "done" / path.name, answer)
    _say(f"job {path.stem}: {'done' if answer['ok'] else answer['error']}")
    engines.revive()
    return True


def running(folder: Path) -> dict[str, Any] | None:
    """State of the living daemon of a folder, or None."""
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        ident = parse_ident(state["owner"])
    except (OSError, ValueError, KeyError):
        return None
    return state if ident is not None and owner_alive(ident) else None


def submit(folder: Path, command: str, options: dict[str, Any], line: str, say: Callable[[str], None]) -> Results:
    """Have the folder's daemon run a benchmark, and wait for it. Raises MoebiusError with its words if it fails."""
    answer = _ask(folder, {"command": command, "options": options, "line": line}, say)
    return Results.model_validate(answer["results"])


def stop(folder: Path) -> None:
    """End the folder's daemon and its engines: asked first, then by a signal."""
    state = running(folder)
    if state is None:
        raise BadInput(f"{folder}: no engines run there")
    ident = parse_ident(state["owner"])
    assert ident is not None
    _write(folder / "jobs" / "0-stop.json", {"command": "stop", "line": "stop"})
    deadline = time.monotonic() + STOP_S
    while owner_alive(ident):
        if time.monotonic() > deadline:
            os.kill(ident.pid, signal.SIGTERM)
            deadline = time.monotonic() + STOP_S
        time.sleep(POLL_S)


def _ask(folder: Path, job: dict[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    if running(folder) is None:
        raise BadInput(f"{folder}: no engines run there; start them with `moebius bench up --dir {folder} ...`")
    name = f"{time.time_ns()}-{secrets.token_hex(2)}.json"
    _write(folder / "jobs" / name, job)
    say(f"job {name.removesuffix('.json')} handed to the engines in {folder}")
    done = folder / "done" / name
    while not done.exists():
        if running(folder) is None and not done.exists():
            raise MoebiusError(f"{folder}: the engines ended before the job was done; see the output of `bench up`")
        time.sleep(POLL_S)
    answer: dict[str, Any] = json.loads(done.read_text(encoding="utf-8"))
    if not answer["ok"]:
        raise MoebiusError(answer["error"])
    return answer


def _write(path: Path, data: dict[str, Any]) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(data), encoding="utf-8")
    part.replace(path)


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)
