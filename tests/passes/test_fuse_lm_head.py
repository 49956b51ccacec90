"""LM head and cost."""

from __future__ import annotations

from dcnr.ids import NodeId
from dcnr.network.graph import Port
from dcnr.network.instantiate import instantiate
from dcnr.passes import prepare
from tests.network.files import Network, chain, shipped


def kind(net: Network) -> str:
    """What the cost became."""
    return prepare(net.graph(), fuse=True).by_id[NodeId("loss")].type


def test_a_tied_head_fuses_and_stays_tied() -> None:
    """It reads the hidden state and the targets, and owns no weight."""
    graph = prepare(shipped("topology_1"), fuse=True)
    node = graph.by_id[NodeId("loss")]
    assert (node.type, node.members, node.tied_to) == ("fused_lm_head", ("lm_head", "loss"), "embedder")
    assert node.inputs == (Port(NodeId("head_down"), 0), None)
    assert node.input_shapes == ((128, 512), (128,))
    assert node.activation_precision == "float16"
    assert instantiate(node).parameters == ()
    assert graph.outputs == ()


def test_a_head_of_its_own_fuses_with_its_names() -> None:
    """Checkpoints hold the linear layer's."""
    node = prepare(chain().graph(), fuse=True).by_id[NodeId("loss")]
    assert [part.node for parameter in instantiate(node).parameters for part in parameter.parts] == ["head", "head"]


def test_without_fusion_the_output_is_there() -> None:
    """Who asks for logits runs that graph."""
    assert prepare(shipped("topology_1"), fuse=False).outputs[0].port == Port(NodeId("lm_head"), 0)


def test_other_costs_and_other_readers_are_left_alone() -> None:
    """Only cross-entropy of logits, read by nobody else."""
    assert kind(chain()) == "fused_lm_head"
    net = chain()
    net.nodes[2] = net.nodes[2].replace("vocab_size: 11", "cost_function: mse")
    assert kind(net) == "cost"
    net = chain()
    net.add("second", "cost", "head")
    net.tail = ["costs: [{name: a, node_id: loss}, {name: b, node_id: second}]"]
    assert kind(net) == "cost"
    net = chain()
    net.add("act", "relu", "head")
    net.edges = [edge.replace("from: head, from_slot: 0, to: loss", "from: act, from_slot: 0, to: loss") for edge in net.edges]
    assert kind(net) == "cost"
