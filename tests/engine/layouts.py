"""Which layout tokens were drawn in: by the samples, and by the iterations."""

from __future__ import annotations

from collections import Counter

from moebius.engine.types import StepOutcome


def check_layouts(*steps: list[StepOutcome]) -> Counter[str]:
    """Samples tell of each token once, and of as many in each layout as iterations drew; `steps` leave none parked.

    Returns tokens by layout.
    """
    told: Counter[str] = Counter()
    for result in (result for outcomes in steps for outcome in outcomes for result in outcome.results):
        assert sum(count for _, count in result.layouts) == len(result.token_ids), result.key
        assert all(a != b for (a, _), (b, _) in zip(result.layouts, result.layouts[1:], strict=False)), result.layouts
        assert all(count > 0 for _, count in result.layouts)
        for layout, count in result.layouts:
            told[layout] += count
    drawn: Counter[str] = Counter()
    for outcomes in steps:
        for iteration in outcomes[0].stats.iterations:  # of all ranks' tokens
            drawn[iteration.layout] += iteration.tokens
    assert told == +drawn, "samples and iterations tell of different numbers"
    return told
