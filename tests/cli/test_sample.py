"""The sampler runs the network's own graph, and never looks ahead."""

from __future__ import annotations

import numpy as np
import pytest

from dcnr.backends.load import load_backend
from dcnr.cli.sample import Sampler
from dcnr.cli.source import read_source
from dcnr.errors import UserError
from dcnr.network.instantiate import instantiate
from dcnr.network.load import load_graph
from dcnr.passes import prepare
from tests.cli.conftest import TINY


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    """The demo's network with random weights."""
    graph = read_source(TINY).graph
    rng = np.random.default_rng(1)
    weights = {
        f"{part.node}.{part.name}": rng.normal(0, 0.3, (part.stop - part.start, *parameter.shape[1:])).astype(np.float32)
        for node in prepare(graph, fuse=False).nodes
        for parameter in instantiate(node).parameters
        for part in parameter.parts
    }
    return Sampler(graph, weights, load_backend("numpy"))


def test_it_never_looks_ahead(sampler: Sampler) -> None:
    """What follows a position, padding included, does not change its logits; what stands before it does."""
    logits_V = sampler.logits([5, 9])
    np.testing.assert_allclose(sampler.window_logits([5, 9, 2, 7])[1], logits_V, atol=1e-5)
    assert not np.allclose(sampler.logits([6, 9]), logits_V, atol=1e-3)


def test_cold_sampling_takes_the_likeliest(sampler: Sampler) -> None:
    """At a temperature near 0 it is the argmax, token after token."""
    first, second = sampler.sample([3], 2, 1e-6, np.random.default_rng(0))
    assert first == int(np.argmax(sampler.logits([3])))
    assert second == int(np.argmax(sampler.logits([3, first])))


def test_sampling_is_a_function_of_the_generator(sampler: Sampler) -> None:
    """Same seed, same text."""
    one, two = (sampler.sample([3], 5, 1.0, np.random.default_rng(7)) for _ in range(2))
    assert one == two


def test_only_the_last_window_counts(sampler: Sampler) -> None:
    """A text longer than the network's window is cut on the left."""
    long = list(np.random.default_rng(2).integers(0, 100, 2000))
    np.testing.assert_array_equal(sampler.logits(long), sampler.logits(long[-1500:]))


HEADLESS = """
name: headless
nodes:
  - {id: embedder, type: embedder, config: {vocab_size: 8, dim: 4, seq_len: 4}}
  - {id: cost, type: fusedlmheadce, config: {dim: 4, vocab_size: 8}}
edges: [{from: embedder, to: cost}]
costs: [{name: loss, node_id: cost}]
"""


def test_a_network_without_logits_cannot_write() -> None:
    """A cost that holds its LM head in itself has none to draw from."""
    with pytest.raises(UserError, match="cannot write text"):
        Sampler(load_graph(HEADLESS, "headless.yml"), {}, load_backend("numpy"))
