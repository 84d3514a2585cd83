"""Weight updates and sleep of a whole group with a real model's shape, over Ray: GB/s beside the link's, on GPUs.

    python -m benchmarks.weights --config configs/shape_30b_x2.yaml --out docs/benchmarks/weights_x2.json

One group is started; its parts run one after the other, the results so far are written after each, and none begins
after `--seconds`. Tensors are views of one buffer, so what is loaded means nothing; the bytes and their way are those
of an update. They come

* ipc: from this process, on GPU 0, which a rank uses too, as a colocated trainer's;
* nccl (on CPU: gloo): from the process of rank 0, by broadcasts to the other ranks; NCCL takes one process per GPU, and
  the ranks have them all. Rank 0 loads the same tensors from its own memory;
* host: from this process, through Ray's object store.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from moebius.engine.weights import ExpectedWeights
from moebius.rollout.bench.results import make_results, portable
from moebius.rollout.config import RolloutConfig, load_config
from moebius.rollout.group import RolloutGroup
from moebius.rollout.group_weights import UpdateReport
from moebius.rollout.transports.broadcast import Broadcaster
from moebius.rollout.transports.sender import Offer
from moebius.rollout.types import LengthTrace
from moebius.rollout.weights import batches

REPEATS = 3
PROMPTS, N, SHORT, LONG = 16, 16, 32, 64  # tokens: as many samples are long as the tail may have
LINK_BYTES = 1 << 30
Shapes = dict[str, tuple[int, ...]]
BEGIN, TAKE, END = f"{__name__}:begin", f"{__name__}:take", f"{__name__}:end"
if __name__ == "__main__":  # the ranks import it by its name
    BEGIN, TAKE, END = (f"benchmarks.weights:{name}" for name in ("begin", "take", "end"))


class Trainer:
    """All weights of the model in its own names, fused experts, on the current GPU (on CPU: in host memory)."""

    def __init__(self, shapes: Shapes, dtype: str) -> None:
        self.shapes = shapes
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        largest = max(torch.Size(shape).numel() for shape in shapes.values())
        self._flat = torch.empty(largest, dtype=getattr(torch, dtype), device=device).normal_(0.0, 0.02)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A stream, as trainers send it."""
        for name, shape in self.shapes.items():
            yield name, self._flat[: torch.Size(shape).numel()].view(shape)


# ---- in the ranks' processes ----------------------------------------------------------------------------------------

_trainer: Trainer | None = None
_sender: Broadcaster | None = None


def begin(shapes: Shapes | None, dtype: str, others: int, bucket_bytes: int) -> Offer | None:
    """Rank 0 (the one with `shapes`): offer an update to the others."""
    global _trainer, _sender
    if shapes is None:
        return None
    if _trainer is None or _sender is None:
        backend: Any = "nccl" if torch.cuda.is_available() else "gloo"
        _trainer, _sender = Trainer(shapes, dtype), Broadcaster(others, backend, bucket_bytes=bucket_bytes)
    return _sender.offer(_trainer.named_tensors())


def take(bucket_bytes: int, offered: tuple[str, tuple[Any, ...]] | None) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """A source of weights: what was offered, and in the process that offers it the tensors themselves."""
    if offered is not None:
        from moebius.rollout.transports.broadcast import receive

        yield from receive(*offered[1])
        return
    assert _trainer is not None
    yield from batches(_trainer.named_tensors(), bucket_bytes)


def end() -> None:
    """Rank 0: leave, and free the tensors."""
    global _trainer, _sender
    if _sender is not None:
        _sender.close()
    _trainer = _sender = None


# ---- the parts ------------------------------------------------------------------------------------------------------


class Run:
    """A started group, and what was measured so far."""

    def __init__(self, group: RolloutGroup, shapes: Shapes, dtype: str, bucket_bytes: int, seconds: float) -> None:
        self.group, self.shapes, self.dtype, self.bucket_bytes = group, shapes, dtype, bucket_bytes
        self.numbers: dict[str, float] = {}
        self.notes: list[str] = []
        self._until = time.monotonic() + seconds
        self._version = 0
        self._trainer = Trainer(shapes, dtype)

    def in_time(self) -> bool:
        """Whether something may begin."""
        return time.monotonic() < self._until

    def step(self) -> None:
        """A step that has to switch: everything is still in order."""
        prompts = [[3 + (7 * p + i) % 100 for i in range(64)] for p in range(PROMPTS)]
        tail = self.group.config.engine.policy.threshold
        lengths = LengthTrace({divmod(i, N): LONG if i < tail else SHORT for i in range(PROMPTS * N)})
        rollouts = self.group.generate(prompts, N, {"max_tokens": LONG}, lengths=lengths)
        assert sum(len(rollout.samples) for rollout in rollouts) == PROMPTS * N
        report = self.group.last_report
        assert report is not None and len(report.switches) == 1, "the step did not switch once"
        self.numbers["switches"] = self.numbers.get("switches", 0.0) + 1
        self.numbers["pause_ms"] = report.switches[0].pause_ms

    def ipc(self) -> None:
        """Full updates that the ranks read in this process's memory."""
        self._repeat("ipc", lambda: self._send("ipc"))
        self.step()

    def host(self) -> None:
        """One full update through the object store."""
        self._note("host", [self._send("host")])
        self.step()

    def broadcast(self) -> None:
        """Full updates from rank 0 to the others."""
        others = self.group.config.ranks - 1

        def update() -> UpdateReport:
            arguments = [
                (self.shapes if rank == 0 else None, self.dtype, others, self.bucket_bytes)
                for rank in range(others + 1)
            ]
            source, args = self.group.on_ranks(BEGIN, arguments)[0]
            self._version += 1
            mine = [None, *((source, each) for each in args)]
            return self.group.pull_update(self._version, TAKE, [(self.bucket_bytes, offered) for offered in mine])

        self._repeat("nccl" if self.group.device == "cuda" else "gloo", update)
        self.group.on_ranks(END, [()] * (others + 1))
        self.step()

    def sleep(self) -> None:
        """Memory given back and taken again; the weights are sent at the end."""
        sleeps, wakes = [], []
        while len(sleeps) < REPEATS and (not sleeps or self.in_time()):
            sleeps.append(self.group.sleep())
            wakes.append(self.group.wake_up())
        self._send("ipc" if self.group.device == "cuda" else "host")
        self.step()
        memory = [start.memory for start in self.group.startup]
        held = sum(m.expert_bytes + m.expert_spare_bytes + m.kv_bytes + m.kv_spare_bytes for m in memory)
        held += sum(kept.ep + kept.tp + kept.shared for m in memory for kept in m.parameter_bytes.values())
        # What the system counts may hold memory that torch had cached: no more than the slots is the sleep's.
        returned = [min(report.freed, report.nbytes) for report in sleeps]
        self.numbers |= {
            "sleep_s": statistics.median(report.seconds for report in sleeps),
            "wake_s": statistics.median(report.seconds for report in wakes),
            "sleep_slots_gb": sleeps[0].nbytes / 1e9,
            "sleep_freed_gb": statistics.median(report.freed for report in sleeps) / 1e9,
            "weights_and_kv_gb": held / 1e9,
            "sleep_returned_pct": 100 * statistics.median(returned) / held,
            "sleep_returned_of_slots_pct": 100 * statistics.median(returned) / max(1, sleeps[0].nbytes),
        }

    def _send(self, transport: Any) -> UpdateReport:
        self._version += 1
        tensors = self._trainer.named_tensors()
        how: dict[str, Any] = {"transport": transport, "bucket_bytes": self.bucket_bytes}
        return self.group.update_weights(tensors, self._version, **how)

    def _repeat(self, name: str, update: Callable[[], UpdateReport]) -> None:
        found = [update()]
        while len(found) < REPEATS and self.in_time():
            found.append(update())
        self._note(name, found)

    def _note(self, name: str, found: list[UpdateReport]) -> None:
        # The first one opens connections and maps memory.
        later = found[1:] or found
        self.numbers["update_gb"] = found[0].nbytes / 1e9
        self.numbers[f"{name}_gbps"] = statistics.median(report.gbps for report in later)
        self.numbers[f"{name}_s"] = statistics.median(report.seconds for report in later)
        self.numbers[f"{name}_first_s"] = found[0].seconds
        if "link_gbps" in self.numbers and name != "host":
            self.numbers[f"{name}_of_link_pct"] = 100 * self.numbers[f"{name}_gbps"] / self.numbers["link_gbps"]


def link() -> dict[str, float]:
    """GB/s of copies from GPU 0 to GPU 1, and within GPU 0, by this process; nothing where there are none."""
    if not torch.cuda.is_available() or torch.cuda.device_count() < 2:
        return {}
    source = torch.empty(LINK_BYTES, dtype=torch.uint8, device="cuda:0")
    found = {}
    for name, device in (("link_gbps", "cuda:1"), ("device_copy_gbps", "cuda:0")):
        target = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device)
        target.copy_(source)
        rates = []
        for _ in range(5):
            torch.cuda.synchronize(0)
            torch.cuda.synchronize(device)
            began = time.perf_counter()
            target.copy_(source)
            torch.cuda.synchronize(0)
            torch.cuda.synchronize(device)
            rates.append(LINK_BYTES / (time.perf_counter() - began) / 1e9)
        found[name] = max(rates)
        del target
    del source
    torch.cuda.empty_cache()
    return found


def shapes_of(config: RolloutConfig) -> Shapes:
    """Names and shapes of a full update."""
    from transformers import AutoConfig

    hf_config = AutoConfig.from_pretrained(config.engine.model, **config.engine.hf_overrides)
    expected = ExpectedWeights.from_hf_config(hf_config)
    return {name: shape for name, shape in expected.shapes.items() if name not in expected.optional}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--bucket-mib", type=int, default=2048, help="sent at once")
    parser.add_argument("--seconds", type=float, default=150, help="begin no part so long after the start-up")
    parser.add_argument("--parts", default="ipc,nccl,sleep,host", help="which, in order")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    config = load_config(given.config, given.overrides)
    on_gpu = torch.cuda.is_available() and config.device != "cpu"
    dtype = config.engine.dtype if config.engine.dtype != "auto" else "bfloat16"
    numbers = link()
    began = time.monotonic()
    with RolloutGroup(config) as group:
        numbers["start_s"] = time.monotonic() - began
        memory = [start.memory for start in group.startup]
        if on_gpu:
            numbers |= {
                "overhead_over_static_ep_gb": max(m.overhead_ep_bytes for m in memory) / 1e9,
                "overhead_over_static_ep_pct": max(100 * m.overhead_ep_bytes / m.device_bytes for m in memory),
                "overhead_over_static_tp_pct": max(100 * m.overhead_tp_bytes / m.device_bytes for m in memory),
            }
        began = time.monotonic()
        run = Run(group, shapes_of(config), dtype, given.bucket_mib << 20, given.seconds)
        run.numbers = numbers
        parts: dict[str, Callable[[], None]] = {
            "ipc": run.ipc, "nccl": run.broadcast, "sleep": run.sleep, "host": run.host
        }  # fmt: skip
        print(f"started after {numbers['start_s']:.1f} s", flush=True)
        run.step()
        for name in given.parts.split(","):
            if not run.in_time():
                run.notes.append(f"{name}: not begun, {given.seconds:g} s were over")
            elif name == "ipc" and not on_gpu:
                run.notes.append("ipc: there is no GPU")
            else:
                parts[name]()
            run.numbers["parts_s"] = time.monotonic() - began
            results = make_results(
                "weights",
                command="python -m benchmarks.weights " + " ".join(sys.argv[1:]),
                options={"config": config.model_dump(mode="json"), "bucket_mib": given.bucket_mib, "repeats": REPEATS},
                results=run.numbers,
                series={"memory_of_rank_0": memory[0].model_dump()},
                notes=["gbps: bytes that came to each rank, by the seconds of the whole call", *run.notes],
            )
            given.out.parent.mkdir(parents=True, exist_ok=True)
            given.out.write_text(portable(results).model_dump_json(indent=1) + "\n", encoding="utf-8")
            print(f"{name}: done after {run.numbers['parts_s']:.1f} s", flush=True)
    for key, value in run.numbers.items():
        print(f"{key:30s} {value:12.3f}")
    for note in run.notes:
        print(note)


if __name__ == "__main__":
    main()
