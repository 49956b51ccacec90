"""The declared outputs of a checkpoint are what plain NumPy makes of its weights."""

from __future__ import annotations

import numpy as np
import pytest

from dcnr.agents.outputs import Outputs
from dcnr.backends.base import Backend
from dcnr.backends.load import load_backend
from dcnr.errors import UserError
from dcnr.network.load import load_graph
from dcnr.passes.outputs_graph import outputs_graph
from tests.storage.exports import SMALL, weights_of

DECLARED = SMALL + "outputs: [{name: logits, node_id: head}, {name: hidden, node_id: act}]\n"
IDS = np.array([[1, 2, 3, 4, 5, 6], [7, 0, 1, 2, 3, 4]])


@pytest.fixture(params=["numpy", "cpu"])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Those that every machine has."""
    return load_backend(request.param)


def outputs(backend: Backend, text: str = DECLARED) -> Outputs:
    """With the weights of seed 0."""
    one = Outputs(backend, outputs_graph(load_graph(text, "network.yml")))
    weights = weights_of(text)
    assert set(one.names) <= weights.keys()
    one.load({name: weights[name] for name in one.names})
    return one


def test_outputs_are_those_of_the_network_file(backend: Backend) -> None:
    """One inside, and one behind a tied matrix; a row at a time as all at once."""
    one, weights = outputs(backend), weights_of(DECLARED)
    found = one.of(IDS)
    entered = weights["embed.weight"][IDS] + weights["embed.position_weight"]
    hidden = np.maximum(entered @ weights["up.weight"].T + weights["up.bias"], 0)
    logits = hidden @ weights["embed.weight"].T + weights.get("head.bias", np.float32(0))
    assert one.seq_len == 6
    assert {name: array.shape for name, array in found.items()} == {"logits": (2, 6, 8), "hidden": (2, 6, 4)}
    np.testing.assert_allclose(found["hidden"], hidden, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["logits"], logits, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(one.of(IDS[1:])["logits"], found["logits"][1:], rtol=1e-6, atol=1e-7)


def test_half_precision_is_given_as_floats_that_anybody_reads(backend: Backend) -> None:
    """Where nodes differ in it, tensors are cast on the way."""
    half = DECLARED.replace("name: small", "name: small\nprecision: bfloat16").replace("{id: act, type: relu}", FLOAT_RELU)
    found, exact = outputs(backend, half).of(IDS), outputs(backend).of(IDS)
    assert {array.dtype for array in found.values()} == {np.dtype(np.float32)}
    np.testing.assert_allclose(found["logits"], exact["logits"], atol=0.1)


FLOAT_RELU = "{id: act, type: relu, config: {precision: float32}}"


def test_an_id_that_the_network_does_not_know_is_refused(backend: Backend) -> None:
    """By the name of the node."""
    with pytest.raises(UserError, match="id 8 is not in the vocabulary of node 'embed'"):
        outputs(backend).of(IDS + 1)
