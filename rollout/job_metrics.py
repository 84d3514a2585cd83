"""Metrics of a running job for Prometheus, under the names that a server has; on loopback only."""

from __future__ import annotations

import time
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from moebius.rollout.errors import BadInput
from moebius.rollout.service_types import ServiceStats, note_report

if TYPE_CHECKING:
    from moebius.rollout.report_types import StepReport
    from moebius.rollout.start import AnyGroup

HOST = "127.0.0.1"


class JobMetrics:
    """A context manager: serves the page at /metrics while it is entered; `port` is the one it got."""

    def __init__(self, group: AnyGroup, port: int) -> None:
        """Raises BadInput when prometheus-client is missing or the port is in use."""
        try:
            from prometheus_client import start_http_server

            from moebius.rollout.server_metrics import Metrics
        except ImportError as error:
            raise BadInput(f"job.metrics_port needs {error.name}: pip install -e '.[serve]'") from error
        self.group = group
        self._stats = ServiceStats(version=group.policy_version)
        self._last: tuple[float, int] | None = None  # time and tokens
        self._server: Any
        try:
            self._server, self._thread = start_http_server(port, addr=HOST, registry=Metrics(self).registry)
        except OSError as error:
            raise BadInput(f"job.metrics_port={port}: cannot listen there: {error}; choose another") from error
        self.port: int = self._server.server_port

    def stats(self) -> ServiceStats:
        """See moebius.rollout.server_metrics.Source."""
        return replace(self._stats, version=self.group.policy_version)

    def progress(self, step: int, tokens: int, live: int, layout: str) -> None:
        """What a group's on_progress tells."""
        stats = self._stats
        now = time.monotonic()
        if self._last is not None and stats.step == step and live and tokens > self._last[1]:
            # Every live sample gets a token in an iteration.
            stats.iteration_ms = 1e3 * (now - self._last[0]) * live / (tokens - self._last[1])
        self._last = (now, tokens)
        stats.step, stats.step_tokens, stats.live, stats.layout = step, tokens, live, layout

    def step_ended(self, report: StepReport) -> None:
        """A step is over."""
        stats = self._stats
        stats.steps += 1
        stats.live, stats.step = 0, None
        stats.prompt_tokens += report.counts.prompt_tokens
        stats.output_tokens += report.counts.output_tokens
        stats.samples.update(report.counts.finish_reasons)
        if report.switches:  # the only places of a step where pages are counted for its report
            stats.kv_use = max(max(s.kv_use_before, s.kv_use_after) for s in report.switches)
        stats.restarts += len(report.losses)
        if report.timeline:
            stats.layout = report.timeline[-1].layout
        note_report(stats, report)

    def restarted(self) -> None:
        """The job has started its ranks again."""
        self._stats.restarts += 1

    def __enter__(self) -> JobMetrics:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
