"""Measures the paper's setting, or less of it on fewer GPUs, step by step, and puts the results into one file.

Called by benchmarks/paper.sh, which says how. Every step is one `moebius bench` command, whose results file
(`<out>/<setting>/<step>/<command>.json`) says that it is done: what was measured is kept, whatever happens later, and a
step is measured again when its folder is removed.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import time
from pathlib import Path

import yaml

from benchmarks.paper_merge import merge
from benchmarks.paper_steps import PARTS, SETTINGS, Setting, Step, needs_gb, settings_of, steps_of
from moebius.rollout.bench import daemon
from moebius.rollout.bench.results import read_results
from moebius.rollout.demo_assets import make_tiny_model
from moebius.rollout.errors import BadInput, MoebiusError

MOEBIUS = (sys.executable, "-m", "moebius.rollout.cli")
UNFINISHED = 3  # exit status: run the same command again
_READY_S, _DOWN_S = 1800.0, 180.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure a part, or what is left of it")
    run.add_argument("--gpus", type=int, required=True, choices=[2, 4, 8])
    run.add_argument(
        "--shape", choices=["235b", "30b"], default="235b", help="model; on fewer than 8 GPUs cut in depth"
    )
    run.add_argument(
        "--cpu", action="store_true", help="a tiny model on CPU ranks: shows that it works, times mean nothing"
    )
    run.add_argument(
        "--part", type=int, choices=sorted(PARTS), help="; ".join(f"{n}: {what}" for n, what in PARTS.items())
    )
    run.add_argument("--out", type=Path, default=Path("runs/paper"))
    run.add_argument("--minutes", type=float, default=8.7, help="begin no step that would end later")
    run.add_argument("--keep-up", action="store_true", help="leave the engine running for the next call")
    run.add_argument("--check", action="store_true", help="only look at the machine, and list steps and their time")
    put = commands.add_parser("merge", help="results so far, into one file")
    put.add_argument("folder", type=Path, help="as runs/paper/paper_x8")
    put.add_argument("--to", type=Path, help="folder for the file; default: beside the steps")
    chosen = parser.parse_args()
    try:
        if chosen.command == "merge":
            print(merge(_setting_named(chosen.folder.name), chosen.folder, chosen.to or chosen.folder))
            return
        setting = _setting(chosen.gpus, chosen.shape, cpu=chosen.cpu)
        folder = chosen.out.resolve() / setting.name
        if chosen.check or chosen.part is None:
            print(estimate(setting, folder))
        check_machine(setting, folder)
        if chosen.check:
            return
        if chosen.part is None:
            raise BadInput("say which part with --part, as above")
        if chosen.part == 5:
            print(merge(setting, folder, folder))
            return
        raise SystemExit(Runner(setting, folder, chosen.minutes, keep_up=chosen.keep_up).run(chosen.part))
    except MoebiusError as error:
        raise SystemExit(f"paper: {error}") from None


def _setting(gpus: int, shape: str, *, cpu: bool) -> Setting:
    setting = SETTINGS.get((gpus, "tiny" if cpu else shape))
    if setting is None:
        raise BadInput(
            f"--gpus {gpus} {'--cpu' if cpu else f'--shape {shape}'} is not foreseen; there are {_foreseen()}"
        )
    return setting


def _setting_named(name: str) -> Setting:
    found = next((setting for setting in SETTINGS.values() if setting.name == name), None)
    if found is None:
        raise BadInput(f"{name} is no folder of this script; there are {', '.join(s.name for s in SETTINGS.values())}")
    return found


def _foreseen() -> str:
    return ", ".join(f"--gpus {gpus} {'--cpu' if shape == 'tiny' else f'--shape {shape}'}" for gpus, shape in SETTINGS)


def estimate(setting: Setting, folder: Path) -> str:
    """A table of all steps with the minutes that each is expected to take, and which are done."""
    lines = [f"{setting.name}: {setting.gpus} ranks on {setting.device}, {setting.layers or 'all'} layers"]
    for part, what in PARTS.items():
        lines.append(f"part {part}: {what}")
        engine = None
        for step in steps_of(setting):
            if step.part != part:
                continue
            if is_done(step, folder):
                lines.append(f"  {step.name:<18}done")
                continue
            starts = step.engine is not None and step.engine != engine
            engine = step.engine  # one that starts its own ends the other
            minutes = step.minutes + setting.start_min * starts
            lines.append(f"  {step.name:<18}{minutes:.1f} min{' with the start of its engine' * starts}")
    return "\n".join(lines)


def check_machine(setting: Setting, folder: Path) -> None:
    """Raise BadInput with all that this machine lacks."""
    folder.mkdir(parents=True, exist_ok=True)
    if setting.device == "cpu":
        model = folder / "model"
        if not (model / "config.json").is_file():
            make_tiny_model(model, num_layers=2)
        engine = {
            "model": str(model), "dtype": "float32", "max_model_len": 256, "max_num_seqs": 16,
            "max_num_batched_tokens": 256, "kv_cache_bytes": int(setting.kv_gib * 2**30), "prepare": "on",
        }  # fmt: skip
        config = {"ranks": setting.gpus, "device": "cpu", "engine": engine, "sampling": {"max_tokens": 64}}
        (folder / "tiny.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        return
    from benchmarks.paper_machine import problems

    engine_up = daemon.running(folder / "engine") is not None
    if found := problems(setting.gpus, needs_gb(setting, folder), engines_up=engine_up):
        raise BadInput("this machine will not do:\n  " + "\n  ".join(found))


def is_done(step: Step, folder: Path) -> bool:
    """Whether its results are there."""
    path = folder / step.file
    if not path.is_file():
        return False
    read_results(path)  # a file that is none is told
    return True


class Runner:
    """Runs the steps of a part that are not done, as far as the time reaches."""

    def __init__(self, setting: Setting, folder: Path, minutes: float, *, keep_up: bool) -> None:
        self.setting, self.folder, self._keep_up = setting, folder, keep_up
        self._deadline = time.monotonic() + 60 * minutes
        self._home = folder / "engine"

    def run(self, part: int) -> int:
        """0: the part is done; 3: some is left for another call; 1: a step failed."""
        steps = [step for step in steps_of(self.setting) if step.part == part]
        failed, left = [], []
        try:
            for step in steps:
                if is_done(step, self.folder):
                    print(f"{step.name}: done before")
                elif step.needs_deepep and importlib.util.find_spec("deep_ep") is None:
                    print(f"{step.name}: left out, deep_ep is not installed")
                elif self._minutes(step) > (self._deadline - time.monotonic()) / 60 and (left or self._began):
                    left.append(step.name)
                elif not self._measure(step):
                    failed.append(step.name)
        finally:
            if not self._keep_up:
                self._down()
        if failed:
            print(f"failed: {', '.join(failed)}; see {self.folder}/<step>/output.txt, and run it again")
            return 1
        if left:
            print(f"left: {', '.join(left)}; run the same command again")
            return UNFINISHED
        print(f"part {part} is done; benchmarks/paper.sh merge {self.folder} puts all results into one file")
        return 0

    _began = False

    def _up(self) -> str | None:
        state = daemon.running(self._home)
        return None if state is None else str(state["engines"][0])

    def _minutes(self, step: Step) -> float:
        starts = step.engine is not None and step.engine != self._up()
        return step.minutes + (self.setting.start_min if starts else 0.0)

    def _measure(self, step: Step) -> bool:
        self._began = True
        print(f"{step.name}: about {self._minutes(step):.1f} min ...", flush=True)
        out = self.folder / step.name
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        if step.engine is None:
            self._down()  # it wants the GPUs for itself
            words = [*step.command, *settings_of(self.setting, self.folder)]
        else:
            if not self._start(step.engine):
                return False
            words = [*step.command, "--dir", str(self._home)]
        limit_s = 60 * max(5.0, 3 * step.minutes)
        with (out / "output.txt").open("w") as log:
            try:
                done = subprocess.run(
                    [*MOEBIUS, "bench", *words, "--out", str(out)], stdout=log, stderr=log, timeout=limit_s, check=False
                )
            except subprocess.TimeoutExpired:
                print(f"{step.name}: not done after {limit_s / 60:.0f} min, ended")
                self._down()
                return False
        if done.returncode == 0 and is_done(step, self.folder):
            print(f"{step.name}: {out / step.command[0]}.json")
            return True
        print(f"{step.name}: failed\n{_tail(out / 'output.txt')}")
        return False

    def _start(self, engine: str) -> bool:
        if self._up() == engine:
            return True
        self._down()
        log_path = self.folder / f"up_{engine.split(':', maxsplit=1)[0]}.log"
        largest = [] if self.setting.device == "cpu" else ["--largest-batch", "2048"]
        words = ["up", "--dir", str(self._home), "--engines", engine, *largest, *settings_of(self.setting, self.folder)]
        with log_path.open("w") as log:
            process = subprocess.Popen([*MOEBIUS, "bench", *words], stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + _READY_S
        while not (daemon.running(self._home) or {}).get("ready"):
            if process.poll() is not None or time.monotonic() > deadline:
                print(f"{engine} did not start\n{_tail(log_path)}")
                process.terminate()
                process.wait(_DOWN_S)
                return False
            time.sleep(0.2)
        return True

    def _down(self) -> None:
        if self._up() is not None:
            daemon.stop(self._home)


def _tail(path: Path, lines: int = 15) -> str:
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


if __name__ == "__main__":
    main()
