"""Which id comes next: a pure function of the logits, of what the user asked for, and of the place in the text.

Rule 1: at temperature 0 the largest logit, ties to the smaller id.
Rule 2: else softmax(logits / temperature), of which the `top_k` likeliest stay, and of these the fewest whose share reaches `top_p`
(Holtzman et al. 2019); ties to the smaller id.
Rule 3: the draw depends on (seed, position) alone, so that an answer can be repeated, and gone on with from any place.

V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Sampling:
    """What the user asked for. `top_k` 0 and `top_p` 1: all of them. `known`: ids from here on have no text, and are never drawn."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    known: int


def draw(logits_V: Logits, sampling: Sampling, position: int) -> int | None:
    """The id at `position` of a text; None if the logits are no numbers."""
    scores_V = np.asarray(logits_V, np.float64)[: sampling.known]
    if not len(scores_V) or np.isnan(scores_V).any() or np.isposinf(scores_V).any() or np.isneginf(scores_V).all():
        return None
    if sampling.temperature == 0:
        return int(np.argmax(scores_V))
    order_V = np.argsort(-scores_V, kind="stable")
    if sampling.top_k:
        order_V = order_V[: sampling.top_k]
    p = np.exp((scores_V[order_V] - scores_V[order_V[0]]) / sampling.temperature)
    share = np.cumsum(p) / p.sum()
    kept = int(np.searchsorted(share, sampling.top_p)) + 1 if sampling.top_p < 1 else len(share)
    whole = share[min(kept, len(share)) - 1]
    at = int(np.searchsorted(share[:kept], _uniform(sampling.seed, position) * whole, side="right"))
    return int(order_V[min(at, kept - 1, len(share) - 1)])


def _uniform(seed: int, position: int) -> float:
    """In [0, 1), by Philox 4x64: the seed is its key, the position its counter."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())
