"""When heads become one attention, and when they do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dcnr.ids import NodeId
from dcnr.network.graph import Port
from dcnr.network.instantiate import instantiate
from dcnr.passes import prepare
from tests.network.files import Network


def heads() -> Network:
    """embedder → fan → two heads → stack → head → loss."""
    net = Network()
    net.add("embedder", "embedder", vocab_size=11, dim=8, seq_len=4)
    net.add("fan", "broadcast", "embedder", num_outputs=2)
    for index in range(2):
        net.add(f"h{index}", "attention_head", f"fan:{index}", input_dim=8, head_dim=4)
    net.add("stack", "stack", "h0", "h1", axis=-1)
    net.add("head", "linear", "stack", in_dim=8, out_dim=11)
    net.add("loss", "cost", "head")
    return net


def fuses(net: Network) -> bool:
    """Whether the stack became a fused_heads."""
    return prepare(net.graph(), fuse=True).by_id[NodeId("stack")].type == "fused_heads"


def test_heads_fuse() -> None:
    """Into a node that reads the broadcast's source and holds q, k and v of every head, in the order of the stack."""
    node = prepare(heads().graph(), fuse=True).by_id[NodeId("stack")]
    assert node.type == "fused_heads"
    assert node.members == ("fan", "h0", "h1", "stack")
    assert node.inputs == (Port(NodeId("embedder"), 0),)
    names = [f"{part.node}.{part.name}" for part in instantiate(node).parameters[0].parts]
    assert names == ["h0.q_weight", "h1.q_weight", "h0.k_weight", "h1.k_weight", "h0.v_weight", "h1.v_weight"]


def test_the_stack_decides_the_order() -> None:
    """Not the broadcast, nor the file."""
    net = heads()
    net.edges = [edge.replace("h0, from_slot: 0, to: stack, to_slot: 0", "h1, from_slot: 0, to: stack, to_slot: 0") for edge in net.edges]
    net.edges[4] = net.edges[4].replace("from: h1", "from: h0")
    assert prepare(net.graph(), fuse=True).by_id[NodeId("stack")].members == ("fan", "h1", "h0", "stack")


def test_heads_may_read_one_slot() -> None:
    """All outputs of a broadcast are the same."""
    net = heads()
    net.edges = [edge.replace("from_slot: 1, to: h1", "from_slot: 0, to: h1") for edge in net.edges]
    assert fuses(net)


def other_reader(net: Network) -> None:
    """Something else reads the broadcast."""
    net.add("side", "relu", "fan:1")
    net.nodes[4] = net.nodes[4].replace("stack, type: stack", "stack0, type: stack")
    net.edges = [edge.replace("to: stack", "to: stack0").replace("from: stack,", "from: stack0,") for edge in net.edges]
    net.add("stack", "add", "stack0", "side")
    net.edges = [edge.replace("from: stack0, from_slot: 0, to: head", "from: stack, from_slot: 0, to: head") for edge in net.edges]


def other_config(net: Network) -> None:
    """One head has no bias."""
    net.nodes[3] = net.nodes[3].replace("head_dim: 4", "head_dim: 4, bias: false")


def other_optimizer(net: Network) -> None:
    """One head has its own learning rate: one array has one."""
    net.nodes[3] = net.nodes[3].replace("head_dim: 4", "head_dim: 4, learning_rate: 0.5")


def other_axis(net: Network) -> None:
    """The stack joins positions."""
    net.nodes[2] = net.nodes[2].replace("head_dim: 4", "head_dim: 8")
    net.nodes[3] = net.nodes[3].replace("head_dim: 4", "head_dim: 8")
    net.nodes[4] = net.nodes[4].replace("axis: -1", "axis: 0")


def read_elsewhere(net: Network) -> None:
    """A head's output is wanted outside."""
    net.tail.append("outputs: [{name: o, node_id: h0}]")


def head_twice(net: Network) -> None:
    """One head fills two places."""
    net.edges = [edge.replace("from: h1, from_slot: 0, to: stack", "from: h0, from_slot: 0, to: stack") for edge in net.edges]
    net.nodes = [node for node in net.nodes if "id: h1" not in node]
    net.edges = [edge for edge in net.edges if "to: h1" not in edge]
    net.edges.append("  - {from: fan, from_slot: 1, to: fan2}")
    net.nodes.append("  - {id: fan2, type: relu}")


def no_broadcast(net: Network) -> None:
    """Heads that read the source itself."""
    net.edges = [edge.replace("from: fan, from_slot: 1", "from: embedder, from_slot: 0") for edge in net.edges]


def other_precision(net: Network) -> None:
    """The stack rounds."""
    net.nodes[4] = net.nodes[4].replace("axis: -1", "axis: -1, activation_precision: fp16")


def two_groups(net: Network) -> None:
    """Placement must keep parts of it elsewhere."""
    net.nodes[1] = net.nodes[1].replace("num_outputs: 2", "num_outputs: 2, colocate_group: a, colocate_policy: required")
    net.nodes[4] = net.nodes[4].replace("axis: -1", "axis: -1, colocate_group: b, colocate_policy: required")


@pytest.mark.parametrize(
    "change",
    [other_reader, other_config, other_optimizer, other_axis, read_elsewhere, head_twice, no_broadcast, other_precision, two_groups],
    ids=lambda change: change.__name__,
)
def test_anything_else_is_left_alone(change: Callable[[Network], None]) -> None:
    """Each condition by itself."""
    net = heads()
    assert fuses(net)
    change(net)
    kinds = {node.type for node in prepare(net.graph(), fuse=True).nodes}
    assert "fused_heads" not in kinds
    assert "attention_head" in kinds
