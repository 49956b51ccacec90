"""Who owns a tied weight."""

from __future__ import annotations

from dcnr.ids import NodeId
from dcnr.passes.precision import precision
from dcnr.passes.tie_weights import tie_weights
from tests.network.files import chain, shipped


def test_the_head_belongs_to_the_embedder() -> None:
    """And nothing else to anyone."""
    graph = tie_weights(shipped("topology_2"))
    assert {node.id: node.tied_to for node in graph.nodes if node.tied_to is not None} == {"lm_head": "embedder"}


def test_a_tied_node_stores_as_its_owner_does() -> None:
    """There is one array."""
    net = chain()
    net.nodes[0] = net.nodes[0].replace("vocab_size", "param_precision: bf16, vocab_size")
    net.nodes[1] = net.nodes[1].replace("out_dim: 11", "out_dim: 11, tie_weight_alias: tokens, precision: fp16")
    head = tie_weights(precision(net.graph())).by_id[NodeId("head")]
    assert (head.param_precision, head.activation_precision) == ("bfloat16", "float16")
