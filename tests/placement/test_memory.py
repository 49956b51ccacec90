"""What nodes hold between forward and backward, counted as their tapes hold it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from dcnr.agents.program import Program, Tape
from dcnr.agents.routing import find_routes
from dcnr.backends.base import HostArray
from dcnr.ids import NodeId
from dcnr.passes import prepare
from dcnr.placement.memory import Held, held, most_again, recomputed_with
from tests.agents.test_program import HALF, MIXED, ROWS, Bench
from tests.agents.tiny import SEQ, TINY, A, graph_of, in_groups
from tests.network.files import Network, chain, shipped

LOG_SUM_EXP = ROWS * SEQ * 4
"""Bytes of a head that the numpy backend, which computes the softmax again, does not hold."""


def bytes_of(arrays: Iterable[object]) -> int:
    """Of the memory behind them, each piece once."""
    bases: dict[int, HostArray] = {}
    for array in arrays:
        if isinstance(array, np.ndarray):
            base = array
            while isinstance(base.base, np.ndarray):
                base = base.base
            bases[id(base)] = base
    return sum(base.nbytes for base in bases.values())


def on_tape(tape: Tape) -> int:
    """Bytes that a tape holds."""
    saved = (array for kept in tape.saved for array in kept or ())
    return bytes_of([*saved, *(array for entered in tape.entered.values() for _, array in entered)])


def forward(bench: Bench) -> Tape:
    """Through the whole graph."""
    (routes,) = find_routes(bench.graph, dict.fromkeys(bench.graph.by_id, A), A).segments
    program, by_name = Program(bench.graph, routes, bench.nodes), bench.envs()
    tape = program.tape()
    program.forward([by_name[node] for node in program.nodes], [bench.fed(entry.consumers[0].node) for entry in routes.inputs], tape)
    return tape


@pytest.mark.parametrize("fuse", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("text", [TINY, HALF, MIXED], ids=["float32", "half", "mixed"])
def test_the_sum_over_nodes_is_what_a_tape_holds(text: str, recompute: bool, fuse: bool) -> None:
    """To the byte, also where neighbours differ in precision; only log-sum-exps are a GPU's."""
    bench = Bench(graph_of(in_groups(text, recompute), fuse))
    kept = sum(one.kept for one in held(bench.graph, ROWS).values())
    heads = 0 if recompute else 2
    assert kept == on_tape(forward(bench)) + heads * LOG_SUM_EXP


def test_a_tensor_that_two_nodes_hold_counts_at_the_first_of_each_place() -> None:
    """Two linear layers read one broadcast: on one PNode the second holds nothing, on two each holds it."""
    net = chain(("fan", "broadcast", {"num_outputs": 2}), ("one", "linear", {"in_dim": 8, "out_dim": 8}))
    net.add("two", "linear", in_dim=8, out_dim=8)
    net.add("sum", "add")
    net.edges = [edge for edge in net.edges if "to: head" not in edge]
    net.edges += [
        "  - {from: fan, from_slot: 1, to: two}", "  - {from: one, to: sum}", "  - {from: two, to: sum, to_slot: 1}",
        "  - {from: sum, to: head}",
    ]  # fmt: skip
    graph = prepare(net.graph(), fuse=False)
    together, apart = held(graph, 1), held(graph, 1, lambda node: node.id)
    assert (together[NodeId("one")].kept, together[NodeId("two")].kept) == (4 * 8 * 4, 0)
    assert (apart[NodeId("one")].kept, apart[NodeId("two")].kept) == (4 * 8 * 4, 4 * 8 * 4)


def test_a_group_that_runs_again_keeps_what_enters_and_holds_the_rest_for_a_while() -> None:
    """What is there while both groups run again, one after the other, is what they keep without `recompute`; the larger one counts."""
    kept, again = (held(graph_of(in_groups(TINY, recompute)), ROWS) for recompute in (False, True))
    graph = graph_of(in_groups(TINY, True))
    grouped = [node.id for node in graph.nodes if recomputed_with(node) is not None]
    entering = ROWS * SEQ * 8 * 4
    assert sum(again[node].kept for node in grouped) == 2 * entering
    # What enters the two groups is also among what their first nodes hold.
    assert sum(again[node].again for node in grouped) + 2 * entering == sum(kept[node].kept for node in grouped)
    sizes = {group: sum(again[node.id].again for node in graph.nodes if recomputed_with(node) == group) for group in ("first", "second")}
    assert most_again(graph, {node: one.again for node, one in again.items()}) == max(sizes.values()) > 0
    assert most_again(graph, {}) == 0


def test_costs_are_never_recomputed() -> None:
    """A head with its cost keeps its gradient, whatever its group says."""
    net = Network()
    net.add("embedder", "embedder", vocab_size=9, dim=4, seq_len=3, recompute=True, colocate_group="g")
    net.add("loss", "tied_lm_head_ce", "embedder", dim=4, vocab_size=9, recompute=True, colocate_group="g")
    graph = net.graph()
    assert [recomputed_with(node) for node in graph.nodes] == ["g", None]
    assert held(graph, 2)[NodeId("loss")] == Held(2 * 3 * 4 * 4)


def test_a_block_of_topology_2_by_hand() -> None:
    """16 tensors of [128, 512, 512] in 16 bit: input of attention, q, k, v, o, a sum; input of the feed-forward, the four times as wide
    input and output of its activation, a sum. And three mebibytes of numbers per row."""
    found = held(prepare(shipped("topology_2"), fuse=True), 128)
    assert sum(found[NodeId(f"block_1_{name}")].kept for name in ("stack", "ln2", "gelu", "ln1")) >> 20 == 16 * 64 + 3
