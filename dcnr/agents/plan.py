"""A PNode's part of a deploy: the prepared graph, its routes, the nodes that compute, and the memory they take.

Everyone runs the same pure passes over the same file, so all agree without asking.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dcnr.agents.routing import Routes, SegmentRoutes, find_routes
from dcnr.backends.base import Array
from dcnr.bus.messages import WITH_DEVICE, Deploy, Hop
from dcnr.errors import UserError
from dcnr.ids import NodeId, PNodeId
from dcnr.network.graph import Graph
from dcnr.network.instantiate import instantiate
from dcnr.network.load import load_graph
from dcnr.nodes.base import Node
from dcnr.optim.hyper import Hyper
from dcnr.passes import prepare
from dcnr.placement.cost import graph_costs, reading_costs
from dcnr.placement.memory import most_again


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What one PNode hosts of a session."""

    graph: Graph
    routes: Routes
    nodes: Mapping[NodeId, Node]
    """All hosted ones."""
    node_bytes: Mapping[NodeId, int]
    """Parameters, optimizer state and activations of each."""
    hyper: Hyper
    again_bytes: int
    """On top of them, while the largest group with `recompute` runs again."""
    near: frozenset[PNodeId]
    """PNodes on this host that compute on a GPU as this one does: tensors go to them from device to device."""

    @property
    def bytes(self) -> int:
        """Memory that it takes."""
        return sum(self.node_bytes.values()) + self.again_bytes


def make_plan(deploy: Deploy, me: PNodeId) -> Plan:
    """The part of `me`. Raises `UserError` for a file that does not load, or an assignment that does not fit it."""
    graph = prepare(load_graph(deploy.network_file, f"{deploy.network}.yml"), deploy.fuse, deploy.purpose)
    assignment = {NodeId(node): pnode for node, pnode in deploy.assignment.items()}
    if assignment.keys() != graph.by_id.keys():
        odd = sorted(assignment.keys() ^ graph.by_id.keys())
        what = f"the assignment of session '{deploy.session}' and its network differ in {', '.join(odd)}"
        raise UserError(what, "run one version everywhere")
    routes = find_routes(graph, assignment, me, deploy.reader)
    if deploy.purpose == "generate":
        return _to_generate(graph, routes, deploy, me)
    if deploy.decides and not routes.segments:
        raise UserError(f"network '{deploy.network}' has no cost, so there is nothing to train", "add a cost")
    rows = max(last - first for first, last in (micro_rows(deploy.batch, deploy.micro_batches, at) for at in range(deploy.micro_batches)))
    hosted = {name: graph.by_id[name] for name in routes.hosted}
    hyper = Hyper.model_validate(deploy.hyper)
    costs = graph_costs(graph, rows, hyper.shards, lambda node: assignment[node.id])
    node_bytes = {name: costs[name].bytes for name in hosted}
    again = most_again(graph, {name: costs[name].again_bytes for name in hosted})
    return Plan(graph, routes, {name: instantiate(node) for name, node in hosted.items()}, node_bytes, hyper, again, _near(deploy, me))


def _to_generate(graph: Graph, routes: Routes, deploy: Deploy, me: PNodeId) -> Plan:
    """Weights, caches, and a window on its way; nothing runs again."""
    costs = reading_costs(graph, deploy.batch)
    nodes = {name: instantiate(graph.by_id[name]) for name in routes.hosted}
    return Plan(graph, routes, nodes, {name: costs[name].bytes for name in nodes}, Hyper(), 0, _near(deploy, me))


def _near(deploy: Deploy, me: PNodeId) -> frozenset[PNodeId]:
    here = {(info.host, info.backend) for info in deploy.peers if info.pnode == me and info.backend == WITH_DEVICE}
    return frozenset(info.pnode for info in deploy.peers if info.pnode != me and (info.host, info.backend) in here)


def micro_rows(batch: int, micro_batches: int, micro: int) -> tuple[int, int]:
    """First row and last + 1 of a micro-batch in the batch of a step."""
    return micro * batch // micro_batches, (micro + 1) * batch // micro_batches


def fits(plan: Plan, deploy: Deploy, place: tuple[SegmentRoutes, int], hop: Hop, payload: Array) -> bool:
    """Whether a tensor is what `place` takes, an external input or incoming gradient: what its maker stores, or the trainer's ids.

    The last micro-batch of a validation may have fewer rows.
    """
    routes, index = place
    maker: NodeId | None
    if hop.phase == "bwd":
        use = routes.incoming[index].use
        shape, maker = plan.graph.by_id[use.port.node].output_shapes[use.port.slot], use.consumer.node
    else:
        entry = routes.inputs[index]
        shape, maker = entry.shape, None if entry.port is None else entry.port.node
    dtype = "int64" if maker is None else plan.graph.by_id[maker].activation_precision
    first, last = micro_rows(deploy.batch, deploy.micro_batches, 0 if hop.phase == "eval" else hop.micro)
    rows = payload.shape[0] if payload.shape else 0
    whole = 1 <= rows <= last - first if hop.phase == "eval" else rows == last - first
    return whole and (payload.shape[1:], payload.dtype.name) == (shape, dtype) and 0 <= hop.weight < math.inf
