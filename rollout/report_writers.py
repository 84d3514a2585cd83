"""Step reports for TensorBoard, Weights & Biases and OpenTelemetry, beside the files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from moebius.rollout.errors import BadInput

if TYPE_CHECKING:
    from moebius.rollout.report_types import StepReport


class ReportSettings(BaseModel):
    """Where figures of step reports go besides."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    writers: list[Literal["tensorboard", "wandb", "otel"]] = Field(
        default_factory=list,
        description="tensorboard: to the run's folder; wandb: Weights & Biases, by its own settings; otel: spans of "
        "OpenTelemetry, to where its environment variables say.",
    )
    project: str = Field("moebius-rollout", description="wandb: project.")
    name: str | None = Field(None, description="wandb: name of the run; None: that of its folder.")


class _Writer(Protocol):
    def write(self, report: StepReport, values: Mapping[str, float]) -> None:
        """A step, and its figures."""

    def close(self) -> None:
        """All have been written."""


class _TensorBoard:
    def __init__(self, settings: ReportSettings, folder: Path) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._summary = Summary
        try:
            self._file: Any = EventFileWriter(str(folder / "tensorboard"))
        except OSError as error:
            raise BadInput(f"report.writers: tensorboard cannot write to {folder / 'tensorboard'}: {error}") from error

    def write(self, report: StepReport, values: Mapping[str, float]) -> None:
        import time

        from tensorboard.compat.proto.event_pb2 import Event

        found = [self._summary.Value(tag=f"rollout/{name}", simple_value=value) for name, value in values.items()]
        self._file.add_event(Event(wall_time=time.time(), step=report.step, summary=self._summary(value=found)))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _Wandb:
    def __init__(self, settings: ReportSettings, folder: Path) -> None:
        import wandb

        # A job that goes on continues its run.
        identity = hashlib.sha256(os.fsencode(folder.absolute())).hexdigest()[:16]
        name = settings.name or folder.name
        try:
            self._run: Any = wandb.init(
                project=settings.project, name=name, id=identity, resume="allow", dir=str(folder)
            )
        except (wandb.errors.Error, OSError, ValueError) as error:  # ValueError: of its settings, by pydantic
            raise BadInput(
                f"report.writers: wandb could not begin run {name!r} of project {settings.project!r} "
                f"({type(error).__name__}: {' '.join(str(error).split())}): log in with `wandb login`, or set "
                "WANDB_MODE=offline"
            ) from error

    def write(self, report: StepReport, values: Mapping[str, float]) -> None:
        self._run.log({f"rollout/{name}": value for name, value in values.items()}, step=report.step)

    def close(self) -> None:
        self._run.finish()


def _otel(settings: ReportSettings, folder: Path) -> _Writer:
    from moebius.rollout.report_spans import SpanWriter

    return SpanWriter(settings.project, settings.name or folder.name)


_MAKERS: dict[str, Callable[[ReportSettings, Path], _Writer]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "otel": _otel,
}


class Writers:
    """A context manager over the writers of a run."""

    def __init__(self, writers: Sequence[_Writer]) -> None:
        self._writers = writers

    def write(self, report: StepReport, more: Mapping[str, float | None] | None = None) -> None:
        """Figures of a report, and `more` of which those that are None are left out."""
        values = figures(report) | {name: value for name, value in (more or {}).items() if value is not None}
        for writer in self._writers:
            writer.write(report, values)

    def __enter__(self) -> Writers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for writer in self._writers:
            writer.close()


def open_writers(settings: ReportSettings, folder: Path) -> Writers:
    """The writers of a run in `folder`. Raises BadInput for one whose package is missing, or that cannot begin."""
    made: list[_Writer] = []
    try:
        for name in dict.fromkeys(settings.writers):
            try:
                made.append(_MAKERS[name](settings, folder))
            except ImportError as error:
                raise BadInput(
                    f"report.writers: {name} is not installed ({error}): pip install -e '.[{name}]'"
                ) from error
    except BaseException:
        for writer in made:
            writer.close()
        raise
    return Writers(made)


def figures(report: StepReport) -> dict[str, float]:
    """The figures of a report by name; units as in the report."""
    counts, pauses = report.counts, [switch.pause_ms for switch in report.switches]
    values: dict[str, float | None] = {
        "policy_version": report.policy_version,
        "tokens_per_s": report.tokens_per_s,
        "samples": counts.samples,
        "output_tokens": counts.output_tokens,
        "parked": counts.parked,
        "resumed": counts.resumed,
        "switches": len(report.switches),
        "cancelled": len(report.cancelled),
        "pause_ms": sum(pauses) if pauses else None,
        "switch_live": report.switches[0].live if report.switches else None,
        "losses": len(report.losses) + sum(lane.lost is not None for lane in report.lanes),
        "update_weights_s": report.update_weights_s,
        "return_reshard_ms": report.return_reshard_ms,
        "gain": report.counterfactual.gain,
    }
    values |= {f"seconds/{name}": value for name, value in report.durations_s.model_dump().items()}
    values |= {f"finished/{reason}": count for reason, count in counts.finish_reasons.items()}
    for layout, found in report.iteration_ms.items():
        values |= {f"iteration_ms/{layout}_{name}": getattr(found, name) for name in ("p50", "p90", "p99")}
    for switch in report.switches[:1]:
        values |= {f"phase_ms/{name}": ms for name, ms in switch.phases_ms.model_dump().items()}
    for lane in report.lanes:
        values |= {
            f"replica_{lane.replica}/tokens_per_s": lane.tokens_per_s,
            f"replica_{lane.replica}/idle_s": lane.idle_s,
        }
    return {name: float(value) for name, value in values.items() if value is not None}
