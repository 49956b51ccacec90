"""Who gets what."""

from __future__ import annotations

from collections.abc import Mapping

from dcnr.agents.routing import (
    ExternalInput,
    ExternalOutput,
    IncomingGradient,
    Local,
    OutgoingGradient,
    Remote,
    Routes,
    SegmentRoutes,
    Use,
    cost_nodes,
    find_routes,
)
from dcnr.ids import NodeId, PNodeId
from dcnr.network.graph import Consumer, Port
from tests.agents.tiny import DIM, SEQ, A, B, alternate, graph_of, spread


def consumer(node: str, slot: int = 0) -> Consumer:
    """An input slot."""
    return Consumer(NodeId(node), slot)


def port(node: str, slot: int = 0) -> Port:
    """An output slot."""
    return Port(NodeId(node), slot)


def split_at(*on_b: str) -> tuple[Routes, Routes]:
    """The routes of `a` and `b`, where `on_b` are on `b`."""
    graph = graph_of()
    homes = {node.id: B if node.id in on_b else A for node in graph.nodes}
    return find_routes(graph, homes, A), find_routes(graph, homes, B)


def test_one_pnode_is_one_segment_that_turns_around() -> None:
    """A whole network takes ids and targets, and hands nothing to anyone."""
    graph = graph_of()
    routes = find_routes(graph, dict.fromkeys(graph.by_id, A), A)
    (segment,) = routes.segments
    assert segment.nodes == tuple(node.id for node in graph.nodes)
    assert segment.turns_around
    assert segment.inputs == (
        ExternalInput(None, (consumer("embedder"),), (SEQ,), from_host=True),
        ExternalInput(None, (consumer("loss", 1),), (SEQ,), from_host=True),
    )
    assert (segment.outputs, segment.incoming, segment.outgoing) == ((), (), ())


def test_one_copy_of_a_broadcast_goes_to_a_pnode() -> None:
    """Both heads on another PNode read one tensor, and each sends its own gradient to the output that it read."""
    here, there = split_at("head_0", "head_1")
    outputs = [output for segment in here.segments for output in segment.outputs if output.port == port("to_heads")]
    assert outputs == [ExternalOutput(port("to_heads"), (), (Remote(B, ((NodeId("head_0"), 0), (NodeId("head_1"), 0))),))]
    (segment,) = there.segments
    assert segment.inputs == (ExternalInput(port("to_heads"), (consumer("head_0"), consumer("head_1")), (SEQ, DIM), from_host=True),)
    assert segment.outgoing == (
        OutgoingGradient((Use(port("to_heads", 0), consumer("head_0")),), Remote(A, ((NodeId("to_heads"), 0),))),
        OutgoingGradient((Use(port("to_heads", 1), consumer("head_1")),), Remote(A, ((NodeId("to_heads"), 1),))),
    )
    assert not segment.turns_around


def test_uses_of_one_output_in_one_segment_send_one_gradient() -> None:
    """`residual` is read by `up` and by `residual_2`: where both are on `b`, `b` adds their gradients in node order."""
    here, there = split_at("up", "gelu", "down", "residual_2")
    uses = (Use(port("residual"), consumer("up")), Use(port("residual"), consumer("residual_2", 1)))
    (segment,) = there.segments
    assert segment.outgoing == (OutgoingGradient(uses, Remote(A, ((NodeId("residual"), 0),))),)
    assert IncomingGradient(uses[0], from_host=True) in [entry for one in here.segments for entry in one.incoming]


def test_uses_in_several_segments_send_a_gradient_each() -> None:
    """Where only `up` is on `b`, the maker of `residual` waits for its gradient and for that of `residual_2`."""
    here, _ = split_at("up")
    maker = next(segment for segment in here.segments if "residual" in segment.nodes)
    assert maker.incoming == (
        IncomingGradient(Use(port("residual"), consumer("up")), from_host=True),
        IncomingGradient(Use(port("residual"), consumer("residual_2", 1)), from_host=False),
    )


def test_segments_of_one_pnode_hand_over_by_reference() -> None:
    """The residual branch around a node elsewhere goes from segment to segment, and its gradient back the same way."""
    here, _ = split_at("up")
    first, last = here.segments
    (output,) = [output for output in first.outputs if output.port == port("residual")]
    index = [entry.port for entry in last.inputs].index(port("residual"))
    assert output.local == (Local(last.index, index),)
    assert not last.inputs[index].from_host
    assert [gradient.to for gradient in last.outgoing if gradient.use.port == port("residual")] == [Local(first.index, 1)]


def test_every_hop_finds_its_place() -> None:
    """On any placement, what one PNode sends is what another expects, and nothing else is expected but ids and targets."""
    graph = graph_of()
    for homes in (spread(graph, [A, B]), alternate(graph, [A, B])):
        routes = {pnode: find_routes(graph, homes, pnode) for pnode in (A, B)}
        sent = {(pnode, "fwd", at) for pnode, at in forwards(routes)} | {(pnode, "bwd", at) for pnode, at in backwards(routes)}
        expected = {(pnode, phase, at) for pnode, part in routes.items() for segment in part.segments for phase, at in arrivals(segment)}
        assert sent == expected


def arrivals(segment: SegmentRoutes) -> list[tuple[str, Local]]:
    """What other PNodes send it: (phase, place)."""
    inputs = [("fwd", Local(segment.index, at)) for at, entry in enumerate(segment.inputs) if entry.from_host and entry.port is not None]
    return inputs + [("bwd", Local(segment.index, at)) for at, entry in enumerate(segment.incoming) if entry.from_host]


def forwards(routes: Mapping[PNodeId, Routes]) -> list[tuple[str, Local]]:
    """Where activations go: (PNode, place)."""
    remotes = [to for part in routes.values() for segment in part.segments for output in segment.outputs for to in output.remote]
    return [(to.pnode, routes[to.pnode].inputs[Consumer(*target)]) for to in remotes for target in to.targets]


def backwards(routes: Mapping[PNodeId, Routes]) -> list[tuple[str, Local]]:
    """Where gradients go: (PNode, place)."""
    sent = [entry for part in routes.values() for segment in part.segments for entry in segment.outgoing]
    return [(entry.to.pnode, routes[entry.to.pnode].gradients[entry.use]) for entry in sent if isinstance(entry.to, Remote)]


def test_what_leads_to_a_cost_only_as_a_target_gets_no_gradient() -> None:
    """The branch that makes the targets of an mse runs forward only; the one gradient on the way is that of the prediction."""
    graph = graph_of(TARGETS_FROM_EDGE)
    homes = {node.id: B if node.id == "target" else A for node in graph.nodes}
    here, there = find_routes(graph, homes, A), find_routes(graph, homes, B)
    (segment,) = there.segments
    assert (segment.backward, segment.outgoing, segment.incoming) == (frozenset(), (), ())
    assert [entry.use.consumer for part in here.segments for entry in part.incoming] == [consumer("loss")]


def test_costs_are_in_graph_order() -> None:
    """The nodes that give losses."""
    assert cost_nodes(graph_of()) == ("loss",)


def test_a_pnode_without_nodes_has_no_segment() -> None:
    """A PNode that hosts nothing has nothing to do."""
    graph = graph_of()
    assert find_routes(graph, dict.fromkeys(graph.by_id, A), B) == Routes((), ())


def test_segments_have_their_costs() -> None:
    """Only the segment of the cost reports a loss."""
    here, there = split_at("loss")
    assert [segment.costs for segment in here.segments] == [()]
    assert isinstance(there.segments[0], SegmentRoutes)
    assert there.segments[0].costs == ("loss",)


TARGETS_FROM_EDGE = """
name: autoencoder
nodes:
  - {id: embedder, type: embedder, config: {vocab_size: 17, dim: 8, seq_len: 5, position_encoding: none}}
  - {id: target, type: relu, config: {}}
  - {id: head, type: linear, config: {in_dim: 8, out_dim: 8}}
  - {id: loss, type: cost, config: {cost_function: mse}}
edges:
  - {from: embedder, to: target}
  - {from: embedder, to: head}
  - {from: head, to: loss}
  - {from: target, to: loss, to_slot: 1}
costs: [{name: mse, node_id: loss}]
"""
