"""The network of every node type, on the backend that defines what is right."""

from __future__ import annotations

import numpy as np

from dcnr.backends.load import load_backend
from dcnr.nodes.registry import NODE_TYPES
from tests.nodes.network import LAYERS, EveryType


def test_every_type_that_trains_is_there() -> None:
    """A new node type joins it, or the claim that the backends run all of them would be stale; `last_position` is for generation alone."""
    trained = {name for name, row in NODE_TYPES.items() if not row.text_only and name != "last_position"}
    assert {one.type for one in LAYERS} == trained


def test_every_parameter_gets_a_gradient() -> None:
    """Nothing is cut off."""
    network = EveryType(load_backend("numpy"), "float32")
    network.run()
    for name, array in network.results().items():
        assert np.isfinite(array).all(), name
        assert np.any(array), name
