"""Linear + activation, dropout + add."""

from __future__ import annotations

from typing import Any

import pytest

from dcnr.ids import NodeId
from dcnr.network.graph import Port
from dcnr.passes import prepare
from tests.network.files import Network, chain


def middle(activation: str, linear: dict[str, Any] | None = None, act: dict[str, Any] | None = None) -> Network:
    """A linear layer, an activation, and the head."""
    wide = 16 if activation == "swiglu" else 8
    return chain(("mid", "linear", {"in_dim": 8, "out_dim": wide, **(linear or {})}), ("act", activation, act or {}))


def kind(net: Network, node: str = "act") -> str:
    """What a node became."""
    return prepare(net.graph(), fuse=True).by_id[NodeId(node)].type


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "swiglu"])
def test_every_activation_joins_its_linear_layer(activation: str) -> None:
    """And the merged node has the activation's id and output."""
    node = prepare(middle(activation).graph(), fuse=True).by_id[NodeId("act")]
    assert (node.type, node.members) == ("linear_activation", ("mid", "act"))
    assert node.output_shapes == ((4, 8),)
    assert getattr(node.config, "activation", None) == activation


def test_what_is_read_elsewhere_or_rounded_stays() -> None:
    """A declared output, a second reader, another storage precision."""
    net = middle("gelu")
    net.tail.append("outputs: [{name: o, node_id: mid}]")
    assert kind(net) == "gelu"
    net = middle("gelu")
    net.add("side", "relu", "mid")
    net.add("sum", "add", "act", "side")
    net.edges = [edge.replace("from: act, from_slot: 0, to: head", "from: sum, from_slot: 0, to: head") for edge in net.edges]
    assert kind(net) == "gelu"
    assert kind(middle("gelu", act={"precision": "fp16"})) == "gelu"


def dropped(slots: tuple[str, ...]) -> Network:
    """embedder → dropout, and an add of `slots`."""
    net = chain(("drop", "dropout", {"rate": 0.5}))
    net.add("sum", "add", *slots)
    net.edges = [edge.replace("from: drop, from_slot: 0, to: head", "from: sum, from_slot: 0, to: head") for edge in net.edges]
    return net


def test_dropout_joins_the_add_after_it() -> None:
    """Slot 0 takes the dropout's input, slot 1 the residual."""
    node = prepare(dropped(("drop", "embedder")).graph(), fuse=True).by_id[NodeId("sum")]
    assert (node.type, node.members) == ("dropout_add", ("drop", "sum"))
    assert node.inputs == (Port(NodeId("embedder"), 0), Port(NodeId("embedder"), 0))


@pytest.mark.parametrize("slots", [("embedder", "drop"), ("drop", "embedder", "embedder"), ("drop", "drop")])
def test_other_sums_are_left_alone(slots: tuple[str, ...]) -> None:
    """The dropout in slot 1, three terms, the dropout twice."""
    assert kind(dropped(slots), "sum") == "add"
