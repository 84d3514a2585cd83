"""A rollout job: steps of questions to shards, reports and rewards, made to be submitted to a Ray cluster.

    python -m moebius.rollout.job --config configs/deepmath_30b_x2.yaml

Started again after a crash or a stop, it goes on with the first step whose shard is missing. SIGTERM and Ctrl-C end the
running step, which is done again next time, and leave in order.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moebius.rollout.config import RolloutConfig, load_config
from moebius.rollout.errors import BadInput, MoebiusError, RankDied
from moebius.rollout.job_config import JobSettings
from moebius.rollout.job_metrics import JobMetrics
from moebius.rollout.job_prompts import StepSource
from moebius.rollout.lengths import step_lengths
from moebius.rollout.output import starting_line, step_line
from moebius.rollout.report_writers import Writers, open_writers
from moebius.rollout.scoring import ScorerPool, Scores, ToScore, started, to_score
from moebius.rollout.shards import JobFolder, shard_rows, write_shard
from moebius.rollout.stop import Stopped, StopSignal

if TYPE_CHECKING:
    from moebius.rollout.deepmath import StepPrompt
    from moebius.rollout.start import AnyGroup
    from moebius.rollout.types import LengthTrace, Rollout

_log = logging.getLogger("moebius.rollout.job")
# Settings that may differ when a job goes on: they do not change what a step yields.
_FREE = ("startup_timeout_s", "step_timeout_s", "ray_address", "cpus_per_rank", "failures", "replicas", "report")
_FREE_JOB = ("out", "steps", "score_workers", "score_timeout_s", "restarts", "progress_s", "metrics_port", "tiny_model")
_RAY_COPY = "/runtime_resources/working_dir_files/"  # where Ray unpacks a job's working directory


class ProgressLog:
    """A line about the running step every `every_s` seconds and when the layout changes; RolloutGroup's on_progress."""

    def __init__(self, step: int, stop: StopSignal, every_s: float, metrics: JobMetrics | None = None) -> None:
        self._step, self._stop, self._every_s, self._metrics = step, stop, every_s, metrics
        self._begun = time.monotonic()
        self._next, self._layout = self._begun + every_s, "EP"

    def __call__(self, done: int, total: int, tokens: int, live: int, layout: str) -> None:
        """See RolloutGroup.generate. Raises Stopped when the job is to stop."""
        self._stop.check()
        if self._metrics is not None:
            self._metrics.progress(self._step, tokens, live, layout)
        now = time.monotonic()
        if now < self._next and layout == self._layout:
            return
        self._next, self._layout = now + self._every_s, layout
        seconds = now - self._begun
        _log.info(
            "step %d: %d of %d samples, %s tokens, %d live, %s, %.0f s", self._step, done, total, f"{tokens:,}", live,
            layout, seconds,
        )  # fmt: skip


def run_job(config: RolloutConfig, *, fresh: bool = False, stop: StopSignal | None = None) -> Path:
    """Do the unfinished steps of `config.job`; returns its folder. `fresh` removes results of an earlier job first.

    Raises:
        BadInput: settings, questions or the scorer are wrong, or the folder holds another job.
        MoebiusError: the group did not start, or ranks died more often than `job.restarts`.
        Stopped: a signal came; finished steps are on disk.
    """
    job = job_of(config)
    stop = stop or StopSignal()
    with ExitStack() as stack:
        folder = stack.enter_context(JobFolder(out_folder(job)))
        if fresh:
            folder.clear()
        if job.tiny_model:
            ensure_tiny_model(config.engine.model)
        source = StepSource.open(config)
        folder.claim(identity(config, source))
        _log.info("%s", source.about)
        left = folder.unfinished(job.steps, source.per_step * job.n)
        stop.check()
        if not left:
            _log.info("all %d steps are in %s already", job.steps, folder.path)
            _write_page(folder.path)
            return folder.path
        _log.info("steps to do: %s; results go to %s", _ranges(left), folder.path)
        # Before the start of the ranks, which takes minutes: whatever can be wrong with a step's input.
        prompts = {step: source.step(step) for step in left}
        lengths = _lengths(config, job, source, left)
        pool = started(job.scorer, workers=job.score_workers, timeout_s=job.score_timeout_s)
        scorer = stack.enter_context(pool)
        group = _start(config, stop)
        stack.enter_context(group)
        writers = stack.enter_context(open_writers(config.report, folder.path))
        metrics = None if job.metrics_port is None else stack.enter_context(JobMetrics(group, job.metrics_port))
        steps = _Steps(job, stop, scorer, group, job.restarts, writers, metrics)
        for step in left:
            steps.do(step, prompts[step], lengths.get(step), folder.path)
    _log.info("done: %d steps in %s, report %s", job.steps, folder.path, folder.path / "report.html")
    return folder.path


@dataclass
class _Steps:
    """Does single steps with a started group."""

    job: JobSettings
    stop: StopSignal
    scorer: ScorerPool | None
    group: AnyGroup
    restarts: int  # left
    writers: Writers
    metrics: JobMetrics | None

    def do(self, step: int, prompts: list[StepPrompt], lengths: LengthTrace | None, folder: Path) -> None:
        """One step from prompts to shard."""
        rollouts = self._generate(step, prompts, lengths)
        report = self.group.last_report
        if report is None:
            raise MoebiusError(f"step {step} has no report")
        scores = None if self.scorer is None else self._score(to_score(rollouts, [p.question for p in prompts]))
        report.write(folder)
        # Last: this file is what says that the step is finished.
        write_shard(folder, step, shard_rows(step, prompts, rollouts, None if scores is None else scores.rewards))
        _log.info("%s", step_line(report, "" if scores is None else scores.words))
        _write_page(folder)
        self.writers.write(report, {} if scores is None else {"reward": scores.mean})
        if self.metrics is not None:
            self.metrics.step_ended(report)

    def _generate(self, step: int, prompts: list[StepPrompt], lengths: LengthTrace | None) -> list[Rollout]:
        ids = [prompt.token_ids for prompt in prompts]
        while True:
            self.stop.check()
            progress = ProgressLog(step, self.stop, self.job.progress_s, self.metrics)
            try:
                return self.group.generate(ids, self.job.n, step=step, on_progress=progress, lengths=lengths)
            except RankDied as error:
                if self.restarts < 1:
                    raise
                self.restarts -= 1
                _log.warning("%s; starting the ranks again, then step %d again", error, step)
                with self.stop.at_once():
                    self.group.restart()
                if self.metrics is not None:
                    self.metrics.restarted()

    def _score(self, items: Sequence[ToScore]) -> Scores:
        assert self.scorer is not None
        begun = time.monotonic()
        scores = self.scorer.score(items, self.stop.check)
        _log.info("%d samples scored in %.1f s", len(items), time.monotonic() - begun)
        for reason, count in scores.failures.items():
            _log.warning("no reward for %d samples: the scorer %s", count, reason)
        return scores


def _lengths(
    config: RolloutConfig, job: JobSettings, source: StepSource, steps: Sequence[int]
) -> dict[int, LengthTrace]:
    if job.replay_lengths is None:
        return {}
    cap = config.sampling.max_tokens
    of_step = step_lengths(job.replay_lengths, prompts=source.per_step, n=job.n, cap=cap)
    return {step: of_step(step) for step in steps}


def job_of(config: RolloutConfig) -> JobSettings:
    """The job section. Raises BadInput without one."""
    if config.job is None:
        raise BadInput(
            "the configuration has no job: section; give --prompts FILE for rollouts of a file's questions, see "
            "configs/deepmath_tiny_cpu.yaml for a job, or give at least --set job.out=FOLDER --set job.data.source=FILE"
        )
    return config.job


def out_folder(job: JobSettings) -> Path:
    """`job.out` as an absolute path. Raises BadInput for a relative one in Ray's copy of the working directory."""
    path = Path(os.path.expandvars(job.out)).expanduser()
    if not path.is_absolute() and _RAY_COPY in f"{Path.cwd()}/":
        raise BadInput(
            f"job.out={job.out}: a relative folder would lie in Ray's temporary copy of the working directory and "
            "vanish with it; give an absolute one (~ and $NAME are allowed) that the cluster's nodes share"
        )
    return path.absolute()


def ensure_tiny_model(model: str) -> None:
    """Make the tiny random model in folder `model`, unless there is one. Two jobs may do so at once."""
    folder = Path(model).expanduser()
    if (folder / "config.json").exists():
        return
    from transformers.utils import logging as transformers_logging

    from moebius.rollout.demo_assets import make_tiny_model

    transformers_logging.disable_progress_bar()
    _log.info("making a tiny random model in %s", folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    make_tiny_model(temporary)
    try:
        temporary.rename(folder)
    except OSError:
        if not (folder / "config.json").exists():  # else another job was quicker, with equal weights
            raise


def identity(config: RolloutConfig, source: StepSource) -> dict[str, Any]:
    """What must stay the same for steps to belong to one job."""
    settings = config.model_dump(mode="json", exclude=set(_FREE))
    for name in ("profile", "collective_timeout_s"):
        settings["engine"].pop(name, None)
    for name in _FREE_JOB:
        settings["job"].pop(name)
    return {"settings": settings, "questions": source.identity}


def _start(config: RolloutConfig, stop: StopSignal) -> AnyGroup:
    from moebius.rollout.placement import connect
    from moebius.rollout.report_startup import startup_line
    from moebius.rollout.start import start_group

    connect(config)
    stop.listen_again()
    _log.info("%s", starting_line(config))
    with stop.at_once():
        group = start_group(config)
    _log.info("%s", startup_line(group.startup))
    return group


def _write_page(folder: Path) -> None:
    from moebius.rollout.report_html import write_html

    write_html(folder)


def _ranges(steps: Sequence[int]) -> str:
    """0-3, 5 for [0, 1, 2, 3, 5]."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][1] + 1:
            parts[-1][1] = step
        else:
            parts.append([step, step])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)


def guarded(config: RolloutConfig, *, fresh: bool = False) -> int:
    """`run_job` with signals taken over and errors as log lines; the process's exit code."""
    logging.basicConfig(
        stream=sys.stdout, level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", force=True
    )
    logging.getLogger("moebius.rollout").setLevel(logging.INFO)
    stop = StopSignal()
    stop.listen()
    try:
        run_job(config, fresh=fresh, stop=stop)
    except Stopped as stopped:
        _log.warning("%s; finished steps are kept, the same command goes on with the next", stopped)
        return 128 + stopped.signum
    except MoebiusError as error:
        _log.error("error: %s", error)
        return 2
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of `python -m moebius.rollout.job`; returns the exit code: 0 done, 2 error, 128 + N by signal N."""
    parser = argparse.ArgumentParser(prog="python -m moebius.rollout.job", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--config", required=True, help="YAML file with the group's settings and a job: section")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting; repeatable"
    )
    parser.add_argument("--out", help="same as --set job.out=...")
    parser.add_argument("--scorer", help="same as --set job.scorer=...: math, or module:function")
    parser.add_argument("--steps", type=int, help="same as --set job.steps=...")
    parser.add_argument("--replay-lengths", help="same as --set job.replay_lengths=...")
    parser.add_argument("--fresh", action="store_true", help="remove the results of an earlier job in the folder first")
    given = parser.parse_args(argv)
    named = {"out": given.out, "scorer": given.scorer, "steps": given.steps, "replay_lengths": given.replay_lengths}
    try:
        config = load_config(given.config, [*given.set, *overrides(named)])
    except MoebiusError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    return guarded(config, fresh=given.fresh)


def overrides(named: dict[str, Any]) -> list[str]:
    """Overrides job.NAME=VALUE of the values that are not None. JSON strings are YAML, so any text comes through."""
    return [f"job.{name}={json.dumps(value)}" for name, value in named.items() if value is not None]


if __name__ == "__main__":
    sys.exit(main())
