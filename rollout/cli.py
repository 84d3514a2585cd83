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

from moebius.rollout import cost_cli, job_cli, serve_cli
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
    prompts: Annotated[
        Path | None, typer.Option(help="Questions: .jsonl or .parquet with DeepMath's or verl's columns. None: a job.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for rollouts.jsonl, step reports and report.html; a job's: job.out.")
    ] = None,
    n: Annotated[int | None, typer.Option("--n", min=1, help="Samples per prompt (default: 1).")] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps; each draws new samples of the same prompts (default: 1).")
    ] = None,
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
    scorer: Annotated[
        str | None, typer.Option(help="Reward samples: math (math-verify), or module:function of (text, answer).")
    ] = None,
    submit: Annotated[bool, typer.Option("--submit", help="Run as a job of a Ray cluster and show its log.")] = False,
    address: Annotated[str | None, typer.Option(help="--submit: the cluster's dashboard, http://HOST:8265.")] = None,
    detach: Annotated[bool, typer.Option("--detach", help="--submit: do not wait for the job.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Job: remove the results of an earlier one first.")] = False,
) -> None:
    """Generate samples of prompts and report where the time went.

    With --submit, or without --prompts, it is a job (the config's job: section): it goes on where it was broken off,
    and writes a Parquet shard per step.
    """
    if submit or prompts is None:
        from moebius.rollout import job_cli

        if capture_lengths is not None:
            raise BadInput("--capture-lengths: of a job, take the lengths afterwards with `moebius capture RUN OUT`")
        if profile:
            raise BadInput("--profile: of a job, set engine.profile.folder=FOLDER")
        named = {
            "n": n, "steps": steps, "scorer": scorer, "data.limit": limit,
            "out": None if out is None else str(out),
            "data.source": None if prompts is None else str(prompts.absolute()),
            "replay_lengths": None if replay_lengths is None else str(replay_lengths.absolute()),
        }  # fmt: skip
        if submit:
            job_cli.submit(named, config, overrides or [], address=address, wait=not detach, fresh=fresh)
        else:
            job_cli.run(named, config, overrides or [], fresh=fresh)
        return
    if out is None:
        raise BadInput("--out: give a folder for the results")
    n, steps = n or 1, steps or 1

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
    if lengths is not None and len(lengths.lengths) != len(questions) * n:
        typer.echo(
            f"note: {replay_lengths} holds the lengths of {len(lengths.lengths)} samples, this run has "
            f"{len(questions) * n}: replay a trace with the prompts and --n that it was captured with"
        )

    from moebius.rollout.output import RunFolder, StepProgress, starting_line, step_line
    from moebius.rollout.report_startup import startup_line
    from moebius.rollout.report_writers import open_writers
    from moebius.rollout.scoring import rewards_of, started
    from moebius.rollout.start import start_group

    console = Console()
    run = RunFolder(out)
    for old in traces.glob("step_*_rank_*.json.gz"):
        old.unlink()
    console.print(starting_line(settings), highlight=False, soft_wrap=True)
    with started(scorer) as pool, open_writers(settings.report, run.path) as writers, start_group(settings) as group:
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
            rewards, told = rewards_of(pool, rollouts, questions)
            done = run.add(group.last_report, rollouts, [question.answer for question in questions], rewards)
            writers.write(done)
            console.print(step_line(done, told), highlight=False, soft_wrap=True)
            if capture_lengths is not None:
                LengthTrace.from_report(done).save(capture_lengths)
    console.print(f"report: {run.path / 'report.html'}", highlight=False, soft_wrap=True)
    if profile:
        console.print(f"traces: {traces}, on the ranks' host", highlight=False, soft_wrap=True)


@app.command()
def report(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Folders with step_NNNN.json files; several are compared.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Several: folder for comparison.html, .csv and .png (default: here).")
    ] = None,
    threshold: Annotated[
        int | None,
        typer.Option(min=1, help="Several: split static runs at so many live samples (default: as switched)."),
    ] = None,
    costs: Annotated[
        Path | None,
        typer.Option(help="One: costs of `moebius calibrate`, to say anew what static layouts would have taken."),
    ] = None,
    rollout_share: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Share of a training step's time that its rollout takes, e.g. 0.7."),
    ] = None,
) -> None:
    """Make report.html, .csv and .png from a folder's step reports, or compare the runs in several, step by step."""
    if len(directories) > 1:
        from moebius.rollout.compare_files import compare_runs

        if costs is not None:
            raise BadInput("--costs: goes with the report of one run; give one folder")
        compare_runs(directories, out or Path(), threshold, share=rollout_share)
        return
    from moebius.rollout.report_files import report_run

    report_run(directories[0], costs, share=rollout_share)


@app.command()
def doctor() -> None:
    """Check whether a rollout group can start on this machine. Exits with 1 when something is wrong."""
    from moebius.rollout.doctor import run_checks

    checks = run_checks()
    for check in checks:
        state = "FAIL" if not check.ok else "note" if check.remedy else "ok  "
        typer.echo(f"{state} {check.name:<14} {check.detail}")
        if check.remedy:
            typer.echo(f"     {'':<14} -> {check.remedy}")
    failed = sum(not check.ok for check in checks)
    if failed:
        typer.echo(f"{failed} of {len(checks)} checks failed")
        raise typer.Exit(1)


cost_cli.register(app)
job_cli.register(app)
serve_cli.register(app)


if __name__ == "__main__":
    app()
