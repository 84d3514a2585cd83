"""CPU time that the host spends on an iteration in TP that drafts, by part.

    python -m benchmarks.host_drafts      # from the repository root; on CPU, about two minutes

While drafts are verified nothing is scheduled ahead, so all of this time is added to the device's. One rank decodes
greedily with a tiny model, which soon repeats itself, so that drafts are often right. The time is that of the thread;
a part's does not contain that of parts within it. Writes docs/benchmarks/host_drafts_cpu.json.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.host import replaced
from moebius.engine.config import TailConfig
from moebius.engine.types import SampleKey, SampleRequest
from moebius.rollout.bench.results import make_results
from moebius.rollout.demo import make_tiny_model
from tests.engine import drafting, work
from tests.engine.fleet import Fleet

MODES = ("ngram", "suffix", "siblings")
# What is timed, by the object it belongs to. `model` and `sampler` compute, and are no part of the host's work.
PARTS = {
    "scheduler": ("schedule", "update_from_output", "update_draft_token_ids"),
    "runner": ("_update_states", "_prepare_inputs", "_build_attention_metadata", "_bookkeeping_sync"),
    "compute": ("_model_forward", "compute_logits", "sampler"),
    "verifier": ("forward",),
    "drafter": ("propose",),
    "front": ("deliver",),
    "mode": ("wants_change", "timed"),
    "core": ("step",),  # what is left of an iteration
}


class Clock:
    """Thread time by part; a part's does not contain that of parts within it."""

    def __init__(self) -> None:
        self.spent: dict[str, list[float]] = {}
        self._inner: list[float] = []  # by open call: time of the parts within it

    def around(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, timed."""
        into = self.spent.setdefault(name, [])

        def timed(*arguments: Any, **named: Any) -> Any:
            self._inner.append(0.0)
            began = time.thread_time()
            try:
                return original(*arguments, **named)
            finally:
                whole = time.thread_time() - began
                into.append(whole - self._inner.pop())
                if self._inner:
                    self._inner[-1] += whole

        return timed


def _places(engine: Any) -> dict[str, list[tuple[Any, str]]]:
    """Where the functions of each part are, in the order of `PARTS`."""
    from moebius.engine.front import RequestFront

    runtime, drafts = engine.pair.tp, engine.switcher.drafts
    runner, scheduler, steady = runtime.runner, runtime.scheduler, runtime.steady
    return {
        "scheduler": [(steady, "_schedule"), (steady, "_update"), (scheduler, "update_draft_token_ids")],
        "runner": [(runner, name) for name in PARTS["runner"]],
        "compute": [(runner, "_model_forward"), (runner.model, "compute_logits"), (runner.sampler, "forward")],
        "verifier": [(runner.rejection_sampler, "forward")],
        "drafter": [(drafts.drafter, "propose")],
        "front": [(RequestFront, "deliver")],
        "mode": [(drafts, name) for name in PARTS["mode"]],
        "core": [(runtime.core, "step")],
    }


def parts_of_an_iteration(engine: Any, mode: str, requests: list[SampleRequest]) -> dict[str, float]:
    """Median microseconds by part in the middle of a step, and drafted and accepted tokens per request."""
    drafting.set_mode(engine, mode)
    clock = Clock()
    timed = [
        (owner, name, clock.around(f"{part}.{told.strip('_')}", getattr(owner, name)))
        for part, places in _places(engine).items()
        for (owner, name), told in zip(places, PARTS[part], strict=True)
    ]
    with replaced(timed):
        outcome = work.run(engine, work.TP, requests)
    found = {}
    for name, values in clock.spent.items():
        middle = values[len(values) // 4 : -(len(values) // 4) or None]
        found[name] = 1e6 * statistics.median(middle) if middle else 0.0
    stats = outcome.stats.drafts
    assert stats is not None and stats.with_drafts > 8, f"{stats}: too little was drafted to tell"
    rows = max(1, stats.rows)
    return found | {"drafted_per_request": stats.drafted / rows, "tokens_per_request": stats.tokens / rows}


def make_requests(count: int, tokens: int, logprobs: bool) -> list[SampleRequest]:
    """Eight samples of each prompt, of one length that they end by."""
    sampling: dict[str, Any] = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}
    sampling |= {"logprobs": 0} if logprobs else {}
    prompts = [[5 + i, 17, 5 + i, 23] * 4 for i in range(count)]
    return [SampleRequest(SampleKey(i // 8, i % 8), prompts[i // 8], sampling, i) for i in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", default="8,32,128", help="live requests, comma-separated")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--draft-tokens", type=int, default=5)
    parser.add_argument("--logprobs", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    options = parser.parse_args()
    counts = [int(count) for count in options.requests.split(",")]
    numbers: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(Path(folder), num_layers=1)
        for path in Path(folder).glob("*token*"):
            path.unlink()
        settings = work.config(
            folder,
            max_num_seqs=max(counts),
            max_num_batched_tokens=8 * max(counts),
            max_model_len=options.tokens + 64,
            kv_cache_bytes=128 << 20,
            enable_prefix_caching=True,
            tail=TailConfig(speculation="siblings", draft_tokens=options.draft_tokens, draft_memory_tokens=1 << 16),
        )
        fleet = Fleet(1, work.make_engine, settings)
        try:
            fleet.call(drafting.wait_for_texts, True)
            fleet.call(drafting.force, True)  # lengths are adaptive, drafting is not
            for mode in options.modes.split(","):
                for count in counts:
                    requests = make_requests(count, options.tokens, options.logprobs)
                    (found,) = fleet.call(parts_of_an_iteration, mode, requests)
                    host = {name: us for name, us in found.items() if "." in name and not name.startswith("compute")}
                    numbers |= {f"{mode}_{count}_{name}_us": us for name, us in host.items()}
                    numbers |= {f"{mode}_{count}_{name}": found[name] for name in found if "." not in name}
                    numbers[f"{mode}_{count}_us"] = sum(host.values())
                    numbers[f"{mode}_{count}_us_per_request"] = sum(host.values()) / count
        finally:
            fleet.close()
    arguments = f" --requests {options.requests}" * (options.requests != "8,32,128") + " --logprobs" * options.logprobs
    results = make_results(
        "host_drafts_cpu",
        command=f"python -m benchmarks.host_drafts{arguments}",
        options=vars(options) | {"out": str(options.out), "parts": PARTS},
        results=numbers,
        notes=["thread CPU time of one rank with a tiny model; `core.step` is what is left of vLLM's iteration"],
    )
    print(results.write(options.out))
    for mode in options.modes.split(","):
        print(f"{mode:36s}" + "".join(f"{count:>10d}" for count in counts))
        first = f"{mode}_{counts[0]}_"
        for name in [name.removeprefix(first) for name in numbers if name.startswith(first)]:
            print(f"  {name:34s}" + "".join(f"{numbers[f'{mode}_{count}_{name}']:10.1f}" for count in counts))


if __name__ == "__main__":
    main()
