"""From a file to the graph; what is refused stands in test_load.py."""

from __future__ import annotations

import pytest

from dcnr.errors import NetworkFileError
from dcnr.ids import NodeId
from dcnr.network.load import load_graph
from dcnr.network.resolve import config_keys
from dcnr.nodes.attention import AttentionHeadConfig
from dcnr.passes import prepare
from tests.network.files import EXAMPLE, chain


def test_nodes_stand_in_topological_order_of_the_file() -> None:
    """Sources first, otherwise as written."""
    net = chain(("a", "relu", {}), ("b", "gelu", {}))
    net.nodes.reverse()
    assert [node.id for node in net.graph().nodes] == ["embedder", "a", "b", "head", "loss"]


def test_fed_slots_have_the_shape_of_what_the_trainer_sends() -> None:
    """Ids without the width, targets without the vocabulary, text without axes."""
    graph = chain().graph()
    assert graph.by_id[NodeId("embedder")].input_shapes == ((4,),)
    assert graph.by_id[NodeId("loss")].input_shapes == ((4, 11), (4,))


def test_the_networks_precision_is_every_nodes_default() -> None:
    """In whichever spelling; the part wins over the whole."""
    graph = load_graph(EXAMPLE.replace("precision: fp16", "precision: half\nparam_precision: fp32"), "example.yml")
    assert {(node.param_precision, node.activation_precision) for node in graph.nodes} == {("float32", "float16")}


def test_the_wire_is_native_unless_the_file_says_otherwise() -> None:
    """The file's own word, also after every pass."""
    assert load_graph(EXAMPLE, "example.yml").wire == "native"
    for wire in ("native", "fp16", "int8"):
        graph = load_graph(f"wire: {wire}\n{EXAMPLE}", "example.yml")
        assert (graph.wire, prepare(graph, True).wire, prepare(graph, False).wire) == (wire, wire, wire)


def test_two_cycles_are_two_problems() -> None:
    """And what hangs behind them is not blamed."""
    net = chain()
    for name in ("a", "b", "c", "d", "e"):
        net.nodes.append(f"  - {{id: {name}, type: relu}}")
    pairs = [("a", "b"), ("b", "a"), ("c", "d"), ("d", "c"), ("d", "e")]
    net.edges += [f"  - {{from: {source}, to: {target}}}" for source, target in pairs]
    with pytest.raises(NetworkFileError) as caught:
        net.graph()
    assert [problem.message for problem in caught.value.problems] == [
        "the edges form a cycle: a → b → a",
        "the edges form a cycle: c → d → c",
    ]


def test_config_keys_have_all_spellings() -> None:
    """Aliases of keys, and the keys that every node has."""
    assert {"input_dim", "dim", "head_dim", "optimizer", "colocate_group"} <= config_keys(AttentionHeadConfig)
