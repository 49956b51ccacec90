"""Moments of a training step, found in what is said on the wire: a trap acts once, before the message that it waits for goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, get_args

from dcnr.bus.codec import decode, decode_with_payload
from dcnr.bus.messages import TRAINER, Decision, Hop, Message, Saved, StepDone, StepReport
from dcnr.errors import PeerError
from tests.faults.proxy import Proxy

Phase = Literal["feeding", "forward", "backward", "reporting", "applying", "checkpointing"]
PHASES: tuple[Phase, ...] = get_args(Phase)


class Trap:
    """Waits for the first message of `phase` about step `step` or a later one; then calls `act` with the name of who sent it."""

    def __init__(self, proxy: Proxy, phase: Phase, step: int, act: Callable[[str], object]) -> None:
        self._proxy = proxy
        self._phase = phase
        self._step = step
        self._act = act
        self.sprung_at: float | None = None
        """When it acted."""
        proxy.tap = self._see

    def _see(self, client: str, subject: str, body: bytes) -> None:
        if not subject.startswith("dcnr.net."):
            return
        try:
            message = decode_with_payload(body)[0] if subject.endswith((".fwd", ".bwd")) else decode(body)
        except PeerError:
            return
        if fits(self._phase, message, self._step):
            self._proxy.tap = None
            self.sprung_at = time.monotonic()
            self._act(client.removesuffix("-control").removesuffix("-tensors"))


def fits(phase: Phase, message: Message, step: int) -> bool:
    """Whether `message` is of `phase`, in step `step` or later."""
    match message:
        case Hop():
            kind = "backward" if message.phase == "bwd" else "feeding" if message.source == TRAINER else "forward"
        case StepReport() | StepDone():
            kind = "reporting"
        case Decision():
            kind = "applying"
        case Saved():
            kind = "checkpointing"
        case _:
            return False
    return kind == phase and message.step >= step
