"""What happens to an assignment when hosts are lost."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcnr.errors import DoesNotFit
from dcnr.ids import NodeId, PNodeId
from dcnr.network.graph import Graph
from dcnr.passes import prepare
from dcnr.placement.again import place_again
from dcnr.placement.assignment import Assignment
from dcnr.placement.cost import graph_costs
from dcnr.placement.groups import together
from dcnr.placement.place import Host, Problem, place
from dcnr.placement.segments import cut_segments
from tests.network.files import MANY, SHIPPED, Network, chain, networks, shipped

ROWS = 2
GIB = 2**30


def host(name: str, memory: int = 64 * GIB, cores: int = 2) -> Host:
    """One of that name."""
    return Host(PNodeId(name), memory, cores)


def needed(graph: Graph, assignment: Assignment, pnode: PNodeId) -> int:
    """Bytes that `pnode` must have for what it holds, as placement counts."""
    groups = together(graph)
    problem = Problem.of(graph, groups, ROWS)
    sizes = [after - before for before, after in zip(problem.memory, problem.memory[1:], strict=False)]
    return problem.again + sum(size for size, group in zip(sizes, groups, strict=True) if assignment[group.nodes[0]] == pnode)


def flops(graph: Graph, assignment: Assignment, pnode: str) -> int:
    """Work of `pnode`."""
    costs = graph_costs(graph, ROWS)
    return sum(costs[node].flops for node in assignment.nodes_of(PNodeId(pnode)))


def moved(before: Assignment, after: Assignment) -> set[NodeId]:
    """Nodes that are elsewhere now."""
    return {node for node in before if before[node] != after[node]}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_spare_host_takes_all_of_a_lost_one(name: str) -> None:
    """Whichever is lost, exactly its nodes move, to the spare one."""
    graph = prepare(shipped(name), fuse=True)
    hosts = [host("a"), host("b"), host("c")]
    before = place(graph, hosts, ROWS)
    for lost in hosts:
        after = place_again(graph, [*(one for one in hosts if one != lost), host("spare")], ROWS, before)
        assert moved(before, after) == set(before.nodes_of(lost.pnode))
        assert after.nodes_of(PNodeId("spare")) == before.nodes_of(lost.pnode)


def test_several_lost_hosts_go_to_several_spare_ones() -> None:
    """The largest part to the one with most room; a part that fits no spare host goes to the neighbours."""
    graph = prepare(shipped("topology_1"), fuse=True)
    before = place(graph, [host("a"), host("b"), host("c")], ROWS)
    large = max((PNodeId("a"), PNodeId("b")), key=lambda pnode: needed(graph, before, pnode))
    after = place_again(graph, [host("c"), host("x", 65 * GIB), host("y", 66 * GIB)], ROWS, before)
    assert after.nodes_of(PNodeId("y")) == before.nodes_of(large)
    assert moved(before, after) == {node for node in before if before[node] != "c"}
    assert set(after.pnodes) == {"c", "x", "y"}
    cramped = place_again(graph, [host("c"), host("x"), host("y", 2**20)], ROWS, before)
    assert set(cramped.pnodes) == {"c", "x"}
    assert set(cramped.nodes_of(PNodeId("x"))) >= set(before.nodes_of(large))


@pytest.mark.parametrize("lost", ["a", "b", "c"])
def test_the_neighbours_share_what_is_lost(lost: str) -> None:
    """Without a spare host both survivors do about half the work of a tied network, whichever was lost: its ends meet at the embedder."""
    graph = prepare(shipped("topology_1"), fuse=True)
    hosts = [host("a"), host("b"), host("c")]
    before = place(graph, hosts, ROWS)
    rest = [one for one in hosts if one.pnode != lost]
    after = place_again(graph, rest, ROWS, before)
    assert moved(before, after) == set(before.nodes_of(PNodeId(lost)))
    work = [flops(graph, after, one.pnode) for one in rest]
    biggest = max(sum(graph_costs(graph, ROWS)[node].flops for node in group.nodes) for group in together(graph))
    assert max(work) <= max(sum(work) * 0.6, biggest * 1.2)


def test_a_faster_neighbour_takes_more() -> None:
    """Work is divided so that both finish at about the same time, what they already hold included."""
    layers = [(f"n{index}", "linear", {"in_dim": 8, "out_dim": 8}) for index in range(60)]
    graph = prepare(chain(*layers).graph(), fuse=False)
    hosts = [host("a", cores=2), host("b", cores=2), host("c", cores=2)]
    before = place(graph, hosts, ROWS)
    after = place_again(graph, [host("a", cores=2), host("c", cores=4)], ROWS, before)
    assert flops(graph, after, "c") / 4 == pytest.approx(flops(graph, after, "a") / 2, rel=0.15)
    assert [segment.pnode for segment in cut_segments(graph, after)] == ["a", "c"]


def test_an_end_without_tie_goes_to_its_only_neighbour() -> None:
    """The pipeline stays one: the last run of a chain goes to the host before it."""
    layers = [(f"n{index}", "linear", {"in_dim": 8, "out_dim": 8}) for index in range(12)]
    graph = prepare(chain(*layers).graph(), fuse=False)
    before = place(graph, [host("a"), host("b"), host("c")], ROWS)
    assert [segment.pnode for segment in cut_segments(graph, place_again(graph, [host("a"), host("b")], ROWS, before))] == ["a", "b"]
    assert [segment.pnode for segment in cut_segments(graph, place_again(graph, [host("b"), host("c")], ROWS, before))] == ["b", "c"]


def test_memory_decides_where_the_neighbours_have_none() -> None:
    """A full neighbour takes nothing; a host far from the run takes what the others cannot, and nobody's nodes move."""
    layers = [(f"n{index}", "linear", {"in_dim": 8, "out_dim": 8}) for index in range(40)]
    graph = prepare(chain(*layers).graph(), fuse=False)
    hosts = [host(name) for name in "abcd"]
    before = place(graph, hosts, ROWS)
    full = {pnode: needed(graph, before, pnode) for pnode in before.pnodes}
    rest = [host("a", full[PNodeId("a")]), host("c", full[PNodeId("c")]), host("d")]
    after = place_again(graph, rest, ROWS, before)
    assert moved(before, after) == set(before.nodes_of(PNodeId("b")))
    assert set(after.nodes_of(PNodeId("d"))) == set(before.nodes_of(PNodeId("b"))) | set(before.nodes_of(PNodeId("d")))


def test_all_is_divided_anew_only_where_nothing_else_fits() -> None:
    """The embedder fits no small host, and the large survivor only instead of what it holds; with nobody left, `place` decides."""
    graph = prepare(shipped("topology_1"), fuse=True)
    before = place(graph, [host("a"), host("b")], ROWS)
    embedder = Problem.of(graph, together(graph), ROWS).memory[1]
    rest = [host("b", needed(graph, before, PNodeId("b")) + embedder - 1), *(host(name, embedder - 1) for name in "xyz")]
    after = place_again(graph, rest, ROWS, before)
    assert after == place(graph, rest, ROWS)
    assert after[NodeId("embedder")] == "b"
    assert moved(before, after) > set(before.nodes_of(PNodeId("a")))
    new = [host("x"), host("y")]
    assert place_again(graph, new, ROWS, before) == place(graph, new, ROWS)


def test_what_does_not_fit_says_so_with_numbers() -> None:
    """As `place` does."""
    graph = prepare(shipped("topology_1"), fuse=True)
    before = place(graph, [host("a"), host("b")], ROWS)
    with pytest.raises(DoesNotFit, match=r"needs \d+\.\d MiB, its largest part 'embedder' \d+\.\d MiB; free are a 1\.0 MiB"):
        place_again(graph, [host("a", 2**20)], ROWS, before)
    with pytest.raises(DoesNotFit, match="there is no PNode"):
        place_again(graph, [], ROWS, before)


def test_nothing_lost_nothing_moved() -> None:
    """Even where memory is short by now: what is there is there. A host that held nothing stays without."""
    graph = prepare(shipped("tiny"), fuse=True)
    before = place(graph, [host("a"), host("b")], ROWS)
    assert place_again(graph, [host("b", 0), host("a", 0), host("c")], ROWS, before) == before


@MANY
@given(networks(), st.integers(0, 2**32))
def test_any_sequence_of_losses(net: Network, seed: int) -> None:
    """Hosts of any memory are lost and join, again and again. Each time: valid, the same in any order, within the memory of whoever took
    more, and nobody who is still there loses a node while one host could take all that was lost."""
    graph = prepare(net.graph(), fuse=True)
    chance = random.Random(seed)
    total = Problem.of(graph, together(graph), ROWS).memory[-1]
    here = [host(f"p{index}", chance.randint(total // 2, 2 * total), chance.randint(1, 4)) for index in range(4)]
    try:
        now = place(graph, here, ROWS)
    except DoesNotFit:
        return
    for turn in range(4):
        here = [one for one in here if chance.random() < 0.6]
        here += [host(f"q{turn}{index}", chance.randint(0, 2 * total), chance.randint(1, 4)) for index in range(chance.randint(0, 2))]
        before = now
        try:
            now = place_again(graph, here, ROWS, before)
        except DoesNotFit:
            with pytest.raises(DoesNotFit):
                place(graph, here, ROWS)
            return
        _check(graph, here, before, now)
        assert place_again(graph, chance.sample(here, len(here)), ROWS, before) == now
        assert place_again(graph, here, ROWS, dict(before)) == now


def _check(graph: Graph, here: list[Host], before: Assignment, now: Assignment) -> None:
    now.validate(graph)
    given_now = {one.pnode for one in here}
    assert set(now.pnodes) <= given_now
    for one in here:
        if set(now.nodes_of(one.pnode)) - set(before.nodes_of(one.pnode)):
            assert needed(graph, now, one.pnode) <= one.memory_free
    lost = {node for node in before if before[node] not in given_now}
    if moved(before, now) > lost and len(lost) < len(before):
        for one in here:
            whole = Assignment({node: one.pnode if node in lost else before[node] for node in before})
            assert needed(graph, whole, one.pnode) > one.memory_free, "others moved, though one host could take all that was lost"


def test_a_survivor_keeps_its_nodes_through_ten_losses() -> None:
    """One host that never leaves holds at the end what it held at first, as long as somebody else can take the rest."""
    graph = prepare(shipped("topology_2"), fuse=True)
    now = first = place(graph, [host("stays"), host("other")], ROWS)
    for turn in range(10):
        now = place_again(graph, [replace(host("stays"), memory_free=needed(graph, first, PNodeId("stays"))), host(f"p{turn}")], ROWS, now)
    assert now.nodes_of(PNodeId("stays")) == first.nodes_of(PNodeId("stays"))
    assert now.pnodes == tuple(PNodeId("p9") if pnode == "other" else pnode for pnode in first.pnodes)
