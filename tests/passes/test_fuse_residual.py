"""When a residual sum, its branch and its norm become one, and when they do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dcnr.ids import NodeId
from dcnr.network.graph import Graph, GraphNode, Port
from dcnr.network.instantiate import instantiate
from dcnr.passes import prepare
from tests.network.files import Network

LINEAR: dict[str, Any] = {"in_dim": 8, "out_dim": 8}


def block(
    *, dropout: bool = True, broadcast: bool = True, linear: dict[str, Any] | None = None, norm: dict[str, Any] | None = None
) -> Network:
    """embedder → relu → linear (→ dropout) → sum with the embedder (→ broadcast) → norm and a second sum → head."""
    net = Network()
    net.add("embedder", "embedder", vocab_size=11, dim=8, seq_len=4)
    net.add("start", "relu", "embedder")
    branch = net.add("down", "linear", "start", **LINEAR, **(linear or {}))
    if dropout:
        branch = net.add("drop", "dropout", branch, rate=0.5)
    net.add("sum", "add", branch, "embedder")
    reads = ["sum", "sum"]
    if broadcast:
        net.add("copy", "broadcast", "sum", num_outputs=2)
        reads = ["copy:0", "copy:1"]
    net.add("norm", "layernorm", reads[0], dim=8, **(norm or {}))
    net.add("act", "relu", "norm")
    net.add("last", "add", "act", reads[1])
    net.add("head", "linear", "last", in_dim=8, out_dim=11)
    net.add("loss", "cost", "head")
    return net


def fused(net: Network) -> tuple[Graph, GraphNode]:
    """The graph, and what became of the norm."""
    graph = prepare(net.graph(), fuse=True)
    return graph, graph.by_id[NodeId("norm")]


@pytest.mark.parametrize("dropout", [True, False])
@pytest.mark.parametrize("broadcast", [True, False])
def test_all_members_join(dropout: bool, broadcast: bool) -> None:
    """The merged node reads the linear layer's input and the residual; its second output is the sum, for whoever read that."""
    graph, node = fused(block(dropout=dropout, broadcast=broadcast))
    assert node.type == "residual_norm"
    assert node.members == ("down", *(["drop"] * dropout), "sum", *(["copy"] * broadcast), "norm")
    assert node.inputs == (Port(NodeId("start"), 0), Port(NodeId("embedder"), 0))
    assert node.output_shapes == ((4, 8), (4, 8))
    assert graph.by_id[NodeId("act")].inputs == (Port(NodeId("norm"), 0),)
    assert graph.by_id[NodeId("last")].inputs[1] == Port(NodeId("norm"), 1)
    parts = [f"{part.node}.{part.name}" for parameter in instantiate(node).parameters for part in parameter.parts]
    assert parts == ["down.weight", "down.bias", "norm.weight", "norm.bias"]


def test_a_norm_may_be_all_that_reads_the_sum() -> None:
    """As before the head of a network: the second output is then read by nobody."""
    net = block(broadcast=False)
    net.edges = [edge for edge in net.edges if "to: last" not in edge and "to: head" not in edge]
    net.nodes = [node for node in net.nodes if "id: last" not in node]
    net.edges.append("  - {from: act, to: head}")
    graph, node = fused(net)
    assert node.type == "residual_norm"
    assert Port(NodeId("norm"), 1) not in graph.consumers


def test_of_two_norms_the_first_joins() -> None:
    """The second reads the sum, as everybody else does."""
    net = block()
    net.edges = [edge.replace("to: last, to_slot: 1", "to: twin, to_slot: 0") for edge in net.edges]
    net.add("twin", "layernorm", dim=8)
    net.edges.append("  - {from: twin, to: last, to_slot: 1}")
    graph, node = fused(net)
    assert node.type == "residual_norm"
    assert (graph.by_id[NodeId("twin")].type, graph.by_id[NodeId("twin")].inputs) == ("layernorm", (Port(NodeId("norm"), 1),))


def other_reader(net: Network) -> None:
    """Something else reads the linear layer."""
    net.add("side", "relu", "down")
    net.edges = [edge.replace("from: act, from_slot: 0, to: last", "from: side, from_slot: 0, to: last") for edge in net.edges]
    net.edges.append("  - {from: act, to: last, to_slot: 2}")


def seen(node: str) -> Callable[[Network], None]:
    """A declared output on `node`."""
    return lambda net: net.tail.append(f"outputs: [{{name: o, node_id: {node}}}]")


@pytest.mark.parametrize(
    "net",
    [
        block(linear={"learning_rate": 0.5}),
        block(linear={"optimizer": "sgd"}),
        block(norm={"weight_decay": 0.5}),
        block(norm={"param_precision": "fp16"}),
        block(linear={"activation_precision": "fp16"}),
    ],
    ids=["learning rate", "optimizer", "decay", "parameter storage", "storage"],
)
def test_a_linear_layer_of_another_kind_stays_outside(net: Network) -> None:
    """What differs in how it is trained or stored."""
    graph, node = fused(net)
    assert node.members == ("drop", "sum", "copy", "norm")
    assert graph.by_id[NodeId("down")].type == "linear"
    assert node.inputs[0] == Port(NodeId("down"), 0)


@pytest.mark.parametrize("change", [other_reader, seen("down")])
def test_a_linear_layer_that_others_see_stays_outside(change: Callable[[Network], None]) -> None:
    """A second reader, a declared output."""
    net = block(dropout=False)
    change(net)
    assert fused(net)[1].members == ("sum", "copy", "norm")


@pytest.mark.parametrize("node", ["sum", "copy"])
def test_a_declared_sum_stays(node: str) -> None:
    """It must be there for whoever asked for it."""
    net = block()
    seen(node)(net)
    assert fused(net)[1].type == "layernorm"


def test_other_sums_and_norms_stay() -> None:
    """A norm that stores otherwise, or is tied to another; members of two groups that must not meet."""
    assert fused(block(norm={"activation_precision": "fp16"}))[1].type == "layernorm"
    net = block(norm={"shared_weight_alias": "gain"})
    net.nodes = [
        node.replace("id: act, type: relu, config: {", "id: act, type: layernorm, config: {dim: 8, tie_weight_alias: gain")
        for node in net.nodes
    ]
    assert fused(net)[1].type == "layernorm"
    groups = [{"colocate_group": group, "colocate_policy": "required"} for group in ("one", "two")]
    graph, node = fused(block(linear=groups[0], norm=groups[1]))
    assert node.members == ("drop", "sum", "copy", "norm")
    assert (node.config.colocate_group, graph.by_id[NodeId("down")].config.colocate_group) == ("two", "one")


def test_a_tied_linear_layer_takes_its_tie_along() -> None:
    """In both directions: as user and as owner of a weight."""
    graph, node = fused(block(linear={"shared_weight_alias": "w"}))
    assert node.tied_to is None
    net = block(linear={"tie_weight_alias": "w"})
    net.nodes = [
        node.replace("id: start, type: relu, config: {", "id: start, type: linear, config: {in_dim: 8, out_dim: 8, shared_weight_alias: w")
        for node in net.nodes
    ]
    graph, node = fused(net)
    assert (node.type, node.tied_to) == ("residual_norm", "start")
    assert [parameter.name for parameter in instantiate(node).parameters] == ["bias", "norm_weight", "norm_bias"]
    net = block(linear={"shared_weight_alias": "w"})
    net.nodes = [
        node.replace("id: act, type: relu, config: {", "id: act, type: linear, config: {in_dim: 8, out_dim: 8, tie_weight_alias: w")
        for node in net.nodes
    ]
    graph, node = fused(net)
    assert (node.type, graph.by_id[NodeId("act")].tied_to) == ("residual_norm", "norm")
