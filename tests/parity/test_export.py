"""An exported folder says all that another program needs: PyTorch computes from it the logits that DCNR computes."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
import yaml

from dcnr.backends.load import load_backend
from dcnr.ids import SessionId
from dcnr.network.load import load_graph
from dcnr.storage.export import export_folder
from dcnr.storage.file import FileStorage
from tests.storage.exports import save_network, weights_of
from tests.tolerances import EXPORTED, worst_error

pytest.importorskip("torch")

from tests.parity.sampler import Sampler
from tests.parity.torch_export import RULES, TorchNetwork, load

NETWORKS = Path(__file__).parents[2] / "networks"
GENERATOR = runpy.run_path(str(NETWORKS / "generate.py"))
VOCABULARY, STEP = 50, 5

TOPOLOGY = GENERATOR["Topology"](layers=2, seq=16, vocab=VOCABULARY, on_text=True, dim=32, heads=4).text()
CHARACTERS = GENERATOR["CharacterModel"]("characters", layers=3, heads=4, dim=32, context=16, dropout=0.2, vocab=VOCABULARY).text()
OTHERS = """\
name: others
nodes:
  - {id: embed, type: embedding, config: {vocab_size: 50, dim: 16, seq_len: 12, position_encoding: rope,
     rope_theta: "100", shared_weight_alias: t}}
  - {id: att, type: multiheadattention, config: {dim: 16, num_heads: 2, head_dim: 6, rope_theta: 500, output_projection: "true"}}
  - {id: sum, type: residual}
  - {id: norm, type: layer_norm, config: {dim: 16, eps: "0.1", bias: false}}
  - {id: up, type: dense, config: {in_dim: 16, out_dim: 32}}
  - {id: act, type: silu}
  - {id: relu, type: relu}
  - {id: gate, type: swiglu}
  - {id: head, type: linear, config: {in_dim: 16, out_dim: 50, bias: true, tie_weight_alias: t}}
  - {id: loss, type: cost, config: {vocab_size: 50}}
edges:
  - {from: embed, to: att}
  - {from: att, to: sum}
  - {from: embed, to: sum, to_slot: "1"}
  - {from: sum, to: norm}
  - {from: norm, to: up}
  - {from: up, to: act}
  - {from: act, to: relu}
  - {from: relu, to: gate}
  - {from: gate, to: head}
  - {from: head, to: loss}
costs: [{name: loss, node_id: loss}]
"""
"""Aliases, quoted values, and what the shipped networks leave at its default: no output is declared, the tied head has a bias."""

CASES = {
    "tiny": ((NETWORKS / "tiny.yml").read_text(), "float32"),
    "topology_1": (TOPOLOGY.replace("precision: fp16", "precision: float32"), "float32"),
    "topology_1, fp16": (TOPOLOGY, "float16"),
    "shakespeare_char": (CHARACTERS, "float32"),
    "others": (OTHERS, "float32"),
}


@pytest.fixture
async def both(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[TorchNetwork, Sampler, float]:
    """A case of `CASES`: exported and loaded by PyTorch; run by us with the same weights; how far apart they may be."""
    text, precision = CASES[request.param]
    storage = FileStorage(tmp_path / "storage")
    await save_network(storage, SessionId("run"), text, STEP)
    await export_folder(storage, tmp_path, SessionId("run"), None, tmp_path / "exported")
    ours = Sampler(load_graph(text, request.param), weights_of(text, STEP), load_backend("numpy"))
    return load(tmp_path / "exported"), ours, EXPORTED[precision]


@pytest.mark.parametrize("both", CASES, indirect=True)
def test_logits_are_those_of_plain_pytorch(both: tuple[TorchNetwork, Sampler, float]) -> None:
    """Of every position of a full window, and of a short text."""
    torch_network, ours, allowed = both
    ids = np.random.default_rng(1).integers(0, VOCABULARY, torch_network.length).tolist()
    assert worst_error(torch_network.logits(ids).numpy(), ours.window_logits(ids)) <= allowed
    assert worst_error(torch_network.logits(ids[:3])[-1].numpy(), ours.logits(ids[:3])) <= allowed


@pytest.mark.parametrize("both", ["tiny", "shakespeare_char"], indirect=True)
def test_greedy_text_is_that_of_plain_pytorch(both: tuple[TorchNetwork, Sampler, float]) -> None:
    """Also beyond the window, where only its last ids count."""
    torch_network, ours, _ = both
    text = list(range(torch_network.length - 3))
    for token in torch_network.generate(text, 6):
        assert token == int(np.argmax(ours.logits(text)))
        text.append(token)


@pytest.mark.parametrize("file", sorted(path.name for path in NETWORKS.glob("*.yml")))
def test_the_reference_knows_the_types_of_every_shipped_network(file: str) -> None:
    """Text nodes and costs are not on the way to the logits."""
    types = {node["type"] for node in yaml.safe_load((NETWORKS / file).read_text())["nodes"]}
    assert types - RULES.keys() <= {"tokenizer", "detokenizer", "cost"}
