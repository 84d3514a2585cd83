"""Step reports made of a few numbers."""

from __future__ import annotations

from collections.abc import Sequence

from moebius.engine.types import Iteration, SampleKey, SampleResult, StepOutcome, StepStats, SwitchRecord
from moebius.rollout.report import build_report
from moebius.rollout.report_types import StepReport


def step_report(
    step: int,
    *,
    lengths: Sequence[int] = (1, 2, 3, 4),
    layout: str = "EP",
    iteration_s: float = 1.0,
    switch_at: int | None = None,
    pause_s: float = 0.5,
    reason: str = "stop",
    model: str = "tiny",
    n: int = 1,
) -> StepReport:
    """Sample i % n of prompt i // n has `lengths[i]` tokens; every iteration takes `iteration_s`.

    With `switch_at` the step goes to TP, after `pause_s`, when so many samples are live.
    """
    now, iterations, switches = 0.0, [], []
    burst = tail = 0.0
    for k in range(1, max(lengths) + 1):
        live = sum(length >= k for length in lengths)
        if switch_at is not None and not switches and live <= switch_at:
            record = SwitchRecord(
                to="TP",
                iteration=k - 1,
                t=now,
                live=live,
                live_by_rank=[live],
                kv_tokens=0,
                phases_ms={"kv": pause_s * 1e3},
                pause_ms=pause_s * 1e3,
                expert_bytes=1,
                kv_bytes=1,
                kv_use_before=0.1,
                kv_use_after=0.1,
            )
            switches.append(record)
            layout, now = "TP", now + pause_s
        now += iteration_s
        burst, tail = (burst + iteration_s, tail) if layout == "EP" else (burst, tail + iteration_s)
        left = sum(length > k for length in lengths)
        iterations.append(Iteration(now, layout, left, live, iteration_s * 1e3))
    results = [
        SampleResult(SampleKey(*divmod(i, n)), [7] * length, None, "x", reason, None, 0, 0)
        for i, length in enumerate(lengths)
    ]
    stats = StepStats(
        0, 1, total_s=now, burst_s=burst, switch_s=pause_s * len(switches), tail_s=tail, iterations=iterations,
        switches=switches,
    )  # fmt: skip
    prompts = [1] * len(lengths)
    return build_report(
        [StepOutcome(results, stats)], step=step, policy_version=0, model=model, device="cpu", prompt_tokens=prompts
    )
