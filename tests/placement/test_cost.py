"""What nodes and edges cost."""

from __future__ import annotations

from dcnr.ids import NodeId
from dcnr.network.graph import Port
from dcnr.passes import prepare
from dcnr.placement.cost import edge_bytes, graph_costs
from tests.network.files import chain

NET = chain(("mid", "linear", {"in_dim": 8, "out_dim": 8}))


def test_a_linear_layer_by_hand() -> None:
    """8 × 8 and a bias over 4 positions and 3 rows: 2 operations a weight forward, twice that backward."""
    cost = graph_costs(prepare(NET.graph(), fuse=False), rows=3, shards=2)[NodeId("mid")]
    assert cost.flops == 3 * 3 * (2 * 4 * 8 * 8)
    assert cost.parameters == 72
    assert cost.parameter_bytes == 72 * 4
    assert cost.optimizer_bytes == 72 * 4 * (2 + 2)
    assert cost.activation_bytes == 3 * (4 * 8) * 4
    assert cost.bytes == cost.parameter_bytes + cost.optimizer_bytes + cost.activation_bytes


def test_reduced_precision_has_a_master_and_a_copy() -> None:
    """Parameters take 6 bytes, activations 2; SGD keeps one moment."""
    net = chain(("mid", "linear", {"in_dim": 8, "out_dim": 8, "optimizer": "sgd"}))
    net.head.append("precision: fp16")
    graph = prepare(net.graph(), fuse=False)
    cost = graph_costs(graph, rows=1, shards=1)[NodeId("mid")]
    assert (cost.parameter_bytes, cost.optimizer_bytes, cost.activation_bytes) == (72 * 6, 72 * 4 * 2, 32 * 2)
    assert edge_bytes(graph, Port(NodeId("mid"), 0), rows=5) == 5 * 4 * 8 * 2


def test_a_tied_node_owns_nothing_and_a_broadcast_copies_nothing() -> None:
    """The first has only its bias, the second no bytes at all."""
    net = chain(("fan", "broadcast", {"num_outputs": 2}), ("sum", "add", {}))
    net.edges.append("  - {from: fan, from_slot: 1, to: sum, to_slot: 1}")
    net.nodes = [node.replace("out_dim: 11", "out_dim: 11, tie_weight_alias: tokens") for node in net.nodes]
    graph = prepare(net.graph(), fuse=False)
    costs = graph_costs(graph, rows=1)
    assert costs[NodeId("head")].parameters == 11
    assert costs[NodeId("fan")].bytes == 0
