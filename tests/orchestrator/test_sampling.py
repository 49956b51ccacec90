"""Which id comes next."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from dcnr.orchestrator.sampling import Sampling, draw

COLD = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0, known=1 << 20)
WARM = replace(COLD, temperature=1.0)


def shares(logits: np.ndarray, sampling: Sampling, draws: int = 4000) -> dict[int, float]:
    """How often each id comes, over many positions."""
    counted = Counter(draw(logits, sampling, position) for position in range(draws))
    return {token: count / draws for token, count in counted.items() if token is not None}


def test_cold_is_the_largest_and_of_equals_the_smaller_id() -> None:
    """Whatever the seed and the position."""
    logits = np.array([0.0, 3.0, 1.0, 3.0], np.float32)
    assert {draw(logits, replace(COLD, seed=seed), position) for seed in range(5) for position in range(5)} == {1}


def test_warm_follows_the_probabilities() -> None:
    """softmax(logits / temperature), by counting."""
    p = np.array([0.5, 0.25, 0.15, 0.1])
    for temperature in (1.0, 2.0):
        wanted = p ** (1 / temperature) / (p ** (1 / temperature)).sum()
        found = shares(np.log(p).astype(np.float32), replace(WARM, temperature=temperature))
        assert [found[token] for token in range(4)] == pytest.approx(wanted, abs=0.03)


def test_top_k_keeps_the_likeliest() -> None:
    """Ties go to the smaller ids; the rest share what is left."""
    found = shares(np.log(np.array([0.1, 0.4, 0.1, 0.4])), replace(WARM, top_k=3))
    assert set(found) == {0, 1, 3}
    assert found[1] == pytest.approx(4 / 9, abs=0.03)


@pytest.mark.parametrize(("top_p", "kept"), [(0.3, {1}), (0.5, {1}), (0.6, {1, 2}), (0.9, {0, 1, 2}), (0.95, {0, 1, 2, 3}), (1e-9, {1})])
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, kept: set[int]) -> None:
    """Never none."""
    found = shares(np.log(np.array([0.15, 0.5, 0.25, 0.1])), replace(WARM, top_p=top_p))
    assert set(found) == kept


@pytest.mark.parametrize("sampling", [WARM, replace(WARM, top_k=700), replace(WARM, top_p=0.95), replace(WARM, top_k=6000, top_p=0.7)])
@pytest.mark.parametrize("temperature", [1.0, 30.0])
def test_of_a_large_vocabulary_the_right_ones_are_kept(sampling: Sampling, temperature: float) -> None:
    """Those of sorting all of it, which takes too long; among many that are equal too."""
    logits = np.round(np.random.default_rng(1).normal(size=20_000) * 4, 1)
    order = np.argsort(-logits, kind="stable")[: sampling.top_k or None]
    p = np.exp(logits[order] / temperature)
    reached = np.searchsorted(np.cumsum(p) / p.sum(), sampling.top_p) + 1 if sampling.top_p < 1 else len(order)
    kept = set(order[:reached].tolist())
    drawn = {draw(logits, replace(sampling, temperature=temperature), position) for position in range(300)}
    assert drawn <= kept
    assert len(drawn) > 5


def test_the_draw_depends_on_seed_and_position_alone() -> None:
    """So that an answer can be repeated, and gone on with from any place."""
    logits = np.zeros(1000, np.float32)
    first = [draw(logits, replace(WARM, seed=7), position) for position in range(20)]
    assert [draw(logits, replace(WARM, seed=7), position) for position in range(10, 20)] == first[10:]
    assert [draw(logits, replace(WARM, seed=8), position) for position in range(20)] != first
    assert len(set(first)) > 15


def test_ids_without_text_are_never_drawn() -> None:
    """The network may have a larger vocabulary than the tokenizer."""
    logits = np.array([1.0, 2.0, 9.0], np.float32)
    assert draw(logits, replace(COLD, known=2), 0) == 1
    assert set(shares(logits, replace(WARM, known=2), 200)) == {0, 1}


@pytest.mark.parametrize("bad", [[np.nan, 1.0], [np.inf, 1.0], [-np.inf, -np.inf], []])
def test_no_numbers_give_no_id(bad: list[float]) -> None:
    """An overflow is said, not hidden; one impossible id is none."""
    assert draw(np.array(bad), WARM, 0) is None
    assert draw(np.array([-np.inf, 1.0]), WARM, 0) == 1


def test_extreme_temperatures() -> None:
    """Neither overflows."""
    logits = np.array([0.0, 1e4, -1e4], np.float32)
    assert draw(logits, replace(WARM, temperature=1e-300), 3) == 1
    assert set(shares(logits, replace(WARM, temperature=1e12), 300)) == {0, 1, 2}
