"""Several runs of the same steps beside each other, each step split at the switch.

The protocol is that of the Moebius paper (arXiv:2606.26607, section 6.3 and figure 10): output lengths are captured in
one run and replayed in the others, so all do the same work. A step is split where the live samples have fallen to the
number at which the switching run left EP: before it lies the burst, after it the tail, in runs that never switch too.

What a run is follows from its policy. A static TP step begins with a switch of nothing, before its first token, as its
engine stood in EP; an engine that had no other layout would not have it, so it is left out of that step's time.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moebius.rollout.errors import BadInput
from moebius.rollout.report_types import StepReport

Kind = Literal["EP", "TP", "switching"]
FIELDS = (
    "run", "kind", "step", "total_s", "burst_s", "switch_s", "tail_s", "split_live", "output_tokens", "tokens_per_s",
    "speedup",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bar:
    """One step of one run. burst_s + switch_s + tail_s = total_s."""

    run: str
    kind: Kind
    step: int
    total_s: float
    burst_s: float
    switch_s: float
    tail_s: float
    split_live: int | None  # live samples at the split; None: the step was never split
    output_tokens: int
    tokens_per_s: float
    speedup: float | None  # shortest static run of this step over this one; None for static runs and without any


@dataclass(frozen=True, slots=True)
class Run:
    """A run by name: its reports, by step."""

    name: str
    reports: dict[int, StepReport]


@dataclass(frozen=True, slots=True)
class Comparison:
    """`bars[i]` are the steps of `runs[i]`, in order."""

    runs: list[Run]
    kinds: list[Kind]
    steps: list[int]
    bars: list[list[Bar]]
    warnings: list[str]

    def total_s(self, run: int) -> float:
        """Seconds of all steps of run number `run`."""
        return sum(bar.total_s for bar in self.bars[run])

    def speedup(self, run: int) -> float | None:
        """Over all steps: the better static run's time over this one's; None for static runs and without any."""
        static = [self.total_s(i) for i, kind in enumerate(self.kinds) if kind != "switching"]
        return None if self.kinds[run] != "switching" or not static else min(static) / self.total_s(run)

    def line(self, run: int) -> str:
        """One line about run number `run`."""
        seconds, gain = self.total_s(run), self.speedup(run)
        tokens = sum(bar.output_tokens for bar in self.bars[run])
        rate = tokens / seconds if seconds else 0.0
        text = f"{self.runs[run].name} ({self.kinds[run]}): {seconds:,.1f} s, {rate:,.0f} tokens/s"
        return text if gain is None else f"{text}, {gain:.3f}x over the better static run"


def load_runs(folders: Sequence[str | Path]) -> list[Run]:
    """The runs in these folders, named after them. Raises BadInput for one without step reports."""
    paths = [Path(folder) for folder in folders]
    runs = []
    for name, path in zip(_names(paths), paths, strict=True):
        reports = [StepReport.load(file) for file in path.glob("step_*.json")]
        if not reports:
            raise BadInput(f"{path}: no step_*.json in it; give the folders that runs wrote their reports to")
        runs.append(Run(name, {report.step: report for report in sorted(reports, key=lambda r: r.step)}))
    return runs


def _names(paths: Sequence[Path]) -> list[str]:
    """Last parts of the paths; as many more as tell them apart."""
    parts = [path.resolve().parts for path in paths]
    if len(set(parts)) < len(parts):
        raise BadInput("the same folder is given twice")
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-count:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def compare(runs: Sequence[Run], threshold: int | None = None) -> Comparison:
    """Compare the steps that all runs have. `threshold`: split static runs at so many live samples; None: where the
    first switching run switched in that step. Raises BadInput when they have no step in common."""
    shared = set.intersection(*(set(run.reports) for run in runs)) if runs else set()
    if not shared:
        listed = "; ".join(f"{run.name}: {sorted(run.reports)}" for run in runs)
        raise BadInput(f"the runs have no step in common ({listed})")
    steps = sorted(shared)
    kinds = [kind_of([run.reports[step] for step in steps]) for run in runs]
    both = list(zip(runs, kinds, strict=True))
    bars = [[_bar(run, kind, step, both, threshold) for step in steps] for run, kind in both]
    static = [own for own, kind in zip(bars, kinds, strict=True) if kind != "switching"]
    if static:
        best = [min(own[i].total_s for own in static) for i in range(len(steps))]
        bars = [
            [_with_speedup(bar, best[i]) if kind == "switching" else bar for i, bar in enumerate(own)]
            for own, kind in zip(bars, kinds, strict=True)
        ]
    return Comparison(list(runs), kinds, steps, bars, _warnings(both, steps))


def policy_of(report: StepReport) -> str | None:
    """The kind of the step's switch policy; None where the report has no decision."""
    return next((str(d.inputs["policy"]) for d in report.decisions if "policy" in d.inputs), None)


def kind_of(reports: Sequence[StepReport]) -> Kind:
    """Whether a run stays in a layout by its policy; where reports have no decisions, by its steps' iterations."""
    policies = {policy_of(report) for report in reports}
    if policies == {"static_ep"}:
        return "EP"
    if policies == {"static_tp"}:
        return "TP"
    if policies - {None}:
        return "switching"
    used = {layout for report in reports for layout in report.iteration_ms}
    if any(report.switches for report in reports) or len(used) > 1:
        return "switching"
    return "TP" if used == {"TP"} else "EP"


def split_at(report: StepReport, live: int) -> float | None:
    """Seconds from the begin of a step until at most `live` samples were live, and stayed so; None: from the start.

    As exact as the report's timeline: its points stand for up to 1/512 of the iterations.
    """
    above = [i for i, point in enumerate(report.timeline) if point.live > live]
    if not above:
        return None
    after = above[-1] + 1
    return report.timeline[after].t if after < len(report.timeline) else report.durations_s.total


def _bar(run: Run, kind: Kind, step: int, runs: Sequence[tuple[Run, Kind]], threshold: int | None) -> Bar:
    report = run.reports[step]
    total = report.durations_s.total
    burst, switch, live = total, 0.0, None
    if kind == "switching":
        if report.switches:
            first = report.switches[0]
            burst, live = first.t, first.live
            switch = min(sum(s.pause_ms for s in report.switches) / 1e3, total - burst)
    else:
        # Replicas begin side by side.
        begin = max((s.pause_ms for s in report.switches if s.iteration == 0), default=0.0) / 1e3
        burst = total = max(0.0, total - begin)
        at = threshold if threshold is not None else _switched_at(runs, step)
        if at is not None:
            burst, live = max(0.0, (split_at(report, at) or 0.0) - begin), at
    return Bar(
        run=run.name,
        kind=kind,
        step=step,
        total_s=total,
        burst_s=burst,
        switch_s=switch,
        tail_s=max(0.0, total - burst - switch),
        split_live=live,
        output_tokens=report.counts.output_tokens,
        tokens_per_s=report.tokens_per_s,
        speedup=None,
    )


def _switched_at(runs: Sequence[tuple[Run, Kind]], step: int) -> int | None:
    """Live samples at which the first switching run switched in this step."""
    switching = (run.reports[step].switches for run, kind in runs if kind == "switching")
    return next((switches[0].live for switches in switching if switches), None)


def _with_speedup(bar: Bar, best_s: float) -> Bar:
    values = {name: getattr(bar, name) for name in FIELDS}
    return Bar(**values | {"speedup": best_s / bar.total_s if bar.total_s else None})


def _warnings(both: Sequence[tuple[Run, Kind]], steps: Sequence[int]) -> list[str]:
    warnings, runs = [], [run for run, _ in both]
    lengths = [
        {s: {(e.prompt, e.sample): e.output_tokens for e in run.reports[s].samples} for s in steps} for run in runs
    ]
    unequal = [step for step in steps if any(own[step] != lengths[0][step] for own in lengths[1:])]
    if unequal:
        warnings.append(
            f"the runs did different work in steps {unequal}: their samples have other lengths. Times can be compared "
            "only of equal work: replay one run's lengths in the others (moebius capture, moebius replay)"
        )
    for what in ("model", "ranks", "device"):
        values = {str(getattr(run.reports[step], what)) for run in runs for step in steps}
        if len(values) > 1:
            warnings.append(f"the runs differ in {what}: {', '.join(sorted(values))}")
    for run, kind in both:
        stayed = [step for step in steps if not run.reports[step].switches]
        if kind == "switching" and stayed:
            warnings.append(f"{run.name} was free to switch and did not in steps {stayed}; it counts as no static run")
        if len(run.reports) > len(steps):
            warnings.append(f"{run.name} has steps that others lack: {sorted(set(run.reports) - set(steps))}")
    return warnings


def median_speedup(comparison: Comparison, run: int) -> float | None:
    """Median over the steps of a run's speed-up; None where it has none."""
    gains = [bar.speedup for bar in comparison.bars[run] if bar.speedup is not None]
    return statistics.median(gains) if gains else None
