"""The service's state and history for Prometheus, all names with the prefix moebius_."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

    from moebius.rollout.service_types import ServiceStats
    from moebius.rollout.start import AnyGroup

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
_REASONS = ("stop", "length", "abort")


class Source(Protocol):
    """What is shown: a service, or a job."""

    @property
    def group(self) -> AnyGroup:
        """Its ranks."""

    def stats(self) -> ServiceStats:
        """What it does and has done."""


class Metrics:
    """What /metrics shows. `latency` and `first_token` are observed by the routes, in seconds."""

    def __init__(self, service: Source) -> None:
        from prometheus_client import CollectorRegistry, Counter, Histogram

        self.service = service
        self.registry: CollectorRegistry = CollectorRegistry()
        self.registry.register(self)
        self.latency = Histogram(
            "moebius_request_seconds", "Duration of requests that were answered.", buckets=_SECONDS,
            registry=self.registry,
        )  # fmt: skip
        self.first_token = Histogram(
            "moebius_time_to_first_token_seconds", "From a request to its first token, of streams.", buckets=_SECONDS,
            registry=self.registry,
        )  # fmt: skip
        self.answers = Counter(
            "moebius_http_answers", "Answers by route and status.", ["route", "status"], registry=self.registry
        )

    def text(self) -> bytes:
        """The page."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry)

    def describe(self) -> list[Metric]:
        """Asked by the registry before there is anything to collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Asked by the registry for every page."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

        stats = self.service.stats()
        gauges: dict[str, tuple[str, float]] = {
            "live_samples": ("Unfinished samples in the running step.", stats.live),
            "waiting_samples": ("Samples that are in no step yet.", stats.waiting),
            "parked_samples": ("Samples that the ranks keep while no step runs.", stats.parked),
            "iteration_ms": ("Duration of the last iterations in ms, a running mean.", stats.iteration_ms),
            "kv_use_ratio": ("Share of KV pages in use, worst rank.", stats.kv_use),
            "policy_version": ("Version of the weights.", stats.version),
            "paused": ("1 while paused.", float(stats.paused)),
            "asleep": ("1 while some memory is given back.", float(bool(stats.asleep))),
            "ready": ("1 unless requests wait for weights, or can no longer be served.", float(_ready(stats))),
            "switch_pause_ms_max": ("Longest pause of a switch in ms.", stats.pause_ms_max),
            "weight_update_seconds_last": ("Duration of the last weight update.", stats.update_s),
            "sampled_tokens": ("Tokens that the running step, or the last one, has sampled so far.", stats.step_tokens),
        }
        for name, (words, value) in gauges.items():
            yield GaugeMetricFamily(f"moebius_{name}", words, value=value)
        layout = GaugeMetricFamily("moebius_layout", "1 for the layout that runs or ran last.", labels=["layout"])
        for name in ("EP", "TP"):
            layout.add_metric([name], float(stats.layout == name))
        yield layout
        counters: dict[str, tuple[str, float]] = {
            "restarts": ("Restarts of the group after the loss of a rank.", stats.restarts),
            "steps": ("Steps that have ended.", stats.steps),
            "prompt_tokens": ("Tokens of answered prompts.", stats.prompt_tokens),
            "output_tokens": ("Tokens of finished samples.", stats.output_tokens),
            "weight_updates": ("Weight updates.", stats.updates),
            "cancelled_switches": ("Switches that were refused, of steps that have ended.", stats.cancelled_switches),
        }
        for name, (words, value) in counters.items():
            yield CounterMetricFamily(f"moebius_{name}", words, value=value)
        yield _by(
            "requests", "Requests by how they ended.", "outcome",
            {kind: stats.requests[kind] for kind in ("ok", "aborted", "failed", "refused")},
        )  # fmt: skip
        reasons = {reason: stats.samples[reason] for reason in _REASONS}
        yield _by("samples", "Finished samples by finish reason.", "reason", reasons)
        switches = {to: stats.switches[to] for to in ("TP", "EP")}
        yield _by("switches", "Switches of steps that have ended, by where they went.", "to", switches)
        phases = CounterMetricFamily(
            "moebius_switch_phase_ms",
            "Milliseconds in each phase of all switches, longest rank.",
            labels=["to", "phase"],
        )
        for (to, phase), ms in sorted(stats.phase_ms.items()):
            phases.add_metric([to, phase], ms)
        yield phases
        config = self.service.group.config
        if config.replicas > 1:
            group: Any = self.service.group
            words = "Switch groups that take prompts."
            yield GaugeMetricFamily("moebius_replicas_in_service", words, value=len(group.in_service))
            words = "Losses of single switch groups, which are started again."
            yield CounterMetricFamily("moebius_replica_losses", words, value=group.losses)
        info = InfoMetricFamily("moebius_server", "Model and ranks.")
        info.add_metric(
            [], {"model": config.engine.model, "ranks": str(config.ranks), "replicas": str(config.replicas)}
        )
        yield info


def _ready(stats: Any) -> bool:
    return stats.blocked is None and stats.dead is None


def _by(name: str, words: str, label: str, values: dict[str, int]) -> Metric:
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(f"moebius_{name}", words, labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family
