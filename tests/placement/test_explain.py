"""Why, in words."""

from __future__ import annotations

import re

from dcnr.ids import PNodeId
from dcnr.passes import prepare
from dcnr.placement.explain import explain
from dcnr.placement.place import Host, place
from tests.network.files import shipped


def sentences(name: str, hosts: list[Host]) -> tuple[str, ...]:
    """About the placement of a shipped network."""
    graph = prepare(shipped(name), fuse=True)
    return explain(graph, hosts, 4, place(graph, hosts, 4))


def test_stages_borders_and_groups_are_told_with_numbers() -> None:
    """In this order: overview, a sentence a stage, a sentence a border, a sentence a group."""
    found = sentences("topology_1", [Host(PNodeId(f"p{index}"), 2**33, 2) for index in range(3)])
    assert len(found) == 1 + 3 + 5 + 1
    assert re.match(
        r"31 nodes run on 3 PNodes in 4 segments; a step of 4 rows takes [\d.]+ GFLOP\. The slowest stage, p\d, takes 1\.\d\d", found[0]
    )
    assert re.match(
        r"p0 holds \d+ nodes \('embedder' to '\w+', then 'loss'\): [\d.]+ GFLOP, \d+% of the work, and [\d.]+ MiB of memory\.",
        found[1],
    )
    assert re.match(r"p0 sends '\w+' to p1 for '\w+': 512\.0 KiB forward, 512\.0 KiB back\.", found[4])
    assert found[9].startswith("'embedder', 'loss' stay together: 'loss' uses the weight of 'embedder'")


def test_shares_add_up() -> None:
    """All work is somewhere."""
    found = " ".join(sentences("shakespeare_char", [Host(PNodeId(f"p{index}"), 2**33, 2) for index in range(4)]))
    assert abs(sum(int(share) for share in re.findall(r"(\d+)% of the work", found)) - 100) <= 2


def test_idle_hosts_are_named() -> None:
    """With why."""
    found = sentences("mlp", [Host(PNodeId(f"p{index}"), 2**33, 2) for index in range(5)])
    assert found[-1].startswith("p3, p4 hold nothing")
