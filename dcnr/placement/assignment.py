"""Which PNode holds which node, and what every such choice must keep to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from dcnr.errors import InvariantError
from dcnr.ids import NodeId, PNodeId
from dcnr.network.graph import Graph
from dcnr.placement.groups import together


@dataclass(frozen=True)
class Assignment(Mapping[NodeId, PNodeId]):
    """Node → PNode, of every node of a prepared graph, in graph order."""

    homes: Mapping[NodeId, PNodeId]

    def __post_init__(self) -> None:
        object.__setattr__(self, "homes", MappingProxyType(dict(self.homes)))

    def __getitem__(self, node: NodeId) -> PNodeId:
        return self.homes[node]

    def __iter__(self) -> Iterator[NodeId]:
        return iter(self.homes)

    def __len__(self) -> int:
        return len(self.homes)

    @property
    def pnodes(self) -> tuple[PNodeId, ...]:
        """Every PNode that holds something, in the order of its first node."""
        return tuple(dict.fromkeys(self.homes.values()))

    def nodes_of(self, pnode: PNodeId) -> tuple[NodeId, ...]:
        """What `pnode` holds, in graph order."""
        return tuple(node for node, holder in self.homes.items() if holder == pnode)

    def validate(self, graph: Graph) -> None:
        """Raise `InvariantError` unless exactly the nodes of `graph` are placed, and what belongs together is together."""
        if self.homes.keys() != graph.by_id.keys():
            wrong = sorted(self.homes.keys() ^ graph.by_id.keys())
            raise InvariantError(f"the assignment and network '{graph.name}' differ in the nodes {', '.join(wrong)}")
        for group in together(graph):
            holders = {self.homes[node] for node in group.nodes}
            if len(holders) > 1:
                raise InvariantError(f"{', '.join(group.nodes)} belong together ({group.why}) but are on {', '.join(sorted(holders))}")
