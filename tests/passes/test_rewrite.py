"""Merging and removing nodes."""

from __future__ import annotations

from dcnr.ids import NodeId
from dcnr.network.graph import Port
from dcnr.network.verify import verify
from dcnr.nodes.linear import LinearActivationConfig, LinearConfig
from dcnr.passes import prepare
from dcnr.passes.rewrite import Merge, input_of, is_declared, merge, only_reader, remove, same_place, same_storage
from tests.network.files import chain


def test_only_reader() -> None:
    """None where several read, or nobody."""
    net = chain(("a", "relu", {}), ("b", "relu", {}))
    graph = net.graph()
    reader = only_reader(graph, graph.by_id[NodeId("a")])
    assert reader is not None
    assert (reader[0].id, reader[1]) == ("b", 0)
    assert only_reader(graph, graph.by_id[NodeId("loss")]) is None
    net.add("c", "relu", "a")
    graph = net.graph()
    assert only_reader(graph, graph.by_id[NodeId("a")]) is None


def test_tied_nodes_and_metrics_follow_a_merged_owner() -> None:
    """The owner's id changes to that of the merged node; a declared output inside is dropped."""
    net = chain(("mid", "linear", {"in_dim": 8, "out_dim": 8, "shared_weight_alias": "m"}), ("act", "relu", {}))
    net.add("other", "linear", "act", in_dim=8, out_dim=8, tie_weight_alias="m")
    net.edges[2] = net.edges[2].replace("from: act", "from: other")
    net.edges = [edge.replace("from: act, from_slot: 0, to: head", "from: other, from_slot: 0, to: head") for edge in net.edges]
    net.tail += ["metrics: [{name: lr, type: learning_rate, node_id: mid}]", "outputs: [{name: o, node_id: mid}]"]
    graph = prepare(net.graph(), fuse=False)
    mid, act = graph.by_id[NodeId("mid")], graph.by_id[NodeId("act")]
    assert is_declared(graph, mid)
    assert isinstance(mid.config, LinearConfig)
    config = LinearActivationConfig.fuse(mid.config, "relu")
    merged = merge(graph, [Merge([mid, act], "linear_activation", config, [input_of(mid, 0)], mid)])
    verify(merged)
    assert merged.by_id[NodeId("other")].tied_to == "act"
    assert merged.by_id[NodeId("act")].members == ("mid", "act")
    assert merged.metrics[0].port.node == "act"
    assert merged.outputs == ()


def test_groups_of_members() -> None:
    """What one member demands, the merged node demands; two demands do not merge."""
    net = chain(
        ("mid", "linear", {"in_dim": 8, "out_dim": 8, "colocate_group": "wish"}),
        ("act", "relu", {"colocate_group": "must", "colocate_policy": "required"}),
        ("end", "relu", {"colocate_group": "other", "colocate_policy": "required", "activation_precision": "fp16"}),
    )
    graph = prepare(net.graph(), fuse=False)
    mid, act, end = (graph.by_id[NodeId(name)] for name in ("mid", "act", "end"))
    assert same_place([mid, act])
    assert not same_place([act, end])
    assert same_storage([mid, act])
    assert not same_storage([act, end])
    fused = prepare(net.graph(), fuse=True).by_id[NodeId("act")]
    assert (fused.config.colocate_group, fused.config.colocate_policy) == ("must", "required")


def test_remove_reconnects_through_chains() -> None:
    """A port that stands for one that went too is followed to the end."""
    graph = chain(("a", "relu", {}), ("b", "relu", {})).graph()
    a, b, embedder = (Port(NodeId(name), 0) for name in ("a", "b", "embedder"))
    left = remove(graph, {NodeId("a"), NodeId("b")}, {b: a, a: embedder})
    verify(left)
    assert left.by_id[NodeId("head")].inputs == (embedder,)
