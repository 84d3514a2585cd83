"""The `moebius` command. Commands import what they need when they run, so that `moebius --help` is quick."""

from __future__ import annotations

import json
import warnings
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from moebius.rollout.bench.cli import app as bench
from moebius.rollout.errors import BadInput, MoebiusError


class _Commands(TyperGroup):
    """Prints errors meant for the user as they are, without a traceback, and exits with 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except MoebiusError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    help="Rollouts of mixture-of-experts models that switch from expert to tensor parallelism within a step.",
)
app.add_typer(bench, name="bench")


def _print_version(value: bool) -> None:
    if value:
        typer.echo(metadata.version("moebius-rollout"))
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of all commands."""
    # Ray announces a coming change of its defaults at every start; rank actors do not depend on it.
    warnings.filterwarnings("ignore", message="Tip: In future versions of Ray", category=FutureWarning)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the model, rollouts and reports.")] = Path("runs/demo"),
    steps: Annotated[int, typer.Option(min=1, help="Rounds of generate, reward and weight update.")] = 3,
    prompts: Annotated[int, typer.Option(min=1, help="Questions per step.")] = 16,
    n: Annotated[int, typer.Option("--n", min=1, help="Samples per question.")] = 8,
    ranks: Annotated[int, typer.Option(min=2, help="Ranks of the group.")] = 2,
    threshold: Annotated[int, typer.Option(min=0, help="Switch to TP when this many samples are left.")] = 32,
) -> None:
    """Run a complete loop with a tiny model on CPU. Needs no GPU and no download."""
    from moebius.rollout.demo import run_demo

    run_demo(out, steps=steps, prompts=prompts, n=n, ranks=ranks, threshold=threshold)


@app.command()
def rollout(
    config: Annotated[Path, typer.Option(help="YAML file with the settings of the group; see configs/.")],
    prompts: Annotated[Path, typer.Option(help="Questions: .jsonl or .parquet with DeepMath's or verl's columns.")],
    out: Annotated[Path, typer.Option(help="Folder for rollouts.jsonl, step reports and report.html.")],
    n: Annotated[int, typer.Option("--n", min=1, help="Samples per prompt.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Steps; each draws new samples of the same prompts.")] = 1,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first so many prompts.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Override a setting, e.g. engine.policy.threshold=32; repeatable.")
    ] = None,
    capture_lengths: Annotated[
        Path | None, typer.Option(help="Write the output length of every sample to this file (one step only).")
    ] = None,
    replay_lengths: Annotated[
        Path | None, typer.Option(help="Give every sample the length in this file, to compare runs of equal work.")
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Write a Chrome trace of each rank around the switch to OUT/profile.")
    ] = False,
) -> None:
    """Generate samples of prompts and report where the time went."""
    from moebius.rollout.config import load_config
    from moebius.rollout.datasets import load_questions
    from moebius.rollout.types import LengthTrace

    if capture_lengths is not None and steps > 1:
        raise BadInput("--capture-lengths holds the lengths of one step; run it with --steps 1")
    traces = out.resolve() / "profile"
    # JSON strings are YAML, so any path comes through.
    chosen = [f"engine.profile.folder={json.dumps(str(traces))}"] if profile else []
    settings = load_config(config, [*(overrides or []), *chosen])
    questions = load_questions(prompts, limit)
    lengths = None if replay_lengths is None else LengthTrace.load(replay_lengths)

    from moebius.rollout.group import RolloutGroup
    from moebius.rollout.output import RunFolder, StepProgress, step_line
    from moebius.rollout.report_startup import startup_line

    console = Console()
    run = RunFolder(out)
    for old in traces.glob("step_*_rank_*.json.gz"):
        old.unlink()
    console.print(f"starting {settings.ranks} ranks with {settings.engine.model} ...", highlight=False, soft_wrap=True)
    with RolloutGroup(settings) as group:
        if group.startup:
            console.print(startup_line(group.startup), highlight=False, soft_wrap=True)
        for step in range(steps):
            with StepProgress(console, f"step {step}", len(questions) * n) as progress:
                rollouts = group.generate(
                    [question.prompt for question in questions],
                    n,
                    step=step,
                    on_progress=progress.update,
                    lengths=lengths,
                )
            done = run.add(group.last_report, rollouts, [question.answer for question in questions])
            console.print(step_line(done), highlight=False, soft_wrap=True)
            if capture_lengths is not None:
                LengthTrace.from_report(done).save(capture_lengths)
    console.print(f"report: {run.path / 'report.html'}", highlight=False, soft_wrap=True)
    if profile:
        console.print(f"traces: {traces}, on the ranks' host", highlight=False, soft_wrap=True)


@app.command()
def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with step_NNNN.json files.")],
) -> None:
    """Make report.html from the step reports in a folder."""
    from moebius.rollout.report_html import write_html

    typer.echo(write_html(directory))


@app.command()
def doctor() -> None:
    """Check whether a rollout group can start on this machine. Exits with 1 when something is wrong."""
    from moebius.rollout.doctor import run_checks

    checks = run_checks()
    for check in checks:
        typer.echo(f"{'ok  ' if check.ok else 'FAIL'} {check.name:<14} {check.detail}")
        if not check.ok:
            typer.echo(f"     {'':<14} -> {check.remedy}")
    failed = sum(not check.ok for check in checks)
    if failed:
        typer.echo(f"{failed} of {len(checks)} checks failed")
        raise typer.Exit(1)




if __name__ == "__main__":
    app()
