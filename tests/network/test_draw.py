"""Mermaid, DOT and SVG."""

from __future__ import annotations

import re

import pytest

from dcnr.network.draw import FORMATS, dot, draw, mermaid
from tests.network.files import SHIPPED, shipped


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", SHIPPED)
def test_every_format_draws_every_network(name: str, form: str) -> None:
    """And the same each time."""
    graph = shipped(name)
    drawn = draw(graph, form)
    assert draw(graph, form) == drawn
    assert all(node.id in drawn for node in graph.nodes)


def test_mermaid_has_every_node_and_edge() -> None:
    """A small network in full."""
    assert mermaid(shipped("mlp")) == (
        "flowchart TD\n"
        '  n0["embedder<br/>embedder"]\n'
        '  n1["hidden<br/>linear"]\n'
        '  n2["gelu<br/>gelu"]\n'
        '  n3["logits<br/>linear"]\n'
        '  n4["loss<br/>cost"]\n'
        "  n0 --> n1\n"
        "  n1 --> n2\n"
        "  n2 --> n3\n"
        "  n3 --> n4\n"
    )


def test_dot_has_every_node_edge_and_block() -> None:
    """Slots stand on the edges that are not from 0 to 0."""
    text = dot(shipped("tiny"))
    edges = [port for node in shipped("tiny").nodes for port in node.inputs if port is not None]
    assert len(re.findall(r'^ *"\w+" \[label=', text, re.M)) == len(shipped("tiny").nodes)
    assert len(re.findall(" -> ", text)) == len(edges)
    assert re.findall(r'subgraph "(\w+)"', text) == ["cluster_block_0", "cluster_block_1"]
    assert '"block_0_in" -> "block_0_residual_attn" [label="1 → 1", fontsize=9];' in text
    assert text.count("{") == text.count("}")
