"""`moebius capture`, `moebius replay`, `moebius questions`, and the job behind `moebius rollout`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Override a setting, e.g. engine.policy.threshold=32; repeatable.")
]


def register(app: typer.Typer) -> None:
    """Add the commands to `moebius`."""
    for command in (capture, replay, questions):
        app.command()(command)


def capture(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, with its step_NNNN.json.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder for one lengths_NNNN.json per step.")],
) -> None:
    """Keep the output lengths of a run, for `moebius replay` to give other runs the same work."""
    from moebius.rollout.lengths import capture as write
    from moebius.rollout.lengths import summary
    from moebius.rollout.types import LengthTrace

    paths = write(run, out)
    typer.echo(f"{out}: {summary([LengthTrace.load(path) for path in paths])}")


def replay(
    lengths: Annotated[
        str, typer.Argument(metavar="LENGTHS", help="Folder of `moebius capture`, a run's folder, a file, or deepmath.")
    ],
    config: Annotated[Path, typer.Option(help="YAML file with the settings of the group and a job: section.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the results, instead of job.out.")] = None,
    overrides: Overrides = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Remove the results of an earlier job there first.")] = False,
) -> None:
    """Run a job in which every sample gets the length it had in another run."""
    run({"replay_lengths": lengths, "out": None if out is None else str(out)}, config, overrides or [], fresh=fresh)


def questions(
    out: Annotated[Path, typer.Argument(metavar="FILE", help=".jsonl or .parquet file to write.")],
    count: Annotated[int, typer.Option(min=1, help="Questions.")] = 18432,
    seed: Annotated[int, typer.Option(help="Another seed, other questions.")] = 0,
    model: Annotated[
        Path | None, typer.Option(help="Folder with the tokenizer that counts; default: words and digits count.")
    ] = None,
) -> None:
    """Write generated questions with DeepMath's columns and prompt lengths. Needs no network."""
    from moebius.rollout.deepmath import measure_with
    from moebius.rollout.deepmath_offline import write_deepmath
    from moebius.rollout.job_config import DataSettings

    measure = None
    if model is not None:
        from moebius.rollout.job_prompts import load_tokenizer

        measure = measure_with(DataSettings(), load_tokenizer(model))
    typer.echo(write_deepmath(out, count, seed=seed, measure=measure))


def run(named: dict[str, Any], config: Path, settings: list[str], *, fresh: bool = False) -> None:
    """Run the job of a config with overrides job.NAME=VALUE; exits with its code unless it is 0."""
    from moebius.rollout.config import load_config
    from moebius.rollout.job import guarded, overrides

    _check_is_job(named, config, settings)
    loaded = load_config(config, [*settings, *overrides(named)])
    code = guarded(loaded, fresh=fresh)
    if code:
        raise typer.Exit(code)


def submit(
    named: dict[str, Any], config: Path, settings: list[str], *, address: str | None, wait: bool, fresh: bool = False
) -> None:
    """Submit the job of a config; exits with 1 when it fails. Faults of the settings are found here, before."""
    from moebius.rollout.config import load_config
    from moebius.rollout.job import job_of, out_folder, overrides
    from moebius.rollout.submit import submit_job

    chosen = [*settings, *overrides(named)]
    _check_is_job(named, config, settings)
    job = job_of(load_config(config, chosen))
    chosen += overrides({"out": str(out_folder(job))})  # relative to here, not to Ray's copy of this folder
    code = submit_job(config, chosen, fresh=fresh, address=address, wait=wait, echo=typer.echo)
    if code:
        raise typer.Exit(code)


def _check_is_job(named: dict[str, Any], config: Path, settings: list[str]) -> None:
    """Raise BadInput where neither the config nor the command says what the job's prompts are.

    What the command names would make a job of the default data set otherwise.
    """
    from moebius.rollout.config import load_config
    from moebius.rollout.job import job_of

    if not named.get("data.source"):
        job_of(load_config(config, settings))
