#!/usr/bin/env python
"""Find fast tile sizes for vLLM's fused MoE kernel on this GPU, and write them where vLLM looks for them.

vLLM ships tuned files for some pairs of experts and widths; for others it says "Using default MoE config". One file
holds, for a number of tokens each, the configuration of the Triton kernel. For the experts that a rank holds:

    python benchmarks/tune_moe.py --model configs/shapes/qwen3-30b-a3b --ranks 2 --layout EP --budget 600
    python benchmarks/tune_moe.py --experts 64 --global-experts 128 --intermediate 768 --hidden 2048 --topk 8

A candidate counts only if its output agrees with that of vLLM's present configuration. The search starts from the
configurations of other shapes that vLLM ships for this GPU and goes on by changing one number at a time. Each number of
tokens gets an equal share of the time that is left. Needs one GPU and nothing but vLLM; see docs/moe-tuning.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

Config = dict[str, int]

SPACE: dict[str, tuple[int, ...]] = {
    "BLOCK_SIZE_M": (16, 32, 64, 128),
    "BLOCK_SIZE_N": (32, 64, 128, 256),
    "BLOCK_SIZE_K": (32, 64, 128, 256),
    "GROUP_SIZE_M": (1, 16, 32, 64),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4, 5),
}
TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 4096)
MARGIN = 0.01  # a candidate must be faster by this share: smaller gains are noise
TOLERANCE = 2e-2  # largest difference of outputs by the largest output; tiles change the order of sums in bf16
ROUTINGS = 8  # draws of tokens and experts that one measurement goes through


@dataclass(frozen=True)
class Problem:
    """The experts of one rank as the kernel sees them."""

    experts: int  # held here
    global_experts: int  # routed to
    intermediate: int  # width of an expert here
    hidden: int
    topk: int
    dtype: str  # bfloat16 | float16


@dataclass
class Found:
    """Outcome for one number of tokens. Times in microseconds per call of the whole expert layer (two GEMMs)."""

    tokens: int
    config: Config
    us: float
    baseline: Config
    baseline_us: float
    tried: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # reasons
    complete: bool = False  # no single change improves it; else the time ran out


Cost = Callable[[Config], tuple[float | None, str]]  # microseconds, or None and why it cannot be used
Save = Callable[[Sequence[Found]], object]


# ---- search: no GPU --------------------------------------------------------------------------------------------------


def normal(config: dict[str, Any]) -> Config:
    """The entries of a configuration that are searched, in the order of SPACE."""
    return {key: int(config[key]) for key in SPACE}


def fits(config: Config, shared_bytes: int, itemsize: int) -> bool:
    """Whether the tiles of all pipeline stages fit into `shared_bytes` of a block's shared memory."""
    rows = config["BLOCK_SIZE_M"] + config["BLOCK_SIZE_N"]
    return config["num_stages"] * rows * config["BLOCK_SIZE_K"] * itemsize <= shared_bytes


def neighbours(config: Config) -> Iterable[Config]:
    """Configurations one step away in one entry; an entry outside of SPACE goes to its nearest values."""
    for key, values in SPACE.items():
        below = [value for value in values if value < config[key]]
        above = [value for value in values if value > config[key]]
        yield from ({**config, key: value} for value in (below[-1:] + above[:1]))


def search(
    tokens: int, seeds: Sequence[Config], cost: Cost, may: Callable[[Config], bool], time_left: Callable[[], float]
) -> Found:
    """Descend from the best of `seeds`, of which the first is the baseline and always measured.

    Raises RuntimeError when the baseline cannot be measured.
    """
    seen: dict[tuple[int, ...], float | None] = {}
    refused: Counter[str] = Counter()

    def measure(config: Config) -> float | None:
        key = tuple(config.values())
        if key not in seen:
            seen[key], reason = cost(config)
            if seen[key] is None:
                refused[reason] += 1
        return seen[key]

    baseline_us = measure(seeds[0])
    if baseline_us is None:
        raise RuntimeError(f"vLLM's own configuration for {tokens} tokens cannot be measured: {dict(refused)}")
    best = Found(tokens, seeds[0], baseline_us, seeds[0], baseline_us)
    pending = [config for config in seeds[1:] if may(config)]
    while True:
        for config in pending:
            if time_left() <= 0:
                best.tried, best.refused = len(seen), refused
                return best
            us = measure(config)
            if us is not None and us < best.us * (1 - MARGIN):
                best.config, best.us = config, us
        pending = [c for c in neighbours(best.config) if tuple(c.values()) not in seen and may(c)]
        if not pending:
            break
    best.tried, best.refused, best.complete = len(seen), refused, True
    return best


def nearest(table: dict[int, Config], tokens: int) -> Config:
    """The entry vLLM uses for `tokens`: that of the nearest number."""
    return table[min(table, key=lambda listed: abs(listed - tokens))]


def write(folder: Path, name: str, found: Sequence[Found], provenance: dict[str, Any]) -> Path:
    """The file vLLM reads, and beside it one that says how it came about. Returns the first."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    by_tokens = {str(f.tokens): f.config for f in sorted(found, key=lambda f: f.tokens)}
    path.write_text(json.dumps({"triton_version": provenance["triton"], **by_tokens}, indent=4) + "\n")
    results = [asdict(f) | {"gain": round(f.baseline_us / f.us, 4)} for f in found]
    side = path.with_name(path.name.removesuffix(".json") + ".provenance.json")
    side.write_text(json.dumps(provenance | {"results": results}, indent=1) + "\n")
    return path


# ---- measurement: one GPU --------------------------------------------------------------------------------------------


class Bench:
    """Times the expert layer of one problem under given configurations."""

    def __init__(self, problem: Problem, seed: int) -> None:
        import torch

        self.problem = p = problem
        self.torch: Any = torch
        self.dtype = getattr(torch, p.dtype)
        self.random = torch.Generator(device="cuda").manual_seed(seed)
        # Scaled so that outputs are of the size of the inputs, as in a trained model.
        self.w13 = self._normal(p.experts, 2 * p.intermediate, p.hidden) * p.hidden**-0.5
        self.w2 = self._normal(p.experts, p.hidden, p.intermediate) * p.intermediate**-0.5
        self.expert_map = None
        if p.global_experts > p.experts:  # EP: this rank holds the first of them
            self.expert_map = torch.full((p.global_experts,), -1, dtype=torch.int32, device="cuda")
            self.expert_map[: p.experts] = torch.arange(p.experts, dtype=torch.int32, device="cuda")
        self.inputs: list[tuple[Any, Any, Any]] = []
        self.reference: list[Any] = []

    def prepare(self, tokens: int, baseline: Config) -> None:
        """Draw inputs for `tokens`, and take the outputs of `baseline` as right."""
        torch, p = self.torch, self.problem
        self.inputs, self.reference = [], []
        for _ in range(ROUTINGS):
            logits = torch.randn(tokens, p.global_experts, device="cuda", generator=self.random)
            weights, ids = torch.topk(logits.softmax(-1), p.topk, dim=-1)
            weights = weights / weights.sum(-1, keepdim=True)
            self.inputs.append((self._normal(tokens, p.hidden), weights.contiguous(), ids.to(torch.int32).contiguous()))
        self.reference = [self._call(baseline, *given) for given in self.inputs]
        torch.cuda.synchronize()
        if not all(bool(torch.isfinite(out).all()) for out in self.reference):
            raise RuntimeError(f"the expert layer gives values that are not finite for {tokens} tokens")

    def cost(self, config: Config) -> tuple[float | None, str]:
        """Microseconds per call, or None and the reason why `config` is out of the question."""
        from triton.errors import TritonError

        try:
            outputs = [self._call(config, *given) for given in self.inputs]
            self.torch.cuda.synchronize()
        except (TritonError, RuntimeError, AssertionError) as error:
            if "CUDA error" in str(error):
                raise  # the device's context is lost
            return None, type(error).__name__
        if not self._agree(outputs):
            return None, "other output"
        return self._time(config), ""

    def _normal(self, *shape: int) -> Any:
        return self.torch.randn(*shape, device="cuda", dtype=self.dtype, generator=self.random)

    def _call(self, config: Config, x: Any, weights: Any, ids: Any) -> Any:
        from vllm.model_executor.layers.fused_moe import fused_experts, override_config

        # Also after an error inside it, `override_config` holds a configuration of this search and no file is read.
        with override_config(config):
            return fused_experts(
                x,
                self.w13,
                self.w2,
                weights,
                ids,
                global_num_experts=self.problem.global_experts,
                expert_map=self.expert_map,
            )

    def _agree(self, outputs: list[Any]) -> bool:
        for out, want in zip(outputs, self.reference, strict=True):
            largest = want.float().abs().max().clamp_min(1e-6)
            difference = (out.float() - want.float()).abs().max() / largest
            if not bool(difference <= TOLERANCE):  # also refuses NaN
                return False
        return True

    def _time(self, config: Config, window_ms: float = 8.0, windows: int = 3) -> float:
        torch = self.torch
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for given in self.inputs:
                self._call(config, *given)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def replay(times: int) -> float:
            start.record()
            for _ in range(times):
                graph.replay()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end))

        replay(1)
        times = max(1, int(window_ms / max(replay(2) / 2, 1e-3)))
        best = min(replay(times) for _ in range(windows)) / times
        graph.reset()
        return 1e3 * best / len(self.inputs)

    def confirm(self, found: Found, rounds: int = 3) -> None:
        """Measure the winner and the baseline in turns, and keep the baseline unless the gain holds."""
        if found.config == found.baseline:
            return
        pairs = [(self._time(found.baseline), self._time(found.config)) for _ in range(rounds)]
        found.baseline_us, found.us = (min(times) for times in zip(*pairs, strict=True))
        if found.us > found.baseline_us * (1 - MARGIN):
            found.config, found.us = found.baseline, found.baseline_us


def present_config(problem: Problem, tokens: int) -> tuple[Config, str]:
    """What vLLM uses at present for `tokens`, and where that comes from."""
    from vllm.model_executor.layers.fused_moe.fused_moe import get_default_config, get_moe_configs

    p = problem
    table = get_moe_configs(p.experts, p.intermediate, None)
    if table:
        return normal(nearest(table, tokens)), "file"
    return normal(get_default_config(tokens, p.experts, p.intermediate, p.hidden, p.topk, None)), "default"


def shipped_seeds(file_name: str, tokens: int) -> list[Config]:
    """What vLLM's files of other shapes on this GPU say for `tokens`, the most frequent first."""
    import vllm.model_executor.layers.fused_moe as fused_moe

    device = file_name.rsplit(",", maxsplit=1)[-1]  # device_name=NAME.json: files without a quantisation
    folder = Path(fused_moe.__file__).parent / "configs"
    seen: Counter[tuple[int, ...]] = Counter()
    for path in folder.glob(f"*{device}"):
        table = {int(key): value for key, value in json.loads(path.read_text()).items() if key.isdigit()}
        if table and all(key in nearest(table, tokens) for key in SPACE):
            seen[tuple(normal(nearest(table, tokens)).values())] += 1
    return [dict(zip(SPACE, values, strict=True)) for values, _ in seen.most_common(12)]


def tune(problem: Problem, tokens: Sequence[int], budget_s: float, seed: int, save: Save | None) -> None:
    """Search for each of `tokens`, within about `budget_s` seconds in all; without `save`, only time what vLLM uses.

    `save` gets all outcomes so far after each number of tokens, so that a run that is cut off leaves what it found.
    """
    import torch
    from vllm.model_executor.layers.fused_moe import get_config_file_name

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    shared = int(getattr(properties, "shared_memory_per_block_optin", 0)) or 96 << 10
    itemsize = torch.empty(0, dtype=getattr(torch, problem.dtype)).element_size()
    bench = Bench(problem, seed)
    deadline = time.monotonic() + budget_s
    results: list[Found] = []
    last: list[Config] = []
    for i, count in enumerate(tokens):
        baseline, origin = present_config(problem, count)
        bench.prepare(count, baseline)
        stop = time.monotonic() + (deadline - time.monotonic()) / (len(tokens) - i)
        if save is None:
            us, reason = bench.cost(baseline)
            if us is None:
                raise RuntimeError(f"{count} tokens: {reason}")
            found = Found(count, baseline, us, baseline, us, tried=1)
        else:
            file_name = get_config_file_name(problem.experts, problem.intermediate, None)
            seeds = [baseline, *last, *shipped_seeds(file_name, count)]
            found = search(count, seeds, bench.cost, lambda c: fits(c, shared, itemsize), partial(_until, stop))
            bench.confirm(found)
            last = [found.config]
        results.append(found)
        print(
            f"{count:>5} tokens: {found.us:9.1f} us, vLLM's {origin} {found.baseline_us:9.1f} us "
            f"({found.baseline_us / found.us:.3f}x), {found.tried} tried, {sum(found.refused.values())} refused"
            f"{'' if found.complete or save is None else ', time ran out'}  {list(found.config.values())}",
            flush=True,
        )
        if save is not None:
            save(results)


def _until(stop: float) -> float:
    return stop - time.monotonic()


def from_model(folder: Path, ranks: int, layout: str, dtype: str) -> Problem:
    """The experts of one of `ranks` ranks, from a model's config.json."""
    from moebius.engine.layout import ModelShape, ShardMap

    config = json.loads((folder / "config.json").read_text())
    shape = ModelShape.from_hf_config(config, ranks)
    shards, topk = ShardMap(shape, ranks), int(config["num_experts_per_tok"])
    if layout == "EP":
        return Problem(shards.experts_per_rank, shape.num_experts, shape.intermediate, shape.hidden, topk, dtype)
    width = shards.intermediate_per_rank
    return Problem(shape.num_experts, shape.num_experts, width, shape.hidden, topk, dtype)


def provenance(problem: Problem, seconds: float, seed: int) -> dict[str, Any]:
    """How a file came about."""
    import torch
    import triton
    import vllm

    return {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "by": "benchmarks/tune_moe.py",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "vllm": vllm.__version__,
        "cuda": torch.version.cuda,
        "problem": asdict(problem),
        "seconds": round(seconds, 1),
        "seed": seed,
        "routings": ROUTINGS,
        "tolerance": TOLERANCE,
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; exits with a message when a shape is not whole."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder with a config.json, instead of the five numbers below")
    parser.add_argument("--ranks", type=int, default=2, help="with --model: ranks of the group")
    parser.add_argument("--layout", choices=["EP", "TP"], default="EP", help="with --model")
    parser.add_argument("--experts", type=int, help="held by a rank")
    parser.add_argument("--global-experts", type=int, help="routed to; default: as many as are held")
    parser.add_argument("--intermediate", type=int, help="width of an expert on a rank")
    parser.add_argument("--hidden", type=int, help="width of the model")
    parser.add_argument("--topk", type=int, help="experts per token")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS), help="numbers of tokens, over all ranks")
    parser.add_argument("--budget", type=float, default=900, help="seconds for the whole search")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "engine" / "moe_configs")
    parser.add_argument("--measure", action="store_true", help="only time what vLLM uses at present; writes nothing")
    args = parser.parse_args(arguments)
    if args.model is None and None in (args.experts, args.intermediate, args.hidden, args.topk):
        parser.error("give --model, or --experts, --intermediate, --hidden and --topk")
    if min(args.tokens) < 1 or args.budget <= 0:
        parser.error("--tokens and --budget must be positive")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune, write, and say where. Returns the exit code."""
    args = parse(arguments)
    if args.model is not None:
        problem = from_model(args.model, args.ranks, args.layout, args.dtype)
    else:
        total = args.global_experts or args.experts
        problem = Problem(args.experts, total, args.intermediate, args.hidden, args.topk, args.dtype)
    import torch

    if not torch.cuda.is_available():
        print("tune_moe needs a GPU, and torch finds none", file=sys.stderr)
        return 2
    from vllm.model_executor.layers.fused_moe import get_config_file_name

    name = get_config_file_name(problem.experts, problem.intermediate, None)
    started = time.monotonic()

    def save(found: Sequence[Found]) -> None:
        write(args.out, name, found, provenance(problem, time.monotonic() - started, args.seed))

    with torch.inference_mode():
        tune(problem, sorted(set(args.tokens)), args.budget, args.seed, None if args.measure else save)
    if not args.measure:
        print(args.out / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
