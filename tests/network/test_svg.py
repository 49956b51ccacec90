"""SVG without other programs."""

from __future__ import annotations

import itertools
from xml.etree import ElementTree

import pytest
from hypothesis import given

from dcnr.network.picture import picture
from dcnr.network.svg import to_svg
from tests.network.files import MANY, SHIPPED, Network, networks, shipped

SPACE = "{http://www.w3.org/2000/svg}"


def boxes(svg: str) -> list[tuple[float, float, float, float]]:
    """(x, y, width, height) of every box."""
    found = ElementTree.fromstring(svg).iter(f"{SPACE}rect")
    return [
        (float(one.attrib["x"]), float(one.attrib["y"]), float(one.attrib["width"]), float(one.attrib["height"]))
        for one in found
        if one.get("class") == "box"
    ]


@pytest.mark.parametrize("name", SHIPPED)
def test_every_node_is_named_in_the_document(name: str) -> None:
    """In a box's title at least, and the document is well-formed."""
    graph = shipped(name)
    root = ElementTree.fromstring(to_svg(picture(graph), graph.name))
    titles = ", ".join(title.text or "" for title in root.iter(f"{SPACE}title")).split(", ")
    assert titles[0] == graph.name
    assert set(titles[1:]) == {node.id for node in graph.nodes}


@MANY
@given(networks())
def test_boxes_never_overlap_and_lie_inside(net: Network) -> None:
    """Whatever the graph."""
    svg = to_svg(picture(net.graph()), "net")
    root = ElementTree.fromstring(svg)
    found = boxes(svg)
    for x, y, width, height in found:
        assert min(x, y) >= 0
        assert x + width <= float(root.attrib["width"])
        assert y + height <= float(root.attrib["height"])
    for (ax, ay, aw, ah), (bx, by, bw, bh) in itertools.combinations(found, 2):
        assert ax + aw <= bx or bx + bw <= ax or ay + ah <= by or by + bh <= ay


def test_titles_are_escaped() -> None:
    """A picture is XML whatever its title."""
    assert ElementTree.fromstring(to_svg(picture(shipped("mlp")), "<&>")).find(f"{SPACE}title") is not None
