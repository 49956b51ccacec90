"""A residual sum joins the layer normalisation that reads it, and the linear layer and dropout of its branch: one pass over the residual
stream instead of four.

[linear →] [dropout →] add (slot 0 the branch, slot 1 the residual) [→ broadcast] → layernorm becomes a `residual_norm`. Whoever else read
the sum reads slot 1 of it. A linear layer that has other readers, or differs from the norm in how it is trained or stored, stays outside.
"""

from __future__ import annotations

from collections.abc import Iterator

from dcnr.network.graph import Graph, GraphNode
from dcnr.nodes.activation import DropoutAddConfig
from dcnr.nodes.linear import LinearConfig
from dcnr.nodes.norm import LayerNormConfig
from dcnr.nodes.residual import ResidualNormConfig
from dcnr.passes.rewrite import Merge, input_of, is_declared, merge, only_reader, ports_of, same_place, same_storage, ties, trained_alike


def fuse_residual(graph: Graph) -> Graph:
    """`graph` with every such group merged into a `residual_norm`."""
    found = (_merge(graph, total) for total in graph.nodes)
    return merge(graph, [one for one in found if one is not None])


def _merge(graph: Graph, total: GraphNode) -> Merge | None:
    """The largest merge around the sum `total`."""
    if total.type != "dropout_add" and (total.type != "add" or len(total.inputs) != 2):
        return None
    end = next((end for end in _ends(graph, total) if _fit(graph, [total, *end])), None)
    if end is None:
        return None
    linear = _linear_before(graph, total)
    members = [total, *end] if linear is None or not _fit(graph, [linear, total, *end]) else [linear, total, *end]
    first, norm = members[0], members[-1]
    dropout = total.config.dropout if isinstance(total.config, DropoutAddConfig) else None
    before = first.config if isinstance(first.config, LinearConfig) else None
    assert isinstance(norm.config, LayerNormConfig)
    return Merge(
        members,
        "residual_norm",
        ResidualNormConfig.fuse(before, dropout, norm.config),
        [input_of(first, 0), input_of(total, 1)],
        norm if before is None else first,
        [[port for member in (total, *end[:-1]) for port in ports_of(member)]],
    )


def _ends(graph: Graph, total: GraphNode) -> Iterator[list[GraphNode]]:
    """[norm] of every norm that reads the sum, then [broadcast, norm] of those that read a copy."""
    readers = _readers(graph, total)
    yield from ([reader] for reader in readers if reader.type == "layernorm")
    for copies in readers:
        if copies.type == "broadcast":
            yield from ([copies, reader] for reader in _readers(graph, copies) if reader.type == "layernorm")


def _linear_before(graph: Graph, total: GraphNode) -> GraphNode | None:
    """The linear layer that only the branch slot of `total` reads."""
    port = total.inputs[0]
    if port is None or graph.by_id[port.node].type != "linear":
        return None
    linear = graph.by_id[port.node]
    return linear if only_reader(graph, linear) == (total, 0) else None


def _fit(graph: Graph, members: list[GraphNode]) -> bool:
    return (
        not any(is_declared(graph, node) for node in members[:-1])
        and same_storage(members)
        and same_place(members)
        and trained_alike([member for member in members if member.type in ("linear", "layernorm")])
        and not ties(graph, members[-1:])
    )


def _readers(graph: Graph, node: GraphNode) -> list[GraphNode]:
    return [graph.by_id[reader.node] for port in ports_of(node) for reader in graph.consumers.get(port, ())]
