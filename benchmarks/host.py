"""CPU time that the host spends on an iteration, by part: vLLM's general code beside `engine.steady_decode`.

    python -m benchmarks.host --requests 1024      # from the repository root; on CPU, about two minutes

One rank decodes with a tiny model, whose forward pass is left out of the count. The time is that of the thread (not of
the wall clock), so other programs on the machine matter little. Writes docs/benchmarks/host_cpu.json.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moebius.engine.config import PolicyConfig
from moebius.engine.types import SampleKey, SampleRequest
from moebius.rollout.bench.results import make_results
from moebius.rollout.demo import make_tiny_model
from tests.engine import work
from tests.engine.fleet import Fleet

PARTS = {  # what is timed, by the object it belongs to
    "scheduler": ("schedule", "update_from_output"),
    "runner": ("_update_states", "_compute_prev_positions", "_prepare_input_ids", "_bookkeeping_sync"),
    "front": ("deliver",),
}


def parts_of_an_iteration(engine: Any, requests: list[SampleRequest], tokens: int) -> dict[str, float]:
    """Median milliseconds by part over the iterations in which all requests decode, without the first few."""
    from moebius.engine.front import RequestFront

    spent: dict[str, list[float]] = {}
    owners = {"scheduler": engine.pair.ep.scheduler, "runner": engine.pair.ep.runner, "front": RequestFront}
    timed = [
        (owners[owner], name, _timed(getattr(owners[owner], name), spent.setdefault(f"{owner}.{name.strip('_')}", [])))
        for owner, names in PARTS.items()
        for name in names
    ]
    with replaced(timed):
        engine.policy.config = PolicyConfig(kind="static_ep")
        engine.run_step(requests)
    return {name: 1e3 * statistics.median(values[-tokens + 4 : -4]) for name, values in spent.items()}


@contextmanager
def replaced(functions: Sequence[tuple[Any, str, Callable[..., Any]]]) -> Iterator[None]:
    """Each (owner, name, other) has `other` in its place inside the block."""
    before = [(owner, name, getattr(owner, name), name in vars(owner)) for owner, name, _ in functions]
    try:
        for owner, name, other in functions:
            setattr(owner, name, other)
        yield
    finally:
        for owner, name, original, was_own in before:
            if was_own:
                setattr(owner, name, original)
            elif name in vars(owner):
                delattr(owner, name)


def _timed(original: Callable[..., Any], into: list[float]) -> Callable[..., Any]:
    def timed(*arguments: Any, **named: Any) -> Any:
        began = time.thread_time()
        try:
            return original(*arguments, **named)
        finally:
            into.append(time.thread_time() - began)

    return timed


def make_requests(count: int, tokens: int, logprobs: bool) -> list[SampleRequest]:
    """Requests of one length that end by it."""
    sampling: dict[str, Any] = {"temperature": 1.0, "max_tokens": tokens, "ignore_eos": True}
    sampling |= {"logprobs": 0} if logprobs else {}
    return [SampleRequest(SampleKey(i, 0), [5 + i % 200] * 8, sampling, i) for i in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    options = parser.parse_args()
    numbers: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(Path(folder), num_layers=1)
        for path in Path(folder).glob("*token*"):
            path.unlink()
        for steady in (True, False):
            settings = work.config(
                folder,
                max_num_seqs=options.requests,
                max_num_batched_tokens=2 * options.requests,
                max_model_len=options.tokens + 32,
                kv_cache_bytes=256 << 20,
                enable_prefix_caching=True,
                steady_decode=steady,
            )
            fleet = Fleet(1, work.make_engine, settings)
            try:
                for logprobs in (False, True):
                    requests = make_requests(options.requests, options.tokens, logprobs)
                    (found,) = fleet.call(parts_of_an_iteration, requests, options.tokens)
                    kind = ("steady" if steady else "general") + ("_logprobs" if logprobs else "")
                    numbers |= {f"{kind}_{name}_ms": ms for name, ms in found.items()}
                    numbers[f"{kind}_us_per_request"] = 1e3 * sum(found.values()) / options.requests
            finally:
                fleet.close()
    for kind in ("", "_logprobs"):
        numbers[f"general_over_steady{kind}"] = (
            numbers[f"general{kind}_us_per_request"] / numbers[f"steady{kind}_us_per_request"]
        )
    results = make_results(
        "host_cpu",
        command=f"python -m benchmarks.host --requests {options.requests} --tokens {options.tokens}",
        options={"requests": options.requests, "tokens": options.tokens, "parts": PARTS},
        results=numbers,
        notes=["thread CPU time of one rank with a tiny model; `general` is vLLM's own code for the same calls"],
    )
    print(results.write(options.out))
    for name, value in numbers.items():
        print(f"{name:60s} {value:9.3f}")


if __name__ == "__main__":
    main()
