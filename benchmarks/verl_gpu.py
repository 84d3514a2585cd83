"""GRPO by unmodified verl on two GPUs of a host: with our rollouts, each layout alone, and with verl's own vLLM.

    python -m benchmarks.verl_gpu --out runs/verl_x2
    python -m benchmarks.verl_gpu --out runs/verl_cpu --device cpu --runs moebius,static_ep     # shows that it works

Each run is a job of examples/verl/smoke.sh with a random Qwen3-MoE of some hundred million parameters. All start at
the same time, as starting is what takes long; they train one after the other, each with the GPUs' time to itself.
Writes verl_x2.json, and beside it the jobs' logs and the calls that verl made.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from benchmarks.gpu_memory import Sampler
from benchmarks.verl_gate import GO, READY
from moebius.rollout.bench.results import make_results

ROOT = Path(__file__).parents[1]
RUNS = ("moebius", "static_ep", "static_tp", "vllm")
OURS = "actor_rollout_ref.rollout.engine_kwargs.moebius"
METRIC = re.compile(r"(?<= - )([\w./@-]+):(?:np\.\w+\()?(-?[\d.]+(?:e[+-]?\d+)?|nan)\)?")
KEPT = (
    "timing_s/", "timing_per_token_ms/", "moebius/", "bench/", "training/rollout_", "rollout_corr/", "actor/perf/",
    "response_length/",
)  # fmt: skip
# The rows of the table: a name, and whose mean over the steps it is.
SHOWN = {
    "gen": "timing_s/gen",
    "burst": "timing_s/gen/burst",
    "switch": "timing_s/gen/switch",
    "tail": "timing_s/gen/tail",
    "logprobs": "timing_s/old_log_prob",
    "train": "timing_s/update_actor",
    "weights": "timing_s/update_weights",
    "step": "timing_s/step",
    "gen, ms a token": "timing_per_token_ms/gen",
    "tokens a sample": "response_length/mean",
    "switches": "moebius/switches",
    "tokens": "moebius/tokens",
    "|dlogp| mean": "bench/logprob_difference_mean",
    "p99": "bench/logprob_difference_p99",
    "max": "bench/logprob_difference_max",
    "Pearson": "training/rollout_actor_probs_pearson_corr",
}


@dataclass
class Shape:
    """Model and load."""

    layers: int = 8
    hidden: int = 1024
    experts: int = 32
    prompts: int = 32  # a step, `samples` of each
    samples: int = 8
    response: int = 384
    steps: int = 3
    kv_bytes: int = 2 << 30
    graphs: bool = False

    @classmethod
    def tiny(cls) -> Shape:
        """What a CPU gets through."""
        return cls(layers=2, hidden=128, experts=4, prompts=4, samples=4, response=64, steps=2, kv_bytes=64 << 20)

    def prepare(self, folder: Path) -> None:
        """Model and questions for all jobs."""
        command = [sys.executable, "examples/verl/prepare.py", "smoke", str(folder), "--layers", str(self.layers)]
        command += ["--hidden", str(self.hidden), "--intermediate", str(self.hidden // 2)]
        command += ["--experts", str(self.experts)]
        command += ["--prompts", str(self.prompts * self.steps), "--stops", "2" if self.hidden > 128 else "30"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)

    def settings(self, name: str, device: str, ray_folder: str, calls: Path) -> list[str]:
        """Of one job, over those of examples/verl/smoke.sh."""
        rollout = "actor_rollout_ref.rollout"
        requests = self.prompts * self.samples
        found = [
            f"data.train_batch_size={self.prompts}", f"data.max_response_length={self.response}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={self.prompts}",
            f"{rollout}.n={self.samples}", f"{rollout}.max_num_seqs={requests}",
            f"{rollout}.max_num_batched_tokens={max(1024, 8 * requests)}",
            f"{rollout}.enforce_eager={not self.graphs}",
            f"++{rollout}.agent.agent_loop_manager_class=benchmarks.verl_gate.Gate",
            f"trainer.total_training_steps={self.steps}",
            f"++ray_kwargs.ray_init._temp_dir={ray_folder}",
            f"++ray_kwargs.ray_init.object_store_memory={1 << 30}",
        ]  # fmt: skip
        if device == "cuda":
            found += [
                "++ray_kwargs.ray_init.num_gpus=2",
                "++actor_rollout_ref.model.override_config.attn_implementation=sdpa",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32",
                f"{rollout}.log_prob_micro_batch_size_per_gpu=32",
                f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes=512",
                "actor_rollout_ref.actor.optim.lr=1e-4",
                f"{rollout}.agent.num_workers=4",
            ]
        if self.graphs:
            sizes = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if size <= requests]
            found.append(f"{rollout}.cudagraph_capture_sizes={sizes}".replace(" ", ""))
        if name == "vllm":
            found.append(f"{rollout}.name=vllm")
            return [*found, f"++{rollout}.engine_kwargs.vllm.kv_cache_memory_bytes={self.kv_bytes}",
                    f"{rollout}.gpu_memory_utilization=0.2"]  # fmt: skip
        found += [f"++{OURS}.policy.threshold={requests // 4}", f"++{OURS}.engine.kv_cache_bytes={self.kv_bytes}"]
        if name != "moebius":  # noting calls, and sums over weights, takes time: not in the run that is compared
            found += [f"++{OURS}.policy.kind={name}", f"++{OURS}.calls={calls}"]
        return found


@dataclass
class Job:
    """One run of verl and what it left."""

    name: str
    folder: Path
    process: subprocess.Popen[bytes]
    log: TextIO
    ray_folder: str
    started: float = field(default_factory=time.monotonic)
    startup_s: float = 0.0
    steps: list[dict[str, float]] = field(default_factory=list)
    memory: dict[str, float] = field(default_factory=dict)
    problem: str = ""

    @classmethod
    def start(cls, name: str, shape: Shape, device: str, data: Path, folder: Path) -> Job:
        """Start verl; it trains when `let_go` is called."""
        ray_folder = tempfile.mkdtemp(prefix="mv", dir="/tmp")  # Ray's sockets need a short path
        settings = shape.settings(name, device, ray_folder, folder / f"{name}.calls.jsonl")
        environment = os.environ | {
            "PYTHON": sys.executable,
            "DEVICE": device,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            READY: str(folder / f"{name}.ready"),
            GO: str(folder / f"{name}.go"),
            # Ray judges by MemTotal, which a virtual machine that grows with its use reports too small.
            "RAY_memory_monitor_refresh_ms": "0",
        }
        if name == "vllm":  # as it is: ours are settings of ranks that are no processes of vLLM's
            for ours in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_USE_V2_MODEL_RUNNER", "VLLM_KV_CACHE_LAYOUT"):
                environment.pop(ours, None)
        log = (folder / f"{name}.log").open("w", encoding="utf-8")
        process = subprocess.Popen(
            ["bash", "examples/verl/smoke.sh", str(data), *settings],
            cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        return cls(name, folder, process, log, ray_folder)

    def look(self) -> None:
        """Note when it has come to the start line, or has ended before."""
        if not self.startup_s and (self.folder / f"{self.name}.ready").exists():
            self.startup_s = time.monotonic() - self.started
        if not self.startup_s and self.process.poll() is not None:
            self.problem = f"ended with status {self.process.returncode} before training"

    def train(self, device: str, limit_s: float) -> None:
        """Let it go, and wait until it has ended."""
        with Sampler(self.process.pid, device) as sampler:
            (self.folder / f"{self.name}.go").touch()
            try:
                code = self.process.wait(limit_s)
                self.problem = f"ended with status {code}" if code else ""
            except subprocess.TimeoutExpired:
                self.problem = f"did not end within {limit_s:.0f} s"
        self.memory = sampler.summary()
        (self.folder / f"{self.name}.memory.json").write_text(json.dumps(sampler.samples), encoding="utf-8")

    def end(self) -> None:
        """Leave no process behind; read what it said."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
        self.log.close()
        shutil.rmtree(self.ray_folder, ignore_errors=True)
        text = (self.folder / f"{self.name}.log").read_text(encoding="utf-8", errors="replace")
        lines = [line for line in text.splitlines() if re.search(r"\bstep:\d+ - ", line)]
        self.steps = [{name: float(value) for name, value in METRIC.findall(line)} for line in lines]
        if self.problem:
            errors = [line for line in text.splitlines() if re.search(r"\w*(Error|Exception)\b.*: ", line)]
            self.problem += ": " + (errors[-1] if errors else text.strip()[-300:])

    def results(self) -> dict[str, float]:
        """Flat numbers; means over all steps but the first, which compiles kernels."""
        steps = self.steps[1:] or self.steps
        found = {"startup_s": self.startup_s, "steps": float(len(self.steps))}
        for name in sorted({name for step in steps for name in step}):
            if name.startswith(KEPT):
                mean = statistics.mean(step[name] for step in steps if name in step)
                found[f"{name.removeprefix('timing_s/')}_s" if name.startswith("timing_s/") else name] = mean
        return found | self.memory


def show(jobs: list[Job], console: Console) -> None:
    """A short table; a line for each job that failed."""
    table = Table(title="means of the steps after the first; seconds, GB", title_justify="left")
    table.add_column("")
    for job in jobs:
        table.add_column(job.name, justify="right")
    rows: dict[str, list[str]] = {"start": [f"{job.startup_s:.0f}" for job in jobs]}
    for title, name in SHOWN.items():
        values = [[step[name] for step in (job.steps[1:] or job.steps) if name in step] for job in jobs]
        if any(values):
            rows[title] = [f"{statistics.mean(found):.4g}" if found else "-" for found in values]
    for name in sorted({name for job in jobs for name in job.memory}):
        rows[name.removesuffix("_gb")] = [f"{job.memory[name]:.2f}" if name in job.memory else "-" for job in jobs]
    for title, cells in rows.items():
        table.add_row(title, *cells)
    console.print(table)
    for job in jobs:
        if job.problem:
            console.print(f"{job.name}: {job.problem}", soft_wrap=True, highlight=False, markup=False)


def run(options: argparse.Namespace, shape: Shape) -> list[Job]:
    """All jobs, together up to their first step, then in turn."""
    folder: Path = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("*.go"), *folder.glob("*.ready"), *folder.glob("*.calls.jsonl")):
        old.unlink()
    data = Path(tempfile.mkdtemp(prefix="mvdata", dir="/tmp"))
    jobs: list[Job] = []
    try:
        shape.prepare(data)
        for name in options.runs:
            jobs.append(Job.start(name, shape, options.device, data, folder))
            time.sleep(2)  # each looks for free ports
        take_turns(jobs, options)
    finally:
        for job in jobs:
            if not job.log.closed:
                job.end()
        shutil.rmtree(data, ignore_errors=True)
    return jobs


def take_turns(jobs: list[Job], options: argparse.Namespace) -> None:
    """Let jobs train, one at a time; wait a while for those that are late, so that they do not start beside others."""
    deadline = time.monotonic() + options.startup_limit
    patient_until = deadline
    left = list(jobs)
    while left:
        now = time.monotonic()
        for job in left:
            job.look()
            if not job.startup_s and not job.problem and now > deadline:
                job.problem = f"did not start within {options.startup_limit:.0f} s"
        for job in [job for job in left if job.problem]:
            left.remove(job)
            job.end()
        ready = [job for job in left if job.startup_s]
        if ready:
            patient_until = min(patient_until, now + options.patience)
        if ready and (len(ready) == len(left) or now > patient_until):
            left.remove(ready[0])
            ready[0].train(options.device, options.train_limit)
            ready[0].end()
        else:
            time.sleep(0.2)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/verl_x2"))
    parser.add_argument("--runs", type=lambda text: text.split(","), default=list(RUNS), help=",".join(RUNS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, help="training steps of each job; 3")
    parser.add_argument("--graphs", action="store_true", help="with CUDA graphs: starts take longer")
    parser.add_argument("--startup-limit", type=float, default=600.0, help="seconds until all jobs are ready")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds from the first ready job to the last")
    parser.add_argument("--train-limit", type=float, default=300.0, help="seconds for the steps of one job")
    options = parser.parse_args()
    if unknown := sorted(set(options.runs) - set(RUNS)):
        parser.error(f"unknown runs {unknown}: choose from {', '.join(RUNS)}")
    shape = Shape.tiny() if options.device == "cpu" else Shape()
    shape.steps, shape.graphs = options.steps or shape.steps, options.graphs
    jobs = run(options, shape)
    results: dict[str, float] = {}
    series: dict[str, Any] = {}
    for job in jobs:
        if job.steps:
            results |= {f"{job.name}/{name}": value for name, value in job.results().items()}
        series[job.name] = {"steps": job.steps}
    written = make_results(
        "verl_x2",
        command="python -m benchmarks.verl_gpu " + " ".join(sys.argv[1:]),
        options=vars(shape) | {"device": options.device, "runs": options.runs},
        results=results,
        series=series,
        notes=[f"{job.name}: {job.problem}" for job in jobs if job.problem],
    ).write(options.out)
    show(jobs, Console(width=120))
    print(written)
    if any(job.problem for job in jobs):
        sys.exit(1)


if __name__ == "__main__":
    main()
