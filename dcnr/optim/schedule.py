"""The learning rate over a session: warm-up, then constant, cosine (Loshchilov & Hutter 2017) or linear down to `min_lr`."""

from __future__ import annotations

import math

from dcnr.optim.hyper import Hyper


def lr_factor(hyper: Hyper, step: int, decay_steps: int) -> float:
    """What `hyper.lr` is multiplied by in step `step` (counted from 1).

    It rises linearly to 1 at step `warmup_steps`, and reaches `min_lr / lr` at step `decay_steps`, where it stays.
    """
    if step <= hyper.warmup_steps:
        return step / hyper.warmup_steps
    done = min(1.0, (step - hyper.warmup_steps) / max(1, decay_steps - hyper.warmup_steps))
    floor = hyper.min_lr / hyper.lr
    match hyper.schedule:
        case "constant":
            return 1.0
        case "cosine":
            return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))
        case "linear":
            return floor + (1 - floor) * (1 - done)
