"""Network files for tests: a few by hand, and a strategy that draws any number of valid ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from dcnr.network.graph import Graph
from dcnr.network.load import load_graph

NETWORKS = Path(__file__).parent.parent.parent / "networks"
SHIPPED = ("mlp", "tiny", "shakespeare_char_cpu", "shakespeare_char", "shakespeare_char_recompute", "topology_1", "topology_2")

MANY = settings(deadline=None, max_examples=60)
"""Examples of a random test; a loaded machine is no failure."""

EXAMPLE = """\
name: tiny-attention
precision: fp16
nodes:
  - id: embedder
    type: embedder
    config:
      vocab_size: "10000"
      dim: "512"
      seq_len: "128"
      position_encoding: "none"
      shared_weight_alias: "token_embedding"
      colocate_group: "token_embedding"
      colocate_policy: "required"
      optimizer: "adam"
    input_shapes: [[128]]
    output_shapes: [[128, 512]]
  - {id: embedder_broadcast, type: broadcast, config: {num_outputs: "2"}}
  - {id: ln1, type: layernorm, config: {dim: "512", optimizer: "adam"}}
  - {id: broadcast_to_heads, type: broadcast, config: {num_outputs: "2"}}
  - id: head_0
    type: attention_head
    config: {head_dim: "256", input_dim: "512", seq_len: "128", position_encoding: "rope", rope_theta: "10000",
             colocate_group: "transformer_block_0", colocate_policy: "required", optimizer: "adam"}
  - id: head_1
    type: SingleHeadAttention
    config: {head_dim: "256", input_dim: "512", seq_len: "128", position_encoding: "rope", rope_theta: "10000",
             colocate_group: "transformer_block_0", colocate_policy: "required", optimizer: "adam"}
  - {id: stack, type: stack, config: {axis: "-1"}}
  - {id: output_proj, type: linear, config: {in_dim: "512", out_dim: "512", optimizer: "adam"}}
  - {id: attn_dropout, type: dropout, config: {rate: "0.1"}}
  - {id: residual_attn, type: add, config: {}}
  - id: lm_head
    type: linear
    config: {in_dim: "512", out_dim: "10000", tie_weight_alias: "token_embedding", colocate_group: "token_embedding",
             colocate_policy: "required", optimizer: "adam"}
  - {id: loss, type: cost, config: {cost_function: "ce_logits", vocab_size: "10000", cost_precision: "float32"}}
edges:
  - {from: embedder, to: embedder_broadcast}
  - {from: embedder_broadcast, from_slot: 0, to: ln1}
  - {from: embedder_broadcast, from_slot: 1, to: residual_attn, to_slot: 1}   # an add: slot 0 main branch, slot 1 residual
  - {from: ln1, to: broadcast_to_heads}
  - {from: broadcast_to_heads, from_slot: 0, to: head_0}
  - {from: broadcast_to_heads, from_slot: 1, to: head_1}
  - {from: head_0, to: stack, to_slot: 0}
  - {from: head_1, to: stack, to_slot: 1}
  - {from: stack, to: output_proj}
  - {from: output_proj, to: attn_dropout}
  - {from: attn_dropout, to: residual_attn}
  - {from: residual_attn, to: lm_head}
  - {from: lm_head, to: loss}
outputs: [{name: logits, node_id: lm_head, slot_id: 0}]
costs: [{name: ce_loss, node_id: loss, slot_id: 0}]
metrics: [{name: head_learning_rate, type: learning_rate, node_id: lm_head, slot_id: 0}]
"""
"""As users write them."""


@cache
def shipped(name: str) -> Graph:
    """A network of the `networks` folder, loaded once."""
    path = NETWORKS / f"{name}.yml"
    return load_graph(path.read_text(encoding="utf-8"), path.name)


@dataclass
class Network:
    """A file in the making. `add` returns the id, so that chains read well."""

    nodes: list[str] = field(default_factory=list)
    edges: list[str] = field(default_factory=list)
    tail: list[str] = field(default_factory=lambda: ["costs: [{name: loss, node_id: loss}]"])
    head: list[str] = field(default_factory=lambda: ["name: net"])

    def add(self, node: str, kind: str, *sources: str, **config: Any) -> str:
        """Add a node whose slots read `sources`: an id, or `id:slot`."""
        keys = ", ".join(f"{key}: {value}" for key, value in config.items())
        self.nodes.append(f"  - {{id: {node}, type: {kind}, config: {{{keys}}}}}")
        for slot, source in enumerate(sources):
            name, _, out = source.partition(":")
            self.edges.append(f"  - {{from: {name}, from_slot: {out or 0}, to: {node}, to_slot: {slot}}}")
        return node

    @property
    def text(self) -> str:
        """The file."""
        return "\n".join([*self.head, "nodes:", *self.nodes, "edges:", *self.edges, *self.tail, ""])

    def graph(self) -> Graph:
        """Loaded."""
        return load_graph(self.text, "net.yml")


def chain(*middle: tuple[str, str, dict[str, Any]], vocab: int = 11, dim: int = 8) -> Network:
    """embedder → `middle` (id, type, config) → head → loss."""
    net = Network()
    here = net.add("embedder", "embedder", vocab_size=vocab, dim=dim, seq_len=4, shared_weight_alias="tokens")
    for node, kind, config in middle:
        here = net.add(node, kind, here, **config)
    here = net.add("head", "linear", here, in_dim=dim, out_dim=vocab)
    net.add("loss", "cost", here, vocab_size=vocab)
    return net


@st.composite
def networks(draw: st.DrawFn) -> Network:
    """Valid networks: blocks of every kind with and without what passes look for."""
    net = Network()
    net.head.append(f"precision: {draw(st.sampled_from(['float32', 'fp16', 'bf16']))}")
    dim = draw(st.sampled_from([4, 8]))
    vocab = draw(st.integers(3, 9))
    source = [net.add("tokenizer", "tokenizer", pad_length=4)] if draw(st.booleans()) else []
    here = net.add("embedder", "embedder", *source, vocab_size=vocab, dim=dim, seq_len=4, shared_weight_alias="tokens")
    for index in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from([_feed_forward, _heads, _attention, _plain]))
        here = kind(draw, net, f"b{index}", here, dim)
    _end(draw, net, here, dim, vocab)
    return net


def _group(draw: st.DrawFn) -> dict[str, str]:
    group = draw(st.sampled_from([None, None, "left", "right"]))
    policy = draw(st.sampled_from(["required", "preferred"]))
    return {} if group is None else {"colocate_group": group, "colocate_policy": policy}


def _branch(draw: st.DrawFn, net: Network, block: str, here: str) -> tuple[str, str]:
    """Where a branch and its residual read."""
    if not draw(st.booleans()):
        return here, here
    fan = net.add(f"{block}_in", "broadcast", here, num_outputs=draw(st.integers(2, 3)))
    return f"{fan}:0", f"{fan}:1"


def _join(draw: st.DrawFn, net: Network, block: str, branch: str, residual: str) -> str:
    if draw(st.booleans()):
        branch = net.add(f"{block}_dropout", "dropout", branch, rate=0.25)
    ends = (branch, residual) if draw(st.booleans()) else (residual, branch)
    return net.add(f"{block}_add", "add", *ends)


def _feed_forward(draw: st.DrawFn, net: Network, block: str, here: str, dim: int) -> str:
    branch, residual = _branch(draw, net, block, here)
    normed = net.add(f"{block}_ln", "layernorm", branch, dim=dim)
    activation = draw(st.sampled_from(["relu", "gelu", "silu", "swiglu"]))
    wide = net.add(f"{block}_up", "linear", normed, in_dim=dim, out_dim=2 * dim, **_group(draw))
    active = net.add(f"{block}_act", activation, wide, **_group(draw))
    down = net.add(f"{block}_down", "linear", active, in_dim=dim if activation == "swiglu" else 2 * dim, out_dim=dim)
    return _join(draw, net, block, down, residual)


def _heads(draw: st.DrawFn, net: Network, block: str, here: str, dim: int) -> str:
    branch, residual = _branch(draw, net, block, here)
    fan = net.add(f"{block}_fan", "broadcast", branch, num_outputs=3)
    bias = [str(draw(st.booleans())).lower()] * 2 if draw(st.booleans()) else ["true", "false"]
    heads = [net.add(f"{block}_head_{i}", "attention_head", f"{fan}:{i}", input_dim=dim, head_dim=dim // 2, bias=bias[i]) for i in range(2)]
    order: Sequence[str] = heads if draw(st.booleans()) else heads[::-1]
    stack = net.add(f"{block}_stack", "stack", *order, axis=draw(st.sampled_from([-1, 1])))
    return _join(draw, net, block, stack, residual)


def _attention(draw: st.DrawFn, net: Network, block: str, here: str, dim: int) -> str:
    return net.add(f"{block}_attention", "attention", here, dim=dim, num_heads=2, output_projection="true", **_group(draw))


def _plain(draw: st.DrawFn, net: Network, block: str, here: str, dim: int) -> str:
    return net.add(f"{block}_relu", "relu", here, **_group(draw))


def _end(draw: st.DrawFn, net: Network, here: str, dim: int, vocab: int) -> None:
    tie = {"tie_weight_alias": "tokens"} if draw(st.booleans()) else {}
    if draw(st.booleans()):
        net.add("loss", "tied_lm_head_ce", here, dim=dim, vocab_size=vocab, **tie)
        return
    logits = net.add("head", "linear", here, in_dim=dim, out_dim=vocab, **tie)
    if draw(st.booleans()):
        logits = net.add("logits", "broadcast", logits, num_outputs=2)
        net.add("detokenizer", "detokenizer", "logits:1")
    net.add("loss", "cost", logits, vocab_size=vocab)
    if draw(st.booleans()):
        net.tail.append("outputs: [{name: logits, node_id: head}]")
