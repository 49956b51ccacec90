"""Rules between nodes that a file may rely on; what is refused stands in test_load.py."""

from __future__ import annotations

import pytest

from dcnr.errors import NetworkFileError
from dcnr.ids import NodeId
from tests.network.files import Network, chain


def test_a_head_may_be_tied_to_the_embedder() -> None:
    """[out, in] of the head is [vocab, dim] of the embedder."""
    net = chain()
    net.nodes[1] = net.nodes[1].replace("out_dim: 11", "out_dim: 11, tie_weight_alias: tokens")
    assert len(net.graph().nodes) == 3


def test_an_embedder_may_be_tied_too() -> None:
    """Two embedders with one table, read side by side."""
    net = Network()
    first = net.add("first", "embedder", vocab_size=5, dim=4, seq_len=3, shared_weight_alias="t")
    second = net.add("second", "embedder", vocab_size=5, dim=4, seq_len=3, tie_weight_alias="t", position_encoding="learned")
    joined = net.add("sum", "add", first, second)
    net.add("loss", "tied_lm_head_ce", joined, dim=4, vocab_size=5, tie_weight_alias="t")
    assert len(net.graph().nodes) == 4


def test_nodes_without_weights_may_end_nowhere() -> None:
    """Only what could learn has to lead to a cost."""
    net = chain()
    net.add("side", "relu", "embedder")
    assert len(net.graph().nodes) == 4


def test_several_costs_are_fine_if_all_are_listed() -> None:
    """Each gets its own gradient."""
    net = chain()
    net.add("second", "cost", "head", cost_function="mse")
    with pytest.raises(NetworkFileError, match="this cost node is not listed"):
        net.graph()
    net.tail = ["costs: [{name: a, node_id: loss}, {name: b, node_id: second}]"]
    assert len(net.graph().costs) == 2


def test_a_cost_without_vocab_size_has_that_of_its_logits() -> None:
    """And is compared all the same."""
    net = chain()
    net.nodes[2] = net.nodes[2].replace("vocab_size: 11", "")
    net.graph()
    net.nodes[1] = net.nodes[1].replace("out_dim: 11", "out_dim: 12")
    with pytest.raises(NetworkFileError, match="its vocabulary is 12, but that of 'embedder' is 11"):
        net.graph()


def test_recompute_is_said_of_a_whole_group() -> None:
    """One node that says otherwise is named with the first of its group; without a group the key means nothing."""
    net = chain()
    net.nodes[1] = net.nodes[1].replace("out_dim: 11", "out_dim: 11, recompute: true")
    with pytest.raises(NetworkFileError, match="recompute is said of a group, and it has none"):
        net.graph()
    net.nodes[1] = net.nodes[1].replace("recompute: true", "recompute: true, colocate_group: g")
    assert net.graph().by_id[NodeId("head")].config.recompute
    net.nodes[2] = net.nodes[2].replace("vocab_size: 11", "vocab_size: 11, colocate_group: g")
    with pytest.raises(NetworkFileError, match="recompute is false, but at 'head' of colocate_group 'g' it is true"):
        net.graph()
