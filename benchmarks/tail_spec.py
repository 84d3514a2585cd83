"""What drafts in the tail are worth: with a trained model, with drafts that are never right, and where they break even.

    python -m benchmarks.arithmetic_model runs/arithmetic
    python -m benchmarks.tail_spec --model runs/arithmetic                        # two GPUs
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
import platform
import shlex
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from moebius.engine.config import EngineConfig, PolicyConfig, TailConfig
from moebius.engine.startup import moe_config_folder
from moebius.engine.types import SampleKey, SampleRequest, StepOutcome
from moebius.kernels.noise import derive_seed
from moebius.rollout.bench.fleet import Fleet
from moebius.rollout.rank_setup import RankSetup, rank_environment
from moebius.rollout.report import installed_versions

ROOT = Path(__file__).resolve().parents[1]
MODES = ("siblings", "suffix", "ngram")
PARTS = ("trained", "zero", "shape")
RATES = (0.0, 0.3, 0.6, 0.8)


# ---- in the ranks ------------------------------------------------------------------------------------------


def make(config: EngineConfig) -> Any:
    from moebius.engine.engine import MoebiusEngine

    return MoebiusEngine(config)


def measure(engine: Any, folder: str, batches: tuple[int, ...]) -> str:
    """Costs of iterations, once for all modes, so that drafts' lengths follow what this machine takes; their origin."""
    from moebius.engine.calibrate import Grid
    from moebius.engine.cost_cache import cached_or_measured

    grid = Grid(batches=batches, contexts=(engine.max_model_len // 4,), iterations=16)
    known = cached_or_measured(engine, grid, folder)
    engine.switcher.drafts.know(known.costs, engine.pair, adaptive=True)
    return known.origin


def set_mode(engine: Any, mode: str) -> None:
    """Draft from other texts from the next tail on; each mode keeps its own."""
    drafts = engine.switcher.drafts
    kept = engine.__dict__.setdefault("libraries", {drafts.mode: drafts.library})
    drafts.mode = drafts.drafter.mode = mode
    drafts.library = kept.setdefault(mode, type(drafts.library)(mode, drafts.library.capacity))


def requests_of(
    engine: Any, prompts: list[list[int]], n: int, step: int, sampling: dict[str, Any]
) -> list[SampleRequest]:
    """This rank's share: prompts dealt out in turn, all samples of a prompt on one rank."""
    return [
        SampleRequest(SampleKey(p, s, step), prompts[p], sampling, derive_seed(1, step, p, s))
        for p in range(engine.rank, len(prompts), engine.world_size)
        for s in range(n)
    ]


def a_step(
    engine: Any, texts: list[str], n: int, step: int, sampling: dict[str, Any], policy: PolicyConfig
) -> StepOutcome:
    """One step with these prompts."""
    engine.policy.config = policy
    prompts = [engine.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    outcome: StepOutcome = engine.run_step(requests_of(engine, prompts, n, step, sampling))
    return outcome


def iterations(
    engine: Any, batch: int, tokens: int, drafting: bool | None, drafted: int, rate: float | None
) -> tuple[float, float]:
    """Milliseconds of an iteration of `batch` samples in TP, and tokens per sample that it gives.

    `drafting`: always, never, or as it pays (None). Then `drafted` random tokens are drafted per sample, and all of
    them verified if always; `rate` of them count as right, whatever they are (None: those that are, next to none).
    Iterations with prompts and before the first draft are left out, and the ends when samples run out.
    """
    from moebius.engine.calibrate import typical

    drafts = engine.switcher.drafts
    undo = []
    if drafts is not None:
        undo = _rig(drafts, drafting, drafted, rate, engine.vocab_size)
    engine.policy.config = PolicyConfig(kind="static_tp")
    r_prompt = np.random.default_rng(1)
    prompts = [r_prompt.integers(10, engine.vocab_size, 64).tolist() for _ in range(batch)]
    sampling = {"temperature": 1.0, "max_tokens": tokens, "ignore_eos": True}
    try:
        outcome = engine.run_step(requests_of(engine, prompts, 1, 0, sampling))
    finally:
        for restore in undo:
            restore()
    whole = [i for i in outcome.stats.iterations if i.live == batch and i.layout == "TP" and i.tokens]
    kept = whole[max(6, len(whole) // 5) : -2]
    if not kept:
        raise ValueError(f"{batch} samples of {tokens} tokens gave {len(whole)} whole iterations: too few to time")
    return typical([i.ms for i in kept]), sum(i.tokens for i in kept) / batch / len(kept)


def _rig(drafts: Any, drafting: bool | None, drafted: int, rate: float | None, vocab: int) -> list[Any]:
    """Random drafts, and a rate at which they count as right; returns what undoes it."""
    from moebius.engine.draft_index import Drafts

    drafter, choice, verifier = drafts.drafter, drafts.choice, drafts.drafter._verifier
    r, luck = np.random.default_rng(0), np.random.default_rng(1)  # the same on all ranks
    cost, force = drafter.cost, choice.force

    def guess(slots: Any, limits: Any, lengths: Any) -> Drafts:
        counts = np.minimum(limits, drafted).astype(np.int32)
        guesses = r.integers(10, vocab, (len(slots), drafter.width), dtype=np.int32)
        return Drafts(guesses, np.full((len(slots), drafter.width), 0.9), counts)

    def accepted(sampled: Any, found: Any) -> Any:
        import torch

        lucky = torch.from_numpy(luck.random(tuple(found.shape)) < rate).to(found.device)
        return (lucky & (found >= 0)).cumprod(dim=1).sum(dim=1)

    drafter.guess, choice.force = guess, drafting
    if drafting:
        drafter.cost = None  # all of them
    undo = [lambda: delattr(drafter, "guess"), lambda: setattr(choice, "force", force)]
    undo.append(lambda: setattr(drafter, "cost", cost))
    if rate is not None:
        verifier.accepted = accepted
        undo.append(lambda: delattr(verifier, "accepted"))
    return undo


def memory(engine: Any) -> list[tuple[str, int]]:
    """Where this rank's memory goes."""
    rows: list[tuple[str, int]] = engine.memory_account().rows()
    return rows


# ---- here -------------------------------------------------------------------------------------------------


class Run:
    """Settings, what was measured so far, and the file it goes to."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        import torch

        self.chosen = chosen
        cpu = chosen.device == "cpu"
        self.gpu = "no GPU" if cpu else torch.cuda.get_device_name()
        self.found: dict[str, Any] = {}
        self.command = shlex.join(["python", "-m", "benchmarks.tail_spec", *sys.argv[1:]])
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
        """Engines of all ranks."""
        ranks = self.chosen.ranks
        devices = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(ranks)))
        setup = RankSetup(settings, 0, ranks, self.chosen.device, devices.split(","), 0, "")
        common = rank_environment(setup) | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_TUNED_CONFIG_FOLDER": str(moe_config_folder()),
            "HF_HUB_OFFLINE": "1",
        }
        started = time.perf_counter()
        fleet = Fleet(name, [common] * ranks, make, settings, logs=logs)
        say(f"{name}: {ranks} ranks started in {time.perf_counter() - started:.0f} s")
        return fleet

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
        clock = Clock(chosen.seconds)
        batches = tuple(b for b in (1, 8, 32, 128) if b <= chosen.threshold) or (1,)
        say("costs " + drafts.call(measure, str(logs / "costs"), batches)[0])
        if "trained" in chosen.parts:
            trained(run, off, drafts, clock)
        if "zero" in chosen.parts:
            zero(run, off, drafts, clock)


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
    """Random drafts, in turns with the engine without."""
    chosen = run.chosen
    found = run.found.setdefault("zero", {})
    for batch in chosen.batches:
        entry: dict[str, list[float]] = {"off_ms": [], "ms": []}
        for turn in range(chosen.turns + 1):
            if turn > 1 and clock.is_over():
                break
            plain = off.call(iterations, batch, chosen.tokens, None, 0, None)[0][0]
            ms, each = drafts.call(iterations, batch, chosen.tokens, None, chosen.draft_tokens, None)[0]
            if turn:  # the first one warms up
                entry["off_ms"].append(round(plain, 4))
                entry["ms"].append(round(ms / each, 4))
        found[str(batch)] = entry
        say(f"zero, {batch} samples: {slower(entry)} % slower")
        run.write()


def slower(entry: dict[str, list[float]]) -> float:
    """Per cent; medians of the turns."""
    return round(100 * (statistics.median(entry["ms"]) / statistics.median(entry["off_ms"]) - 1), 2)


def shape(run: Run, logs: Path) -> None:
    """One engine: without drafts, with some that are never right, and with some forced to be, in turns."""
    chosen = run.chosen
    model = {"model": str(chosen.model)} if chosen.shape == "none" else {"model": chosen.shape, "load_format": "dummy"}
    found = run.found.setdefault("shape", {})
    sizes = {} if chosen.device == "cpu" else {"capture_sizes": [1, 2, 4, *(b for b in chosen.batches if b > 4)]}
    with run.fleet(run.settings("siblings", **model, **sizes), logs, "shape") as engines:
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
                ms, _ = engines.call(iterations, batch, tokens, True, drafted, 0.0)[0]
                entry["ms"][str(drafted)] = round(ms, 4)
            ms, each = engines.call(iterations, batch, 2 * tokens, None, chosen.draft_tokens, 0.0)[0]
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
                ms, each = engines.call(
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


def expected(rate: float, drafted: int) -> float:
    """Tokens per sample and iteration."""
    return float(sum(rate**j for j in range(drafted + 1)))


def best_length(rate: float, times: dict[str, float]) -> int:
    """The draft length that is fastest at this acceptance; at 0, where none is, the longest."""
    if not rate:
        return max(map(int, times))
    return max(map(int, times), key=lambda k: expected(rate, k) / times[str(k)])


def even_acceptance(plain: float, times: dict[int, float]) -> float | None:
    """Least acceptance at which some draft length is as fast as none; times[k] has k drafted tokens. None: never."""
    for percent in range(101):
        if any(expected(percent / 100, k) / ms >= 1 / plain for k, ms in times.items()):
            return percent / 100
    return None


def summary(outcomes: list[StepOutcome]) -> dict[str, Any]:
    """What is kept of a step."""
    stats = outcomes[0].stats
    tail = [i for i in stats.iterations if i.layout == "TP"]
    drafts = stats.drafts
    kept: dict[str, Any] = {
        "live_at_switch": stats.switches[0].live if stats.switches else None,
        "tail_s": round(stats.tail_s, 4),
        "tail_tokens": sum(i.tokens for i in tail),
        "tail_iterations": len(tail),
        "total_s": round(stats.total_s, 4),
        "longest": max(len(r.token_ids) for outcome in outcomes for r in outcome.results),
        "tokens_sha": _digest(outcomes),
        "tokens_per_iteration": None,
    }
    if drafts is not None:
        tried = zip(drafts.accepted, drafts.verified, strict=True)
        kept |= {
            "tokens_per_iteration": round(drafts.tokens / drafts.rows, 4) if drafts.rows else None,
            "acceptance_by_position": [round(right / count, 4) for right, count in tried if count],
            "iterations_ahead": drafts.ahead,
            "changes": drafts.changes,
            "plain_s": None if drafts.plain_s is None else round(drafts.plain_s, 4),
        }
    return kept


def _digest(outcomes: list[StepOutcome]) -> str:
    """Of all tokens: equal ones mean equal samples."""
    import hashlib

    results = sorted((r.key, r.token_ids) for outcome in outcomes for r in outcome.results)
    return hashlib.sha256(repr(results).encode()).hexdigest()[:16]


def report(chosen: argparse.Namespace, found: dict[str, Any], gpu: str, command: str) -> dict[str, Any]:
    """The results file."""
    return {
        "machine": f"{chosen.ranks} x {gpu}, {platform.machine()}, {os.cpu_count()} CPU cores",
        "versions": installed_versions(),
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "what": {
            "trained": f"{chosen.model.name}: {chosen.prompts} prompts x {chosen.n}, switch at {chosen.threshold}; "
            "speed-ups are of tail seconds (per token: by tokens sampled in the tail), all measured steps together",
            "zero": "the trained model, random drafts, as it pays; ms per token of a sample beside the engine without",
            "shape": f"{chosen.shape}: random weights; acceptance that pays, from ms with drafts never right; speeds "
            "with forced acceptance; zero against the same engine told never to draft",
        },
        "results": results_of(found),
        **{part: found[part] for part in PARTS if part in found},
    }  # fmt: skip


def results_of(found: dict[str, Any]) -> dict[str, Any]:
    """The figures by name; those of parts that were not run are missing."""
    results: dict[str, Any] = {}
    steps = found.get("trained", {})
    off = steps.get("off", [])
    by_mode: dict[str, float] = {}
    by_token: dict[str, float] = {}
    for mode in MODES:
        # Only steps that both had: each has its own prompts.
        pairs = list(zip(off, steps.get(mode, []), strict=False))
        if pairs:
            plain, mine = (sum(pair[i]["tail_s"] for pair in pairs) for i in (0, 1))
            by_mode[mode] = round(plain / mine, 4)
            tokens, own = (sum(pair[i]["tail_tokens"] for pair in pairs) for i in (0, 1))
            by_token[mode] = round(plain / tokens / (mine / own), 4)
    if "siblings" in by_mode:
        each = [step["tokens_per_iteration"] for step in steps["siblings"] if step["tokens_per_iteration"]]
        digests = {str([step["tokens_sha"] for step in steps[mode]][:1]) for mode in ("off", *MODES) if steps.get(mode)}
        results |= {
            "tail_speedup_trained": by_mode["siblings"],
            "tail_speedup_trained_by_mode": by_mode,
            "tail_speedup_per_token_trained_by_mode": by_token,
            "tokens_per_iteration_trained": round(statistics.mean(each), 4) if each else None,
            "same_samples_in_all_modes": len(digests) == 1,
        }
    if zeros := {batch: slower(entry) for batch, entry in found.get("zero", {}).items()}:
        results["zero_acceptance_slowdown_pct"] = max(zeros.values())
        results["zero_acceptance_slowdown_pct_by_batch"] = zeros
    if batches := found.get("shape", {}).get("batches"):
        even = {batch: entry["even_acceptance"] for batch, entry in batches.items()}
        results |= {
            "break_even_acceptance_b8": even.get("8"),
            "break_even_acceptance_b64": even.get("64"),
            "break_even_acceptance_by_batch": even,
            "speed_by_forced_acceptance_and_batch": {
                str(rate): {
                    batch: entry["forced"][str(rate)]["speed"]
                    for batch, entry in batches.items()
                    if str(rate) in entry["forced"]
                }
                for rate in RATES
            },
            "zero_acceptance_slowdown_pct_shape_by_batch": {
                batch: round(100 * (entry["zero_ms"] / statistics.median(entry["plain_ms"]) - 1), 2)
                for batch, entry in batches.items()
            },
        }
    return results


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
    parser.add_argument("--turns", type=int, default=3, help="of each measurement in `zero`")
    parser.add_argument(
        "--seconds", type=float, default=900, help="after each start of engines; then nothing new begins"
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
