"""What declared outputs need of a network."""

from __future__ import annotations

import pytest

from dcnr.errors import UserError
from dcnr.ids import NodeId
from dcnr.network.verify import verify
from dcnr.passes.outputs_graph import outputs_graph
from tests.network.files import SHIPPED, chain, shipped


@pytest.mark.parametrize("net", SHIPPED)
def test_shipped_networks_give_their_outputs_without_costs_and_text(net: str) -> None:
    """What is left keeps to what every graph keeps to."""
    graph = outputs_graph(shipped(net))
    verify(graph)
    assert [sink.name for sink in graph.outputs] == ["logits"]
    assert not {"cost", "tokenizer", "detokenizer"} & {node.type for node in graph.nodes}


def test_only_what_leads_to_the_outputs_that_are_asked_for_stays() -> None:
    """In the order in which they were asked for, each once; by default all."""
    net = chain()
    net.tail.append("outputs: [{name: logits, node_id: head}, {name: hidden, node_id: embedder}]")
    graph = outputs_graph(net.graph(), ["hidden", "hidden"])
    assert ([node.id for node in graph.nodes], [sink.name for sink in graph.outputs]) == ([NodeId("embedder")], ["hidden"])
    assert [sink.name for sink in outputs_graph(net.graph()).outputs] == ["logits", "hidden"]


def test_who_reads_a_tied_matrix_keeps_its_owner() -> None:
    """Its matrix is there, whatever became of its tensors."""
    graph = outputs_graph(shipped("topology_2"))
    head = graph.by_id[NodeId("lm_head")]
    assert head.tied_to in graph.by_id


def test_what_is_no_output_of_ids_is_refused_in_words() -> None:
    """Nothing declared, another name, a cost, a text node."""
    with pytest.raises(UserError, match="declares no outputs"):
        outputs_graph(chain().graph())
    with pytest.raises(UserError, match="has no output 'hidden'"):
        outputs_graph(shipped("tiny"), ["hidden"])
    net = chain()
    net.tail.append("outputs: [{name: loss, node_id: loss}]")
    with pytest.raises(UserError, match=r"'loss' .* is a cost"):
        outputs_graph(net.graph())
