"""What a run shows and leaves behind: a progress bar, a line per step, rollouts.jsonl, step reports and report.html."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from moebius.rollout.errors import MoebiusError
from moebius.rollout.report_replicas import lanes_words

if TYPE_CHECKING:
    from moebius.rollout.config import RolloutConfig
    from moebius.rollout.report_types import StepReport
    from moebius.rollout.types import Rollout


class StepProgress:
    """A progress bar over the samples of one step, on terminals only; a context manager.

    `update` has the signature of RolloutGroup's `on_progress`.
    """

    def __init__(self, console: Console, description: str, total: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("samples, {task.fields[tokens]:,} tokens, {task.fields[live]} live, {task.fields[layout]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(description, total=total, tokens=0, live=0, layout="-")

    def __enter__(self) -> StepProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, done: int, total: int, tokens: int, live: int, layout: str) -> None:
        """Finished and all samples, tokens sampled so far, samples unfinished, and the layout that runs."""
        self._progress.update(self._task, completed=done, total=total, tokens=tokens, live=live, layout=layout)


def starting_line(config: RolloutConfig) -> str:
    """What is being started."""
    several = f"{config.replicas} replicas of " if config.replicas > 1 else ""
    cores = os.cpu_count() or 1
    slow = f" (more than this machine's {cores} cores: slow)" if config.total_ranks > cores and on_cpu(config) else ""
    return f"starting {several}{config.ranks} ranks{slow} with {config.engine.model} ..."


def on_cpu(config: RolloutConfig) -> bool:
    """Whether ranks surely run on CPU; where Ray or the cluster decides, that is not known here."""
    return config.device == "cpu" and config.ray_address is None


def step_line(report: StepReport, extra: str = "") -> str:
    """One line about a step: its size, speed, switch, and seconds in each layout."""
    counts, seconds = report.counts, report.durations_s
    if report.switches:
        switch = report.switches[0]
        more = f" and {len(report.switches) - 1} more" if report.lanes and len(report.switches) > 1 else ""
        switched = f"switch at {switch.live} live, pause {switch.pause_ms:.0f} ms{more}"
    elif report.cancelled:
        switched = f"no switch ({report.cancelled[-1].reason})"
    else:
        switched = f"no switch{_why_not(report)}"
    line = (
        f"step {report.step}: {counts.prompts} prompts, {counts.samples} samples, {counts.output_tokens:,} tokens, "
        f"{report.tokens_per_s:,.0f} tokens/s | {switched} | burst {seconds.burst:.2f} s, tail {seconds.tail:.2f} s"
    )
    lost = f"ranks lost {len(report.losses)} times" if report.losses else ""
    return " | ".join(part for part in (line, lost, lanes_words(report), extra) if part)


def _why_not(report: StepReport) -> str:
    """Where live samples never fell to the threshold before all ended, that; else nothing."""
    threshold = next((d.inputs["threshold"] for d in report.decisions if "threshold" in d.inputs), None)
    live = [point.live for point in report.timeline if point.live]
    if isinstance(threshold, int) and live and min(live) > threshold:
        return f" (never fewer than {min(live)} live before the end, threshold {threshold})"
    return ""


class RunFolder:
    """The folder of one run. Starting a run removes the results of an earlier one in the same folder."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self.rollouts = self.path / "rollouts.jsonl"
        made = ("report.html", "report.csv", "report_switches.csv", "report.png", "step.svg")
        for old in [self.rollouts, *(self.path / name for name in made), *self.path.glob("step_*.json")]:
            old.unlink(missing_ok=True)

    def add(
        self,
        report: StepReport | None,
        rollouts: Sequence[Rollout],
        answers: Sequence[str],
        rewards: Sequence[Sequence[float | None]] | None = None,
    ) -> StepReport:
        """Write the step's report, append its rollouts as JSON lines, and bring report.html up to date.

        `answers[i]` belongs to prompt i, `rewards[i]` to its samples. Returns the report; raises
        MoebiusError for None, a step without prompts.
        """
        from moebius.rollout.report_html import write_html

        if report is None:
            raise MoebiusError("a step without prompts has no report; give at least one prompt")
        report.write(self.path)
        with self.rollouts.open("a", encoding="utf-8") as lines:
            for rollout in rollouts:
                row = asdict(rollout) | {"step": report.step, "answer": answers[rollout.prompt_index]}
                for sample in row["samples"]:
                    del sample["routed_experts"]  # for trainers; as text it would be many times the tokens
                if rewards is not None:
                    row["rewards"] = rewards[rollout.prompt_index]
                lines.write(json.dumps(row, ensure_ascii=False) + "\n")
        write_html(self.path)
        return report
