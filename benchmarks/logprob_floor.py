"""How far log-probabilities of one model differ by rounding alone: transformers against itself in a finer format.

    python -m benchmarks.logprob_floor MODEL --device cuda

What trainer and engine differ by has to be judged beside that. Each rounds in its own way, so that differences of about
the square root of 2 times this are to be expected of two that compute the same.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROWS, LENGTH = 8, 192
LONGEST_S = 120.0


def measure(model: Path, device: str) -> dict[str, float]:
    """Mean, 99th percentile and maximum of |dlogp| over drawn tokens; on CUDA bfloat16 against float32, else float32
    against float64. Both have the same weights, rounded to the coarser format.

    Contexts are tokens drawn uniformly, and each position's token is drawn from the coarser model's distribution.
    """
    import torch
    from transformers import AutoModelForCausalLM

    coarse, fine = (torch.bfloat16, torch.float32) if device == "cuda" else (torch.float32, torch.float64)
    generator = torch.Generator().manual_seed(0)
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=coarse, attn_implementation="sdpa").to(device).eval()
    tokens = torch.randint(3, lm.config.vocab_size, (ROWS, LENGTH), generator=generator).to(device)
    with torch.inference_mode():
        first = lm(tokens).logits.double().log_softmax(-1)
        lm.set_experts_implementation("eager")  # the usual one knows no float64
        second = lm.to(fine)(tokens).logits.double().log_softmax(-1)
    drawn = torch.multinomial(first.exp().flatten(0, 1).cpu(), 1, generator=generator).view(ROWS, LENGTH, 1).to(device)
    difference = (first.gather(-1, drawn) - second.gather(-1, drawn)).abs()
    found = {"mean": difference.mean(), "p99": difference.quantile(0.99), "max": difference.max()}
    return {f"floor_logprob_difference_{name}": value.item() for name, value in found.items()}


class Floor:
    """The measurement in a process of its own, beside whatever else is starting."""

    def __init__(self, model: Path, device: str) -> None:
        command = [sys.executable, "-m", "benchmarks.logprob_floor", str(model), "--device", device]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def result(self, limit_s: float = LONGEST_S) -> tuple[dict[str, float], str]:
        """The numbers, and what went wrong, if anything."""
        try:
            output, errors = self._process.communicate(timeout=max(0.0, limit_s))
        except subprocess.TimeoutExpired:
            self.end()
            return {}, f"did not end within {limit_s:.0f} s"
        if self._process.returncode:
            return {}, (errors.strip().splitlines() or ["no words"])[-1]
        found: dict[str, float] = json.loads(output.strip().splitlines()[-1])
        return found, ""

    def end(self) -> None:
        """Leave no process behind."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    print(json.dumps(measure(options.model, options.device)))


if __name__ == "__main__":
    main()
