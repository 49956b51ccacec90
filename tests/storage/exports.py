"""A checkpoint of a network that really loads, for tests of what is exported and imported."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dcnr.ids import Epoch, PNodeId, SessionId
from dcnr.network.load import load_graph
from dcnr.passes import prepare
from dcnr.storage.base import Storage
from dcnr.storage.checkpoint import Manifest, part_key, write_manifest, write_part
from dcnr.storage.export import shapes_of
from dcnr.storage.tensors import Float32Array
from tests.storage.manifests import manifest_of

SMALL = """\
name: small  # a comment that stays
nodes:
  - {id: embed, type: embedder, config: {vocab_size: 8, dim: 4, seq_len: 6, position_encoding: learned, shared_weight_alias: tokens}}
  - {id: up, type: linear, config: {in_dim: 4, out_dim: 4, optimizer: sgd}}
  - {id: act, type: relu}
  - {id: head, type: linear, config: {in_dim: 4, out_dim: 8, tie_weight_alias: tokens}}
  - {id: loss, type: cost, config: {cost_function: ce_logits, vocab_size: 8}}
edges:
  - {from: embed, to: up}
  - {from: up, to: act}
  - {from: act, to: head}
  - {from: head, to: loss}
costs: [{name: loss, node_id: loss}]
"""


def weights_of(text: str, seed: int = 0) -> dict[str, Float32Array]:
    """Random ones for every parameter of a network file, of a size at which nothing saturates: gains near one, matrices by their width."""
    generator = np.random.Generator(np.random.Philox(seed))
    found: dict[str, Float32Array] = {}
    for name, shape in shapes_of(prepare(load_graph(text, "network.yml"), fuse=False)).items():
        value = generator.standard_normal(shape, np.float32)
        if len(shape) > 1:
            found[name] = value / np.float32(np.sqrt(shape[-1]))
        else:
            found[name] = np.float32(name.endswith(".weight")) + value / np.float32(10)
    return found


async def save_network(storage: Storage, session: SessionId, text: str, step: int = 5, dataset: str = "books") -> Manifest:
    """A checkpoint of the network file `text`, all of it in one part, with moments that are not zero."""
    weights = weights_of(text, step)
    moments = {f"{name}:{moment}": value + 1 for name, value in weights.items() for moment in "mv"}
    part = await write_part(storage, part_key(session, step, PNodeId("p"), Epoch(1)), weights | moments)
    manifest = replace(manifest_of(session, step, 1, [part]), network=load_graph(text, "n").name, network_file=text, dataset=dataset)
    manifest = replace(manifest, hyper={"optimizer": "adamw", "lr": 0.01, "momentum": 0.0})
    await write_manifest(storage, manifest)
    return manifest
