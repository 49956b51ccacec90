"""What a network may do to messages, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from dcnr.bus.memory import Fate


@dataclass
class Weather:
    """Loses, repeats and delays messages with these probabilities; delayed ones are overtaken. A `Fate`."""

    seed: int
    loss: float = 0.05
    repeat: float = 0.05
    delay: float = 0.2
    longest: float = 0.02
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def __call__(self, sender: str, receiver: str, subject: str, data: bytes) -> Iterable[float]:
        if self.rng.random() < self.loss:
            return ()
        copies = 2 if self.rng.random() < self.repeat else 1
        return [self.rng.random() * self.longest if self.rng.random() < self.delay else 0.0 for _ in range(copies)]


def cut(sender: str, receiver: str) -> Fate:
    """Nothing gets from `sender` to `receiver`; the other way is open."""
    return lambda origin, to, subject, data: () if (origin, to) == (sender, receiver) else (0.0,)
