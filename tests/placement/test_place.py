"""Dividing a network among hosts."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcnr.errors import DoesNotFit
from dcnr.ids import PNodeId
from dcnr.network.graph import Graph
from dcnr.passes import prepare
from dcnr.placement.assignment import Assignment
from dcnr.placement.cost import graph_costs
from dcnr.placement.groups import together
from dcnr.placement.place import SLACK, Host, place
from dcnr.placement.segments import cut_segments
from dcnr.placement.traffic import crossings
from tests.network.files import MANY, SHIPPED, Network, chain, networks, shipped

GIB = 2**30


def hosts(count: int, memory: int = 64 * GIB, cores: int = 2) -> list[Host]:
    """Equal ones."""
    return [Host(PNodeId(f"p{index}"), memory, cores) for index in range(count)]


def flops(graph: Graph, assignment: Assignment) -> list[int]:
    """Of each PNode."""
    costs = graph_costs(graph, 2)
    return [sum(costs[node].flops for node in assignment.nodes_of(pnode)) for pnode in assignment.pnodes]


def held(graph: Graph, assignment: Assignment, pnode: str) -> int:
    """Bytes on one host."""
    costs = graph_costs(graph, 2, place=lambda node: assignment[node.id])
    return sum(costs[node].bytes for node in assignment.nodes_of(PNodeId(pnode)))


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_networks_use_every_host_there_is_work_for(name: str, count: int, fuse: bool) -> None:
    """Valid for 1 to 8 hosts, each of which gets something if there are enough groups."""
    graph = prepare(shipped(name), fuse)
    assignment = place(graph, hosts(count), rows=2)
    assignment.validate(graph)
    assert len(assignment.pnodes) == min(count, len(together(graph)))


@MANY
@given(networks(), st.integers(1, 8), st.booleans(), st.randoms())
def test_placement_is_valid_and_deterministic(net: Network, count: int, fuse: bool, random: object) -> None:
    """The order of the hosts does not matter, and a second call gives the same."""
    graph = prepare(net.graph(), fuse)
    some = hosts(count)
    found = place(graph, some, rows=3)
    found.validate(graph)
    random.shuffle(some)  # type: ignore[attr-defined]  # a random.Random that hypothesis made
    assert place(graph, some, rows=3) == found
    assert len(found.pnodes) == min(count, len(together(graph)))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_blocks_are_balanced(count: int) -> None:
    """No host of a character model does much more than its share."""
    graph = prepare(shipped("shakespeare_char"), fuse=True)
    work = flops(graph, place(graph, hosts(count), rows=2))
    assert max(work) <= 1.15 * sum(work) / count


def test_stages_are_a_pipeline() -> None:
    """Two hosts make three segments: the tied head comes back to the embedder's."""
    graph = prepare(shipped("topology_2"), fuse=True)
    segments = cut_segments(graph, place(graph, hosts(2), rows=2))
    assert [segment.pnode for segment in segments] == ["p0", "p1", "p0"]
    assert segments[0].nodes[0] == "embedder"
    assert segments[2].nodes == ("loss",)


def test_cuts_are_where_little_crosses() -> None:
    """Between residual sums, never inside a branch, where the residual would cross as well; with fusion, where the one that is normalised
    and the sum itself cross, both as wide as the model."""
    for fuse, tensors in ((False, 4), (True, 5)):
        graph = prepare(shipped("topology_2"), fuse)
        sent = crossings(graph, place(graph, hosts(4), rows=2), rows=2)
        assert [crossing.forward_bytes for crossing in sent] == [2 * 512 * 512 * 2] * tensors
        assert all(len(crossing.readers) == 1 for crossing in sent)


def test_the_search_finds_the_best_there_is() -> None:
    """Against every contiguous division of a small network."""
    graph = prepare(shipped("shakespeare_char_cpu"), fuse=True)
    groups = together(graph)
    costs = graph_costs(graph, 2)
    work = [sum(costs[node].flops for node in group.nodes) for group in groups]
    best = min(
        max(sum(work[:first]), sum(work[first:second]), sum(work[second:]))
        for first, second in itertools.combinations(range(1, len(groups)), 2)
    )
    assert max(flops(graph, place(graph, hosts(3), rows=2))) <= SLACK * best


def test_faster_hosts_get_more() -> None:
    """Three times the cores, so many times the work that both finish at about the same time."""
    graph = prepare(shipped("shakespeare_char"), fuse=True)
    assignment = place(graph, [Host(PNodeId("a"), 64 * GIB, 1), Host(PNodeId("b"), 64 * GIB, 3)], rows=2)
    slow, fast = flops(graph, assignment)
    assert max(slow, fast / 3) <= 1.15 * (slow + fast) / 4


def test_memory_is_honoured() -> None:
    """A host with little gets little."""
    graph = prepare(shipped("topology_1"), fuse=True)
    small, large = 40 * 2**20, 64 * GIB
    assignment = place(graph, [Host(PNodeId("a"), large, 2), Host(PNodeId("b"), small, 2)], rows=2)
    assert held(graph, assignment, "b") <= small
    assert assignment.pnodes == ("a", "b")
    swapped = place(graph, [Host(PNodeId("a"), small, 2), Host(PNodeId("b"), large, 2)], rows=2)
    assert held(graph, swapped, "a") <= small


def test_a_host_without_memory_is_left_out() -> None:
    """The others do the work."""
    graph = prepare(shipped("tiny"), fuse=True)
    assert place(graph, [*hosts(2), Host(PNodeId("full"), 0, 2)], rows=2).pnodes == ("p0", "p1")


def test_what_does_not_fit_says_so_with_numbers() -> None:
    """What is needed, the largest part, and what is free."""
    graph = prepare(shipped("topology_1"), fuse=True)
    with pytest.raises(DoesNotFit, match=r"needs \d+\.\d MiB, its largest part 'embedder' \d+\.\d MiB; free are p0 1\.0 MiB, p1 1\.0 MiB"):
        place(graph, hosts(2, memory=2**20), rows=2)
    with pytest.raises(DoesNotFit, match="there is no PNode for network"):
        place(graph, [], rows=2)


def test_preferred_groups_stay_together_where_it_costs_little() -> None:
    """A wish for the two nodes at the border moves the border."""

    def divided(*wish: str) -> Assignment:
        layers = [
            (f"n{index}", "linear", {"in_dim": 8, "out_dim": 8} | ({"colocate_group": "g"} if f"n{index}" in wish else {}))
            for index in range(40)
        ]
        return place(prepare(chain(*layers).graph(), fuse=False), hosts(2), rows=1)

    plain = divided()
    last, first = plain.nodes_of(PNodeId("p0"))[-1], plain.nodes_of(PNodeId("p1"))[0]
    assert plain[last] != plain[first]
    wished = divided(last, first)
    assert wished[last] == wished[first]
