"""Network files: what loads, and what a person reads when one does not."""

from __future__ import annotations

import pytest
from hypothesis import given

from dcnr.errors import NetworkFileError
from dcnr.ids import NodeId
from dcnr.network.graph import Port
from dcnr.network.load import load_graph, read_spec
from dcnr.network.verify import verify
from tests.network.files import EXAMPLE, MANY, SHIPPED, Network, networks, shipped

EMBED = "  - {id: embed, type: embedder, config: {vocab_size: 9, dim: 4, seq_len: 3, shared_weight_alias: t}}\n"
HEAD = "  - {id: head, type: linear, config: {in_dim: 4, out_dim: 9}}\n"
LOSS = "  - {id: loss, type: cost, config: {vocab_size: 9}}\n"
EDGES = "edges:\n  - {from: embed, to: head}\n  - {from: head, to: loss}\n"
MIDDLE = "  - {id: mid, type: linear, config: {in_dim: 4, out_dim: 4, tie_weight_alias: t}}\n"
AROUND = "edges: [{from: embed, to: mid}, {from: mid, to: head}, {from: head, to: loss}]\n"
COSTS = "costs: [{name: loss, node_id: loss}]\n"
GOOD = f"name: net\nnodes:\n{EMBED}{HEAD}{LOSS}{EDGES}{COSTS}"


def extended(nodes: str, edges: str = EDGES) -> str:
    """The good file with more nodes, and other edges."""
    return GOOD.replace(LOSS, LOSS + nodes).replace(EDGES, edges)


def problems(text: str) -> list[str]:
    """What is wrong with `text`."""
    with pytest.raises(NetworkFileError) as caught:
        load_graph(text, "net.yml")
    return [str(problem) for problem in caught.value.problems]


BAD = {
    "not a mapping": ("- 1\n", [
        "net.yml:1:1: a list stands where a network should. Write it with the keys name, precision, param_precision, activation_precision, "
        "wire, nodes, edges, outputs, costs, metrics.",
    ]),
    "no name": (GOOD.replace("name: net\n", "# net\n"), ["net.yml:2:1: the key 'name' is missing. Add name: … here."]),
    "bad name": (GOOD.replace("net\n", "my net\n", 1), [
        "net.yml:1:1: 'my net' is not a network name. Use 1 to 64 letters, digits, '_' or '-'.",
    ]),
    "no nodes": ("name: net\ncosts: []\n", ["net.yml:1:1: the network has no nodes. List them under nodes:."]),
    "unknown top key": (f"{GOOD}edgs: []\n", ["net.yml:10:1: unknown key 'edgs' in a network. Did you mean 'edges'?"]),
    "unknown node key": (GOOD.replace("type: linear, config", "type: linear, confg"), [
        "net.yml:4:5: node 'head': config key 'in_dim' is missing. Add in_dim: … to the config.",
        "net.yml:4:5: node 'head': config key 'out_dim' is missing. Add out_dim: … to the config.",
        "net.yml:4:30: node 'head': unknown key 'confg' in a node. Did you mean 'config'?",
    ]),
    "unknown edge key": (GOOD.replace("to: loss}", "to: loss, slot: 0}"), [
        "net.yml:8:28: unknown key 'slot' in an edge. Did you mean 'to_slot'?",
    ]),
    "unknown config key": (GOOD.replace("in_dim: 4", "in_dim: 4, bais: false"), [
        "net.yml:4:50: node 'head': unknown config key 'bais' for type 'linear'. Did you mean 'bias'?",
    ]),
    "unknown config key, nearest is an alias": (GOOD.replace("type: cost, config: {", "type: tied_lm_head_ce, config: {in_dimm: 4, "), [
        "net.yml:5:5: node 'loss': config key 'dim' is missing. Add dim: … to the config.",
        "net.yml:5:48: node 'loss': unknown config key 'in_dimm' for type 'tied_lm_head_ce'. Did you mean 'in_dim'?",
    ]),
    "wrong config value": (GOOD.replace("out_dim: 9", "out_dim: nine"), [
        "net.yml:4:50: node 'head': config key 'out_dim' is 'nine': input should be a valid integer, unable to parse string as an integer. "
        "Mend the value of out_dim.",
    ]),
    "config is a list": (GOOD.replace("{vocab_size: 9}", "[vocab_size]"), [
        "net.yml:5:36: node 'loss': config is a list. Write it as a mapping: config: {key: value}.",
    ]),
    "config holds a mapping": (GOOD.replace("{vocab_size: 9}", "{vocab_size: {a: 1}}"), [
        "net.yml:5:49: node 'loss': config key 'vocab_size' holds a mapping. Use a scalar or a list of scalars.",
    ]),
    "unknown type": (GOOD.replace("type: linear", "type: liner"), [
        "net.yml:4:16: node 'head': unknown type 'liner'. Did you mean 'linear'?",
    ]),
    "internal type": (GOOD.replace("type: linear", "type: linear_activation"), [
        "net.yml:4:16: node 'head': the type 'linear_activation' is only made by fusion. Write the nodes that it stands for.",
    ]),
    "no type": (GOOD.replace("type: linear, ", ""), ["net.yml:4:5: node 'head': the key 'type' is missing. Add type: … here."]),
    "no id": (GOOD.replace("id: embed, ", ""), [
        "net.yml:3:5: the key 'id' is missing. Add id: … here.",
        "net.yml:7:6: an edge goes from 'embed', which is no node. Known nodes: head, loss.",
    ]),
    "bad id": (GOOD.replace("embed,", "em bed,"), [
        "net.yml:3:6: node 'em bed': this is not a node id. Use 1 to 64 letters, digits, '_' or '-'.",
    ]),
    "reserved id": (GOOD.replace("embed,", "trainer,"), [
        "net.yml:3:6: node 'trainer': this id is reserved for the trainer. Choose another one.",
    ]),
    "duplicate id": (GOOD.replace(LOSS, LOSS + "  - {id: head, type: relu}\n"), [
        "net.yml:6:6: node 'head': the id is taken by an earlier node. Give each node its own id.",
    ]),
    "duplicate key": (GOOD.replace("seq_len: 3,", "seq_len: 3, dim: 5,"), [
        "net.yml:3:77: the key 'dim' stands twice (first in line 3). Remove one of the two.",
    ]),
    "unknown node in an edge": (GOOD.replace("from: embed", "from: embedd"), [
        "net.yml:7:6: an edge goes from 'embedd', which is no node. Did you mean 'embed'?",
    ]),
    "edge without end": (GOOD.replace(", to: loss", ""), [
        "net.yml:5:5: node 'loss': nothing is connected to input slot 0. Add an edge {from: …, to: loss, to_slot: 0}.",
        "net.yml:8:5: the key 'to' is missing. Add to: … here.",
    ]),
    "output slot out of range": (GOOD.replace("from: head", "from: head, from_slot: 1"), [
        "net.yml:8:18: node 'head': there is no output slot 1; it has 1 slot. Correct from_slot.",
    ]),
    "input slot out of range": (GOOD.replace("to: loss", "to: loss, to_slot: 2"), [
        "net.yml:5:5: node 'loss': nothing is connected to input slot 0. Add an edge {from: …, to: loss, to_slot: 0}.",
        "net.yml:8:28: node 'loss': there is no input slot 2; it has 2 slots. Correct to_slot.",
    ]),
    "not a slot": (GOOD.replace("to: loss", "to: loss, to_slot: -1"), [
        "net.yml:5:5: node 'loss': nothing is connected to input slot 0. Add an edge {from: …, to: loss, to_slot: 0}.",
        "net.yml:8:37: 'to_slot' is '-1', not a slot number. Use 0, 1, 2, …",
    ]),
    "slot served twice": (GOOD.replace(EDGES, EDGES + "  - {from: embed, to: head}\n"), [
        "net.yml:9:5: node 'head': input slot 0 of 'head' is already served in line 7. "
        "Remove one of the two edges, or use another to_slot.",
    ]),
    "slot not served": (GOOD.replace("  - {from: embed, to: head}\n", ""), [
        "net.yml:4:5: node 'head': nothing is connected to input slot 0. Add an edge {from: …, to: head, to_slot: 0}.",
    ]),
    "edge out of a cost": (GOOD.replace(EDGES, EDGES + "  - {from: loss, to: embed}\n"), [
        "net.yml:9:6: node 'loss': a cost is the end of the graph; no edge may leave it. Remove the edge.",
    ]),
    "too many outputs": (extended("  - {id: fan, type: broadcast, config: {num_outputs: 1000000000000}}\n"), [
        "net.yml:6:5: node 'fan': it has more than 1024 outputs. Use fewer.",
    ]),
    "far slot": (extended("  - {id: sum, type: add}\n", EDGES + "  - {from: head, to: sum, to_slot: 1000}\n"), [
        "net.yml:6:5: node 'sum': nothing is connected to input slot 0 and 999 more. Add an edge {from: …, to: sum, to_slot: 0}.",
    ]),
    "one input for an add": (extended("  - {id: sum, type: add}\n", EDGES.replace("to: loss}", "to: sum}\n  - {from: sum, to: loss}")), [
        "net.yml:6:5: node 'sum': it needs at least two inputs and has 1. Add edges to its slots 0, 1, ….",
    ]),
    "gap in the slots": (
        extended(
            "  - {id: sum, type: add}\n",
            EDGES.replace("to: loss}", "to: sum}\n  - {from: head, to: sum, to_slot: 2}\n  - {from: sum, to: loss}"),
        ),
        ["net.yml:6:5: node 'sum': nothing is connected to input slot 1. Add an edge {from: …, to: sum, to_slot: 1}."],
    ),
    "cycle": (
        extended("  - {id: a, type: relu}\n  - {id: b, type: gelu}\n", EDGES + "  - {from: a, to: b}\n  - {from: b, to: a}\n"),
        ["net.yml:6:5: node 'a': the edges form a cycle: a → b → a. Remove one of its edges; data must flow one way."],
    ),
    "shape refused by the type": (GOOD.replace("in_dim: 4", "in_dim: 5"), [
        "net.yml:4:5: node 'head': wants a last axis of 5 (in_dim), got [3, 4] (it gets [3, 4] from 'embed'). Make the two ends agree.",
    ]),
    "declared shape is wrong": (GOOD.replace("out_dim: 9}}", "out_dim: 9}, input_shapes: [[3, 5]], output_shapes: [[3, 9], [3, 9]]}"), [
        "net.yml:4:63: node 'head': input_shapes says [3, 5] for slot 0, but it is [3, 4] ('embed' brings it). "
        "Correct input_shapes or the config.",
        "net.yml:4:87: node 'head': output_shapes lists 2 slots; it has 1 slot. Correct output_shapes.",
    ]),
    "not a shape": (GOOD.replace("out_dim: 9}}", "out_dim: 9}, input_shapes: [3, 4]}"), [
        "net.yml:4:77: node 'head': 'input_shapes' is not a list of shapes. Write one list of whole numbers per slot: [[128, 512]].",
    ]),
    "vocabulary of the cost": (GOOD.replace("out_dim: 9", "out_dim: 8").replace(
        "cost, config: {vocab_size: 9}", "cost, config: {vocab_size: 8}"
    ), [
        "net.yml:5:37: node 'loss': its vocabulary is 8, but that of 'embed' is 9. Give embedder, head and cost the same vocabulary.",
    ]),
    "vocabulary of the head": (GOOD.replace("out_dim: 9", "out_dim: 8"), [
        "net.yml:5:5: node 'loss': wants a last axis of 9 (vocab_size), got [3, 8] (it gets [3, 8] from 'head'). Make the two ends agree.",
    ]),
    "tie without owner": (GOOD.replace("out_dim: 9", "out_dim: 9, tie_weight_alias: tt"), [
        "net.yml:4:62: node 'head': no node shares its weight as 'tt'. Did you mean 't'?",
    ]),
    "tie with two owners": (GOOD.replace("out_dim: 9", "out_dim: 9, shared_weight_alias: t"), [
        "net.yml:4:62: node 'head': the alias 't' is already shared by 'embed'. Let one node own it; give the others tie_weight_alias.",
    ]),
    "tie of another shape": (f"name: net\nnodes:\n{EMBED}{MIDDLE}{HEAD}{LOSS}{AROUND}{COSTS}", [
        "net.yml:4:61: node 'mid': its weight is [4, 4], but that of 'embed' is [9, 4]. Tied weights need the same vocabulary and width.",
    ]),
    "tie of a node without weight": (GOOD.replace("{vocab_size: 9}}", "{vocab_size: 9, tie_weight_alias: t}}"), [
        "net.yml:5:52: node 'loss': 'loss' (cost) has no weight that could be tied. Remove the alias.",
    ]),
    "tie to a tied node": (GOOD.replace("out_dim: 9", "out_dim: 9, tie_weight_alias: u").replace(
        "shared_weight_alias: t", "shared_weight_alias: u, tie_weight_alias: u"
    ), [
        "net.yml:3:101: node 'embed': 'embed' shares a weight that is itself tied. Tie to the node that owns the weight.",
        "net.yml:4:62: node 'head': 'embed' shares a weight that is itself tied. Tie to the node that owns the weight.",
    ]),
    "no cost": (f"name: net\nnodes:\n{EMBED}{HEAD}edges: [{{from: embed, to: head}}]\n", [
        "net.yml:1:1: the network has no cost node, so there is nothing to train for. Add a node of type cost.",
    ]),
    "cost not listed": (GOOD.replace(COSTS, ""), [
        "net.yml:5:5: node 'loss': this cost node is not listed under costs. Add {name: loss, node_id: loss} to costs.",
    ]),
    "no cost by that name": (GOOD.replace("node_id: loss", "node_id: los"), [
        "net.yml:5:5: node 'loss': this cost node is not listed under costs. Add {name: loss, node_id: loss} to costs.",
        "net.yml:9:22: costs names 'los', which is no node. Did you mean 'loss'?",
    ]),
    "cost that is none": (GOOD.replace(COSTS, "costs: [{name: loss, node_id: loss}, {name: l, node_id: head}]\n"), [
        "net.yml:9:48: node 'head': it is listed under costs but is a linear. Name a node of type cost.",
    ]),
    "outputs": (f"{GOOD}outputs: [{{name: a, node_id: x}}, {{name: a, node_id: head, slot_id: 1}}, {{node_id: head}}, 7]\n", [
        "net.yml:10:21: outputs names 'x', which is no node. Known nodes: embed, head, loss.",
        "net.yml:10:35: 'a' stands twice in outputs. Give each entry its own name.",
        "net.yml:10:59: node 'head': there is no output slot 1; it has 1 slot. Correct slot_id.",
        "net.yml:10:72: the key 'name' is missing. Add name: … here.",
        "net.yml:10:89: '7' stands where an entry of 'outputs' should. Write it with the keys name, node_id, slot_id.",
    ]),
    "metrics": (f"{GOOD}metrics: [{{name: a, node_id: head, type: learning_rat}}, {{name: b, node_id: head}}]\n", [
        "net.yml:10:36: unknown metric type 'learning_rat'. Did you mean 'learning_rate'?",
        "net.yml:10:57: the key 'type' is missing. Add type: … here.",
    ]),
    "lists that are none": ("name: net\nnodes: {}\nedges: x\n", [
        "net.yml:1:1: the network has no nodes. List them under nodes:.",
        "net.yml:2:8: 'nodes' is a mapping, not a list. Write nodes: [ … ].",
        "net.yml:3:8: 'edges' is 'x', not a list. Write edges: [ … ].",
    ]),
    "precision of the network": (f"precision: fp8\n{GOOD}", ["net.yml:1:1: unknown precision 'fp8'. Use float32, float16 or bfloat16."]),
    "empty precision": (f"precision: ''\n{GOOD}", ["net.yml:1:1: unknown precision ''. Use float32, float16 or bfloat16."]),
    "wire": (f"wire: int4\n{GOOD}", ["net.yml:1:1: unknown wire 'int4'. Use native, fp16 or int8."]),
    "precision and optimizer of a node": (GOOD.replace("out_dim: 9", "out_dim: 9, param_precision: int8, optimizer: adan"), [
        "net.yml:4:62: node 'head': unknown param_precision 'int8'. Use float32, float16 or bfloat16.",
        "net.yml:4:85: node 'head': unknown optimizer 'adan'. Did you mean 'adam'?",
    ]),
    "dead end": (extended(
        "  - {id: side, type: linear, config: {in_dim: 4, out_dim: 2}}\n", EDGES + "  - {from: embed, to: side}\n"
    ), [
        "net.yml:6:5: node 'side': it leads to no cost, so it would never learn. Connect it, or remove it.",
    ]),
}  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), BAD.values(), ids=BAD.keys())
def test_every_wrong_file_says_what_is_wrong_where_and_what_to_do(text: str, expected: list[str]) -> None:
    """All problems of the file, in the order of its lines, and no others."""
    assert problems(text) == expected


def test_problems_of_every_kind_are_reported_together() -> None:
    """Trouble with the form, with a config, with an edge and with a sink does not hide each other."""
    text = GOOD.replace("type: cost", "typ: cost").replace("in_dim: 4", "in_dim: x").replace("from: embed", "from: embad")
    found = problems(f"{text}outputs: [{{name: o, node_id: hed}}]\n")
    assert [line.split(": ")[0] for line in found] == ["net.yml:4:39", "net.yml:5:5", "net.yml:5:16", "net.yml:7:6", "net.yml:10:21"]


def test_the_users_example_loads_unchanged() -> None:
    """Strings everywhere, aliases of types in any case, slots that default to 0."""
    graph = load_graph(EXAMPLE, "example.yml")
    verify(graph)
    assert len(graph.nodes) == 12
    assert graph.by_id[NodeId("head_1")].type == "attention_head"
    assert graph.by_id[NodeId("residual_attn")].inputs == (Port(NodeId("attn_dropout"), 0), Port(NodeId("embedder_broadcast"), 1))
    assert graph.by_id[NodeId("loss")].inputs[1] is None
    assert graph.by_id[NodeId("loss")].input_shapes == ((128, 10000), (128,))
    assert graph.metrics[0].type == "learning_rate"


@pytest.mark.parametrize(("name", "vnodes"), [("topology_1", 143), ("topology_2", 183)])
def test_production_topologies_have_their_vnodes(name: str, vnodes: int) -> None:
    """143 and 183, every node of the file one VNode."""
    assert len(shipped(name).nodes) == vnodes


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_networks_load(name: str) -> None:
    """And are sound."""
    verify(shipped(name))


@MANY
@given(networks())
def test_valid_networks_load(net: Network) -> None:
    """In any order of their nodes the graph is topological and sound."""
    verify(net.graph())
    backwards = Network(net.nodes[::-1], net.edges[::-1], net.tail, net.head).graph()
    verify(backwards)
    assert backwards.by_id == net.graph().by_id


def test_ids_may_look_like_numbers() -> None:
    """What the file says is the id, be it `007`."""
    assert load_graph(GOOD.replace("embed,", "007,").replace("from: embed", "from: 007"), "net.yml").nodes[0].id == "007"


def test_an_output_slot_may_feed_several_edges() -> None:
    """No broadcast is needed for that."""
    graph = load_graph(GOOD.replace(LOSS, LOSS + "  - {id: s, type: add}\n").replace(
        EDGES, "edges: [{from: embed, to: s}, {from: embed, to: s, to_slot: 1}, {from: s, to: head}, {from: head, to: loss}]\n"
    ), "net.yml")  # fmt: skip
    assert len(graph.consumers[Port(NodeId("embed"), 0)]) == 2


def test_read_spec_keeps_what_the_file_says() -> None:
    """Nothing is resolved: scalars as they are, shapes and slots as numbers."""
    spec = read_spec(EXAMPLE, "example.yml")
    assert spec.precision == "fp16"
    assert spec.nodes[0].config["dim"] == "512"
    assert spec.nodes[0].output_shapes == ((128, 512),)
    assert (spec.edges[2].source, spec.edges[2].from_slot, spec.edges[2].to_slot) == ("embedder_broadcast", 1, 1)
    assert (spec.nodes[1].place.line, spec.nodes[1].place.column) == (17, 5)


def test_read_spec_raises_on_form_alone() -> None:
    """It knows nothing of types and edges."""
    assert read_spec(GOOD.replace("linear", "liner"), "net.yml").nodes[1].type == "liner"
    with pytest.raises(NetworkFileError):
        read_spec(f"{GOOD}x: 1\n", "net.yml")
