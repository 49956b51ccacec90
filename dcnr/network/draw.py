"""A network as text that draws: Mermaid and DOT with every node, SVG with repetition folded (`picture`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from dcnr.network.graph import Graph, GraphNode
from dcnr.network.picture import block_of, blocks, picture
from dcnr.network.svg import to_svg


def draw(graph: Graph, form: str) -> str:
    """`graph` in one of `FORMATS`."""
    return _DRAWERS[form](graph)


def mermaid(graph: Graph) -> str:
    """A Mermaid flowchart; blocks are subgraphs. Nodes are numbered, since words like `end` cannot be ids there."""
    number = {node.id: f"n{index}" for index, node in enumerate(graph.nodes)}
    lines = ["flowchart TD"]
    for block, nodes in _sections(graph):
        declared = [f'{number[node.id]}["{node.id}<br/>{node.type}"]' for node in nodes]
        lines += [f"  {line}" for line in declared] if block is None else _wrapped(f'subgraph b_{block}["{block}"]', declared, "end")
    for source, target, slots in _edges(graph):
        arrow = f'-->|"{slots}"|' if slots else "-->"
        lines.append(f"  {number[source.id]} {arrow} {number[target.id]}")
    return "\n".join(lines) + "\n"


def dot(graph: Graph) -> str:
    """A Graphviz digraph; blocks are clusters."""
    lines = [f'digraph "{graph.name}" {{', "  rankdir=TB;", '  node [shape=box, style=rounded, fontname="monospace", fontsize=10];']
    for block, nodes in _sections(graph):
        declared = [f'"{node.id}" [label="{node.id}\\n{node.type}"];' for node in nodes]
        opening = f'subgraph "cluster_{block}" {{ label="{block}";'
        lines += [f"  {line}" for line in declared] if block is None else _wrapped(opening, declared, "}")
    for source, target, slots in _edges(graph):
        lines.append(f'  "{source.id}" -> "{target.id}"' + (f' [label="{slots}", fontsize=9];' if slots else ";"))
    return "\n".join([*lines, "}"]) + "\n"


def svg(graph: Graph) -> str:
    """An SVG document of the folded picture."""
    return to_svg(picture(graph), graph.name)


def _wrapped(opening: str, lines: list[str], closing: str) -> list[str]:
    return [f"  {opening}", *(f"    {line}" for line in lines), f"  {closing}"]


def _sections(graph: Graph) -> Iterator[tuple[str | None, list[GraphNode]]]:
    """Nodes outside of blocks, then every block."""
    found = blocks(graph)
    yield None, [node for node in graph.nodes if block_of(node.id) not in found]
    for block, nodes in found.items():
        yield block, list(nodes)


def _edges(graph: Graph) -> Iterator[tuple[GraphNode, GraphNode, str]]:
    """(source, target, slots where they are not 0 → 0)."""
    for node in graph.nodes:
        for slot, port in enumerate(node.inputs):
            if port is not None:
                yield graph.by_id[port.node], node, f"{port.slot} → {slot}" if port.slot or slot else ""


_DRAWERS: Mapping[str, Callable[[Graph], str]] = {"mermaid": mermaid, "dot": dot, "svg": svg}

FORMATS = tuple(_DRAWERS)
