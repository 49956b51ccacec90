"""Every node type with every option that changes its numbers, in sizes 1, 7, 33 and 127.

`tests/nodes` checks them by finite differences, and each backend runs the same ones against `numpy`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from dcnr.backends.base import Activation
from dcnr.nodes.activation import DropoutAddConfig, DropoutConfig
from dcnr.nodes.attention import AttentionHeadConfig, FusedHeadsConfig
from dcnr.nodes.base import Node, Shape
from dcnr.nodes.cost import CostConfig, FusedLmHeadConfig
from dcnr.nodes.linear import LinearActivationConfig, LinearConfig
from dcnr.nodes.norm import LayerNormConfig
from dcnr.nodes.registry import NODE_TYPES
from dcnr.nodes.residual import ResidualNormConfig
from dcnr.nodes.spec import BuildArgs, NodeConfig


@dataclass(frozen=True)
class Case:
    """One node. Shapes have no batch dimension; slots that take ids or targets say how many values there are in `ids`."""

    name: str
    type: str
    config: NodeConfig
    inputs: tuple[Shape, ...]
    ids: tuple[int | None, ...]
    """By slot: None for numbers, else the number of different ids."""
    rows: int
    tied: bool
    members: tuple[str, ...]

    @property
    def is_cost(self) -> bool:
        """Whether its output is a loss."""
        return "targets" in NODE_TYPES[self.type].feeds

    def build(self, tied: bool | None = None) -> Node:
        """The node."""
        outputs = NODE_TYPES[self.type].shapes(self.config, self.inputs)
        return NODE_TYPES[self.type].build(
            BuildArgs("node", self.config, self.inputs, outputs, self.tied if tied is None else tied, self.members)
        )


def case(
    kind: str,
    config: Mapping[str, object] | NodeConfig,
    inputs: Sequence[Shape],
    rows: int = 2,
    ids: tuple[int | None, ...] = (),
    tied: bool = False,
    members: tuple[str, ...] = ("node",),
) -> Case:
    """A case, named after what is special in it."""
    resolved = config if isinstance(config, NodeConfig) else NODE_TYPES[kind].config.model_validate(config)
    told = re.sub(r"[ '{}]", "", str(resolved.model_dump(exclude_unset=True, exclude_none=True)))
    name = f"{kind}[{told}]{'x'.join(str(shape) for shape in inputs)}*{rows}{'tied' if tied else ''}".replace(" ", "")
    return Case(name, kind, resolved, tuple(inputs), ids or (None,) * len(inputs), rows, tied, members)


LINEAR = (
    case("linear", {"in_dim": 1, "out_dim": 1}, [(1,)], rows=1),
    case("linear", {"in_dim": 33, "out_dim": 127}, [(7, 33)]),
    case("linear", {"in_dim": 127, "out_dim": 7, "bias": False}, [(33, 127)]),
    case("linear", {"in_dim": 7, "out_dim": 33}, [(7,)], rows=33),
    case("linear", {"in_dim": 7, "out_dim": 33}, [(7, 7)], tied=True),
    case("linear", {"in_dim": 7, "out_dim": 1, "bias": False}, [(3, 7)], tied=True),
    *(
        case("linear_activation", LinearActivationConfig.fuse(config, kind), [(7, 7)], members=("up", kind))
        for kind in get_args(Activation)
        for config in (LinearConfig(in_dim=7, out_dim=34), LinearConfig(in_dim=7, out_dim=34, bias=False))
    ),
)

EMBEDDING = (
    case("embedder", {"vocab_size": 33, "dim": 7, "seq_len": 7}, [(7,)], ids=(33,)),
    case("embedder", {"vocab_size": 1, "dim": 1, "seq_len": 1}, [(1,)], ids=(1,), rows=1),
    case("embedder", {"vocab_size": 7, "dim": 33, "seq_len": 127, "position_encoding": "learned"}, [(33,)], ids=(7,), rows=3),
    case("embedder", {"vocab_size": 127, "dim": 34, "seq_len": 33, "position_encoding": "rope"}, [(33,)], ids=(127,)),
    case("embedder", {"vocab_size": 7, "dim": 2, "seq_len": 7, "position_encoding": "rope", "rope_theta": 100.0}, [(5,)], ids=(7,)),
    case("embedder", {"vocab_size": 7, "dim": 3, "seq_len": 7, "position_encoding": "learned"}, [(7,)], ids=(7,), tied=True),
)

NORM = (
    case("layernorm", {"dim": 7}, [(33, 7)]),
    case("layernorm", {"dim": 33, "bias": False}, [(7, 33)]),
    case("layernorm", {"dim": 127, "eps": 1e-3}, [(127,)], rows=1),
    case("layernorm", {"dim": 127}, [(1, 127)], rows=7),
)

_PROJECTION, _PLAIN_PROJECTION = LinearConfig(in_dim=7, out_dim=33), LinearConfig(in_dim=7, out_dim=33, bias=False)
_NORM, _PLAIN_NORM = LayerNormConfig(dim=33), LayerNormConfig(dim=33, bias=False, eps=1e-3)
_DROPOUT = DropoutConfig(rate=0.3)
RESIDUAL = (
    case("residual_norm", ResidualNormConfig.fuse(_PROJECTION, _DROPOUT, _NORM), [(7, 7), (7, 33)],
         members=("down", "drop", "add", "copy", "norm")),
    case("residual_norm", ResidualNormConfig.fuse(_PLAIN_PROJECTION, None, _PLAIN_NORM), [(7, 7), (7, 33)],
         members=("down", "add", "norm")),
    case("residual_norm", ResidualNormConfig.fuse(_PROJECTION, DropoutConfig(rate=0), _NORM), [(7,), (33,)], rows=33,
         members=("down", "drop", "add", "norm")),
    case("residual_norm", ResidualNormConfig.fuse(None, _DROPOUT, _NORM), [(33,), (33,)], rows=7, members=("drop", "add", "norm")),
    case("residual_norm", ResidualNormConfig.fuse(None, None, _PLAIN_NORM), [(1, 33), (1, 33)], members=("add", "norm")),
    case("residual_norm", ResidualNormConfig.fuse(_PROJECTION, _DROPOUT, _NORM), [(7, 7), (7, 33)], tied=True,
         members=("down", "drop", "add", "norm")),
)  # fmt: skip

_HEAD = {"head_dim": 8, "input_dim": 7}
ATTENTION = (
    case("attention_head", _HEAD, [(7, 7)]),
    case("attention_head", {**_HEAD, "rope_theta": 50.0, "bias": False}, [(33, 7)]),
    case("attention_head", {**_HEAD, "position_encoding": "none"}, [(1, 7)], rows=1),
    case("attention_head", {"head_dim": 7, "input_dim": 33, "position_encoding": "none", "causal": False}, [(33, 33)]),
    case("attention_head", {"head_dim": 2, "input_dim": 1, "causal": False, "seq_len": 127}, [(127, 1)], rows=1),
    case("attention", {"dim": 8, "num_heads": 2}, [(7, 8)], rows=3),
    case("attention", {"dim": 7, "num_heads": 3, "head_dim": 4, "bias": False}, [(33, 7)]),
    case("attention", {"dim": 8, "num_heads": 2, "output_projection": True}, [(7, 8)]),
    case("attention", {"dim": 7, "num_heads": 1, "head_dim": 6, "output_projection": True, "bias": False, "causal": False}, [(7, 7)]),
    case("attention", {"dim": 33, "num_heads": 3, "position_encoding": "none", "output_projection": True}, [(5, 33)]),
    *(
        case("fused_heads", FusedHeadsConfig.fuse([AttentionHeadConfig(input_dim=7, head_dim=4, bias=bias)] * 3), [(7, 7)],
             members=("copy", "head_0", "head_1", "head_2", "stack"))
        for bias in (True, False)
    ),
)  # fmt: skip

ACTIVATION = (
    *(case(kind, {}, [shape]) for kind in ("relu", "gelu", "silu") for shape in ((1,), (7, 33), (127,))),
    *(case("swiglu", {}, [shape]) for shape in ((2,), (7, 66), (127, 14))),
    case("dropout", {"rate": 0.1}, [(7, 33)]),
    case("dropout", {"rate": 0.5}, [(127,)], rows=7),
    case("dropout", {"rate": 0}, [(7,)]),
    case("dropout_add", DropoutAddConfig.fuse(DropoutConfig(rate=0.3)), [(7, 33), (7, 33)], members=("drop", "add")),
    case("dropout_add", DropoutAddConfig.fuse(DropoutConfig(rate=0)), [(7,), (7,)], members=("drop", "add")),
)

STRUCTURE = (
    case("broadcast", {"num_outputs": 1}, [(7,)]),
    case("broadcast", {"num_outputs": 3}, [(7, 33)]),
    case("split", {"num_outputs": 3}, [(7, 33)]),
    case("split", {"sizes": [1, 5, 1], "axis": 0}, [(7, 33)]),
    case("split", {"sizes": "126 1", "axis": "-2"}, [(127, 1)]),
    case("stack", {}, [(7, 1), (7, 33)]),
    case("stack", {"axis": 0}, [(1, 7), (33, 7), (7, 7)]),
    case("stack", {"axis": -3}, [(1, 3, 7), (2, 3, 7)]),
    case("add", {}, [(7, 33), (7, 33)]),
    case("add", {}, [(127,), (127,), (127,)]),
    case("reshape", {"shape": "[-1, 11]"}, [(7, 33)]),
    case("reshape", {"shape": 33}, [(3, 11)]),
    case("mask", {"kind": "causal"}, [(7, 7)]),
    case("mask", {"kind": "causal", "fill": 0.5}, [(2, 7, 33)]),
    case("mask", {"kind": "random", "rate": 0.4}, [(7, 33)]),
    case("mask", {"kind": "random", "rate": 0}, [(7,)]),
)

_HEAD_CE = FusedLmHeadConfig.fuse(LinearConfig(in_dim=7, out_dim=33), CostConfig())
COST = (
    case("cost", {"cost_function": "mse"}, [(7, 33), (7,)], ids=(None, 33)),
    case("cost", {"cost_function": "mse"}, [(7, 33), (7, 33)]),
    case("cost", {"cost_function": "mse"}, [(7,), (7,)], rows=33),
    case("cost", {"cost_function": "ce"}, [(7, 33), (7,)], ids=(None, 33)),
    case("cost", {"cost_function": "ce_logits", "vocab_size": 127}, [(33, 127), (33,)], ids=(None, 127)),
    case("cost", {"cost_function": "ce_logits"}, [(7,), ()], ids=(None, 7), rows=7),
    case("cost", {"cost_function": "ce_logits"}, [(1, 1), (1,)], ids=(None, 1), rows=3),
    case("tied_lm_head_ce", {"dim": 7, "vocab_size": 33}, [(127, 7), (127,)], ids=(None, 33), rows=5),
    case("tied_lm_head_ce", {"dim": 1, "vocab_size": 7, "bias": True}, [(1, 1), (1,)], ids=(None, 7)),
    case("tied_lm_head_ce", {"dim": 7, "vocab_size": 33}, [(7, 7), (7,)], ids=(None, 33), tied=True),
    case("fused_lm_head", _HEAD_CE, [(7, 7), (7,)], ids=(None, 33), members=("head", "loss")),
    case("fused_lm_head", _HEAD_CE, [(33, 7), (33,)], ids=(None, 33), members=("head", "loss"), tied=True),
)

CASES = LINEAR + EMBEDDING + NORM + RESIDUAL + ATTENTION + ACTIVATION + STRUCTURE + COST
