"""Step reports as spans of OpenTelemetry, made when a step is over: nothing is traced while it runs.

A step is a span, with one for each of its parts: burst (in EP), switch with its phases, tail (in TP). Of several
replicas each has a span of its own between. The weight update before a step is a span by itself. A phase's time is the
longest of all ranks, so the phases of a switch may end a little later than it does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, Tracer

from moebius.engine.phases import SWITCH_PHASES
from moebius.rollout.report_lanes import views
from moebius.rollout.report_types import StepReport, SwitchEntry

_PARTS = {"EP": "burst", "TP": "tail"}


class SpanWriter:
    """Sends spans through the process's tracer provider, or, if there is none, by OTLP over HTTP.

    Where to is said by OpenTelemetry's own variables: OTEL_EXPORTER_OTLP_ENDPOINT (default http://localhost:4318),
    OTEL_EXPORTER_OTLP_HEADERS, OTEL_SERVICE_NAME.
    """

    def __init__(self, service: str, run: str, provider: TracerProvider | None = None) -> None:
        """`service` is the name where OTEL_SERVICE_NAME is not set. Raises ImportError without the OTLP exporter."""
        self._own: TracerProvider | None = None  # to be closed
        set_up = trace.get_tracer_provider()
        if provider is None and isinstance(set_up, TracerProvider):
            provider = set_up
        if provider is None:
            named = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME") or service})
            provider = self._own = TracerProvider(resource=named)
            provider.add_span_processor(BatchSpanProcessor(_exporter()))
        self._tracer, self._run = provider.get_tracer("moebius.rollout"), run

    def write(self, report: StepReport, values: Mapping[str, float]) -> None:
        """The spans of a step, `values` as attributes of the first."""
        # A report that does not say when its step began is of a step that has just ended.
        began = time.time() - report.durations_s.total if report.began_at is None else report.began_at
        if report.update_weights_s is not None:
            ended = began if report.update_ended_at is None else report.update_ended_at
            attributes = {"moebius.run": self._run, "moebius.policy_version": report.policy_version}
            _span(self._tracer, "weight update", ended - report.update_weights_s, ended, attributes)
        attributes = {
            "moebius.run": self._run,
            "moebius.step": report.step,
            "moebius.model": report.model,
            "moebius.ranks": report.ranks,
            **{f"moebius.{name.replace('/', '.')}": value for name, value in values.items()},
        }
        end = began + report.durations_s.total
        whole = _start(self._tracer, "rollout step", began, attributes, None)
        for loss in report.losses:
            told = {"why": loss.why, "rank": loss.rank, "phase": loss.phase, "seconds": loss.seconds}
            whole.add_event("ranks lost", {k: v for k, v in told.items() if v is not None}, timestamp=_ns(began))
        if not report.lanes:
            _parts(self._tracer, report, began, whole)
        else:
            seen = [lane for lane in report.lanes if lane.durations_s is not None]
            for lane, view in zip(seen, views(report), strict=True):
                start = began + lane.began_s
                own = {"moebius.replica": lane.replica, "moebius.node": lane.node, "moebius.samples": lane.samples}
                span = _start(self._tracer, f"replica {lane.replica}", start, own, whole)
                _parts(self._tracer, view, start, span)
                span.end(_ns(start + view.durations_s.total))
        whole.end(_ns(end))

    def close(self) -> None:
        """Send what waits, and end a provider of one's own."""
        if self._own is not None:
            self._own.shutdown()


def _exporter() -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


def _parts(tracer: Tracer, report: StepReport, began: float, parent: Span) -> None:
    """Burst, switches and tail of one group's step."""
    at, layout = 0.0, report.timeline[0].layout if report.timeline else "EP"
    for switch in sorted(report.switches, key=lambda s: s.t):
        first, last = _extent(switch)
        _part(tracer, report, layout, at, max(at, first), began, parent)
        _switch(tracer, switch, began, parent)
        at, layout = last, "TP" if switch.to == "TP" else "EP"
    _part(tracer, report, layout, at, max(at, report.durations_s.total), began, parent)


def _part(tracer: Tracer, report: StepReport, layout: str, at: float, end: float, began: float, parent: Span) -> None:
    points = [point for point in report.timeline if at < point.t <= end and point.layout == layout]
    attributes = {
        "moebius.layout": layout,
        "moebius.iterations": sum(point.iterations for point in points),
        "moebius.tokens": sum(point.tokens for point in points),
    }
    _span(tracer, _PARTS[layout], began + at, began + end, attributes, parent)


def _extent(switch: SwitchEntry) -> tuple[float, float]:
    """Begin and end in seconds of the step. `t` lies between quiesce and decide; the pause counts from quiesce on."""
    phases = switch.phases_ms
    first = max(0.0, switch.t - (phases.drain + phases.quiesce) / 1e3)
    return first, switch.t + max(0.0, switch.pause_ms - phases.quiesce) / 1e3


def _switch(tracer: Tracer, switch: SwitchEntry, began: float, parent: Span) -> None:
    first, last = _extent(switch)
    attributes = {
        "moebius.to": switch.to,
        "moebius.iteration": switch.iteration,
        "moebius.live": switch.live,
        "moebius.pause_ms": switch.pause_ms,
        "moebius.expert_bytes": switch.expert_bytes,
        "moebius.staged_bytes": switch.staged_bytes,
        "moebius.staged_layers": switch.staged_layers,
        "moebius.kv_bytes": switch.kv_bytes,
    }
    span = _start(tracer, f"switch to {switch.to}", began + first, attributes, parent)
    at, ms = began + first, switch.phases_ms.model_dump(by_alias=True)
    for phase in SWITCH_PHASES[switch.to]:
        if ms[phase] > 0:
            _span(tracer, phase, at, at + ms[phase] / 1e3, {}, span)
            at += ms[phase] / 1e3
    span.end(_ns(began + last))


def _start(tracer: Tracer, name: str, start: float, attributes: Mapping[str, Any], parent: Span | None) -> Span:
    # Without a parent it is a trace of its own, whatever span the caller is in.
    context = trace.set_span_in_context(trace.INVALID_SPAN if parent is None else parent)
    return tracer.start_span(name, context, start_time=_ns(start), attributes=attributes)


def _span(
    tracer: Tracer, name: str, start: float, end: float, attributes: Mapping[str, Any], parent: Span | None = None
) -> None:
    _start(tracer, name, start, attributes, parent).end(_ns(end))


def _ns(seconds: float) -> int:
    return round(1e9 * seconds)
