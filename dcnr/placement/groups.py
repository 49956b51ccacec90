"""What must not be torn apart: nodes that placement moves as one.

Three reasons, each a fact of the graph: a tied node uses its owner's matrix; `colocate_policy: required` says so; a cost reads logits, the
largest tensor of a network, so it stays with the node that makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dcnr.ids import NodeId
from dcnr.network.graph import Graph


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes in graph order, and why they stay together (empty for a single node)."""

    nodes: tuple[NodeId, ...]
    why: str


def together(graph: Graph) -> tuple[Group, ...]:
    """All nodes of `graph` in groups, ordered by their first node."""
    parent = {node.id: node.id for node in graph.nodes}
    reasons: list[tuple[NodeId, str]] = []

    def root(node: NodeId) -> NodeId:
        while parent[node] != node:
            node = parent[node]
        return node

    for first, second, why in _bonds(graph):
        parent[root(second)] = root(first)
        reasons.append((first, why))
    members: dict[NodeId, list[NodeId]] = {}
    for node in graph.nodes:
        members.setdefault(root(node.id), []).append(node.id)
    why_of: dict[NodeId, list[str]] = {}
    for node_id, why in reasons:
        why_of.setdefault(root(node_id), []).append(why)
    return tuple(Group(tuple(nodes), "; ".join(dict.fromkeys(why_of.get(name, ())))) for name, nodes in members.items())


def preferred(graph: Graph) -> tuple[tuple[NodeId, ...], ...]:
    """Groups that a file would like to see on one PNode."""
    wishes: dict[str, list[NodeId]] = {}
    for node in graph.nodes:
        if node.config.colocate_group is not None and node.config.colocate_policy == "preferred":
            wishes.setdefault(node.config.colocate_group, []).append(node.id)
    return tuple(tuple(nodes) for nodes in wishes.values())


def _bonds(graph: Graph) -> Sequence[tuple[NodeId, NodeId, str]]:
    bonds: list[tuple[NodeId, NodeId, str]] = []
    first_of: dict[str, NodeId] = {}
    for node in graph.nodes:
        if node.tied_to is not None:
            bonds.append((node.tied_to, node.id, f"'{node.id}' uses the weight of '{node.tied_to}'"))
        group = node.config.colocate_group
        if group is not None and node.config.colocate_policy == "required":
            first = first_of.setdefault(group, node.id)
            if first != node.id:
                bonds.append((first, node.id, f"colocate_group '{group}' is required"))
        if node.type == "cost":
            makers = (port.node for port in node.inputs if port is not None)
            bonds += [(maker, node.id, f"the cost '{node.id}' reads the output of '{maker}'") for maker in makers]
    return bonds
