"""The arithmetic of generation: pieces of a sequence give what the whole of it gives, wherever its VNodes are."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest

from dcnr.backends.load import load_backend
from dcnr.errors import InvariantError
from dcnr.ids import NodeId, PNodeId
from dcnr.network.graph import Graph
from tests.agents.readings import Relay, deploy_to_generate, graph_to_generate
from tests.agents.tiny import NORMED, TINY, A, B, C, alternate, spread
from tests.network.files import NETWORKS

LEARNED = TINY.replace("position_encoding: none", "position_encoding: learned")
TOPOLOGY = runpy.run_path(str(NETWORKS / "generate.py"))["Topology"](layers=4, seq=16, vocab=50, on_text=False, dim=64, heads=4).text()
IDS = [3, 14, 15, 9, 2]
Place = Callable[[Graph, Sequence[PNodeId]], Mapping[NodeId, PNodeId]]


@pytest.mark.parametrize("backend", ["numpy", "cpu"])
@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("text", [TINY, NORMED, LEARNED], ids=["tiny", "normed", "learned"])
@pytest.mark.parametrize(
    ("place", "pnodes"), [(spread, (A,)), (spread, (A, B, C)), (alternate, (A, B))], ids=["one", "three", "many borders"]
)
def test_pieces_give_what_the_whole_gives(place: Place, pnodes: Sequence[PNodeId], text: str, fuse: bool, backend: str) -> None:
    """With a cache, id by id after the first two, and without one; another sequence goes its own way in another slot."""
    relay = Relay(deploy_to_generate(place(graph_to_generate(text, fuse), pnodes), text, fuse), load_backend(backend), text)
    whole = [relay.feed(IDS[: length + 1], 0, attempt=length, caches=False) for length in range(5)]
    found = {1: relay.feed(IDS[:2], 0, attempt=9)}
    for position in (2, 3, 4):
        relay.feed(IDS[::-1][:3], 0, attempt=position, slot=1)
        found[position] = relay.feed(IDS[position : position + 1], position, attempt=9)
    for position, logits in found.items():
        np.testing.assert_allclose(logits, whole[position], rtol=1e-4, atol=1e-5)
    assert len({tuple(np.round(logits, 3)) for logits in whole}) == 5


@pytest.mark.parametrize("backend", ["numpy", "cpu"])
def test_a_cache_rounds_nothing_that_is_not_rounded_without_one(backend: str) -> None:
    """Turned keys, and values with their bias, in half precision: texts would soon differ. What is left is the order of sums."""
    text = TOPOLOGY.replace("precision: fp16", "precision: bf16")
    relay = Relay(deploy_to_generate(dict.fromkeys(graph_to_generate(text, True).by_id, A), text, True), load_backend(backend), text)
    ids = np.random.default_rng(2).integers(0, 50, 16).tolist()
    worst = []
    for position in range(16):
        with_cache = relay.feed(ids[position : position + 1], position, attempt=99).astype(np.float64)
        without = relay.feed(ids[: position + 1], 0, attempt=position, caches=False, slot=1).astype(np.float64)
        worst.append(np.abs(with_cache - without).max() / np.abs(without).max())
    assert np.mean(worst) < 0.03, worst


def test_a_token_costs_one_position() -> None:
    """In every segment of every PNode."""
    relay = Relay(deploy_to_generate(alternate(graph_to_generate(), (A, B))), load_backend("numpy"))
    relay.feed(IDS[:3], 0)
    relay.read.clear()
    relay.feed(IDS[3:4], 3)
    assert relay.read
    assert {tensor.shape[1] for job in relay.read for tensor in job.inputs} == {1}


def test_without_a_checkpoint_there_is_nothing_to_read() -> None:
    """The seed is for training."""
    relay = Relay(deploy_to_generate(dict.fromkeys(graph_to_generate().by_id, A)), load_backend("numpy"))
    with pytest.raises(InvariantError):
        relay.forwards[A].load(None)
