"""For benchmarks/verl_gpu.py: model and load, and one job of verl with what it left."""

from __future__ import annotations

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from benchmarks.gpu_memory import Sampler
from benchmarks.shared_gpu import SharedGpu
from benchmarks.verl_gate import GO, READY

ROOT = Path(__file__).parents[1]
OURS = "actor_rollout_ref.rollout.engine_kwargs.moebius"
METRIC = re.compile(r"(?<= - )([\w./@-]+):(?:np\.\w+\()?(-?[\d.]+(?:e[+-]?\d+)?|nan)\)?")
KEPT = (
    "timing_s/", "timing_per_token_ms/", "moebius/", "bench/", "training/rollout_", "rollout_corr/", "actor/perf/",
    "response_length/",
)  # fmt: skip
SAID = ("mode", "tags", "version", "tensors", "bytes", "sum", "expected")  # of a call, what is kept of it


@dataclass
class Shape:
    """Model and load."""

    layers: int = 8
    hidden: int = 1024
    experts: int = 32
    layer_std: float = 0.02  # see `demo_assets.save_random_model`
    first_stop: int = 320  # end a sample, `stops` of 512 tokens: about a tenth of all reach `response`
    stops: int = 8
    prompts: int = 16  # a step, `samples` of each
    samples: int = 8
    response: int = 256
    steps: int = 3
    kv_bytes: int = 2 << 30
    graphs: bool = False

    @classmethod
    def tiny(cls) -> Shape:
        """What a CPU gets through."""
        return cls(
            layers=2, hidden=128, experts=4, layer_std=0.08, first_stop=300, stops=30, prompts=4, samples=4,
            response=64, steps=2, kv_bytes=64 << 20,
        )  # fmt: skip

    def prepare(self, folder: Path) -> None:
        """Model and questions for all jobs."""
        command = [sys.executable, "examples/verl/prepare.py", "smoke", str(folder), "--layers", str(self.layers)]
        command += ["--hidden", str(self.hidden), "--intermediate", str(self.hidden // 2)]
        command += ["--experts", str(self.experts), "--layer-std", str(self.layer_std), "--stops", str(self.stops)]
        command += ["--first-stop", str(self.first_stop)]
        command += ["--prompts", str(self.prompts * self.steps)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)

    def settings(self, name: str, device: str, ray_folder: str, calls: Path, shared: bool = False) -> list[str]:
        """Of one job, over those of examples/verl/smoke.sh. `shared`: its ranks share a GPU."""
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
            if shared:  # vLLM takes no two ranks of one engine on a GPU: two engines, each on "its own"
                found += [f"{rollout}.data_parallel_size=1", f"{rollout}.expert_parallel_size=1"]
            return [*found, f"++{rollout}.engine_kwargs.vllm.kv_cache_memory_bytes={self.kv_bytes}",
                    f"{rollout}.gpu_memory_utilization=0.2"]  # fmt: skip
        found += [f"++{OURS}.policy.threshold={requests // 4}", f"++{OURS}.engine.kv_cache_bytes={self.kv_bytes}"]
        if name != "moebius":
            found.append(f"++{OURS}.policy.kind={name}")
        if name != "moebius" or shared:  # noting calls, and sums over weights, takes time: not where times are compared
            found.append(f"++{OURS}.calls={calls}")
        if shared:
            found.append(f"++{OURS}.engine.custom_all_reduce=False")
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
    def start(
        cls, name: str, shape: Shape, device: str, data: Path, folder: Path, shared: SharedGpu | None = None
    ) -> Job:
        """Start verl; it trains when `train` is called."""
        ray_folder = tempfile.mkdtemp(prefix="mv", dir="/tmp")  # Ray's sockets need a short path
        settings = shape.settings(name, device, ray_folder, folder / f"{name}.calls.jsonl", shared is not None)
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
        if shared is not None:
            environment = shared.environment(environment)
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
            finally:  # also of a job that is broken off
                self.memory = sampler.summary()
        (self.folder / f"{self.name}.memory.json").write_text(json.dumps(sampler.samples), encoding="utf-8")

    def read(self) -> None:
        """Take its steps from its log; it may still run."""
        text = (self.folder / f"{self.name}.log").read_text(encoding="utf-8", errors="replace")
        lines = [line for line in text.splitlines() if re.search(r"\bstep:\d+ - ", line)]
        self.steps = [{name: float(value) for name, value in METRIC.findall(line)} for line in lines]

    def end(self, grace_s: float = 10.0) -> None:
        """Leave no process behind; read what it said."""
        if self.log.closed:
            return
        self.terminate()
        try:
            self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.log.close()
        shutil.rmtree(self.ray_folder, ignore_errors=True)
        self.read()
        if self.problem:
            text = (self.folder / f"{self.name}.log").read_text(encoding="utf-8", errors="replace")
            errors = [line for line in text.splitlines() if re.search(r"\w*(Error|Exception)\b.*: ", line)]
            self.problem += ": " + (errors[-1] if errors else text.strip()[-300:])

    def calls(self) -> list[dict[str, Any]]:
        """What verl asked of our engine, in order; a row for calls that follow each other, with what they agree on."""
        file = self.folder / f"{self.name}.calls.jsonl"
        rows: list[dict[str, Any]] = []
        for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
            found = json.loads(line)
            row = {name: found[name] for name in ("call", *SAID) if name in found}
            if rows and {**row, "times": rows[-1]["times"]} == rows[-1]:
                rows[-1]["times"] += 1
            elif row["call"] != "generated":  # the answers to "generate", which come in between
                rows.append(row | {"times": 1})
        return rows

    def terminate(self) -> None:
        """Ask it to end."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)

    def results(self) -> dict[str, float]:
        """Flat numbers; means over all steps but the first, which compiles kernels."""
        steps = self.steps[1:] or self.steps
        found = {"startup_s": self.startup_s, "steps": float(len(self.steps))}
        for name in sorted({name for step in steps for name in step}):
            if name.startswith(KEPT):
                mean = statistics.mean(step[name] for step in steps if name in step)
                found[f"{name.removeprefix('timing_s/')}_s" if name.startswith("timing_s/") else name] = mean
        return found | self.memory


def take_turns(jobs: Sequence[Job], device: str, last: float, patience: float, done: Callable[[], None]) -> None:
    """Let jobs train, one at a time, until `last` (of time.monotonic()); `done` is called after each.

    The first ones wait `patience` seconds for those that are late, so that they do not train while others start. Each
    may take its share of the time that is left.
    """
    patient_until = last
    left = list(jobs)
    while left:
        now = time.monotonic()
        for job in left:
            job.look()
            if not job.problem and now >= last:
                job.problem = "had no time left to train" if job.startup_s else "did not start in time"
        for job in [job for job in left if job.problem]:
            left.remove(job)
            job.terminate()
        ready = [job for job in left if job.startup_s]
        if ready:
            patient_until = min(patient_until, now + patience)
        if ready and (len(ready) == len(left) or now > patient_until):
            ready[0].train(device, max(0.0, last - now) / len(left))
            ready[0].end()
            left.remove(ready[0])
            done()
        else:
            time.sleep(0.2)
