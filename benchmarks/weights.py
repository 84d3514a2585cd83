"""Weight updates and sleep of a whole group with a real model's shape, over Ray, on GPUs.

    python -m benchmarks.weights --config configs/shape_30b_x2.yaml --out weights.json

The sending process packs on GPU 0, which a rank of the group uses too, as a colocated trainer would. Its tensors are
views of one buffer, so what is loaded means nothing; the bytes and their way are those of an update.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from moebius.engine.weights import ExpectedWeights
from moebius.rollout.bench.results import make_results
from moebius.rollout.config import load_config
from moebius.rollout.group import RolloutGroup

REPEATS = 3


class Trainer:
    """All weights of the model in its own names, fused experts, in bf16 on the current GPU."""

    def __init__(self, config: object) -> None:
        expected = ExpectedWeights.from_hf_config(config)
        self.shapes = {name: shape for name, shape in expected.shapes.items() if name not in expected.optional}
        largest = max(torch.Size(shape).numel() for shape in self.shapes.values())
        self._flat = torch.empty(largest, dtype=torch.bfloat16, device="cuda").normal_(0.0, 0.02)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A stream, as trainers send it."""
        for name, shape in self.shapes.items():
            yield name, self._flat[: torch.Size(shape).numel()].view(shape)


def measure(group: RolloutGroup, trainer: Trainer, bucket_bytes: int, max_tokens: int) -> dict[str, float]:
    """Updates, sleeping and waking, with a step before and after that must switch."""
    numbers: dict[str, float] = {}
    prompts = [[3 + (7 * p + i) % 1000 for i in range(64)] for p in range(16)]
    sampling = {"max_tokens": max_tokens, "ignore_eos": True}

    def step() -> None:
        rollouts = group.generate(prompts, 16, sampling)
        assert sum(len(r.samples) for r in rollouts) == 256
        report = group.last_report
        assert report is not None
        numbers["switches"] = numbers.get("switches", 0.0) + len(report.switches)
        if report.switches:
            numbers["pause_ms"] = report.switches[0].pause_ms

    step()
    version = 0
    for transport in ("ipc", "host"):
        found = []
        for _ in range(REPEATS if transport == "ipc" else 1):
            version += 1
            found.append(
                group.update_weights(trainer.named_tensors(), version, transport=transport, bucket_bytes=bucket_bytes)
            )
        numbers[f"{transport}_gbps"] = statistics.median(report.gbps for report in found)
        numbers[f"{transport}_s"] = statistics.median(report.seconds for report in found)
        numbers["update_gb"] = found[0].nbytes / 1e9
    step()
    sleeps, wakes = [], []
    for _ in range(REPEATS):
        sleeps.append(group.sleep())
        wakes.append(group.wake_up())
        version += 1
        group.update_weights(trainer.named_tensors(), version, transport="ipc", bucket_bytes=bucket_bytes)
    step()
    memory = [start.memory for start in group.startup]
    held = sum(m.expert_bytes + m.expert_spare_bytes + m.kv_bytes + m.kv_spare_bytes for m in memory)
    held += sum(kept.ep + kept.tp + kept.shared for m in memory for kept in m.parameter_bytes.values())
    numbers |= {
        "sleep_s": statistics.median(report.seconds for report in sleeps),
        "wake_s": statistics.median(report.seconds for report in wakes),
        "sleep_freed_gb": statistics.median(report.freed for report in sleeps) / 1e9,
        "weights_and_kv_gb": held / 1e9,
        "sleep_returned_pct": 100 * statistics.median(report.freed for report in sleeps) / held,
        "overhead_over_static_ep_gb": max(m.overhead_ep_bytes for m in memory) / 1e9,
        "overhead_over_static_ep_pct": max(100 * m.overhead_ep_bytes / m.device_bytes for m in memory),
        "overhead_over_static_tp_pct": max(100 * m.overhead_tp_bytes / m.device_bytes for m in memory),
    }
    return numbers


def main() -> None:
    from transformers import AutoConfig

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--bucket-mib", type=int, default=2048)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    config = load_config(arguments.config, arguments.overrides)
    hf_config = AutoConfig.from_pretrained(config.engine.model, **config.engine.hf_overrides)
    with RolloutGroup(config) as group:
        numbers = measure(group, Trainer(hf_config), arguments.bucket_mib << 20, arguments.max_tokens)
        memory = group.startup[0].memory.model_dump()
    results = make_results(
        "weights",
        command="python -m benchmarks.weights " + " ".join(sys.argv[1:]),
        options={"config": config.model_dump(mode="json")},
        results=numbers,
        series={"memory_of_rank_0": memory},
        notes=["pause_ms is that of the last step's switch"],
    )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(results.model_dump_json(indent=1) + "\n", encoding="utf-8")
    for name, value in numbers.items():
        print(f"{name:30s} {value:12.3f}")


if __name__ == "__main__":
    main()
