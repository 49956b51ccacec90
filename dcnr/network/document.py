"""The table of node types for `networks/README.md`, made from `NODE_TYPES` so that it cannot disagree with the code."""

from __future__ import annotations

from pydantic import AliasChoices
from pydantic.fields import FieldInfo

from dcnr.network.shapes import feed_of
from dcnr.nodes.registry import NODE_TYPES
from dcnr.nodes.spec import NodeConfig, NodeType


def node_table() -> str:
    """A Markdown table of every type that a file may name; keys without a default are bold."""
    rows = ["| type | config keys | what it does |", "|---|---|---|"]
    rows += [f"| {_names(row)} | {_keys(row)} | {row.summary}{_fed(row)} |" for row in NODE_TYPES.values() if not row.internal]
    return "\n".join(rows) + "\n"


def _names(row: NodeType) -> str:
    return ", ".join(f"`{name}`" for name in (row.name, *row.aliases))


def _keys(row: NodeType) -> str:
    own = {name: field for name, field in row.config.model_fields.items() if name not in NodeConfig.model_fields}
    needed_first = sorted(own.items(), key=lambda item: not item[1].is_required())
    return ", ".join(_key(name, field) for name, field in needed_first) or "–"


def _key(name: str, field: FieldInfo) -> str:
    alias = field.validation_alias
    others = [str(choice) for choice in alias.choices if choice != name] if isinstance(alias, AliasChoices) else []
    also = f" (or {', '.join(f'`{other}`' for other in others)})" if others else ""
    if field.is_required():
        return f"**`{name}`**{also}"
    return f"`{name}`{also}" if field.default is None else f"`{name}`{also} = {_shown(field.default)}"


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _fed(row: NodeType) -> str:
    fed = [f"slot {slot}" for slot in range(len(row.feeds)) if feed_of(row, slot) in ("ids", "targets")]
    return f" The trainer feeds {', '.join(fed)} unless an edge does." if fed else ""
