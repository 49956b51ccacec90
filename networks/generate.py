"""Writes the large networks beside this file: `python networks/generate.py`.

topology_1.yml and topology_2.yml are the production transformers, spelled out to single attention heads; shakespeare_char.yml and its
CPU size are character models without biases. What they are is in `FILES` below; README.md in this folder explains the format, with a table
of node types that is also written from here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dcnr.network.document import node_table

Config = Mapping[str, object]


@dataclass
class Draft:
    """Lines of a file as they come; an edge goes from the node before unless it says otherwise."""

    header: list[str]
    nodes: list[str] = field(default_factory=list)
    edges: list[str] = field(default_factory=list)
    count: int = 0

    def part(self, title: str) -> None:
        """A comment above what follows, among the nodes and the edges."""
        gap = [""] if self.nodes else []
        self.nodes += [*gap, f"  # {title}"]
        self.edges += [*gap, f"  # {title}"]

    def node(self, name: str, kind: str, config: Config | None = None, after: str | None = None, slot: int = 0) -> str:
        """Add a node; `after` feeds its slot 0 from its output `slot`. Returns the name."""
        keys = ", ".join(f'{key}: "{value}"' for key, value in (config or {}).items())
        self.nodes.append(f"  - {{id: {name}, type: {kind}, config: {{{keys}}}}}")
        self.count += 1
        if after is not None:
            self.edge(after, name, from_slot=slot)
        return name

    def edge(self, source: str, target: str, from_slot: int = 0, to_slot: int = 0) -> None:
        """Add an edge; slot 0 is not written."""
        slots = (f", from_slot: {from_slot}" if from_slot else "") + (f", to_slot: {to_slot}" if to_slot else "")
        self.edges.append(f"  - {{from: {source}, to: {target}{slots}}}")

    def text(self, tail: list[str]) -> str:
        """The file."""
        return "\n".join([*self.header, "", "nodes:", *self.nodes, "", "edges:", *self.edges, "", *tail, ""])


@dataclass(frozen=True)
class Topology:
    """A production transformer: pre-norm blocks with one VNode per head and a SwiGLU layer before the tied LM head."""

    layers: int
    seq: int
    vocab: int
    on_text: bool
    """Tokenizer, embedding dropout, broadcast of the logits and detokenizer as well."""
    dim: int = 512
    heads: int = 8

    def text(self) -> str:
        """The file."""
        name = f"distributed-multi-head-attention-{self.layers}l-swiglu_ffn"
        draft = Draft([
            f"# {self.layers} transformer blocks of {self.heads} heads, width {self.dim}, context {self.seq}, vocabulary {self.vocab}.",
            "# Written by generate.py: change it there.",
            f"name: {name}",
            "precision: fp16",
        ])  # fmt: skip
        here = self._front(draft)
        for index in range(self.layers):
            here = self._block(draft, f"block_{index}", here, f"transformer_block_{index}")
        logits = self._head(draft, here)
        return draft.text([
            f"outputs: [{{name: logits, node_id: {logits}, slot_id: 0}}]",
            "costs: [{name: ce_loss, node_id: loss, slot_id: 0}]",
            "metrics: [{name: head_learning_rate, type: learning_rate, node_id: lm_head, slot_id: 0}]",
        ])  # fmt: skip

    def _front(self, draft: Draft) -> str:
        draft.part("text to vectors")
        tokens = draft.node("tokenizer", "tokenizer", {"vocab_size": self.vocab, "pad_length": self.seq}) if self.on_text else None
        embedder = draft.node("embedder", "embedder", {
            "vocab_size": self.vocab, "dim": self.dim, "seq_len": self.seq, "position_encoding": "none",
            "shared_weight_alias": "token_embedding", "colocate_group": "token_embedding", "colocate_policy": "required",
            "optimizer": "adam",
        }, after=tokens)  # fmt: skip
        return draft.node("embedding_dropout", "dropout", {"rate": "0.1"}, after=embedder) if self.on_text else embedder

    def _block(self, draft: Draft, block: str, before: str, group: str) -> str:
        """22 nodes: attention and feed-forward, each with its residual."""
        draft.part(block.replace("_", " "))
        norm: Config = {"dim": self.dim, "optimizer": "adam"}
        branch = draft.node(f"{block}_in_broadcast", "broadcast", {"num_outputs": 2}, after=before)
        normed = draft.node(f"{block}_ln1", "layernorm", norm, after=branch)
        fan = draft.node(f"{block}_broadcast_to_heads", "broadcast", {"num_outputs": self.heads}, after=normed)
        head: Config = {
            "head_dim": self.dim // self.heads, "input_dim": self.dim, "seq_len": self.seq,
            "position_encoding": "rope", "rope_theta": 10000,
            "colocate_group": group, "colocate_policy": "required", "optimizer": "adam",
        }  # fmt: skip
        heads = [draft.node(f"{block}_head_{i}", "attention_head", head, after=fan, slot=i) for i in range(self.heads)]
        stack = draft.node(f"{block}_stack", "stack", {"axis": -1})
        for slot, name in enumerate(heads):
            draft.edge(name, stack, to_slot=slot)
        projected = draft.node(f"{block}_output_proj", "linear", self._branch_end(self.dim), after=stack)
        middle = self._residual(draft, f"{block}_attn_dropout", f"{block}_residual_attn", projected, branch)
        branch = draft.node(f"{block}_mid_broadcast", "broadcast", {"num_outputs": 2}, after=middle)
        normed = draft.node(f"{block}_ln2", "layernorm", norm, after=branch)
        up = draft.node(f"{block}_ffn_up", "linear", {"in_dim": self.dim, "out_dim": 4 * self.dim, "optimizer": "adam"}, after=normed)
        active = draft.node(f"{block}_gelu", "gelu", after=up)
        down = draft.node(f"{block}_ffn_down", "linear", self._branch_end(4 * self.dim), after=active)
        return self._residual(draft, f"{block}_ffn_dropout", f"{block}_residual_ffn", down, branch)

    def _residual(self, draft: Draft, dropout: str, add: str, branch_end: str, broadcast: str) -> str:
        draft.node(dropout, "dropout", {"rate": "0.1"}, after=branch_end)
        draft.node(add, "add", after=dropout)
        draft.edge(broadcast, add, from_slot=1, to_slot=1)
        return add

    def _branch_end(self, width: int) -> Config:
        """The projection that ends a residual branch starts smaller, so that depth does not blow up the sum."""
        return {"in_dim": width, "out_dim": self.dim, "init_std": _branch_std(self.layers), "optimizer": "adam"}

    def _head(self, draft: Draft, before: str) -> str:
        draft.part("vectors to logits")
        wide = 8 * self.dim
        normed = draft.node("final_ln", "layernorm", {"dim": self.dim, "optimizer": "adam"}, after=before)
        up = draft.node("head_up", "linear", {"in_dim": self.dim, "out_dim": wide, "optimizer": "adam"}, after=normed)
        gated = draft.node("head_swiglu", "swiglu", after=up)
        down = draft.node("head_down", "linear", {"in_dim": wide // 2, "out_dim": self.dim, "optimizer": "adam"}, after=gated)
        logits = draft.node("lm_head", "linear", {
            "in_dim": self.dim, "out_dim": self.vocab, "bias": "false", "tie_weight_alias": "token_embedding",
            "colocate_group": "token_embedding", "colocate_policy": "required", "optimizer": "adam",
        }, after=down)  # fmt: skip
        if self.on_text:
            fan = draft.node("logits_broadcast", "broadcast", {"num_outputs": 2}, after=logits)
            draft.node("detokenizer", "detokenizer", {"vocab_size": self.vocab}, after=fan, slot=1)
            before_loss = fan
        else:
            before_loss = logits
        draft.node("loss", "cost", {"cost_function": "ce_logits", "vocab_size": self.vocab, "cost_precision": "float32"}, after=before_loss)
        return logits


@dataclass(frozen=True)
class CharacterModel:
    """A GPT over characters: learned positions, no biases, a tied LM head."""

    name: str
    layers: int
    heads: int
    dim: int
    context: int
    dropout: float
    recompute: bool = False
    """Every block is a group that runs its forward again before its backward."""
    vocab: int = 65

    def text(self) -> str:
        """The file."""
        sizes = f"{self.layers} blocks of {self.heads} heads, width {self.dim}, context {self.context} characters, dropout {self.dropout}"
        draft = Draft([
            f"# {sizes}{'; blocks are recomputed' if self.recompute else ''}.",
            "# Written by generate.py: change it there.",
            f"name: {self.name}",
            "precision: float32",
        ])  # fmt: skip
        draft.part("characters to vectors")
        here = draft.node("embedder", "embedder", {
            "vocab_size": self.vocab, "dim": self.dim, "seq_len": self.context, "position_encoding": "learned",
            "shared_weight_alias": "characters",
        })  # fmt: skip
        here = self._dropout(draft, "embedding_dropout", here)
        for index in range(self.layers):
            here = self._block(draft, f"block_{index}", here)
        draft.part("vectors to logits")
        here = draft.node("final_ln", "layernorm", {"dim": self.dim, "bias": "false"}, after=here)
        here = draft.node("lm_head", "linear", {
            "in_dim": self.dim, "out_dim": self.vocab, "bias": "false", "tie_weight_alias": "characters",
        }, after=here)  # fmt: skip
        draft.node("loss", "cost", {"cost_function": "ce_logits", "vocab_size": self.vocab}, after=here)
        return draft.text([
            "outputs: [{name: logits, node_id: lm_head}]",
            "costs: [{name: loss, node_id: loss}]",
        ])  # fmt: skip

    def _dropout(self, draft: Draft, name: str, before: str, group: Config | None = None) -> str:
        return draft.node(name, "dropout", {"rate": self.dropout, **(group or {})}, after=before) if self.dropout else before

    def _block(self, draft: Draft, block: str, before: str) -> str:
        draft.part(block.replace("_", " "))
        std = _branch_std(self.layers)
        group: Config = {"colocate_group": block, "recompute": "true"} if self.recompute else {}
        norm: Config = {"dim": self.dim, "bias": "false", **group}
        here = draft.node(f"{block}_ln1", "layernorm", norm, after=before)
        here = draft.node(f"{block}_attention", "attention", {
            "dim": self.dim, "num_heads": self.heads, "seq_len": self.context, "position_encoding": "none", "bias": "false",
            "output_projection": "true", "output_init_std": std, **group,
        }, after=here)  # fmt: skip
        middle = draft.node(f"{block}_residual_attn", "add", group, after=self._dropout(draft, f"{block}_attn_dropout", here, group))
        draft.edge(before, middle, to_slot=1)
        here = draft.node(f"{block}_ln2", "layernorm", norm, after=middle)
        wide = 4 * self.dim
        here = draft.node(f"{block}_ffn_up", "linear", {"in_dim": self.dim, "out_dim": wide, "bias": "false", **group}, after=here)
        here = draft.node(f"{block}_gelu", "gelu", group, after=here)
        here = draft.node(f"{block}_ffn_down", "linear", {
            "in_dim": wide, "out_dim": self.dim, "bias": "false", "init_std": std, **group,
        }, after=here)  # fmt: skip
        end = draft.node(f"{block}_residual_ffn", "add", group, after=self._dropout(draft, f"{block}_ffn_dropout", here, group))
        draft.edge(middle, end, to_slot=1)
        return end


def _branch_std(layers: int) -> str:
    return f"{0.02 / math.sqrt(2 * layers):.6g}"


FILES: Mapping[str, Topology | CharacterModel] = {
    "topology_1.yml": Topology(layers=6, seq=128, vocab=10000, on_text=True),
    "topology_2.yml": Topology(layers=8, seq=512, vocab=32768, on_text=False),
    "shakespeare_char.yml": CharacterModel("shakespeare_char", layers=6, heads=6, dim=384, context=256, dropout=0.2),
    "shakespeare_char_recompute.yml": CharacterModel(
        "shakespeare_char_recompute", layers=6, heads=6, dim=384, context=256, dropout=0.2, recompute=True
    ),
    "shakespeare_char_cpu.yml": CharacterModel("shakespeare_char_cpu", layers=4, heads=4, dim=128, context=64, dropout=0.0),
}


TABLE_BEGIN, TABLE_END = "<!-- node types: written by generate.py -->\n", "<!-- end of node types -->\n"


def with_table(readme: str) -> str:
    """`readme` with the table of node types as the code has it."""
    before, rest = readme.split(TABLE_BEGIN)
    _, after = rest.split(TABLE_END)
    return f"{before}{TABLE_BEGIN}\n{node_table()}\n{TABLE_END}{after}"


def write_all(folder: Path) -> None:
    """Write every file of `FILES` into `folder`, and the table into its README.md."""
    for name, network in FILES.items():
        (folder / name).write_text(network.text(), encoding="utf-8")
    readme = folder / "README.md"
    readme.write_text(with_table(readme.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write_all(Path(__file__).parent)
