"""Which precision wins."""

from __future__ import annotations

from typing import Any

import pytest

from dcnr.ids import NodeId
from dcnr.passes.precision import precision
from tests.network.files import Network, chain


def settled(net: Network, node: str) -> tuple[str, str]:
    """(param, activation) precision of a node."""
    found = precision(net.graph()).by_id[NodeId(node)]
    return found.param_precision, found.activation_precision


@pytest.mark.parametrize(
    ("network", "node", "expected"),
    [
        ([], {}, ("float32", "float32")),
        (["precision: fp16"], {}, ("float16", "float16")),
        (["precision: fp16", "param_precision: fp32"], {}, ("float32", "float16")),
        (["precision: fp16"], {"precision": "bf16"}, ("bfloat16", "bfloat16")),
        (["precision: fp16"], {"precision": "bf16", "activation_precision": "float32"}, ("bfloat16", "float32")),
        (["activation_precision: half"], {"param_precision": "bfloat16"}, ("bfloat16", "float16")),
    ],
)
def test_the_most_special_key_wins(network: list[str], node: dict[str, Any], expected: tuple[str, str]) -> None:
    """The node's own part, the node, the network's part, the network, float32."""
    net = chain(("middle", "layernorm", {"dim": 8, **node}))
    net.head += network
    assert settled(net, "middle") == expected


def test_costs_take_float32_unless_they_say_so() -> None:
    """`cost_precision` is theirs alone."""
    net = chain()
    net.head.append("precision: fp16")
    assert settled(net, "loss") == ("float16", "float32")
    net.nodes[2] = net.nodes[2].replace("vocab_size: 11", "vocab_size: 11, cost_precision: fp16")
    assert settled(net, "loss") == ("float16", "float16")
