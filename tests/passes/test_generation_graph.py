"""What generation keeps of a network, and whom it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings

from dcnr.errors import UserError
from dcnr.ids import NodeId
from dcnr.network.graph import Port
from dcnr.network.instantiate import instantiate
from dcnr.passes import prepare
from dcnr.passes.generation_graph import generation_graph
from tests.network.files import Network, chain, networks, shipped

SHIPPED = ("mlp", "shakespeare_char", "shakespeare_char_cpu", "shakespeare_char_recompute", "tiny", "topology_1", "topology_2")


def parameters(net: str, purpose: str, fuse: bool) -> set[tuple[str, str]]:
    """Canonical (node, name) of every parameter."""
    graph = prepare(shipped(net), fuse, "generate" if purpose == "generate" else "train")
    return {(part.node, part.name) for node in graph.nodes for parameter in instantiate(node).parameters for part in parameter.parts}


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("net", SHIPPED)
def test_shipped_networks_generate_from_the_parameters_that_they_train(net: str, fuse: bool) -> None:
    """Every checkpoint serves; the logits are those of one position, and no cost or text node is left."""
    graph = prepare(shipped(net), fuse, "generate")
    assert parameters(net, "generate", fuse) == parameters(net, "train", fuse)
    (sink,) = graph.outputs
    assert graph.by_id[sink.port.node].output_shapes[sink.port.slot][0] == 1
    assert not {"cost", "tokenizer", "detokenizer"} & {node.type for node in graph.nodes}
    assert not graph.costs


def test_what_follows_the_last_attention_alone_gets_the_last_position() -> None:
    """The cut is as early as it can be: before the norm, not only before the head."""
    graph = generation_graph(shipped("tiny"))
    assert graph.by_id[NodeId("final_ln")].inputs == (Port(NodeId("last_position"), 0),)
    assert graph.by_id[NodeId("last_position")].inputs == (Port(NodeId("block_1_residual_ffn"), 0),)


def bigram() -> Network:
    """Whose rows are the logits of what follows."""
    net = Network()
    net.add("loss", "cost", net.add("embedder", "embedder", vocab_size=11, dim=11, seq_len=4), vocab_size=11)
    return net


def two_heads() -> Network:
    """Whose logits are added up."""
    net = chain()
    net.edges.pop()
    net.edges[-1] = net.edges[-1].replace("embedder", "fan")
    net.add("fan", "broadcast", "embedder", num_outputs=2)
    net.add("other", "linear", "fan:1", in_dim=8, out_dim=11)
    net.add("sum", "add", "head", "other")
    net.edges.append("  - {from: sum, to: loss}")
    return net


def attention_last() -> Network:
    """Whose logits come out of attention."""
    net = Network()
    here = net.add("embedder", "embedder", vocab_size=12, dim=8, seq_len=4)
    here = net.add("head", "attention", here, dim=8, num_heads=2, head_dim=6)
    net.add("loss", "cost", here, vocab_size=12)
    return net


@pytest.mark.parametrize("make", [bigram, two_heads, attention_last])
def test_logits_that_no_node_of_one_input_makes_are_those_of_the_last_position_too(make: Callable[[], Network]) -> None:
    """It is taken behind them."""
    for fuse in (True, False):
        graph = prepare(make().graph(), fuse, "generate")
        assert graph.outputs[0].port == Port(NodeId("last_position"), 0)
        assert graph.by_id[NodeId("last_position")].output_shapes == ((1, 12 if make is attention_last else 11),)


def test_logits_are_the_declared_output_or_what_the_first_cost_reads() -> None:
    """The declared one goes first; a broadcast of the logits is none of them."""
    net = chain()
    net.edges = [edge.replace("from: head,", "from: fan,") for edge in net.edges]
    net.add("fan", "broadcast", "head", num_outputs=2)
    net.add("other", "relu", "fan:1")
    assert generation_graph(net.graph()).outputs[0].port == Port(NodeId("head"), 0)
    net.tail.append("outputs: [{name: logits, node_id: other}]")
    graph = generation_graph(net.graph())
    assert graph.outputs[0].port == Port(NodeId("other"), 0)
    assert [node.id for node in graph.nodes] == ["embedder", "last_position", "head", "other"]


def test_a_head_that_computes_its_own_cost_is_the_linear_layer_in_it() -> None:
    """With the weight that it is tied to."""
    net = Network()
    net.add("embedder", "embedder", vocab_size=11, dim=8, seq_len=4, shared_weight_alias="tokens")
    net.add("loss", "tied_lm_head_ce", "embedder", dim=8, vocab_size=11, tie_weight_alias="tokens")
    node = prepare(net.graph(), True, "generate").by_id[NodeId("loss")]
    assert (node.type, node.tied_to, node.output_shapes) == ("linear", "embedder", ((1, 11),))


MIXING: dict[str, tuple[tuple[str, str, dict[str, Any]], str]] = {
    "attention that looks ahead": (("a", "attention", {"dim": 8, "num_heads": 2, "causal": "false"}), "not causal"),
    "a head that looks ahead": (("a", "attention_head", {"input_dim": 8, "head_dim": 8, "causal": "false"}), "not causal"),
    "a reshape": (("a", "reshape", {"shape": "[4, 8]"}), "another shape"),
    "a causal mask": (("a", "mask", {}), "mask depends"),
}


@pytest.mark.parametrize("name", MIXING)
def test_who_mixes_positions_is_refused_by_name(name: str) -> None:
    """Node, type and reason."""
    node, why = MIXING[name]
    with pytest.raises(UserError, match=rf"node 'a' \({node[1]}\): .*{why}"):
        generation_graph(chain(node).graph())


def test_to_cut_along_positions_is_refused() -> None:
    """Along the last axis it is not."""
    for axis, size in ((0, 2), (1, 4)):
        net = chain(("cut", "split", {"num_outputs": 2, "axis": axis}))
        net.edges = [edge.replace("to: head,", "to: join,") for edge in net.edges]
        net.add("join", "stack", axis=axis)
        net.edges += ["  - {from: cut, from_slot: 1, to: join, to_slot: 1}", "  - {from: join, to: head}"]
        if axis == 0:
            with pytest.raises(UserError, match=r"node 'cut' \(split\): it works along the axis of positions"):
                generation_graph(net.graph())
        else:
            assert size == generation_graph(net.graph()).by_id[NodeId("cut")].output_shapes[0][1]


def test_a_cost_without_logits_is_refused_with_the_remedy() -> None:
    """Probabilities and squares say nothing of logits."""
    net = chain()
    net.nodes[-1] = net.nodes[-1].replace("vocab_size: 11", "cost_function: mse")
    with pytest.raises(UserError, match=r"node 'loss' .* reads no logits .*declare it under outputs"):
        generation_graph(net.graph())


@given(networks())
@settings(max_examples=60, deadline=None)
def test_any_network_generates_or_is_refused_in_words(net: Network) -> None:
    """And what is prepared passes verification, fused or not."""
    for fuse in (True, False):
        try:
            graph = prepare(net.graph(), fuse, "generate")
        except UserError as error:
            refused = str(error)
        else:
            refused = ""
            (sink,) = graph.outputs
            assert sink.name == "logits"
            assert graph.by_id[sink.port.node].output_shapes[sink.port.slot][0] == 1
        assert not refused or "node '" in refused
