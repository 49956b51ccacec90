"""Parameters, masters, moments and accumulators."""

from __future__ import annotations

import numpy as np
import pytest

from dcnr.agents.weights import Owned, Weights, squared_norms, tensor_names
from dcnr.backends.numpy.backend import NumpyBackend
from dcnr.ids import NodeId
from dcnr.network.graph import Graph
from dcnr.network.instantiate import instantiate
from dcnr.optim.hyper import Hyper
from dcnr.optim.update import StepNumbers
from tests.agents.tiny import DIM, NORMED, TINY, VOCABULARY, graph_of

BACKEND = NumpyBackend()
EMBEDDER, HEAD = NodeId("embedder"), NodeId("lm_head")
HALF = TINY.replace("name: tiny", "name: tiny\nparam_precision: fp16")
NUMBERS = StepNumbers(updates=1, lr=0.1, lr_factor=1.0, grad_factor=0.5)


def weights_of(graph: Graph, shards: int = 2, hyper: Hyper | None = None, saved: dict[str, np.ndarray] | None = None) -> Weights:
    """All nodes of `graph`, from seed 7 or from `saved`."""
    nodes = {node.id: instantiate(node) for node in graph.nodes}
    weights = Weights(BACKEND, graph, nodes, frozenset(nodes), shards)
    weights.load(hyper or Hyper(), 7, saved)
    return weights


def owned_by(weights: Weights, node: str, parameter: str = "weight") -> Owned:
    """One of them."""
    return next(owned for owned in weights.owned if (owned.node.id, owned.parameter.name) == (node, parameter))


@pytest.mark.parametrize("text", [TINY, NORMED], ids=["tiny", "normed"])
def test_fusion_and_order_do_not_change_first_values(text: str) -> None:
    """Plain and fused graphs start from the same canonical tensors."""
    plain, fused = weights_of(graph_of(text)).snapshot()(), weights_of(graph_of(text, fuse=True)).snapshot()()
    assert plain.keys() == fused.keys()
    for name, tensor in plain.items():
        np.testing.assert_array_equal(tensor, fused[name], err_msg=name)


def test_names_are_canonical() -> None:
    """What is written is what is asked for, moments included, the tied matrix once."""
    graph = graph_of(fuse=True)
    names = tensor_names(graph, {node.id: instantiate(node) for node in graph.nodes}, Hyper())
    assert set(names) == set(weights_of(graph).snapshot()())
    assert {"embedder.weight", "embedder.weight:m", "embedder.weight:v", "head_0.q_weight", "up.bias:v"} <= set(names)
    assert not [name for name in names if name.startswith("lm_head")]
    assert not [name for name in tensor_names(graph, {}, Hyper()) if name]


@pytest.mark.parametrize("text", [TINY, HALF, NORMED], ids=["float32", "float16", "normed"])
def test_a_checkpoint_brings_everything_back(text: str) -> None:
    """Tensors of trained plain weights, loaded into a fused graph, come out the same; 16-bit copies are rounded from the master."""
    trained = weights_of(graph_of(text))
    for owned in trained.owned:
        assert owned.gradients is not None
        owned.gradients[...] = np.random.default_rng(1).normal(size=owned.gradients.shape)
        owned.update(BACKEND, Hyper(), NUMBERS)
    saved = trained.snapshot()()
    loaded = weights_of(graph_of(text, fuse=True), saved=saved)
    for name, tensor in loaded.snapshot()().items():
        assert tensor.dtype == np.float32
        np.testing.assert_array_equal(tensor, saved[name], err_msg=name)
    embedder = owned_by(loaded, "embedder")
    low = loaded.params[EMBEDDER]["weight"]
    assert low.dtype == (np.float16 if text == HALF else np.float32)
    np.testing.assert_array_equal(low, embedder.master.astype(low.dtype))


def test_tensors_are_copies() -> None:
    """A snapshot does not change with later steps."""
    weights = weights_of(graph_of())
    before = weights.snapshot()()["up.weight"]
    kept = before.copy()
    owned_by(weights, "up").master[...] = 0
    np.testing.assert_array_equal(before, kept)


def test_a_tied_node_reads_its_owners_array() -> None:
    """It has an accumulator of its own and no optimizer state."""
    weights = weights_of(graph_of())
    assert weights.params[HEAD]["weight"] is weights.params[EMBEDDER]["weight"]
    assert weights.gradients[HEAD]["weight"] is not weights.gradients[EMBEDDER]["weight"]
    assert not [owned for owned in weights.owned if owned.node.id == HEAD]


def test_folding_adds_shards_in_order_and_then_the_tied() -> None:
    """The owner's gradient is ((own shards) + (tied shards)), and its norm that of the sum."""
    weights = weights_of(graph_of(), shards=3)
    draw = np.random.default_rng(2)
    own, tied = (draw.normal(size=(3, VOCABULARY, DIM)).astype(np.float32) for _ in range(2))
    weights.gradients[EMBEDDER]["weight"][...] = own
    weights.gradients[HEAD]["weight"][...] = tied
    owner = owned_by(weights, "embedder")
    squares, finite = owner.fold(BACKEND, 3)
    expected = ((own[0] + own[1]) + own[2]) + ((tied[0] + tied[1]) + tied[2])
    assert owner.gradients is not None
    np.testing.assert_array_equal(owner.gradients[0], expected)
    assert squares == pytest.approx(float(np.square(expected, dtype=np.float64).sum()), rel=1e-12)
    assert finite


def test_folding_fewer_shards_leaves_the_others_out() -> None:
    """A micro-batch of one row writes one shard; what lies in the others is old."""
    weights = weights_of(graph_of(), shards=2)
    up = owned_by(weights, "up")
    assert up.gradients is not None
    up.gradients[0], up.gradients[1] = 1.0, np.nan
    assert up.fold(BACKEND, 1) == (up.gradients[0].size, True)


def test_norms_are_per_node() -> None:
    """Parameters of a node are added, and one infinity makes the whole not finite."""
    owned = weights_of(graph_of()).owned
    measured = [(2.0, one.node.id != "down") for one in owned]
    norms, finite = squared_norms(zip(owned, measured, strict=True))
    assert norms[NodeId("up")] == 4.0
    assert norms[EMBEDDER] == 2.0
    assert not finite


def test_a_parameter_that_never_gets_a_gradient_stays() -> None:
    """Nodes outside the backward have no accumulator and are not updated."""
    graph = graph_of()
    nodes = {node.id: instantiate(node) for node in graph.nodes}
    weights = Weights(BACKEND, graph, nodes, frozenset(set(nodes) - {NodeId("up")}), 1)
    weights.load(Hyper(), 7, None)
    up = owned_by(weights, "up")
    before = up.master.copy()
    assert up.fold(BACKEND, 1) == (0.0, True)
    up.update(BACKEND, Hyper(), NUMBERS)
    np.testing.assert_array_equal(up.master, before)


def test_sgd_without_momentum_keeps_no_moments() -> None:
    """Only what the optimizer needs is kept and saved."""
    weights = weights_of(graph_of(), hyper=Hyper(optimizer="sgd", momentum=0.0))
    assert all(not owned.moments for owned in weights.owned)
    assert not [name for name in weights.snapshot()() if ":" in name]
