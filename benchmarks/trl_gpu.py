"""TRL's GRPOTrainer in server mode against `moebius serve` on one host: weights go packed over NCCL.

    PYTHONPATH=.venv/trl python -m benchmarks.trl_gpu --out runs/trl_x2
    PYTHONPATH=.venv/trl python -m benchmarks.trl_gpu --out runs/trl_cpu --device cpu     # gloo; shows that it works

The server's ranks take the first two GPUs. The trainer takes the third; where there is none, it shares GPU 0 with a
rank: NCCL refuses that unless the two seem to be on different hosts (NCCL_HOSTID), and then goes over sockets, so that
seconds of updates say nothing about NVLink there. With one GPU all three share it (benchmarks/shared_gpu.py), and no
seconds say anything. Writes trl_x2.json, or trl_shared_x1.json, and beside it both sides' logs and step reports.
How far log-probabilities differ by rounding alone is measured beside (benchmarks/logprob_floor.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.logprob_floor import Floor
from benchmarks.shared_gpu import OVER_LOOPBACK, SharedGpu, results_name
from moebius.rollout.bench.engines import visible_devices
from moebius.rollout.bench.results import make_results
from moebius.rollout.demo_assets import make_tiny_model, math_reward
from moebius.rollout.report_types import StepReport

ROOT = Path(__file__).parents[1]
STEPS, PROMPTS, N = 3, 16, 8
STARTED = time.monotonic()
# Tokens that end a sample, besides the model's own: the random model hardly ever does.
STOPS = {"cpu": list(range(300, 308)), "cuda": list(range(320, 328))}
SHOWN = {
    "|dlogp| mean": "sampling/sampling_logp_difference/mean",
    "|dlogp| max": "sampling/sampling_logp_difference/max",
    "entropy": "entropy",
    "grad norm": "grad_norm",
    "step s": "step_time",
    "weights s": "update_s",
    "weights GB": "update_gb",
}


# ---- the trainer: a process of its own ------------------------------------------------------------------------------


def train(model: str, url: str, out: Path, device: str) -> None:
    """TRL's own trainer and client; only what it does is timed. Writes out/trainer.json after every step."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    if device == "cpu":
        _gloo_in_place_of_nccl()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        group_port = probe.getsockname()[1]
    questions = [(i, 3 * i + 1) for i in range(PROMPTS * STEPS)]
    rows = [
        {"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "answer": str(a + b)} for a, b in questions
    ]
    config = GRPOConfig(
        output_dir=str(out / "trainer"),
        per_device_train_batch_size=PROMPTS * N,
        num_generations=N,
        max_completion_length=96 if device == "cpu" else 256,
        generation_kwargs={"stop_token_ids": STOPS[device]},
        max_steps=STEPS,
        learning_rate=1e-4,
        beta=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=device == "cpu",
        bf16=device == "cuda",
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32" if device == "cpu" else "bfloat16"},
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=url,
        vllm_server_timeout=60,
        vllm_group_port=group_port,
    )
    trainer = GRPOTrainer(
        model=model, reward_funcs=_reward, args=config, train_dataset=Dataset.from_list(rows)
    )  # fmt: skip
    nbytes = sum(parameter.numel() * parameter.element_size() for parameter in trainer.model.parameters())
    updates: list[float] = []
    original = trainer.vllm_generation.sync_weights

    def timed() -> None:
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        original()
        updates.append(time.perf_counter() - began)

    class Writer(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            entries = [entry for entry in state.log_history if "grad_norm" in entry]
            sent = [{"update_s": seconds, "update_gb": nbytes / 1e9} for seconds in updates]
            steps = [entry | update for entry, update in zip(entries, sent, strict=False)]
            (out / "trainer.json").write_text(json.dumps(steps), encoding="utf-8")

    trainer.vllm_generation.sync_weights = timed
    trainer.add_callback(Writer())
    trainer.train()


def _reward(completions: list[Any], answer: list[str], **others: Any) -> list[float]:
    texts = [completion[0]["content"] for completion in completions]
    return [math_reward(text, right) + len(set(text)) % 7 / 14 for text, right in zip(texts, answer, strict=True)]


def _gloo_in_place_of_nccl() -> None:
    """Where there are no GPUs: all but the bytes' way is then as on GPUs."""
    from trl.generation import vllm_client

    from tests.integration.gloo_transfer import GlooTransferEngine

    init = vllm_client.VLLMClient.init_communicator
    vllm_client.NCCLWeightTransferEngine = GlooTransferEngine
    vllm_client.VLLMClient.init_communicator = lambda self, device: init(self, "cuda")


# ---- both sides -----------------------------------------------------------------------------------------------------


def settings(model: Path, device: str, out: Path, shared: bool = False) -> dict[str, Any]:
    """Of the server. `shared`: its ranks share a GPU."""
    small = device == "cpu"
    engine = {
        "model": str(model),
        "dtype": "float32" if small else "bfloat16",
        "max_model_len": 512,
        "max_num_seqs": PROMPTS * N,
        "kv_cache_bytes": (32 << 20) if small else (2 << 30),
        "enforce_eager": True,
        "custom_all_reduce": not shared,
        "policy": {"kind": "rollout", "threshold": PROMPTS * N // 4},
    }
    service = {"reports": str(out / "reports"), "idle_s": 0.5, "quiet_s": 0.2}
    return {"ranks": 2, "device": device, "cpus_per_rank": 1, "startup_timeout_s": 400, "engine": engine,
            "service": service}  # fmt: skip


def environments(device: str, gpus: int, shared: SharedGpu | None = None) -> tuple[dict[str, str], dict[str, str]]:
    """Variables of the server's process and of the trainer's."""
    common = os.environ | {"VLLM_HOST_IP": "127.0.0.1", "HF_HUB_OFFLINE": "1", "RAY_memory_monitor_refresh_ms": "0"}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    common |= {"PYTHONPATH": path, "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    if device == "cpu":
        return common, common
    if shared is not None:
        common = shared.environment(common)
        return common, common | {"CUDA_VISIBLE_DEVICES": shared.gpu}
    server, trainer = common | {"CUDA_VISIBLE_DEVICES": "0,1"}, common | {"CUDA_VISIBLE_DEVICES": "2"}
    if gpus < 3:
        server |= OVER_LOOPBACK
        trainer |= OVER_LOOPBACK | {"CUDA_VISIBLE_DEVICES": "0", "NCCL_HOSTID": "trainer"}
    return server, trainer


def wait_until_serving(process: subprocess.Popen[bytes], log: Path, limit_s: float) -> str:
    """The server's address. Raises RuntimeError with the end of its log if there is none."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        text = log.read_text(encoding="utf-8", errors="replace")
        if (found := re.search(r"serving on (http://\S+)", text)) is not None:
            return found[1]
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode}:\n{text[-3000:]}")
        time.sleep(0.2)
    raise RuntimeError(f"the server did not start within {limit_s:.0f} s; see {log}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it started."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def time_is_up(*_: Any) -> None:
    """Handler of SIGTERM: as if the trainer's limit were over, so that the steps it came to are written."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise subprocess.TimeoutExpired("all", time.monotonic() - STARTED)


def run(options: argparse.Namespace, shared: SharedGpu | None) -> dict[str, Any]:
    """Server, then trainer. Returns the trainer's steps and the server's step reports."""
    out: Path = options.out.resolve()
    shutil.rmtree(out / "reports", ignore_errors=True)
    (out / "trainer.json").unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="mt", dir="/tmp"))
    sizes: dict[str, Any] = {"num_layers": 2, "heads": 2, "hidden": 64, "moe_intermediate": 32}
    if options.device == "cuda":
        sizes = {
            "num_layers": 8, "heads": 16, "kv_heads": 4, "hidden": 1024, "moe_intermediate": 512, "num_experts": 32,
            "layer_std": 0.02,
        }  # fmt: skip
    model = make_tiny_model(scratch / "model", max_len=512, **sizes)
    serve_settings = settings(model, options.device, out, shared is not None)
    (out / "serve.yaml").write_text(yaml.safe_dump(serve_settings), encoding="utf-8")
    serving, training = environments(options.device, len(visible_devices()), shared)
    serve = [sys.executable, "-m", "moebius.rollout.cli", "serve", "--config", str(out / "serve.yaml"), "--port", "0"]
    code, late = 0, ""
    with (out / "server.log").open("wb") as server_log, (out / "trainer.log").open("wb") as trainer_log:
        began = time.monotonic()
        server = subprocess.Popen(
            serve, env=serving | {"RAY_TMPDIR": str(scratch)}, stdout=server_log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        floor = Floor(model, options.device)
        try:
            url = wait_until_serving(server, out / "server.log", 400)
            started = time.monotonic() - began
            command = [sys.executable, "-m", "benchmarks.trl_gpu", "--train", url, "--model", str(model)]
            command += ["--out", str(out), "--device", options.device]
            try:
                code = subprocess.run(
                    command, cwd=ROOT, env=training, stdout=trainer_log, stderr=subprocess.STDOUT,
                    timeout=options.limit, check=False,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired as error:
                late = f"the trainer did not end within {error.timeout:.0f} s"
            rounding, problem = floor.result()
        finally:
            floor.end()
            stop(server)
            shutil.rmtree(scratch, ignore_errors=True)
    if code or not (out / "trainer.json").exists():
        text = (out / "trainer.log").read_text(encoding="utf-8", errors="replace")
        raise RuntimeError(f"{late or f'the trainer ended with status {code}'}:\n{text[-3000:]}")
    reports = [StepReport.model_validate_json(file.read_text()) for file in sorted((out / "reports").glob("*.json"))]
    drawn = [report for report in reports if report.counts.samples == PROMPTS * N]
    switches = [{"live": s.live, "pause_ms": s.pause_ms, "to": s.to} for report in drawn for s in report.switches]
    steps = json.loads((out / "trainer.json").read_text(encoding="utf-8"))
    notes = [shared.note] if shared is not None else []
    notes += [late] if late else []
    notes += [f"the difference by rounding alone was not measured: {problem}"] if problem else []
    return {"steps": steps, "switches": switches, "startup_s": started, "floor": rounding, "notes": notes}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/trl_x2"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for the trainer")
    parser.add_argument("--train", metavar="URL", help=argparse.SUPPRESS)  # be the trainer
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.model, options.train, options.out, options.device)
        return
    signal.signal(signal.SIGTERM, time_is_up)
    shared = SharedGpu.where_needed(options.device, 2)
    try:
        found = run(options, shared)
    finally:
        if shared is not None:
            shared.close()
    steps, switches = found["steps"], found["switches"]
    table = Table(title=f"{len(steps)} steps, {len(switches)} switches, server up in {found['startup_s']:.0f} s")
    table.add_column("step", justify="right")
    for title in SHOWN:
        table.add_column(title, justify="right")
    for number, step in enumerate(steps, 1):
        table.add_row(str(number), *[f"{step[name]:.4g}" if name in step else "-" for name in SHOWN.values()])
    results = {name: statistics.mean(step[name] for step in steps) for name in SHOWN.values() if name in steps[0]}
    results |= {"startup_s": found["startup_s"], "steps": float(len(steps)), "switches": float(len(switches))}
    results |= found["floor"]
    written = make_results(
        results_name("trl", shared),
        command="python -m benchmarks.trl_gpu " + " ".join(sys.argv[1:]),
        options={"device": options.device, "prompts": PROMPTS, "samples": N},
        results=results,
        series={"steps": steps, "switches": switches},
        notes=found["notes"],
    ).write(options.out)
    console = Console(width=120)
    console.print(table)
    for line in [*found["notes"], *(f"{name}: {value:.4g}" for name, value in found["floor"].items()), str(written)]:
        console.print(line, soft_wrap=True, highlight=False, markup=False)


if __name__ == "__main__":
    main()
