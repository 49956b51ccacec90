"""Metrics go out on one subject per kind and id; whoever subscribes sees them, and nobody waits for them."""

from __future__ import annotations

from dcnr.bus import subjects
from dcnr.bus.base import Bus
from dcnr.bus.codec import encode
from dcnr.bus.messages import Metric, SessionMetrics, StepMetrics, ValidationMetrics

_KINDS: dict[type[Metric], subjects.MetricKind] = {
    StepMetrics: "step",
    ValidationMetrics: "validation",
    SessionMetrics: "session",
}


def subject_of(metric: Metric) -> str:
    """Where a metric is published."""
    return subjects.metrics(_KINDS[type(metric)], metric.session)


async def publish(bus: Bus, metric: Metric) -> None:
    """Send one metric."""
    await bus.publish(subject_of(metric), encode(metric))
