"""What drafts in the tail are worth: with a trained model, with drafts that are never right, and where they break even.

    python -m benchmarks.arithmetic_model runs/arithmetic
    python -m benchmarks.tail_spec --model runs/arithmetic                        # two GPUs
    python -m benchmarks.tail_spec --model runs/arithmetic --ranks 1 --out runs/tail_spec_x1.json
    python -m benchmarks.tail_spec --model runs/tiny --tiny --out runs/tail.json  # CPU, to see that it works

Three parts; each figure says which it comes from. Engines that are compared are up together and take turns.

`trained`: steps with n samples per prompt, without drafts and in every mode, with the same prompts and seeds. In bf16
passes of different widths round differently, so samples may part and tails have other lengths; therefore also seconds
per token of the tail.

`zero`: drafts of random tokens, drafting and lengths as it pays, beside the engine without drafts.

`shape`: the model shape of --shape with random weights (--shape none: the trained model), one engine. Milliseconds of
an iteration of b samples that verifies k drafted tokens each, none of them right; from these the acceptance at which
(1 + a + ... + a**k) / ms(b, k) equals 1 / ms(b, 0) without drafts, for the best k. Then the speed with acceptance
forced to some rates, measured, beside what that formula says; and again `zero`, here against the same engine that is
told never to draft.

Writes docs/benchmarks/tail_spec_x2.json unless --out names another file; after every measurement, so that a run that
is broken off leaves what it had. A part that is run alone keeps what the file has of the others.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.tail_ranks import a_step, iterations, make, measure, memory, set_mode
from benchmarks.tail_results import MODES, PARTS, RATES, best_length, even_acceptance, expected, report, slower, summary
from moebius.engine.config import EngineConfig, PolicyConfig, TailConfig
from moebius.engine.startup import moe_config_folder
from moebius.rollout.bench.fleet import Fleet
from moebius.rollout.rank_setup import RankSetup, rank_environment

ROOT = Path(__file__).resolve().parents[1]


class Run:
    """Settings, what was measured so far, and the file it goes to."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        import torch

        self.chosen = chosen
        cpu = chosen.device == "cpu"
        self.gpu = "no GPU" if cpu else torch.cuda.get_device_name()
        self.found: dict[str, Any] = {}
        # Where things lay on this host is nothing to keep.
        words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
        self.command = shlex.join(["python", "-m", "benchmarks.tail_spec", *words])
        if chosen.out.is_file() and set(chosen.parts) != set(PARTS):
            before = json.loads(chosen.out.read_text(encoding="utf-8"))
            self.found = {part: before[part] for part in PARTS if part in before and part not in chosen.parts}
            if self.found:
                self.command = f"{before['command']} && {self.command}"
        self.base: dict[str, Any] = {
            "dtype": "float32" if cpu else "bfloat16", "max_num_seqs": 32 if cpu else 512, "enforce_eager": cpu,
            "kv_cache_bytes": (32 << 20) if cpu else (6 << 30), "max_model_len": 512 if cpu else 2048,
        }  # fmt: skip

    def settings(self, mode: str, **more: Any) -> EngineConfig:
        """Of an engine with drafts of this kind."""
        tail = TailConfig(speculation=mode, draft_tokens=self.chosen.draft_tokens)  # type: ignore[arg-type]
        policy = PolicyConfig(threshold=self.chosen.threshold)
        return EngineConfig(**self.base, **more, policy=policy, tail=tail)

    def fleet(self, settings: EngineConfig, logs: Path, name: str) -> Fleet:
        """Engines of all ranks, which are still starting: see `wait`."""
        ranks = self.chosen.ranks
        devices = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(ranks)))
        setup = RankSetup(settings, 0, ranks, self.chosen.device, devices.split(","), 0, "")
        common = rank_environment(setup) | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_TUNED_CONFIG_FOLDER": str(moe_config_folder()),
            "HF_HUB_OFFLINE": "1",
        }
        return Fleet(name, [common] * ranks, make, settings, logs=logs, wait=False)

    def write(self) -> dict[str, Any]:
        """Write what there is; returns the results."""
        written = report(self.chosen, self.found, self.gpu, self.command)
        self.chosen.out.parent.mkdir(parents=True, exist_ok=True)
        self.chosen.out.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
        results: dict[str, Any] = written["results"]
        return results


def say(words: str) -> None:
    """A line with the time."""
    print(f"{time.strftime('%H:%M:%S')} {words}", flush=True)


def wait(fleet: Fleet) -> None:
    """Until its engines are up."""
    fleet.wait_until_ready()
    say(f"{fleet.name}: {len(fleet)} ranks, up after {fleet.start_seconds:.0f} s")


class Clock:
    """Whether a part has time left."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def is_over(self) -> bool:
        """Whether to begin nothing more."""
        return time.monotonic() > self._end


def with_trained(run: Run, logs: Path) -> None:
    """Parts `trained` and `zero`, with two engines that take turns."""
    chosen = run.chosen
    with ExitStack() as stack:
        model = {"model": str(chosen.model)}
        off = stack.enter_context(run.fleet(run.settings("off", **model), logs, "off"))
        drafts = stack.enter_context(run.fleet(run.settings("siblings", **model), logs, "drafts"))
        for fleet in (off, drafts):
            wait(fleet)
        clock = Clock(chosen.seconds)
        batches = tuple(b for b in (1, 8, 32, 128) if b <= chosen.threshold) or (1,)
        say("costs " + drafts.call(measure, str(logs / "costs"), batches)[0])
        if "trained" in chosen.parts:
            trained(run, off, drafts, clock)
        if "zero" in chosen.parts:
            zero(run, off, drafts, Clock(chosen.seconds / 2))


def trained(run: Run, off: Fleet, drafts: Fleet, clock: Clock) -> None:
    """Steps in all modes, in turns."""
    chosen = run.chosen
    texts = [json.loads(line)["prompt"] for line in (chosen.model / "questions.jsonl").read_text("utf-8").splitlines()]
    sampling = {"temperature": 1.0, "max_tokens": chosen.max_tokens}
    policy = PolicyConfig(threshold=chosen.threshold)
    found: dict[str, list[dict[str, Any]]] = run.found.setdefault("trained", {})
    for step in range(chosen.steps + 1):  # the first one warms up
        first = step * chosen.prompts % len(texts)
        prompts = (texts[first:] + texts)[: chosen.prompts]
        # The other modes once: they are no part of the bar, and a step takes as long as its burst.
        modes = ["off", *(MODES if step == 1 else MODES[:1])]
        for mode in modes[::-1] if step % 2 else modes:
            if clock.is_over() and found.get("siblings") and found.get("off"):
                say("trained: no time for more steps")
                return
            fleet = off if mode == "off" else drafts
            if mode != "off":
                fleet.call(set_mode, mode)
            entry = summary(fleet.call(a_step, prompts, chosen.n, step, sampling, policy))
            say(f"step {step} {mode}: tail {entry['tail_s']} s, {entry['tail_tokens']} tokens, "
                f"{entry['tokens_per_iteration']} per sample and iteration")  # fmt: skip
            if not entry["tail_tokens"]:
                raise SystemExit("a step ended before it came to TP: raise --threshold, or --max-tokens")
            if step:
                found.setdefault(mode, []).append(entry)
                run.write()


def zero(run: Run, off: Fleet, drafts: Fleet, clock: Clock) -> None:
    """Random drafts, in turns with the engine without; all batches in each turn."""
    chosen = run.chosen
    found: dict[str, dict[str, list[float]]] = run.found.setdefault("zero", {})
    for turn in range(chosen.turns + 1):
        if turn > 1 and clock.is_over():
            say(f"zero: no time for more than {turn - 1} turns")
            break
        for batch in chosen.batches:
            entry = found.setdefault(str(batch), {"off_ms": [], "ms": [], "changes": []})
            for fleet in (off, drafts) if turn % 2 else (drafts, off):
                drafted = 0 if fleet is off else chosen.draft_tokens
                ms, each, changes = fleet.call(iterations, batch, chosen.tokens, None, drafted, None)[0]
                if not turn:
                    continue  # warms up
                entry["off_ms" if fleet is off else "ms"].append(round(ms / each, 4))
                if fleet is drafts:
                    entry["changes"].append(changes)
        if turn:
            run.write()
    for batch, entry in found.items():
        spread = (max(entry["off_ms"]) - min(entry["off_ms"])) / statistics.median(entry["off_ms"])
        say(f"zero, {batch} samples: {slower(entry)} % slower; without drafts turns lie {100 * spread:.0f} % apart")


def shape(run: Run, logs: Path) -> None:
    """One engine: without drafts, with some that are never right, and with some forced to be, in turns."""
    chosen = run.chosen
    model = {"model": str(chosen.model)} if chosen.shape == "none" else {"model": chosen.shape, "load_format": "dummy"}
    found = run.found.setdefault("shape", {})
    sizes = {} if chosen.device == "cpu" else {"capture_sizes": [1, 2, 4, *(b for b in chosen.batches if b > 4)]}
    with run.fleet(run.settings("siblings", **model, **sizes), logs, "shape") as engines:
        wait(engines)
        found["memory"] = dict(engines.call(memory)[0])
        clock = Clock(chosen.seconds)
        lengths = sorted({1, 2, 3, chosen.draft_tokens} & set(range(1, chosen.draft_tokens + 1)))
        tokens = chosen.tokens // 2 if len(chosen.batches) > 1 else chosen.tokens
        engines.call(iterations, chosen.batches[0], tokens, None, 1, None)  # warms up
        for batch in chosen.batches:
            entry: dict[str, Any] = {"plain_ms": [], "ms": {}, "forced": {}}
            engines.call(iterations, batch, min(tokens, 40), True, 1, None)
            for drafted in lengths:
                entry["plain_ms"].append(round(engines.call(iterations, batch, tokens, False, 0, None)[0][0], 4))
                ms, *_ = engines.call(iterations, batch, tokens, True, drafted, 0.0)[0]
                entry["ms"][str(drafted)] = round(ms, 4)
            ms, each, _ = engines.call(iterations, batch, 2 * tokens, None, chosen.draft_tokens, 0.0)[0]
            entry["zero_ms"] = round(ms / each, 4)
            entry["plain_ms"].append(round(engines.call(iterations, batch, 2 * tokens, False, 0, None)[0][0], 4))
            plain = statistics.median(entry["plain_ms"])
            entry["even_acceptance"] = even_acceptance(plain, {int(k): ms for k, ms in entry["ms"].items()})
            for rate in RATES:
                if clock.is_over():
                    say("shape: no time for forced rates")
                    break
                drafted = best_length(rate, entry["ms"])
                # So many more tokens that about as many iterations are timed.
                ms, each, _ = engines.call(
                    iterations, batch, round(tokens * expected(rate, drafted)), True, drafted, rate
                )[0]
                entry["forced"][str(rate)] = {
                    "drafted": drafted, "ms": round(ms, 4), "tokens_per_iteration": round(each, 4),
                    "speed": round(plain * each / ms, 4),
                    "speed_by_formula": round(plain * expected(rate, drafted) / entry["ms"][str(drafted)], 4),
                }  # fmt: skip
            found.setdefault("batches", {})[str(batch)] = entry
            forced = {rate: one["speed"] for rate, one in entry["forced"].items()}
            say(f"shape, {batch} samples: {plain:.2f} ms, with drafts {entry['ms']}, pays from "
                f"{entry['even_acceptance']}, speed by rate {forced}")  # fmt: skip
            run.write()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of benchmarks.arithmetic_model")
    parser.add_argument("--shape", default="configs/shapes/qwen3-30b-a3b", help="of part `shape`; none: --model")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS), help="of trained,zero,shape")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default=None)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--n", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3, help="measured ones; `suffix` and `ngram` once")
    parser.add_argument("--max-tokens", type=int, default=1800)
    parser.add_argument("--threshold", type=int, default=128)
    parser.add_argument("--draft-tokens", type=int, default=5)
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")], default=[8, 16, 32, 64, 128])
    parser.add_argument("--tokens", type=int, default=240, help="of each sample in `zero`; half of it in `shape`")
    parser.add_argument("--turns", type=int, default=5, help="of each measurement in `zero`")
    parser.add_argument(
        "--seconds", type=float, default=900, help="of each part, half of it for `zero`; then nothing new begins"
    )
    parser.add_argument("--tiny", action="store_true", help="few and short samples on CPU: it works, no more")
    parser.add_argument("--logs", type=Path, help="folder for the ranks' output; default: none is kept")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/benchmarks/tail_spec_x2.json")
    chosen = parser.parse_args()
    if unknown := set(chosen.parts) - set(PARTS):
        parser.error(f"--parts has {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if chosen.tiny:
        chosen.device, chosen.shape, chosen.prompts, chosen.n, chosen.steps = "cpu", "none", 2, 4, 1
        chosen.max_tokens, chosen.threshold, chosen.batches, chosen.tokens, chosen.turns = 48, 8, [2], 40, 1
    import torch

    chosen.device = chosen.device or ("cuda" if torch.cuda.is_available() else "cpu")
    run = Run(chosen)
    with tempfile.TemporaryDirectory() as folder:
        logs = chosen.logs or Path(folder)
        if {"trained", "zero"} & set(chosen.parts):
            with_trained(run, logs)
        if "shape" in chosen.parts:
            shape(run, logs)
    print(json.dumps(run.write(), indent=1))


if __name__ == "__main__":
    main()
