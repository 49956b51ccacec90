"""A compiled segment computes what its nodes compute one by one."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest

from dcnr.agents.program import Program, Tape
from dcnr.agents.routing import find_routes
from dcnr.backends.base import Array, HostArray
from dcnr.backends.numpy.backend import NumpyBackend
from dcnr.errors import InvariantError
from dcnr.ids import NodeId
from dcnr.network.graph import Graph, Port
from dcnr.network.instantiate import instantiate
from dcnr.nodes.base import Env, Node
from dcnr.nodes.initial import initial_value
from tests.agents.tiny import NORMED, SEQ, TINY, VOCABULARY, A, B, graph_of, in_groups

ROWS = 3
BACKEND = NumpyBackend()
WEIGHT = 1 / (ROWS * SEQ)
LOSS_SCALE = 4.0


class Bench:
    """Nodes, parameters, accumulators and inputs of a graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes: dict[NodeId, Node] = {node.id: instantiate(node) for node in graph.nodes}
        self.params = {
            name: {p.name: BACKEND.from_host(initial_value(1, replace(p, std=0.3 if p.std else None))) for p in node.parameters}
            for name, node in self.nodes.items()
        }
        for node in graph.nodes:
            if node.tied_to is not None:
                self.params[node.id]["weight"] = self.params[node.tied_to]["weight"]
        draw = np.random.default_rng(5)
        self.ids = draw.integers(0, VOCABULARY, (ROWS, SEQ))
        self.targets = draw.integers(0, VOCABULARY, (ROWS, SEQ))

    def envs(self) -> dict[NodeId, Env]:
        """Fresh accumulators."""
        return {
            node.id: Env(
                BACKEND, self.params[node.id], {name: np.full(p.shape, np.nan, np.float32) for name, p in self.params[node.id].items()},
                False, node.activation_precision, 9, 2, 1, True, WEIGHT, LOSS_SCALE,
            )
            for node in self.graph.nodes
        }  # fmt: skip

    def fed(self, node: NodeId) -> HostArray:
        """What the trainer sends."""
        return self.ids if node == "embedder" else self.targets

    def plain(self) -> tuple[float, dict[NodeId, dict[str, HostArray]]]:
        """(loss, parameter gradients), node by node, with dictionaries and no cleverness."""
        envs, values, saved, loss = self.envs(), dict[Port, Array](), {}, 0.0
        for node in self.graph.nodes:
            arguments = tuple(
                self.fed(node.id) if port is None else BACKEND.cast(values[port], node.activation_precision) for port in node.inputs
            )
            outputs, saved[node.id] = self.nodes[node.id].forward(envs[node.id], arguments)
            values |= {Port(node.id, slot): output for slot, output in enumerate(outputs)}
            loss = outputs[0] if node.id == "loss" else loss
        gradients: dict[tuple[NodeId, int], Array] = {}
        for node in reversed(self.graph.nodes):
            arriving = tuple(self.total(gradients, Port(node.id, slot)) for slot in range(len(node.output_shapes)))
            results = self.nodes[node.id].backward(envs[node.id], saved[node.id], arriving)
            gradients |= {(node.id, slot): result for slot, result in enumerate(results)}
        return loss, {name: {**env.grads} for name, env in envs.items()}

    def total(self, gradients: dict[tuple[NodeId, int], Array], port: Port) -> Array | None:
        """The sum of the gradients of everyone who reads `port`, in its maker's precision."""
        precision = self.graph.by_id[port.node].activation_precision
        terms = [BACKEND.cast(gradients[one.node, one.slot], precision) for one in self.graph.consumers.get(port, ())]
        return (terms[0] if len(terms) == 1 else BACKEND.add(terms)) if terms else None


def run_whole(bench: Bench) -> tuple[float, dict[NodeId, dict[str, HostArray]]]:
    """The same through one program."""
    (routes,) = find_routes(bench.graph, dict.fromkeys(bench.graph.by_id, A), A).segments
    program, by_name = Program(bench.graph, routes, bench.nodes), bench.envs()
    envs, tape = [by_name[node] for node in program.nodes], program.tape()
    outputs, losses = program.forward(envs, [bench.fed(entry.consumers[0].node) for entry in routes.inputs], tape)
    assert outputs == []
    assert program.backward(envs, [], tape) == []
    return losses[0], {name: {**env.grads} for name, env in by_name.items()}


RECOMPUTED = in_groups(TINY, True)


def assert_same_bits(bench: Bench) -> None:
    """The program's loss and parameter gradients are those of its nodes run one by one."""
    loss, gradients = bench.plain()
    found_loss, found = run_whole(bench)
    assert found_loss == loss
    for name, expected in gradients.items():
        for parameter, gradient in expected.items():
            np.testing.assert_array_equal(found[name][parameter], gradient, err_msg=f"{name}.{parameter}")


HALF = TINY.replace("name: tiny", "name: tiny\nprecision: fp16")
MIXED = HALF.replace("{in_dim: 8, out_dim: 16}", "{in_dim: 8, out_dim: 16, precision: fp32}")


@pytest.mark.parametrize("fuse", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("text", [TINY, MIXED, NORMED], ids=["float32", "mixed", "normed"])
def test_a_program_equals_its_nodes_one_by_one(text: str, fuse: bool) -> None:
    """Loss and every parameter gradient, bit for bit, also where neighbours differ in precision."""
    assert_same_bits(Bench(graph_of(text, fuse)))


@pytest.mark.parametrize("fuse", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("text", [RECOMPUTED, in_groups(MIXED, True)], ids=["float32", "mixed"])
def test_what_is_recomputed_has_the_same_bits(text: str, fuse: bool) -> None:
    """Loss and every parameter gradient of a program with blocks, dropout inside, equal those of the nodes one by one."""
    assert_same_bits(Bench(graph_of(text, fuse)))


def test_a_block_keeps_only_what_enters_it() -> None:
    """Between forward and backward its nodes have saved nothing; each of two groups holds the one tensor that enters it."""
    bench = Bench(graph_of(RECOMPUTED))
    (routes,) = find_routes(bench.graph, dict.fromkeys(bench.graph.by_id, A), A).segments
    program, by_name = Program(bench.graph, routes, bench.nodes), bench.envs()
    envs, tape = [by_name[node] for node in program.nodes], program.tape()
    program.forward(envs, [bench.ids, bench.targets], tape)
    grouped = [node.config.recompute for node in bench.graph.nodes]
    assert [saved is None for saved in tape.saved] == grouped
    assert [len(entered) for entered in tape.entered.values()] == [1, 1]
    (first,) = tape.entered[program.nodes.index(NodeId("in_broadcast"))]
    (second,) = tape.entered[program.nodes.index(NodeId("up"))]
    assert first[1].shape == second[1].shape == (ROWS, SEQ, 8)
    program.backward(envs, [], tape)
    assert tape.entered == {}
    assert tape.saved == [None] * len(program.nodes)


def test_a_cost_is_in_no_block() -> None:
    """Its forward adds to gradients, so it runs once, also where the file has it in a group that is recomputed."""
    text = TINY.replace(
        "tie_weight_alias: tokens, colocate_group: tokens", "tie_weight_alias: tokens, recompute: true, colocate_group: tokens"
    )
    text = text.replace("shared_weight_alias: tokens,", "shared_weight_alias: tokens, recompute: true,")
    text = text.replace("{cost_function: ce_logits", "{colocate_group: tokens, recompute: true, cost_function: ce_logits")
    bench = Bench(graph_of(text, fuse=True))
    assert bench.graph.by_id[NodeId("loss")].type == "fused_lm_head"
    assert bench.graph.by_id[NodeId("loss")].config.recompute
    loss, gradients = bench.plain()
    found_loss, found = run_whole(bench)
    assert found_loss == loss
    np.testing.assert_array_equal(found[NodeId("loss")]["weight"], gradients[NodeId("loss")]["weight"])


def test_two_programs_in_a_row_equal_one() -> None:
    """What leaves one segment enters the other, and the gradients come back."""
    bench = Bench(graph_of())
    loss, gradients = bench.plain()
    homes = {node.id: A if index < 9 else B for index, node in enumerate(bench.graph.nodes)}
    homes[NodeId("lm_head")] = B
    (here,), (there,) = (find_routes(bench.graph, homes, pnode).segments for pnode in (A, B))
    by_name = bench.envs()
    first, second = (Program(bench.graph, routes, bench.nodes) for routes in (here, there))
    envs = [[by_name[node] for node in program.nodes] for program in (first, second)]
    tapes = first.tape(), second.tape()
    outputs, _ = first.forward(envs[0], [bench.ids], tapes[0])
    assert [output.shape for output in outputs] == [(ROWS, *shape) for shape, _ in first.output_shapes]
    inputs = [outputs[0] if entry.port is not None else bench.targets for entry in there.inputs]
    _, losses = second.forward(envs[1], inputs, tapes[1])
    back = second.backward(envs[1], [], tapes[1])
    first.backward(envs[0], back, tapes[0])
    assert losses == [loss]
    for name, expected in gradients.items():
        for parameter, gradient in expected.items():
            np.testing.assert_array_equal(by_name[name].grads[parameter], gradient, err_msg=f"{name}.{parameter}")


def test_tensors_are_let_go_of_after_their_last_use() -> None:
    """Neither program nor tape keeps an activation when the backward is done."""
    bench = Bench(graph_of())
    (routes,) = find_routes(bench.graph, dict.fromkeys(bench.graph.by_id, A), A).segments
    program, by_name = Program(bench.graph, routes, bench.nodes), bench.envs()
    envs, tape = [by_name[node] for node in program.nodes], program.tape()
    program.forward(envs, [bench.ids, bench.targets], tape)
    lasting = {id(array) for array in (bench.ids, bench.targets, *(array for arrays in bench.params.values() for array in arrays.values()))}
    kept = [
        weakref.ref(array)
        for saved in tape.saved
        for array in saved or ()
        if isinstance(array, np.ndarray) and array.base is None and id(array) not in lasting
    ]
    assert len(kept) > 5
    program.backward(envs, [], tape)
    gc.collect()
    assert [reference for reference in kept if reference() is not None] == []
    assert tape.saved == [None] * len(program.nodes)


def test_an_error_names_its_node() -> None:
    """A shape that a node cannot take is noted with the node's id."""
    bench = Bench(graph_of())
    (routes,) = find_routes(bench.graph, dict.fromkeys(bench.graph.by_id, A), A).segments
    program, by_name = Program(bench.graph, routes, bench.nodes), bench.envs()
    bench.params[NodeId("down")]["weight"] = np.zeros((3, 3), np.float32)
    tape = program.tape()
    with pytest.raises(ValueError, match=r".") as caught:
        program.forward([by_name[node] for node in program.nodes], [bench.ids, bench.targets], tape)
    assert caught.value.__notes__ == ["node 'down'"]


def test_a_backward_without_its_forward_is_a_bug() -> None:
    """An empty tape raises."""
    bench = Bench(graph_of())
    (routes,) = find_routes(bench.graph, dict.fromkeys(bench.graph.by_id, A), A).segments
    program, by_name = Program(bench.graph, routes, bench.nodes), bench.envs()
    with pytest.raises(InvariantError, match="without its forward"):
        program.backward([by_name[node] for node in program.nodes], [], Tape(program.nodes))
