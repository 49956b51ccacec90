"""Pieces of a sequence on a real GPU give what the whole of it gives: slices of positions, caches as they are stored, the last position."""

from __future__ import annotations

import runpy

import numpy as np
import pytest

from dcnr.backends.base import Backend, HostArray
from tests.agents.readings import Relay, deploy_to_generate, graph_to_generate
from tests.agents.tiny import A, B, alternate, spread
from tests.network.files import NETWORKS

pytestmark = pytest.mark.gpu

LENGTH, VOCABULARY = 32, 50
GENERATOR = runpy.run_path(str(NETWORKS / "generate.py"))
NETWORK = {
    "heads, rope": GENERATOR["Topology"](layers=2, seq=LENGTH, vocab=VOCABULARY, on_text=False, dim=64, heads=4).text(),
    "attention, learned": GENERATOR["CharacterModel"](
        "characters", layers=2, heads=4, dim=64, context=LENGTH, dropout=0.1, vocab=VOCABULARY
    ).text(),
}
ALLOWED = {"float32": 1e-3, "fp16": 0.05, "bf16": 0.2}
"""Mean error over positions, relative to the largest logit."""


def logits_of(backend: Backend, text: str, pnodes: int, caches: bool) -> list[HostArray]:
    """After a prompt of five ids, and after each id that follows."""
    graph = graph_to_generate(text, True)
    homes = spread(graph, (A,)) if pnodes == 1 else alternate(graph, (A, B))
    relay = Relay(deploy_to_generate(homes, text, True), backend, text)
    ids = np.random.default_rng(2).integers(0, VOCABULARY, LENGTH).tolist()
    if not caches:
        return [relay.feed(ids[:length], 0, attempt=length, caches=False) for length in range(5, LENGTH + 1)]
    return [relay.feed(ids[:5], 0), *(relay.feed(ids[position : position + 1], position) for position in range(5, LENGTH))]


@pytest.mark.parametrize("precision", ["float32", "fp16", "bf16"])
@pytest.mark.parametrize("network", NETWORK)
def test_a_gpu_says_with_a_cache_and_without_what_the_definition_says(gpu: Backend, numpy: Backend, network: str, precision: str) -> None:
    """In one piece and cut up between two PNodes."""
    text = NETWORK[network].replace("precision: fp16", "precision: float32").replace("precision: float32", f"precision: {precision}", 1)
    wanted = np.array(logits_of(numpy, text, 1, caches=False), np.float64)
    for pnodes, caches in ((1, True), (2, True), (1, False)):
        found = np.array(logits_of(gpu, text, pnodes, caches), np.float64)
        worst = np.abs(found - wanted).max(axis=1) / np.abs(wanted).max(axis=1)
        assert worst.mean() <= ALLOWED[precision], (pnodes, caches)
