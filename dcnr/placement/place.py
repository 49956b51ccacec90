"""Which host gets which nodes.

Rule 1: what belongs together (`groups`) is one atom, placed where its first node stands. Atoms keep graph order, and every host gets
a contiguous run of them: a pipeline. A group that spans the network (embedder and tied head) makes its host both first and last stage.
Rule 2: as many hosts work as there are atoms for, unless memory forbids it.
Rule 3: the slowest stage is as fast as can be; among partitions within `SLACK` of that, the one that sends the fewest bytes, and of those
the most even one.
Rule 4: same graph, hosts and rows, same assignment; the order in which hosts are given does not matter.

Both searches are dynamic programs over (hosts used, atoms placed), as for the linear partition problem.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from dcnr.errors import DoesNotFit
from dcnr.ids import NodeId, PNodeId
from dcnr.network.graph import Graph, Port
from dcnr.placement.assignment import Assignment
from dcnr.placement.cost import edge_bytes, graph_costs, reading_costs
from dcnr.placement.groups import Group, preferred, together
from dcnr.placement.memory import most_again, recomputed_with

SLACK = 1.1
"""How much slower than the best balance a stage may be to save bytes on the wire."""


@dataclass(frozen=True, slots=True)
class Host:
    """A PNode that can take nodes. `memory_free` in bytes; `cores` is its speed relative to the others."""

    pnode: PNodeId
    memory_free: int
    cores: int


def place(graph: Graph, hosts: Sequence[Host], rows: int, reads: bool = False) -> Assignment:
    """Divide `graph` (prepared) among `hosts` for `rows` batch rows in flight. Raises `DoesNotFit` with the numbers.

    `reads`: it generates, `rows` sequences at a time.
    """
    groups = together(graph)
    problem = Problem.of(graph, groups, rows, reads)
    for stages in range(min(len(hosts), len(groups)), 0, -1):
        roomy = sorted(hosts, key=lambda host: (-host.memory_free, host.pnode))[:stages]
        for order in (sorted(roomy, key=lambda host: host.pnode), roomy):
            ends = problem.solve(order)
            if ends is not None:
                assignment = _assignment(graph, groups, order, ends)
                assignment.validate(graph)
                return assignment
    larger = "start more or larger PNodes"
    raise _does_not_fit(graph, groups, hosts, problem, larger if reads else f"use a smaller batch, or {larger}")


def _assignment(graph: Graph, groups: Sequence[Group], hosts: Sequence[Host], ends: Sequence[int]) -> Assignment:
    holder: dict[NodeId, PNodeId] = {}
    start = 0
    for host, end in zip(hosts, ends, strict=True):
        holder.update((node, host.pnode) for group in groups[start:end] for node in group.nodes)
        start = end
    return Assignment({node.id: holder[node.id] for node in graph.nodes})


def _does_not_fit(graph: Graph, groups: Sequence[Group], hosts: Sequence[Host], problem: Problem, remedy: str) -> DoesNotFit:
    if not hosts:
        return DoesNotFit(f"there is no PNode for network '{graph.name}'", "start one with dcnr-agent")
    sizes = [after - before for before, after in zip(problem.memory, problem.memory[1:], strict=False)]
    largest = max(range(len(groups)), key=sizes.__getitem__)
    free = ", ".join(f"{host.pnode} {_mib(host.memory_free)}" for host in sorted(hosts, key=lambda host: host.pnode))
    needed = problem.memory[-1] + problem.again
    return DoesNotFit(
        f"network '{graph.name}' needs {_mib(needed)}, its largest part '{groups[largest].nodes[0]}' {_mib(sizes[largest])}; "
        f"free are {free}",
        remedy,
    )


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


@dataclass(frozen=True, slots=True)
class Problem:
    """A graph as placement sees it: running totals over its atoms, and what each border would send."""

    flops: tuple[int, ...]
    """flops[i]: of the first i atoms."""
    memory: tuple[int, ...]
    again: int
    """On top of it, on any host: the largest group that may run again there."""
    cut: tuple[int, ...]
    """cut[i]: bytes between the first i atoms and the rest, both ways."""

    @classmethod
    def of(cls, graph: Graph, groups: Sequence[Group], rows: int, reads: bool = False) -> Problem:
        """Atoms share no activations, since a border may come between any two; a group that is recomputed is taken as a whole."""
        atom_of = {node: index for index, group in enumerate(groups) for node in group.nodes}
        of_node = (
            reading_costs(graph, rows) if reads else graph_costs(graph, rows, place=lambda node: recomputed_with(node) or atom_of[node.id])
        )
        costs = [[of_node[node] for node in group.nodes] for group in groups]
        return cls(
            tuple(accumulate((sum(cost.flops for cost in group) for group in costs), initial=0)),
            tuple(accumulate((sum(cost.bytes for cost in group) for group in costs), initial=0)),
            most_again(graph, {node: cost.again_bytes for node, cost in of_node.items()}),
            _cuts(graph, groups, rows),
        )

    def solve(self, hosts: Sequence[Host]) -> list[int] | None:
        """Where each host's run of atoms ends; None if the memory does not suffice."""
        slowest = self._slowest_stage(hosts)
        if slowest is None:
            return None
        atoms = len(self.flops) - 1
        # (bytes sent, sum of squared times): both add up over the runs, so the best whole has the best beginning.
        worth: list[list[tuple[float, float]]] = [[(math.inf, math.inf)] * (atoms + 1) for _ in range(len(hosts) + 1)]
        start: list[list[int]] = [[0] * (atoms + 1) for _ in range(len(hosts) + 1)]
        worth[0][0] = (0.0, 0.0)
        for used, host in enumerate(hosts, 1):
            for end in range(used, atoms + 1):
                for begin in range(end - 1, used - 2, -1):
                    time = self.time(host, begin, end)
                    if time > slowest * SLACK or not self._fits(host, begin, end):
                        break
                    sent, squares = worth[used - 1][begin]
                    found = (sent + self.cut[begin], squares + time * time)
                    if found < worth[used][end]:
                        worth[used][end], start[used][end] = found, begin
        ends = [atoms]
        for used in range(len(hosts), 1, -1):
            ends.append(start[used][ends[-1]])
        return ends[::-1]

    def _slowest_stage(self, hosts: Sequence[Host]) -> float | None:
        """The time of the slowest stage in the best balance."""
        atoms = len(self.flops) - 1
        best = [0.0] + [math.inf] * atoms
        for used, host in enumerate(hosts, 1):
            best = [math.inf if end < used else self._best_last_run(host, best, used - 1, end) for end in range(atoms + 1)]
        return best[atoms] if math.isfinite(best[atoms]) else None

    def _best_last_run(self, host: Host, before: Sequence[float], first: int, end: int) -> float:
        """The slowest stage when `host` takes the last run up to atom `end`, and `before` says how the rest does."""
        found = math.inf
        for begin in range(end - 1, first - 1, -1):
            time = self.time(host, begin, end)
            if time >= found or not self._fits(host, begin, end):
                break
            found = min(found, max(before[begin], time))
        return found

    def time(self, host: Host, begin: int, end: int) -> float:
        """Of the atoms from `begin` to `end` on `host`."""
        return (self.flops[end] - self.flops[begin]) / max(1, host.cores)

    def _fits(self, host: Host, begin: int, end: int) -> bool:
        return self.memory[end] - self.memory[begin] + self.again <= host.memory_free


def _cuts(graph: Graph, groups: Sequence[Group], rows: int) -> tuple[int, ...]:
    """Forward, a tensor crosses a border once however many read it beyond, and all outputs of a broadcast are one tensor; backward, every
    reader sends its gradient. To tear a preferred group apart weighs as much as its largest tensor."""
    atom_of = {node: index for index, group in enumerate(groups) for node in group.nodes}
    change = [0] * (len(groups) + 1)

    def cross(atoms: Sequence[int], size: int) -> None:
        change[min(atoms) + 1] += size
        if max(atoms) + 1 < len(change):
            change[max(atoms) + 1] -= size

    readers: dict[Port, list[int]] = {}
    for port, consumers in graph.consumers.items():
        tensor = Port(port.node, 0) if graph.by_id[port.node].type == "broadcast" else port
        readers.setdefault(tensor, []).extend(atom_of[consumer.node] for consumer in consumers)
    for tensor, atoms in readers.items():
        size, source = edge_bytes(graph, tensor, rows), atom_of[tensor.node]
        cross([source, *atoms], size)
        for atom in atoms:
            cross([source, atom], size)
    for wish in preferred(graph):
        cross([atom_of[node] for node in wish], max(edge_bytes(graph, Port(node, 0), rows) for node in wish))
    return tuple(accumulate(change))
