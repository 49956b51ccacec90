"""From a graph node to what computes."""

from __future__ import annotations

from dataclasses import replace

from dcnr.ids import NodeId
from dcnr.network.instantiate import instantiate
from tests.network.files import shipped


def test_parameters_are_named_after_the_node_of_the_file() -> None:
    """Canonical names are `<node id>.<parameter>`."""
    node = instantiate(shipped("mlp").by_id[NodeId("hidden")])
    assert [(part.node, part.name) for parameter in node.parameters for part in parameter.parts] == [
        ("hidden", "weight"),
        ("hidden", "bias"),
    ]


def test_a_tied_node_lists_only_what_it_owns() -> None:
    """The weight is the owner's."""
    graph_node = replace(shipped("mlp").by_id[NodeId("logits")], tied_to=NodeId("embedder"))
    assert [parameter.name for parameter in instantiate(graph_node).parameters] == ["bias"]
