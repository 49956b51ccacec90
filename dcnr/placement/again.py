"""Where the nodes of lost hosts go, so that as little as possible moves.

Rule 1: what is on a host that is still there stays. Atoms stay whole, as in `place`; a host that takes more has memory for all that it will
hold, one that takes nothing more is not asked.
Rule 2: a host that held nothing takes all of what a lost one held, if it has the memory: the roomiest takes the largest.
Rule 3: of what is left, every run of atoms is divided between the hosts that hold its neighbours in the pipeline, where the slower of the
two is as fast as can be, and, within `SLACK` of that, where the fewest bytes cross. A run without neighbours goes to one host.
Rule 4: where they lack the memory, whoever can take the longest piece of the run takes it, and so on to its end.
Rule 5: where nothing stays, or not all fits in this way, `place` divides everything anew.
Rule 6: same arguments, same assignment; the order in which hosts are given does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from dcnr.ids import NodeId, PNodeId
from dcnr.network.graph import Graph
from dcnr.placement.assignment import Assignment
from dcnr.placement.groups import Group, together
from dcnr.placement.place import SLACK, Host, Problem, place

Run = tuple[int, int]
"""Atoms from the first up to, without it, the second."""


def place_again(graph: Graph, hosts: Sequence[Host], rows: int, previous: Mapping[NodeId, PNodeId]) -> Assignment:
    """Place `graph` on `hosts`, starting from `previous`, some hosts of which may be lost. Raises `DoesNotFit` with the numbers."""
    groups = together(graph)
    before = [previous.get(group.nodes[0]) for group in groups]
    here = {host.pnode for host in hosts}
    if here.isdisjoint(before):
        return place(graph, hosts, rows)
    repair = _Repair(graph, groups, hosts, rows, [home if home in here else None for home in before])
    repair.give_to_fresh(before)
    left = [run for run in repair.runs() if not repair.divide(run)]
    if not all(repair.fill(run) for run in left):
        return place(graph, hosts, rows)
    assignment = repair.assignment()
    assignment.validate(graph)
    return assignment


class _Repair:
    """Atoms find new homes one after another."""

    def __init__(self, graph: Graph, groups: Sequence[Group], hosts: Sequence[Host], rows: int, homes: list[PNodeId | None]) -> None:
        self._graph = graph
        self._groups = groups
        self._hosts = {host.pnode: host for host in sorted(hosts, key=lambda host: host.pnode)}
        self._problem = Problem.of(graph, groups, rows)
        self._homes = homes
        """Of every atom; None while it has none."""

    def assignment(self) -> Assignment:
        """Once every atom has a home."""
        holder = {node: home for group, home in zip(self._groups, self._homes, strict=True) if home is not None for node in group.nodes}
        return Assignment({node.id: holder[node.id] for node in self._graph.nodes})

    def runs(self) -> list[Run]:
        """Atoms without a home, in runs as long as they are."""
        found = []
        for home, atoms in groupby(range(len(self._homes)), self._homes.__getitem__):
            if home is None:
                begin, *rest = atoms
                found.append((begin, begin + 1 + len(rest)))
        return found

    def give_to_fresh(self, before: Sequence[PNodeId | None]) -> None:
        """Rule 2, the homes having been those of `before`."""
        fresh = [host for pnode, host in self._hosts.items() if pnode not in self._homes]
        fresh.sort(key=lambda host: -host.memory_free)
        lost = sorted({home for home, now in zip(before, self._homes, strict=True) if home is not None and now is None})
        parts = [[atom for atom, home in enumerate(before) if home == pnode] for pnode in lost]
        for part in sorted(parts, key=lambda part: (-self._bytes(part), part)):
            if fresh and self._bytes(part) + self._problem.again <= fresh[0].memory_free:
                self._settle(part, fresh.pop(0))

    def divide(self, run: Run) -> bool:
        """Rule 3; False if the memory does not suffice."""
        begin, end = run
        before, after = self._neighbours(run)
        if before is None and after is None:
            return self._give_to_one(run)
        found = []
        for border in self._borders(run, before, after):
            pieces = [(host, piece) for host, piece in ((before, (begin, border)), (after, (border, end))) if host is not None]
            if all(self._takes(host, piece) for host, piece in pieces):
                found.append((max(self._time_with(host, piece) for host, piece in pieces), border))
        if not found:
            return False
        limit = min(found)[0] * SLACK
        _, _, border = min((self._problem.cut[border], slowest, border) for slowest, border in found if slowest <= limit)
        for host, piece in ((before, range(begin, border)), (after, range(border, end))):
            if host is not None:
                self._settle(piece, host)
        return True

    def fill(self, run: Run) -> bool:
        """Rule 4; False if the memory does not suffice."""
        begin, end = run
        while begin < end:
            reach = {host.pnode: self._reach(host, (begin, end)) for host in self._hosts.values()}
            longest = max(reach, key=reach.__getitem__)
            if reach[longest] == begin:
                return False
            self._settle(range(begin, reach[longest]), self._hosts[longest])
            begin = reach[longest]
        return True

    def _give_to_one(self, run: Run) -> bool:
        able = [host for host in self._hosts.values() if self._takes(host, run)]
        if able:
            self._settle(range(*run), min(able, key=lambda host: self._time_with(host, run)))
        return bool(able)

    def _neighbours(self, run: Run) -> tuple[Host | None, Host | None]:
        """Who holds the nearest node that the run reads, and the nearest that reads it. They need not be
        the atoms beside it: a tied head is an atom with the embedder."""
        inside = {node for group in self._groups[slice(*run)] for node in group.nodes}
        home_of = {node: home for group, home in zip(self._groups, self._homes, strict=True) for node in group.nodes}
        edges = [(port.node, node.id) for node in self._graph.nodes for port in node.inputs if port is not None]
        feeding = {source for source, reader in edges if reader in inside} - inside
        reading = {reader for source, reader in edges if source in inside} - inside
        order = [node.id for node in self._graph.nodes if home_of[node.id] is not None]
        before = next((home_of[node] for node in reversed(order) if node in feeding), None)
        after = next((home_of[node] for node in order if node in reading), None)
        return (None if before is None else self._hosts[before]), (None if after is None else self._hosts[after])

    def _borders(self, run: Run, before: Host | None, after: Host | None) -> Sequence[int]:
        begin, end = run
        if after is None or before == after:
            return (end,)
        return (begin,) if before is None else range(begin, end + 1)

    def _settle(self, atoms: Sequence[int], host: Host) -> None:
        for atom in atoms:
            self._homes[atom] = host.pnode

    def _held(self, host: Host) -> list[int]:
        return [atom for atom, home in enumerate(self._homes) if home == host.pnode]

    def _bytes(self, atoms: Sequence[int]) -> int:
        return sum(self._problem.memory[atom + 1] - self._problem.memory[atom] for atom in atoms)

    def _time_with(self, host: Host, run: Run) -> float:
        return sum(self._problem.time(host, atom, atom + 1) for atom in self._held(host)) + self._problem.time(host, *run)

    def _takes(self, host: Host, run: Run) -> bool:
        return self._reach(host, run) == run[1]

    def _reach(self, host: Host, run: Run) -> int:
        """How far into the run `host` has memory."""
        begin, end = run
        room = host.memory_free - self._problem.again - self._bytes(self._held(host))
        memory = self._problem.memory
        return next((atom for atom in range(begin, end) if memory[atom + 1] - memory[begin] > room), end)
