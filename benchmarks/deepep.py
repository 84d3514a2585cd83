"""EP with deep_ep beside EP with vLLM's all-gather: two engines of ours in one run, with the same NCCL, taking turns.

    python -m benchmarks.deepep --config configs/shape_30b_x2.yaml --set engine.kv_cache_bytes=17179869184

Parts, all by default (--parts): `roundtrip`, dispatch and combine alone in a CUDA graph, by tokens per rank; `step`, a
step that starts in EP and switches with live samples; `agreement`, greedy tokens and their log probabilities of both
engines, and as a scale what the two layouts of the all-gather engine differ by; `sweep`, milliseconds of a decode
iteration by global batch.

Writes docs/benchmarks/deepep_x2.json unless --out names another file, after every part; a part that is not run keeps
what the file has of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moebius.engine.all2all import DEEPEP_V2, ENVIRONMENT, nccl_words
from moebius.engine.config import PolicyConfig
from moebius.engine.types import SampleKey, SampleRequest
from moebius.kernels.graph_times import microseconds_per_call
from moebius.rollout.bench import rank
from moebius.rollout.bench.engines import BenchSetup, Engines
from moebius.rollout.bench.results import make_results
from moebius.rollout.bench.stats import slowest_rank
from moebius.rollout.bench.sweep import STATIC, SweepOptions, output_tokens, windows_of
from moebius.rollout.bench.traces import Workload, long_tail
from moebius.rollout.config import load_config

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("roundtrip", "step", "agreement", "sweep")  # the longest last
CHAIN = 24  # round trips per CUDA graph
Numbers = dict[str, float]


# ---- in the ranks ----------------------------------------------------------------------------------------------------


def facts(subject: rank.Ours) -> dict[str, Any]:
    """What this engine's EP runs with."""
    from moebius.engine.all2all import look

    account = subject.engine.memory_account()
    found = look()
    return {
        "all2all": subject.engine.pair.all2all.backend,
        "nccl": nccl_words(found.nccl),
        "deep_ep": found.deep_ep,
        "all2all_bytes": account.all2all_bytes.ep,
        "starts": {built.layout: round(built.total_s, 1) for built in subject.engine.startup.runtimes},
        "capture_s": {built.layout: round(built.capture_s, 1) for built in subject.engine.startup.runtimes},
    }


def greedy(subject: rank.Ours, load: Workload, policy: PolicyConfig) -> tuple[dict[int, Any], list[int]]:
    """One greedy step: per request of this rank its tokens and their log probabilities, and the samples live at each
    switch."""
    engine = subject.engine
    engine.policy.config = policy
    requests = [
        SampleRequest(
            SampleKey(i, 0),
            load.prompt(i),
            {"temperature": 0.0, "max_tokens": load.lengths[i], "ignore_eos": True, "logprobs": 0},
            i,
        )
        for i in load.indices(engine.rank, engine.world_size)
    ]
    outcome = engine.run_step(requests)
    found = {result.key.prompt: (result.token_ids, result.logprobs) for result in outcome.results}
    return found, [switch.live for switch in outcome.stats.switches]


def roundtrips(subject: rank.Ours, sizes: Sequence[int], rounds: int) -> dict[int, list[float]]:
    """Microseconds of a dispatch and a combine of this engine's kind, by tokens per rank; a value per round."""
    import torch

    from moebius.engine import deepep_patches as deepep

    pair = subject.engine.pair
    pair.ep.install_groups()
    found = deepep.dispatchers(pair.ep.expert_modules)
    config = pair.ep.core.vllm_config.model_config.hf_text_config
    experts, topk, hidden = pair.shape.num_experts, int(config.num_experts_per_tok), pair.shape.hidden
    ranks, group = subject.engine.world_size, pair.ep.groups["_DP"]
    times: dict[int, list[float]] = {}
    with torch.inference_mode():
        for tokens in sizes:
            rows, ids, weights = deepep.example(tokens, experts, topk, hidden)
            # Where each token's experts are all on one rank, what comes back must be what was sent.
            if found and experts // ranks % topk == 0:
                back = deepep.roundtrip(found[0][0], rows, ids, weights, experts=experts, most=deepep.rounded(tokens))
                if not torch.equal(back, rows):
                    raise RuntimeError(f"{tokens} tokens came back changed from their experts' ranks")
            generator = torch.Generator("cuda").manual_seed(subject.engine.rank)
            ids = torch.rand((tokens, experts), device="cuda", generator=generator).topk(topk, dim=1).indices

            def once(rows: Any = rows, ids: Any = ids, weights: Any = weights, tokens: int = tokens) -> Any:
                if found:
                    most = deepep.rounded(tokens)
                    return deepep.roundtrip(found[0][0], rows, ids, weights, experts=experts, most=most)
                gathered = group.all_gatherv([rows, weights, ids], dim=0, sizes=[tokens] * ranks)
                return group.reduce_scatterv(gathered[0], dim=0, sizes=[tokens] * ranks)

            times[tokens] = _timed(once, rounds)
    pair.activate(pair.active.layout)
    return times


def _timed(once: Callable[[], Any], rounds: int) -> list[float]:
    """Microseconds per call, in a graph of CHAIN calls; the mean of ten replays is one value."""
    import torch

    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(3):
            once()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CHAIN):
                once()
        graph.replay()
        return microseconds_per_call(graph, CHAIN, replays=10, rounds=rounds)


# ---- what they come to -----------------------------------------------------------------------------------------------


def compare(measured: dict[str, dict[int, list[float]]], names: tuple[str, str]) -> Numbers:
    """Medians in ms, and how much faster the second engine is, in per cent of its own time: the median over rounds, of
    which each measured both."""
    base, other = (measured[name] for name in names)
    numbers: Numbers = {}
    for batch in sorted(set(base) & set(other)):
        numbers[f"allgather_ms_b{batch}"] = statistics.median(base[batch])
        numbers[f"deepep_ms_b{batch}"] = statistics.median(other[batch])
        ratios = [one / two for one, two in zip(base[batch], other[batch], strict=True)]
        numbers[f"deepep_vs_allgather_pct_b{batch}"] = 100 * (statistics.median(ratios) - 1)
    return numbers


def agreement(one: dict[int, Any], other: dict[int, Any]) -> Numbers:
    """Of two greedy runs of the same requests: the share of tokens before the first difference, of first tokens that
    are equal, and the log probabilities' differences over the tokens before the first difference."""
    shares, firsts, drifts = [], [], []
    for key, (tokens, logprobs) in one.items():
        others, other_logprobs = other[key]
        same = next((i for i, (a, b) in enumerate(zip(tokens, others, strict=True)) if a != b), len(tokens))
        shares.append(same / len(tokens))
        firsts.append(float(same > 0))
        drifts += [abs(a - b) for a, b in zip(logprobs[:same], other_logprobs[:same], strict=True)]
    return {
        "agreement": statistics.fmean(shares),
        "first_token_agreement": statistics.fmean(firsts),
        "logprob_drift_mean": statistics.fmean(drifts) if drifts else 0.0,
        "logprob_drift_max": max(drifts, default=0.0),
    }


def merged(parts: Sequence[tuple[dict[int, Any], Any]]) -> dict[int, Any]:
    """What all ranks answered for."""
    return {key: value for found, _ in parts for key, value in found.items()}


# ---- the parts -------------------------------------------------------------------------------------------------------


def sweep(engines: Engines, names: tuple[str, str], given: argparse.Namespace) -> tuple[Numbers, dict[str, Any]]:
    """Decode iterations in EP, the engines taking turns in every round."""
    options = SweepOptions(batches=given.batches, context=given.context, iterations=given.iterations)
    vocab = engines.capacity(names[0]).vocab
    measured: dict[str, dict[int, list[float]]] = {name: {} for name in names}
    for batch in given.batches:
        length = output_tokens(batch, options, [engines.capacity(name).max_num_batched_tokens for name in names])
        for turn in range(-1, given.rounds):  # the first is to warm up
            load = Workload.uniform(batch, given.context, length if turn >= 0 else 3, seed=turn, vocab=vocab)
            for name in names:
                by_rank = engines.fleet(name).call(rank.run, load, STATIC["EP"])
                if turn >= 0:
                    measured[name].setdefault(batch, []).append(statistics.median(windows_of(by_rank, options)))
        print(f"  batch {batch}: " + ", ".join(f"{statistics.median(measured[n][batch]):.2f} ms" for n in names))
    return compare(measured, names), {"sweep_ms": measured}


def roundtrip(engines: Engines, names: tuple[str, str], given: argparse.Namespace) -> tuple[Numbers, dict[str, Any]]:
    """Dispatch and combine alone."""
    numbers: Numbers = {}
    series: dict[str, Any] = {}
    for name, label in zip(names, ("allgather_", ""), strict=True):
        by_rank = engines.fleet(name).call(roundtrips, given.tokens, given.rounds)
        series[name] = {t: slowest_rank([found[t] for found in by_rank]) for t in given.tokens}
        numbers |= {f"{label}roundtrip_us_{t}": statistics.median(us) for t, us in series[name].items()}
    return numbers, {"roundtrip_us": series}


def step(engines: Engines, names: tuple[str, str], given: argparse.Namespace) -> tuple[Numbers, dict[str, Any]]:
    """One step that switches with live samples, on either engine."""
    vocab = engines.capacity(names[0]).vocab
    lengths = tuple(long_tail(given.live * 4, seed=1, body=48, tail=160, stragglers=given.live))
    load = Workload((given.context,) * len(lengths), lengths, 1, vocab)
    policy = PolicyConfig(kind="rollout", threshold=given.live, costs=None)
    found = [engines.fleet(name).call(greedy, load, policy) for name in names]
    whole = []
    for parts in found:
        samples, switches = merged(parts), parts[0][1]
        whole.append(bool(switches) and all(len(samples[i][0]) == n for i, n in enumerate(lengths)))
    numbers = {f"switched_{key}": value for key, value in agreement(*(merged(parts) for parts in found)).items()}
    numbers |= {"switched_step_ok": float(whole[1]), "allgather_switched_step_ok": float(whole[0])}
    numbers["switched_live"] = float(found[1][0][1][0]) if found[1][0][1] else 0.0
    return numbers, {}


def agree(engines: Engines, names: tuple[str, str], given: argparse.Namespace) -> tuple[Numbers, dict[str, Any]]:
    """Greedy tokens of EP on both engines, and of EP and TP on the first."""
    load = Workload.uniform(64, given.context, 64, seed=2, vocab=engines.capacity(names[0]).vocab)
    runs = [(names[0], STATIC["EP"]), (names[1], STATIC["EP"]), (names[0], STATIC["TP"])]
    base, other, tp = (merged(engines.fleet(name).call(greedy, load, policy)) for name, policy in runs)
    numbers = {f"greedy_{key}": value for key, value in agreement(base, other).items()}
    return numbers | {f"ep_tp_{key}": value for key, value in agreement(base, tp).items()}, {}


RUN: dict[str, Callable[..., tuple[Numbers, dict[str, Any]]]] = {
    "sweep": sweep, "roundtrip": roundtrip, "step": step, "agreement": agree,
}  # fmt: skip


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def integers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--against", default=DEEPEP_V2, help="engine.ep.all2all of the second engine")
    parser.add_argument("--batches", type=integers, default=[2, 8, 64, 256, 512, 1024, 2048])
    parser.add_argument("--tokens", type=integers, default=[1, 8, 32, 128, 256, 512, 1024, 2048], help="per rank")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--live", type=int, default=128, help="samples that a switched step switches with")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks" / "deepep_x2.json")
    given = parser.parse_args(arguments)
    given.parts = [part for part in PARTS if part in given.parts.split(",")]
    if not given.parts:
        parser.error(f"--parts: none of {', '.join(PARTS)}")
    return given


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts, print what they came to and how long they took."""
    given = parse(arguments)
    names = ("moebius:ep.all2all=allgather_reducescatter", f"moebius:ep.all2all={given.against}")
    old = json.loads(given.out.read_text(encoding="utf-8")) if given.out.exists() else {}
    numbers, series = dict(old.get("results", {})), dict(old.get("series", {}))
    took: Numbers = {}
    command = "python -m benchmarks.deepep " + " ".join(sys.argv[1:] if arguments is None else arguments)

    def save(starts: dict[str, Any]) -> None:
        results = make_results(
            "deepep",
            command=command,
            options={"parts": given.parts, "engines": starts, "environment": ENVIRONMENT, "took_s": took},
            results=numbers,
            series=series,
            notes=[
                "deepep_vs_allgather_pct: how much faster an EP iteration is with deep_ep; below 0 it is slower",
                "weights are random, so log probabilities lie close together: read drifts beside those of EP and TP",
            ],
        )
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(results.model_dump_json(indent=1) + "\n", encoding="utf-8")

    config = load_config(given.config, given.overrides)
    with tempfile.TemporaryDirectory() as folder:
        logs = given.out.parent / "deepep_logs" if given.out.parent != ROOT / "docs" / "benchmarks" else Path(folder)
        setup = BenchSetup.of(
            config,
            ranks=None,
            largest_batch=min(max(given.batches), config.engine.max_num_seqs),
            weights="dummy" if config.engine.load_format == "dummy" else "checkpoint",
            folder=Path(folder),
        )
        started = time.perf_counter()
        with Engines(setup, names, logs) as engines:
            took["start"] = time.perf_counter() - started
            starts = {name: engines.fleet(name).call(facts)[0] for name in names}
            print(f"start: {took['start']:.1f} s; {json.dumps(starts)}", flush=True)
            for part in given.parts:
                started = time.perf_counter()
                found, more = RUN[part](engines, names, given)
                numbers |= found
                series |= more
                took[part] = time.perf_counter() - started
                print(f"{part}: {took[part]:.1f} s", flush=True)
                save(starts)
    for name, value in numbers.items():
        print(f"{name:40s} {value:12.4f}")


if __name__ == "__main__":
    main()
