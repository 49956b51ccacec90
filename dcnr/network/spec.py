"""A network file as it was read: names, scalars and places, nothing resolved yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Scalar = str | int | float | bool | None
ConfigValue = Scalar | tuple["ConfigValue", ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a file; line and column count from 1."""

    file: str = "<memory>"
    line: int = 0
    column: int = 0


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One entry of `nodes`. Shapes have no batch dimension; None where the file leaves them out."""

    id: str
    type: str
    config: Mapping[str, ConfigValue]
    input_shapes: tuple[tuple[int, ...], ...] | None = None
    output_shapes: tuple[tuple[int, ...], ...] | None = None
    place: Place = field(default=Place(), compare=False)
    key_places: Mapping[str, Place] = field(default_factory=dict, compare=False)
    """Where each key stands, the node's own (`type`, `input_shapes`, …) and those of its config."""


@dataclass(frozen=True, slots=True)
class EdgeSpec:
    """One entry of `edges`."""

    source: str
    target: str
    from_slot: int = 0
    to_slot: int = 0
    place: Place = field(default=Place(), compare=False)
    key_places: Mapping[str, Place] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class SinkSpec:
    """One entry of `outputs`, `costs` or `metrics` (which alone has a type)."""

    name: str
    node_id: str
    slot_id: int = 0
    type: str | None = None
    place: Place = field(default=Place(), compare=False)
    key_places: Mapping[str, Place] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class NetworkSpec:
    """A whole file. `precision` and its two parts are the network's defaults."""

    name: str
    nodes: tuple[NodeSpec, ...]
    edges: tuple[EdgeSpec, ...]
    outputs: tuple[SinkSpec, ...] = ()
    costs: tuple[SinkSpec, ...] = ()
    metrics: tuple[SinkSpec, ...] = ()
    precision: str | None = None
    param_precision: str | None = None
    activation_precision: str | None = None
    wire: str | None = None
    place: Place = field(default=Place(), compare=False)
    key_places: Mapping[str, Place] = field(default_factory=dict, compare=False)
