"""The table of node types. To add one: write its family file, then name it here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dcnr.nodes.activation import DROPOUT, DROPOUT_ADD, GELU, RELU, SILU, SWIGLU
from dcnr.nodes.attention import ATTENTION, ATTENTION_HEAD, FUSED_HEADS
from dcnr.nodes.cost import COST, FUSED_LM_HEAD, TIED_LM_HEAD_CE
from dcnr.nodes.embedding import EMBEDDER
from dcnr.nodes.linear import LINEAR, LINEAR_ACTIVATION
from dcnr.nodes.norm import LAYERNORM
from dcnr.nodes.residual import RESIDUAL_NORM
from dcnr.nodes.spec import NodeType
from dcnr.nodes.structure import ADD, BROADCAST, LAST_POSITION, MASK, RESHAPE, SPLIT, STACK
from dcnr.nodes.text import DETOKENIZER, TOKENIZER

_ROWS = (
    LINEAR, EMBEDDER, LAYERNORM, ATTENTION_HEAD, ATTENTION,
    RELU, GELU, SILU, SWIGLU, DROPOUT,
    BROADCAST, SPLIT, STACK, ADD, RESHAPE, MASK,
    TOKENIZER, DETOKENIZER,
    COST, TIED_LM_HEAD_CE,
    FUSED_HEADS, FUSED_LM_HEAD, LINEAR_ACTIVATION, DROPOUT_ADD, RESIDUAL_NORM, LAST_POSITION,
)  # fmt: skip

NODE_TYPES: Mapping[str, NodeType] = MappingProxyType({row.name: row for row in _ROWS})
"""By canonical name, in the order of the documentation."""

_BY_ANY_NAME: Mapping[str, NodeType] = MappingProxyType({name: row for row in _ROWS for name in (row.name, *row.aliases)})


def find_type(name_or_alias: str) -> NodeType | None:
    """The row of a name or alias in any case; None if there is none."""
    return _BY_ANY_NAME.get(name_or_alias.strip().lower())
