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
Weights = npt.NDArray[np.float64]
Ids = npt.NDArray[np.intp]

FEW = 1024
"""How many ids are looked at first for a share of `top_p`; eight times as many, if they do not have it."""


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
    scores_V = np.asarray(logits_V)[: sampling.known]
    largest = float(scores_V.max(initial=-np.inf))
    if not np.isfinite(largest):  # an overflow, a NaN, or nothing that is possible
        return None
    if sampling.temperature == 0:
        return int(np.argmax(scores_V))
    kept = _likeliest(scores_V, sampling.top_k) if 0 < sampling.top_k < len(scores_V) else np.arange(len(scores_V))
    weights_V = np.exp((scores_V[kept].astype(np.float64) - largest) / sampling.temperature)
    if sampling.top_p < 1:
        few = _nucleus(weights_V, sampling.top_p)
        kept, weights_V = kept[few], weights_V[few]
    share = np.cumsum(weights_V)
    at = int(np.searchsorted(share, _uniform(sampling.seed, position) * share[-1], side="right"))
    return int(kept[min(at, np.searchsorted(share, share[-1]))])  # at most the last that has a share at all


def _nucleus(weights_V: Weights, top_p: float) -> Ids:
    """Of the likeliest the fewest whose share reaches `top_p`, in their order. To sort them all would take longer than all the rest."""
    enough, count = weights_V.sum() * top_p, min(FEW, len(weights_V))
    few = _likeliest(weights_V, count)
    while weights_V[few].sum() < enough and count < len(weights_V):
        count = min(8 * count, len(weights_V))
        few = _likeliest(weights_V, count)
    order = few[np.argsort(-weights_V[few], kind="stable")]
    return np.sort(order[: int(np.searchsorted(np.cumsum(weights_V[order]), enough)) + 1])


def _likeliest(scores_V: Logits, count: int) -> Ids:
    """The ids of the `count` largest, in their order; of equals the smaller ids."""
    least = np.partition(scores_V, -count)[-count]
    above, equal = np.flatnonzero(scores_V > least), np.flatnonzero(scores_V == least)
    return np.sort(np.concatenate([above, equal[: count - len(above)]]))


def _uniform(seed: int, position: int) -> float:
    """In [0, 1), by Philox 4x64: the seed is its key, the position its counter."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())
