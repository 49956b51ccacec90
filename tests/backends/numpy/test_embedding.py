"""Embeddings and rotary positions."""

from __future__ import annotations

import numpy as np

from dcnr.backends.base import Rope
from dcnr.backends.numpy.backend import NumpyBackend

backend = NumpyBackend()


def test_gradients_of_equal_ids_are_summed() -> None:
    """And those of ids that do not occur are zero."""
    ids, dy = np.array([[2, 0, 2]]), np.ones((1, 3, 2), np.float16)
    into, positions = np.full((4, 2), 9, np.float32), np.full((5, 2), 9, np.float32)
    backend.embedding_backward(dy, ids, into, positions, False)
    np.testing.assert_array_equal(into, [[1, 1], [0, 0], [2, 2], [0, 0]])
    np.testing.assert_array_equal(positions, [[1, 1]] * 3 + [[0, 0]] * 2)
    backend.embedding_backward(dy, ids, into, positions, True)
    np.testing.assert_array_equal(into, [[2, 2], [0, 0], [4, 4], [0, 0]])


def test_the_output_has_the_precision_asked_for() -> None:
    """Whatever the tables are stored in."""
    w = np.full((3, 2), 0.1, np.float32)
    assert backend.embedding(np.array([[1]]), w, None, "float16").dtype == np.float16
    np.testing.assert_array_equal(backend.embedding(np.array([[1]]), w, w, "float32"), np.float32(0.1) * np.full((1, 1, 2), 2, np.float32))


def test_rotated_products_depend_on_distance_alone() -> None:
    """The point of rotary positions."""
    rng = np.random.default_rng(2)
    q, k = (np.repeat(rng.normal(size=(1, 1, 8)), 9, axis=1) for _ in range(2))
    scores = (backend.rotate(q, Rope(100.0)) @ backend.rotate(k, Rope(100.0)).swapaxes(1, 2))[0]
    for distance in range(1, 8):
        np.testing.assert_allclose(np.diagonal(scores, distance), scores[0, distance])
    assert np.ptp(scores[0]) > 0.1


def test_a_pair_turns_by_position_over_theta() -> None:
    """Pair (2i, 2i+1) of position t by t * theta**(-2i/D)."""
    x = np.tile([1.0, 0.0], (1, 3, 2))
    y = backend.rotate(x, Rope(16.0))
    angle = np.arange(3)[:, None] * np.array([1, 16.0**-0.5])
    np.testing.assert_allclose(y[0], np.stack([np.cos(angle), np.sin(angle)], axis=-1).reshape(3, 4))
    np.testing.assert_allclose(backend.rotate(y, Rope(16.0), backward=True), x, atol=1e-15)
