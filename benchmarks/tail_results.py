"""What `benchmarks.tail_spec` makes of the times it has taken: draft lengths, rates that pay, the results file."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
from datetime import UTC, datetime
from typing import Any

from moebius.engine.types import StepOutcome
from moebius.rollout.report import installed_versions

MODES = ("siblings", "suffix", "ngram")
PARTS = ("trained", "zero", "shape")
RATES = (0.0, 0.3, 0.6, 0.8)


def slower(entry: dict[str, list[float]]) -> float:
    """Per cent; medians of the turns."""
    return round(100 * (statistics.median(entry["ms"]) / statistics.median(entry["off_ms"]) - 1), 2)


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
