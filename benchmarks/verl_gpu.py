"""GRPO by unmodified verl on two GPUs of a host: with our rollouts, and with verl's own vLLM.

    python -m benchmarks.verl_gpu --out runs/verl_x2
    python -m benchmarks.verl_gpu --out runs/verl_cpu --device cpu --runs moebius,static_ep     # shows that it works

With one GPU only, the ranks share it (benchmarks/shared_gpu.py): that shows what is right, and no times.

Each run is a job of examples/verl/smoke.sh with a random Qwen3-MoE of some hundred million parameters. All start at
the same time, as starting is what takes long; they train one after the other, each with the GPUs' time to itself. The
whole ends within --limit seconds, also when a job fails or hangs or it is terminated: what there is by then is written.
Writes verl_x2.json (verl_shared_x1.json where ranks share), and beside it the jobs' logs.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.logprob_floor import LONGEST_S, Floor
from benchmarks.shared_gpu import SharedGpu, results_name
from benchmarks.verl_jobs import Job, Shape, take_turns
from moebius.rollout.bench.results import make_results

RUNS = ("moebius", "static_ep", "static_tp", "vllm")
ENDING_S = 20.0  # of the limit, to end jobs
APART_S = 2.0  # between the starts of two jobs: each looks for free ports
SHARED_PROMPTS = 8  # a step, where ranks share a GPU: all is several times slower there
FLOOR = "floor_logprob_difference_mean"
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
    "tokens in TP": "bench/tokens_tp",
    "|dlogp| mean": "bench/logprob_difference_mean",
    "  in EP": "bench/logprob_difference_ep_mean",
    "  in TP": "bench/logprob_difference_tp_mean",
    "|dlogp| p99": "bench/logprob_difference_p99",
    "  in EP ": "bench/logprob_difference_ep_p99",
    "  in TP ": "bench/logprob_difference_tp_p99",
    "|dlogp| max": "bench/logprob_difference_max",
    "Pearson": "training/rollout_actor_probs_pearson_corr",
}


def show(jobs: list[Job], floor: dict[str, float], console: Console) -> None:
    """A short table; a line for each job that failed."""
    by_rounding = f"; |dlogp| by rounding alone {floor[FLOOR]:.4g}" if FLOOR in floor else ""
    table = Table(title=f"means of the steps after the first; seconds, GB{by_rounding}", title_justify="left")
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


class Stopped(BaseException):
    """Somebody wants this to end."""


def stop(*_: Any) -> None:
    """Handler of SIGTERM: end in order, whatever else comes."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Stopped


class Comparison:
    """All jobs, together up to their first step, then in turn."""

    def __init__(self, options: argparse.Namespace, shape: Shape) -> None:
        self.options, self.shape = options, shape
        self.last = time.monotonic() + options.limit - ENDING_S
        self.folder: Path = options.out.resolve()
        self.jobs: list[Job] = []
        self.floor: dict[str, float] = {}
        self.problems: list[str] = []
        self.path: Path | None = None  # of the results
        self.shared = SharedGpu.where_needed(options.device, 2)
        self.patience = options.patience
        if self.shared is not None:  # where times say nothing, nobody waits for those that are late
            self.patience, shape.prompts = 0.0, min(shape.prompts, SHARED_PROMPTS)

    def run(self) -> None:
        """Run and write, whatever happens."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in (*self.folder.glob("*.go"), *self.folder.glob("*.ready"), *self.folder.glob("*.calls.jsonl")):
            old.unlink()
        data = Path(tempfile.mkdtemp(prefix="mvdata", dir="/tmp"))
        floor: Floor | None = None
        try:
            self.shape.prepare(data)
            for name in self.options.runs:
                self.jobs.append(Job.start(name, self.shape, self.options.device, data, self.folder, self.shared))
                time.sleep(APART_S)
            floor = Floor(data / "model", self.options.device)
            self.floor, problem = floor.result(min(LONGEST_S, self.last - time.monotonic()))
            if problem:
                self.problems.append(f"the difference by rounding alone was not measured: {problem}")
            take_turns(self.jobs, self.options.device, self.last, self.patience, self.write)
        except (Stopped, KeyboardInterrupt):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self.problems.append("broken off from outside")
        finally:
            self.write()  # before anything that may take time
            if floor is not None:
                floor.end()
            for job in self.jobs:
                job.terminate()
            until = time.monotonic() + ENDING_S / 2
            for job in self.jobs:
                job.end(max(0.1, until - time.monotonic()))
            self.write()
            shutil.rmtree(data, ignore_errors=True)
            if self.shared is not None:
                self.shared.close()

    def notes(self) -> list[str]:
        """What is not as the file's name and options say."""
        if self.shared is None:
            return []
        of_vllm = "vllm: two engines, of one rank each, in place of one with expert parallelism"
        return [self.shared.note, *([of_vllm] if "vllm" in self.options.runs else [])]

    def write(self) -> None:
        """What there is by now."""
        results: dict[str, float] = dict(self.floor)
        for job in self.jobs:
            job.read()
            if job.steps:
                results |= {f"{job.name}/{name}": value for name, value in job.results().items()}
        self.path = make_results(
            results_name("verl", self.shared),
            command="python -m benchmarks.verl_gpu " + " ".join(sys.argv[1:]),
            options=vars(self.shape) | {"device": self.options.device, "runs": self.options.runs},
            results=results,
            series={job.name: {"steps": job.steps, "calls": job.calls()} for job in self.jobs},
            notes=[*self.notes(), *self.problems, *(f"{job.name}: {job.problem}" for job in self.jobs if job.problem)],
        ).write(self.options.out)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/verl_x2"))
    parser.add_argument(
        "--runs", type=lambda text: text.split(","), default=["moebius", "vllm"], help="of " + ",".join(RUNS)
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, help="training steps of each job; 3")
    parser.add_argument("--graphs", action="store_true", help="with CUDA graphs: starts take longer")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds until all is over and written")
    parser.add_argument("--patience", type=float, default=90.0, help="seconds from the first ready job to the last")
    options = parser.parse_args()
    if unknown := sorted(set(options.runs) - set(RUNS)):
        parser.error(f"unknown runs {unknown}: choose from {', '.join(RUNS)}")
    shape = Shape.tiny() if options.device == "cpu" else Shape()
    shape.steps, shape.graphs = options.steps or shape.steps, options.graphs
    signal.signal(signal.SIGTERM, stop)
    comparison = Comparison(options, shape)
    comparison.run()
    show(comparison.jobs, comparison.floor, Console(width=120))
    for job in comparison.jobs:
        if calls := job.calls():
            print(f"{job.name}, asked by verl:", " > ".join(f"{row['call']} x{row['times']}" for row in calls))
    for line in (*comparison.notes(), *comparison.problems):
        print(line)
    print(comparison.path)
    if comparison.problems or any(job.problem for job in comparison.jobs):
        sys.exit(1)


if __name__ == "__main__":
    main()
