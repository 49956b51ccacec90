"""What a network is and costs."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from dcnr.ids import PNodeId
from dcnr.placement.analyze import analyze
from dcnr.placement.place import Host
from tests.network.files import Network, shipped

HOSTS = [Host(PNodeId(name), 2**40, 1) for name in ("a", "b", "c")]


@pytest.mark.parametrize(
    ("name", "vnodes", "parameters"),
    [
        ("mlp", 5, 256 * 64 + 64 * 128 + 128 + 128 * 256 + 256),
        ("shakespeare_char", 65, 65 * 384 + 256 * 384 + 6 * (12 * 384 * 384 + 2 * 384) + 384),
        ("shakespeare_char_cpu", 36, 65 * 128 + 64 * 128 + 4 * (12 * 128 * 128 + 2 * 128) + 128),
        ("topology_1", 143, 27_185_664),
        ("topology_2", 183, 45_147_648),
    ],
)
def test_nodes_and_parameters(name: str, vnodes: int, parameters: int) -> None:
    """By hand where a hand can; a tied matrix counts once; fusion counts the same."""
    found = analyze(shipped(name), rows=1)
    assert (found.vnodes, found.parameters) == (vnodes, parameters)
    assert analyze(shipped(name), rows=1, fuse=False).parameters == parameters
    assert sum(node.parameters for node in found.nodes) == parameters
    assert len(found.nodes) == vnodes


def test_operations_are_about_six_a_parameter_and_token() -> None:
    """Forward 2, backward 4, attention on top; embeddings are no products, but the tied head is."""
    found = analyze(shipped("topology_2"), rows=4)
    assert found.tokens_per_row == 512
    assert 1.0 < found.flops_per_token / (6 * found.parameters) < 1.2
    assert found.flops_per_row == pytest.approx(found.flops_per_token * 512, rel=1e-3)


def test_memory_grows_with_rows_where_it_should() -> None:
    """Activations do; weights and optimizer do not. Without fusion there are logits to hold."""
    one, four = analyze(shipped("topology_1"), rows=1), analyze(shipped("topology_1"), rows=4)
    assert four.activation_bytes == 4 * one.activation_bytes
    assert (four.parameter_bytes, four.optimizer_bytes) == (one.parameter_bytes, one.optimizer_bytes) == (27_185_664 * 6, 27_185_664 * 16)
    assert analyze(shipped("topology_1"), rows=1, fuse=False).activation_bytes > 1.3 * one.activation_bytes


def test_crossings_are_those_of_the_placement() -> None:
    """Three hosts in a ring. Tensors are [rows, 128, 512] float16, there and back; inside of the blocks, where a residual sum and its norm
    are one node, two of them cross a border, elsewhere one."""
    found = analyze(shipped("topology_1"), rows=4, hosts=HOSTS)
    assert [(crossing.sender, crossing.receiver) for crossing in found.crossings] == [
        ("a", "b"),
        ("a", "b"),
        ("b", "c"),
        ("b", "c"),
        ("c", "a"),
    ]
    assert found.crossing_bytes == 5 * 2 * 4 * 128 * 512 * 2
    plain = analyze(shipped("topology_1"), rows=4, hosts=HOSTS, fuse=False)
    assert plain.crossing_bytes == 3 * 2 * 4 * 128 * 512 * 2
    assert {node.pnode for node in found.nodes} == {"a", "b", "c", None}
    assert [node.node for node in found.nodes if node.pnode is None] == ["tokenizer", "logits_broadcast", "detokenizer"]
    assert analyze(shipped("topology_1"), rows=4).crossings == ()


def test_it_is_plain_data() -> None:
    """The command line makes tables and JSON of it."""
    fields = asdict(analyze(shipped("mlp"), rows=1, hosts=HOSTS))
    assert fields["nodes"][1]["output_shapes"] == ((32, 128),)


def test_a_head_with_its_cost_has_its_tokens_counted() -> None:
    """Where the cost is the head, its input has no vocabulary."""
    net = Network()
    net.add("embedder", "embedder", vocab_size=9, dim=4, seq_len=3)
    net.add("loss", "tied_lm_head_ce", "embedder", dim=4, vocab_size=9)
    assert analyze(net.graph(), rows=1).tokens_per_row == 3
