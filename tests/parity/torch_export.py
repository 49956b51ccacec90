"""An exported folder as a person loads it in PyTorch: reads `network.yml` and `model.safetensors` with the libraries of these formats,
shares no line with DCNR, and computes logits in float32.

    network = load(Path("run1-model"))
    network.logits([5, 9, 2])            # [3, V]
    network.generate([5, 9, 2], 20)      # 20 ids, the likeliest each time

B batch rows, T positions, V vocabulary, H heads, D width of a head.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

Config = Mapping[str, Any]
Parameters = Mapping[str, Tensor]
"""Of one node, by name."""
Rule = Callable[[Parameters, Config, Sequence[Tensor]], tuple[Tensor, ...]]
"""Outputs of a node."""


def load(folder: Path) -> TorchNetwork:
    """The network in `folder`."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        tied = json.loads(file.metadata()["tied"])
    weights = load_file(folder / "model.safetensors")
    weights |= {name: weights[owner] for name, owner in tied.items()}
    return TorchNetwork(yaml.safe_load((folder / "network.yml").read_text(encoding="utf-8")), weights)


@dataclass(frozen=True, slots=True)
class TorchNetwork:
    """The mapping of a network file, and a tensor for each `<node>.<parameter>`."""

    file: Mapping[str, Any]
    weights: Mapping[str, Tensor]

    @property
    def length(self) -> int:
        """Positions of the longest text that it reads."""
        return min(int(node["config"]["seq_len"]) for node in self.file["nodes"] if node["type"].lower() in ("embedder", "embedding"))

    def logits(self, ids: Sequence[int]) -> Tensor:
        """[T, V] of the token that follows each position of `ids`."""
        node, slot = self._logits_port()
        with torch.no_grad():
            return self._outputs(node, torch.tensor([ids]), {})[slot][0]

    def generate(self, ids: Sequence[int], count: int) -> list[int]:
        """`count` ids that follow `ids`: each time the likeliest, the smaller of equal ones, after the last `length` ids."""
        text = list(ids)
        for _ in range(count):
            text.append(int(self.logits(text[-self.length :])[-1].argmax()))
        return text[len(ids) :]

    def _logits_port(self) -> tuple[str, int]:
        """The output of that name, or what the first cost reads."""
        for output in self.file.get("outputs") or ():
            if output["name"] == "logits":
                return str(output["node_id"]), int(output.get("slot_id", 0))
        return self._sources(str(self.file["costs"][0]["node_id"]))[0]

    def _sources(self, node: str) -> list[tuple[str, int]]:
        """What enters each slot of a node."""
        edges = [edge for edge in self.file["edges"] if str(edge["to"]) == node]
        edges.sort(key=lambda edge: int(edge.get("to_slot", 0)))
        return [(str(edge["from"]), int(edge.get("from_slot", 0))) for edge in edges]

    def _outputs(self, name: str, ids_BT: Tensor, known: dict[str, tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        if name not in known:
            node = next(node for node in self.file["nodes"] if str(node["id"]) == name)
            own = {key.removeprefix(f"{name}."): value for key, value in self.weights.items() if key.startswith(f"{name}.")}
            kind, config = node["type"].lower(), node.get("config") or {}
            if kind in ("embedder", "embedding"):
                inputs = [ids_BT]
            else:
                inputs = [self._outputs(source, ids_BT, known)[slot] for source, slot in self._sources(name)]
            known[name] = RULES[kind](own, config, inputs)
        return known[name]


def word(config: Config, key: str, default: str) -> str:
    """A value as text; files may quote what is no string."""
    return str(config.get(key, default)).lower()


def rotate(x: Tensor, theta: float) -> Tensor:
    """Rotary positions: neighbours in the last axis are one complex number each, turned by its position."""
    length, width = x.shape[-2:]
    angle = torch.outer(torch.arange(length).double(), theta ** (-torch.arange(0, width, 2).double() / width))
    pairs = torch.view_as_complex(x.double().reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2).float()


def linear(p: Parameters, config: Config, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """x w^T + b."""
    return (F.linear(inputs[0], p["weight"], p.get("bias")),)


def embedder(p: Parameters, config: Config, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Rows of the table, plus those of the positions, or turned by them."""
    x = F.embedding(inputs[0], p["weight"])
    if "position_weight" in p:
        x = x + p["position_weight"][: x.shape[1]]
    return (rotate(x, float(config.get("rope_theta", 10000))) if word(config, "position_encoding", "none") == "rope" else x,)


def layernorm(p: Parameters, config: Config, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Over the last axis."""
    x = inputs[0]
    return (F.layer_norm(x, x.shape[-1:], p["weight"], p.get("bias"), float(config.get("eps", 1e-5))),)


def by_head(x_BTF: Tensor, heads: int) -> Tensor:
    """[B, T, H * D] → [B, H, T, D]."""
    return x_BTF.reshape(*x_BTF.shape[:2], heads, -1).transpose(1, 2)


def attention(p: Parameters, config: Config, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Heads side by side in the rows of q, k and v; a single head is the same with one."""
    heads = int(config.get("num_heads", 1))
    q, k, v = (by_head(F.linear(inputs[0], p[f"{name}_weight"], p.get(f"{name}_bias")), heads) for name in ("q", "k", "v"))
    if word(config, "position_encoding", "rope") == "rope":
        theta = float(config.get("rope_theta", 10000))
        q, k = rotate(q, theta), rotate(k, theta)
    o = F.scaled_dot_product_attention(q, k, v, is_causal=word(config, "causal", "true") == "true").transpose(1, 2).flatten(-2)
    return (F.linear(o, p["out_weight"], p.get("out_bias")) if "out_weight" in p else o,)


def swiglu(p: Parameters, config: Config, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """value * silu(gate)."""
    value, gate = inputs[0].chunk(2, dim=-1)
    return (value * F.silu(gate),)


def axis_of(config: Config) -> int:
    """An axis of the file counts without the batch."""
    axis = int(config.get("axis", -1))
    return axis if axis < 0 else axis + 1


RULES: Mapping[str, Rule] = {
    "linear": linear,
    "dense": linear,
    "embedder": embedder,
    "embedding": embedder,
    "layernorm": layernorm,
    "layer_norm": layernorm,
    "attention": attention,
    "multiheadattention": attention,
    "attention_head": attention,
    "singleheadattention": attention,
    "relu": lambda p, config, inputs: (F.relu(inputs[0]),),
    "gelu": lambda p, config, inputs: (F.gelu(inputs[0]),),
    "silu": lambda p, config, inputs: (F.silu(inputs[0]),),
    "swiglu": swiglu,
    "dropout": lambda p, config, inputs: (inputs[0],),
    "broadcast": lambda p, config, inputs: (inputs[0],) * int(config["num_outputs"]),
    "stack": lambda p, config, inputs: (torch.cat(list(inputs), axis_of(config)),),
    "add": lambda p, config, inputs: (torch.stack(list(inputs)).sum(0),),
    "residual": lambda p, config, inputs: (torch.stack(list(inputs)).sum(0),),
}
"""Every type that the shipped networks lead to their logits through."""
