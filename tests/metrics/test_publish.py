"""Metrics on the bus."""

from __future__ import annotations

import asyncio
from functools import partial

from dcnr.bus import codec
from dcnr.bus.memory import MemoryBroker
from dcnr.bus.messages import Message, SessionMetrics, StepMetrics, ValidationMetrics
from dcnr.ids import SessionId
from dcnr.metrics.publish import publish

S = SessionId("s")
STEP = StepMetrics(S, 1, 2.0, 0.1, 1.0, 1.0, False, 10.0, 100.0)
VALIDATION = ValidationMetrics(S, 1, 2.0, 7.4, 2.9, 100, True)
STATE = SessionMetrics(S, "running", 0, "")


def test_each_kind_has_its_subject() -> None:
    """A watcher of one session's steps hears steps and nothing else."""

    async def story() -> list[tuple[str, Message]]:
        broker = MemoryBroker()
        heard: list[tuple[str, Message]] = []

        def hear(subject: str, data: bytes) -> None:
            heard.append((subject, codec.decode(data)))

        listener, sender = broker.connect(), broker.connect()
        for subject in ("dcnr.metrics.step.s", "dcnr.metrics.session.s", "dcnr.metrics.validation.s", "dcnr.metrics.step.t"):
            await listener.subscribe(subject, partial(hear, subject))
        await publish(sender, STEP)
        await publish(sender, VALIDATION)
        await publish(sender, STATE)
        await sender.close()
        await listener.close()
        return heard

    assert asyncio.run(story()) == [
        ("dcnr.metrics.step.s", STEP),
        ("dcnr.metrics.validation.s", VALIDATION),
        ("dcnr.metrics.session.s", STATE),
    ]
