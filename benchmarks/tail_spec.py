"""What drafts in the tail are worth: with a trained model, with drafts that are never right, and where they break even.

    python -m benchmarks.arithmetic_model runs/arithmetic
    python -m benchmarks.tail_spec --model runs/arithmetic                        # two GPUs
    python -m benchmarks.tail_spec --model runs/tiny --tiny --out runs/tail.json  # CPU, to see that it works

Three parts; each figure says which it comes from. (1) `trained`: steps with n samples per prompt in every mode, with
the same prompts and seeds. In bf16 passes of different widths round differently, so samples may part and tails have
other lengths; therefore also seconds per token of the tail. (2) `zero`: drafts of random tokens, adaptive, beside the
engine without drafts. (3) `break_even`: the shape of --shape with random weights (--shape none: the trained model),
milliseconds of an iteration of b samples that verifies k drafted tokens each, none of them right; from these the
acceptance at which (1 + a + ... + a**k) / ms(b, k) equals 1 / ms(b, 0) without drafts, for the best k.

Writes docs/benchmarks/tail_spec_x2.json unless --out names another file.
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
MODES = ("off", "ngram", "suffix", "siblings")


# ---- in the ranks ------------------------------------------------------------------------------------------


def make(config: EngineConfig) -> Any:
    from moebius.engine.engine import MoebiusEngine

    return MoebiusEngine(config)


def measure(engine: Any, folder: str) -> str:
    """Costs of iterations, once for all modes, so that drafts' lengths follow what this machine takes; their origin."""
    import torch

    from moebius.engine.calibrate import Grid, Room
    from moebius.engine.cost_cache import cached_or_measured

    known = cached_or_measured(engine, Grid.at_start(Room.of(engine), on_gpu=torch.cuda.is_available()), folder)
    if engine.switcher.drafts is not None:
        engine.switcher.drafts.know(known.costs, engine.pair, adaptive=True)
    return known.origin


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


def iterations(engine: Any, batch: int, tokens: int, drafted: int | None, fixed: bool) -> list[float]:
    """Milliseconds of the iterations of `batch` samples in TP.

    `drafted` random tokens are drafted per sample (None: no drafts); `fixed`: all of them are verified, else as many as
    pay. The first iterations, with prompts and before drafts are ready, are left out.
    """
    from moebius.engine.draft_index import Drafts

    drafts = engine.switcher.drafts
    if drafts is not None:
        drafter, r = drafts.drafter, np.random.default_rng(0)

        def guess(slots: Any, limits: Any, lengths: Any) -> Drafts:
            counts = np.minimum(limits, drafted or 0).astype(np.int32)
            guesses = r.integers(10, engine.vocab_size, (len(slots), drafter.width), dtype=np.int32)
            return Drafts(guesses, np.full((len(slots), drafter.width), 0.9), counts)

        drafter.guess = guess
        cost = drafter.cost
        if fixed:
            drafter.cost = None
    engine.policy.config = PolicyConfig(kind="static_tp")
    r_prompt = np.random.default_rng(1)
    prompts = [r_prompt.integers(10, engine.vocab_size, 64).tolist() for _ in range(batch)]
    sampling = {"temperature": 1.0, "max_tokens": tokens, "ignore_eos": True}
    try:
        outcome = engine.run_step(requests_of(engine, prompts, 1, 0, sampling))
    finally:
        if drafts is not None:
            del drafter.guess
            drafter.cost = cost
    full = [i.ms for i in outcome.stats.iterations if i.live == batch and i.layout == "TP"]
    return full[len(full) // 4 :]


# ---- here -------------------------------------------------------------------------------------------------


def fleet(settings: EngineConfig, ranks: int, device: str, logs: Path, name: str) -> Fleet:
    """Engines of all ranks."""
    devices = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(ranks)))
    common = rank_environment(RankSetup(settings, 0, ranks, device, devices.split(","), 0, "")) | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_TUNED_CONFIG_FOLDER": str(moe_config_folder()),
        "HF_HUB_OFFLINE": "1",
    }
    return Fleet(name, [common] * ranks, make, settings, logs=logs)


def trained(arguments: argparse.Namespace, base: dict[str, Any], logs: Path) -> dict[str, Any]:
    """Part 1 and 2, per mode."""
    lines = (Path(base["model"]) / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["prompt"] for line in lines]
    sampling = {"temperature": 1.0, "max_tokens": arguments.max_tokens}
    policy = PolicyConfig(threshold=arguments.threshold)
    found: dict[str, Any] = {}
    for mode in MODES:
        tail = TailConfig(speculation=mode, draft_tokens=arguments.draft_tokens)
        settings = EngineConfig(**base, policy=policy, tail=tail)
        with fleet(settings, arguments.ranks, arguments.device, logs, mode) as engines:
            if mode != "off":
                engines.call(measure, str(logs / "costs"))
            steps = []
            for step in range(arguments.steps + 1):  # the first one warms up
                first = step * arguments.prompts % len(texts)
                chosen = (texts[first:] + texts)[: arguments.prompts]
                steps.append(engines.call(a_step, chosen, arguments.n, step, sampling, policy))
            found[mode] = {"steps": [_step(outcomes) for outcomes in steps[1:]]}
            if not all(step["tail_tokens"] for step in found[mode]["steps"]):
                raise SystemExit("a step ended before it came to TP: raise --threshold, or --max-tokens")
            if mode in ("off", "siblings"):
                found[mode]["zero_ms"] = {
                    batch: _median(engines.call(iterations, batch, arguments.tokens, arguments.draft_tokens, False))
                    for batch in arguments.batches
                }
    return found


def _step(outcomes: list[StepOutcome]) -> dict[str, Any]:
    stats = outcomes[0].stats
    tail = [i for i in stats.iterations if i.layout == "TP"]
    drafts = stats.drafts
    return {
        "live_at_switch": stats.switches[0].live if stats.switches else None,
        "tail_s": round(stats.tail_s, 4),
        "tail_tokens": sum(i.tokens for i in tail),
        "tail_iterations": len(tail),
        "total_s": round(stats.total_s, 4),
        "longest": max(len(r.token_ids) for outcome in outcomes for r in outcome.results),
        "tokens_per_iteration": round(drafts.tokens / drafts.rows, 4) if drafts and drafts.rows else None,
        "acceptance_by_position": [
            round(right / tried, 4) for right, tried in zip(drafts.accepted, drafts.verified, strict=True) if tried
        ]
        if drafts
        else None,
        "tokens_sha": _digest(outcomes),
    }


def _digest(outcomes: list[StepOutcome]) -> str:
    """Of all tokens: equal ones mean equal samples."""
    import hashlib

    results = sorted((r.key, r.token_ids) for outcome in outcomes for r in outcome.results)
    return hashlib.sha256(repr(results).encode()).hexdigest()[:16]


def _median(by_rank: list[list[float]]) -> float:
    return round(statistics.median(by_rank[0]), 4)


def break_even(arguments: argparse.Namespace, base: dict[str, Any], logs: Path) -> dict[str, Any]:
    """Part 3."""
    found: dict[str, Any] = {"plain_ms": {}, "ms": {}, "acceptance": {}}
    for mode in ("off", "ngram"):
        tail = TailConfig(speculation=mode, draft_tokens=arguments.draft_tokens, adaptive=False)
        settings = EngineConfig(**base, policy=PolicyConfig(threshold=max(arguments.batches)), tail=tail)
        with fleet(settings, arguments.ranks, arguments.device, logs, f"even-{mode}") as engines:
            for batch in arguments.batches:
                engines.call(iterations, batch, 8, None, True)
                if mode == "off":
                    found["plain_ms"][batch] = _median(engines.call(iterations, batch, arguments.tokens, None, True))
                    continue
                found["ms"][batch] = [
                    _median(engines.call(iterations, batch, arguments.tokens, drafted or None, True))
                    for drafted in range(arguments.draft_tokens + 1)
                ]
    for batch, times in found["ms"].items():
        found["acceptance"][batch] = even_acceptance(found["plain_ms"][batch], times)
    return found


def even_acceptance(plain: float, times: list[float]) -> float | None:
    """Least acceptance at which some draft length is as fast as none; times[k] has k drafted tokens. None: never."""
    for percent in range(101):
        share = percent / 100
        if any(sum(share**j for j in range(k + 1)) / ms >= 1 / plain for k, ms in enumerate(times) if k):
            return share
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of benchmarks.arithmetic_model")
    parser.add_argument("--shape", default="configs/shapes/qwen3-30b-a3b", help="model of part 3; none: --model")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default=None)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--n", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=1800)
    parser.add_argument("--threshold", type=int, default=128)
    parser.add_argument("--draft-tokens", type=int, default=5)
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 32, 64, 128])
    parser.add_argument("--tokens", type=int, default=200, help="of each sample in parts 2 and 3")
    parser.add_argument("--tiny", action="store_true", help="few and short samples on CPU: it works, no more")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/benchmarks/tail_spec_x2.json")
    chosen = parser.parse_args()
    if chosen.tiny:
        chosen.device, chosen.shape, chosen.prompts, chosen.n, chosen.steps = "cpu", "none", 2, 4, 1
        chosen.max_tokens, chosen.threshold, chosen.batches, chosen.tokens = 48, 8, [2], 16
    import torch

    chosen.device = chosen.device or ("cuda" if torch.cuda.is_available() else "cpu")
    cpu = chosen.device == "cpu"
    base: dict[str, Any] = {
        "dtype": "float32" if cpu else "bfloat16", "max_num_seqs": 32 if cpu else 1024, "enforce_eager": cpu,
        "kv_cache_bytes": (32 << 20) if cpu else (8 << 30), "max_model_len": 512 if cpu else 2048,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        first = trained(chosen, base | {"model": str(chosen.model)}, logs)
        shape = (
            {"model": str(chosen.model)} if chosen.shape == "none" else {"model": chosen.shape, "load_format": "dummy"}
        )
        even = break_even(chosen, base | shape, logs)
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    written = report(chosen, first, even, torch.cuda.get_device_name() if not cpu else "no GPU")
    chosen.out.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(written["results"], indent=1))


def report(chosen: argparse.Namespace, first: dict[str, Any], even: dict[str, Any], gpu: str) -> dict[str, Any]:
    """The results file."""

    def per_token(mode: str) -> float:
        steps = first[mode]["steps"]
        return sum(s["tail_s"] for s in steps) / sum(s["tail_tokens"] for s in steps)

    def tail(mode: str) -> float:
        return sum(s["tail_s"] for s in first[mode]["steps"])

    slower = {
        batch: round(100 * (ms / first["off"]["zero_ms"][batch] - 1), 2)
        for batch, ms in first["siblings"]["zero_ms"].items()
    }
    tokens = [s["tokens_per_iteration"] for s in first["siblings"]["steps"] if s["tokens_per_iteration"]]
    speedups = {mode: round(tail("off") / tail(mode), 4) for mode in MODES[1:]}
    by_token = {mode: round(per_token("off") / per_token(mode), 4) for mode in MODES[1:]}
    results = {
        "tail_speedup_trained": speedups["siblings"],
        "tail_speedup_trained_by_mode": speedups,
        "tail_speedup_per_token_trained_by_mode": by_token,
        "tokens_per_iteration_trained": round(statistics.mean(tokens), 4) if tokens else None,
        "zero_acceptance_slowdown_pct": max(slower.values()),
        "zero_acceptance_slowdown_pct_by_batch": slower,
        "break_even_acceptance_b8": even["acceptance"].get(8),
        "break_even_acceptance_b64": even["acceptance"].get(64),
        "break_even_acceptance_by_batch": even["acceptance"],
        "same_samples_in_all_modes": len({str([s["tokens_sha"] for s in first[m]["steps"]]) for m in MODES}) == 1,
    }
    return {
        "machine": f"{chosen.ranks} x {gpu}, {platform.machine()}, {os.cpu_count()} CPU cores",
        "versions": installed_versions(),
        "command": shlex.join(["python", "-m", "benchmarks.tail_spec", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "what": {
            "trained": f"{chosen.model}: {chosen.prompts} prompts x {chosen.n}, switch at {chosen.threshold} live; "
            "speed-ups are of tail seconds (per token: by tokens sampled in the tail), all measured steps together",
            "zero": "the trained model, random drafts, lengths adaptive; ms per iteration beside the engine without",
            "break_even": f"{chosen.shape}: random weights; acceptance that pays, from ms with drafts never right",
        },
        "results": results,
        "trained": first,
        "break_even": even,
    }


if __name__ == "__main__":
    main()
