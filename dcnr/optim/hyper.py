"""The hyper-parameters of a session: what `--set key=value` may set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

OptimizerName = Literal["sgd", "adam", "adamw"]
ScheduleName = Literal["constant", "cosine", "linear"]
SAVE_AFTER = 30.0
"""Seconds of work that a fault may cost."""


class Hyper(BaseModel):
    """Defaults train a small transformer. Every field is a `--set` key."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    optimizer: OptimizerName = "adamw"
    lr: float = Field(default=3e-4, gt=0)
    min_lr: float = Field(default=0.0, ge=0)
    schedule: ScheduleName = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    decay_steps: int | None = Field(default=None, gt=0)
    """Step at which `min_lr` is reached; the session's last step if not given."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    clip_norm: float = Field(default=0.0, ge=0)
    """0 for no clipping."""
    loss_scale: float | None = Field(default=None, gt=0)
    """First loss scale; 65536 if any parameter or activation is float16, else 1."""
    loss_scale_window: int = Field(default=2000, gt=0)
    """Good steps after which the scale doubles."""
    shards: int = Field(default=2, ge=1, le=64)
    """Row shards of a micro-batch on CPU backends: part of the numbers, like the batch size, so fixed per session."""
    checkpoint_every: int | None = Field(default=None, ge=0)
    """Steps between checkpoints; 0 for only the first, the last and at suspend; if not given, about every `SAVE_AFTER` seconds of work."""
    keep_last: int = Field(default=3, ge=1)
    """How many of the newest checkpoints stay in storage."""
    keep_every: int = Field(default=0, ge=0)
    """Those of steps that are multiples of this stay too; 0 for none. That of the best validation stays in any case."""
    validate_every: int = Field(default=0, ge=0)
    """Steps between validations, of which the last step is one too; 0 for none at all."""
    validate_batches: int = Field(default=0, ge=0)
    """Batches of a validation, from the start of the validation split; 0 for the whole of it."""
    patience: int = Field(default=0, ge=0)
    """Validations without a better loss after which the session ends; 0 for never."""

    def saves(self, step: int, seconds: float) -> bool:
        """Whether the state after `step` is to be saved, `seconds` of work after the last time."""
        return seconds >= SAVE_AFTER if self.checkpoint_every is None else self.checkpoint_every > 0 and step % self.checkpoint_every == 0

    def validates(self, step: int, last: int) -> bool:
        """Whether the state after `step` of `last` is to be validated."""
        return self.validate_every > 0 and step > 0 and (step % self.validate_every == 0 or step == last)

    def next_validation(self, after: int, last: int) -> int:
        """The first step after `after` whose state is to be validated; `last` if there is none."""
        return min(last, (after // self.validate_every + 1) * self.validate_every) if self.validate_every else last

    def validations(self, after: int, step: int, last: int) -> int:
        """How many validations there are after step `after`, up to `step`."""
        if not self.validate_every:
            return 0
        every = max(0, step // self.validate_every - after // self.validate_every)
        return every + (step == last and step > after and step % self.validate_every != 0)

    def keeps(self, steps: Sequence[int]) -> frozenset[int]:
        """Of complete checkpoints, those that stay."""
        every = {step for step in steps if self.keep_every and step % self.keep_every == 0}
        return frozenset(every.union(sorted(steps)[-self.keep_last :]))
