"""A PNode's part of a deploy."""

from __future__ import annotations

import pytest

from dcnr.agents.plan import Plan, make_plan, micro_rows
from dcnr.errors import NetworkFileError, UserError
from dcnr.ids import NodeId, PNodeId
from dcnr.placement.cost import graph_costs
from tests.agents.tiny import TINY, A, B, deploy_of, graph_of, in_groups, spread


def test_parts_of_all_pnodes_make_the_network() -> None:
    """Two plans host every node once, and their memory is that of all nodes."""
    graph = graph_of()
    homes = spread(graph, [A, B])
    deploy = deploy_of(homes, hyper={"shards": 3})
    plans = [make_plan(deploy, pnode) for pnode in (A, B)]
    assert all(isinstance(plan, Plan) for plan in plans)
    hosted = sorted(node for plan in plans for node in plan.routes.hosted)
    assert hosted == sorted(graph.by_id)
    costs = graph_costs(graph, 3, 3, lambda node: homes[node.id])
    assert sum(plan.bytes for plan in plans) == sum(cost.bytes for cost in costs.values())


def test_groups_that_run_again_take_less_but_the_largest_counts_once() -> None:
    """The plan of a recomputed network holds fewer activations, and room for one group."""
    homes = dict.fromkeys(graph_of().by_id, A)
    kept, again = (make_plan(deploy_of(homes, text=in_groups(TINY, recompute)), A) for recompute in (False, True))
    assert kept.again_bytes == 0
    assert again.again_bytes > 0
    assert sum(again.node_bytes.values()) < again.bytes < kept.bytes


def test_everyone_prepares_the_same_graph() -> None:
    """The assignment of a fused deploy names the nodes of the fused graph."""
    graph = graph_of(fuse=True)
    plan = make_plan(deploy_of(dict.fromkeys(graph.by_id, A), fuse=True), A)
    assert list(plan.nodes) == [node.id for node in graph.nodes]


def test_an_assignment_of_another_graph_is_refused() -> None:
    """A plain assignment for a fused deploy names the nodes that differ."""
    with pytest.raises(UserError, match=r"differ in .*lm_head"):
        make_plan(deploy_of(dict.fromkeys(graph_of().by_id, A), fuse=True), A)


def test_a_file_that_does_not_load_is_refused() -> None:
    """The problems of the file are the error."""
    with pytest.raises(NetworkFileError):
        make_plan(deploy_of({NodeId("x"): A}, text="name: [oops"), A)


@pytest.mark.parametrize(("batch", "micro_batches"), [(6, 1), (6, 3), (7, 3), (5, 5)])
def test_micro_batches_cover_the_batch(batch: int, micro_batches: int) -> None:
    """Rows follow each other without gap."""
    rows = [micro_rows(batch, micro_batches, micro) for micro in range(micro_batches)]
    assert [row for first, last in rows for row in range(first, last)] == list(range(batch))


def test_a_pnode_without_nodes_has_an_empty_plan() -> None:
    """Nothing hosted, nothing taken."""
    plan = make_plan(deploy_of(dict.fromkeys(graph_of().by_id, A)), A)
    assert plan.bytes > 0
    other = make_plan(deploy_of(spread(graph_of(), [A, B])), PNodeId("elsewhere"))
    assert (other.routes.hosted, other.bytes) == ((), 0)
