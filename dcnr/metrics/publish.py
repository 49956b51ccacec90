"""Metrics go out on one subject per kind and id; whoever subscribes sees them, and nobody waits for them."""

from __future__ import annotations

from dcnr.bus import subjects
from dcnr.bus.base import Bus
from dcnr.bus.codec import encode
from dcnr.bus.messages import SessionMetrics, StepMetrics


def subject_of(metric: StepMetrics | SessionMetrics) -> str:
    """Where a metric is published."""
    return subjects.metrics("step" if isinstance(metric, StepMetrics) else "session", metric.session)


async def publish(bus: Bus, metric: StepMetrics | SessionMetrics) -> None:
    """Send one metric."""
    await bus.publish(subject_of(metric), encode(metric))
