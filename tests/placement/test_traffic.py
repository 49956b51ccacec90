"""What crosses machines."""

from __future__ import annotations

from dcnr.ids import NodeId, PNodeId
from dcnr.network.graph import Consumer, Port
from dcnr.passes import prepare
from dcnr.placement.traffic import crossings
from tests.network.files import chain, shipped

A, B = PNodeId("a"), PNodeId("b")


def test_one_copy_forward_and_one_gradient_a_reader_back() -> None:
    """Two outputs of one broadcast are one tensor on the wire."""
    net = chain(("fan", "broadcast", {"num_outputs": 2}), ("sum", "add", {}))
    net.edges.append("  - {from: fan, from_slot: 1, to: sum, to_slot: 1}")
    graph = prepare(net.graph(), fuse=False)
    homes = {node.id: A if node.id in ("embedder", "fan") else B for node in graph.nodes}
    (crossing,) = crossings(graph, homes, rows=3)
    assert (crossing.port, crossing.sender, crossing.receiver) == (Port(NodeId("fan"), 0), A, B)
    assert crossing.readers == (Consumer(NodeId("sum"), 0), Consumer(NodeId("sum"), 1))
    assert crossing.forward_bytes == 3 * 4 * 8 * 4
    assert crossing.backward_bytes == 2 * crossing.forward_bytes


def test_each_receiver_gets_its_own_copy() -> None:
    """In graph order, then by receiver."""
    graph = prepare(shipped("tiny"), fuse=True)
    homes = {node.id: A for node in graph.nodes} | {NodeId("block_0_ln1"): B, NodeId("block_0_ln2"): PNodeId("c")}
    found = [(crossing.port.node, crossing.receiver) for crossing in crossings(graph, homes, rows=1)]
    assert found == [
        ("block_0_in", "b"),
        ("block_0_in", "c"),
        ("block_0_ln1", "a"),
        ("block_0_stack", "c"),
        ("block_0_ln2", "a"),
        ("block_0_ln2", "a"),
    ]


def test_nothing_crosses_on_one_pnode() -> None:
    """Everything goes by reference."""
    graph = prepare(shipped("topology_1"), fuse=True)
    assert crossings(graph, {node.id: A for node in graph.nodes}, rows=1) == ()


def test_targets_send_no_gradient_back() -> None:
    """A tensor that only serves a slot of ids or targets crosses once."""
    net = chain()
    net.nodes[2] = "  - {id: loss, type: cost, config: {cost_function: mse}}"
    net.add("other", "relu", "head")
    net.edges.append("  - {from: other, to: loss, to_slot: 1}")
    graph = prepare(net.graph(), fuse=False)
    homes = {node.id: B if node.id == "loss" else A for node in graph.nodes}
    assert [(crossing.port.node, crossing.backward_bytes > 0) for crossing in crossings(graph, homes, rows=1)] == [
        ("head", True),
        ("other", False),
    ]
