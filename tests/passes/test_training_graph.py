"""What training leaves out."""

from __future__ import annotations

from dcnr.ids import NodeId
from dcnr.network.graph import Port
from dcnr.network.verify import verify
from dcnr.passes.training_graph import training_graph
from tests.network.files import Network, chain, shipped


def ids(net: Network) -> list[str]:
    """The nodes that are left."""
    graph = training_graph(net.graph())
    verify(graph)
    return [node.id for node in graph.nodes]


def test_text_nodes_and_their_broadcast_go() -> None:
    """Topology 1 trains as 140 nodes: ids enter at the embedder, the cost reads the head."""
    graph = training_graph(shipped("topology_1"))
    verify(graph)
    assert {node.id for node in shipped("topology_1").nodes} - set(graph.by_id) == {"tokenizer", "detokenizer", "logits_broadcast"}
    assert graph.by_id[NodeId("embedder")].inputs == (None,)
    assert graph.by_id[NodeId("loss")].inputs == (Port(NodeId("lm_head"), 0), None)


def test_a_network_without_text_stays_as_it_is() -> None:
    """Object for object."""
    assert training_graph(shipped("topology_2")) == shipped("topology_2")


def test_what_text_is_made_into_goes_up_to_the_fed_slot() -> None:
    """Ids may pass through a broadcast on their way to the embedder and the cost."""
    net = Network()
    net.add("tokenizer", "tokenizer", pad_length=3)
    net.add("ids", "broadcast", "tokenizer", num_outputs=2)
    net.add("embedder", "embedder", "ids:0", vocab_size=5, dim=4, seq_len=3)
    net.add("head", "linear", "embedder", in_dim=4, out_dim=5)
    net.add("loss", "cost", "head", "ids:1")
    assert ids(net) == ["embedder", "head", "loss"]
    assert training_graph(net.graph()).by_id[NodeId("loss")].inputs[1] is None


def test_what_leads_to_no_cost_goes() -> None:
    """With the sinks that read it."""
    net = chain(("a", "broadcast", {"num_outputs": 2}))
    net.add("side", "relu", "a:1")
    net.tail.append("outputs: [{name: side, node_id: side}, {name: a, node_id: a, slot_id: 1}]")
    assert ids(net) == ["embedder", "head", "loss"]
    assert [(sink.name, sink.port) for sink in training_graph(net.graph()).outputs] == [("a", Port(NodeId("embedder"), 0))]


def test_a_broadcast_with_two_readers_stays() -> None:
    """Also if both read the same slot."""
    net = chain(("a", "broadcast", {"num_outputs": 3}), ("b", "add", {}))
    net.edges.append("  - {from: a, to: b, to_slot: 1}")
    assert ids(net) == ["embedder", "a", "b", "head", "loss"]


def test_lone_broadcasts_in_a_row_all_go() -> None:
    """Whoever read the last reads the source of the first."""
    assert ids(chain(*((name, "broadcast", {"num_outputs": 2}) for name in "abc"))) == ["embedder", "head", "loss"]
