"""A network file, read strictly: text to `NetworkSpec`, and on to a checked `Graph`.

Rule 1: every problem of a file is reported at once, in the order of its lines, each with its place, its node and what to do.
Rule 2: a key that is not known is an error that names the nearest known one.
Rule 3: numbers may be written as strings, ids may look like numbers; nothing else is converted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dcnr.errors import InvariantError
from dcnr.network.graph import Graph
from dcnr.network.problems import Problems, nearest
from dcnr.network.resolve import resolve
from dcnr.network.spec import ConfigValue, EdgeSpec, NetworkSpec, NodeSpec, SinkSpec
from dcnr.network.yaml_tree import Leaf, Mapped, Sequence, Tree, kind, read_tree

NETWORK_KEYS = (
    "name", "precision", "param_precision", "activation_precision", "wire", "nodes", "edges", "outputs", "costs", "metrics",
)  # fmt: skip
NODE_KEYS = ("id", "type", "config", "input_shapes", "output_shapes")
EDGE_KEYS = ("from", "to", "from_slot", "to_slot")
SINK_KEYS = ("name", "node_id", "slot_id")
METRIC_KEYS = ("name", "type", "node_id", "slot_id")

_SLOT = re.compile(r"[0-9]{1,6}")


def read_spec(text: str, file: str) -> NetworkSpec:
    """What `text` says, nothing resolved. Raises `NetworkFileError` with everything that is wrong with its form."""
    problems = Problems()
    spec = _read(text, file, problems)
    problems.raise_if_any()
    return spec


def load_graph(text: str, file: str) -> Graph:
    """The checked graph of `text`. Raises `NetworkFileError` with everything that is wrong with it."""
    problems = Problems()
    return resolve(_read(text, file, problems), problems)


def _read(text: str, file: str, problems: Problems) -> NetworkSpec:
    return _Reader(problems).network(read_tree(text, file, problems))


@dataclass(slots=True)
class _Reader:
    """Takes the tree apart. A value of the wrong kind is reported, then treated as if it were not there."""

    problems: Problems

    def network(self, tree: Tree) -> NetworkSpec:
        top = self._mapping(tree, NETWORK_KEYS, "a network", None)
        if top is None:
            return NetworkSpec("", (), (), place=tree.place)
        return NetworkSpec(
            name=self._text(top, "name", None, required=True) or "",
            nodes=tuple(node for item in self._list(top, "nodes", None) if (node := self._node(item)) is not None),
            edges=tuple(edge for item in self._list(top, "edges", None) if (edge := self._edge(item)) is not None),
            outputs=self._sinks(top, "outputs", SINK_KEYS),
            costs=self._sinks(top, "costs", SINK_KEYS),
            metrics=self._sinks(top, "metrics", METRIC_KEYS),
            precision=self._text(top, "precision", None),
            param_precision=self._text(top, "param_precision", None),
            activation_precision=self._text(top, "activation_precision", None),
            wire=self._text(top, "wire", None),
            place=top.place,
            key_places=top.key_places,
        )

    def _node(self, tree: Tree) -> NodeSpec | None:
        entry = self._mapping(tree, NODE_KEYS, "a node", None)
        if entry is None:
            return None
        name = self._text(entry, "id", None, required=True)
        if name is None:
            return None
        config = self._config(entry.items.get("config"), name)
        return NodeSpec(
            id=name,
            type=self._text(entry, "type", name, required=True) or "",
            config={key: _plain(value) for key, value in config.items.items()} if config else {},
            input_shapes=self._shapes(entry, "input_shapes", name),
            output_shapes=self._shapes(entry, "output_shapes", name),
            place=entry.place,
            key_places={**entry.key_places, **(config.key_places if config else {})},
        )

    def _config(self, tree: Tree | None, node: str) -> Mapped | None:
        if tree is None or (isinstance(tree, Leaf) and tree.value is None):
            return None
        if not isinstance(tree, Mapped):
            self.problems.say(tree.place, node, f"config is {kind(tree)}", "Write it as a mapping: config: {key: value}.")
            return None
        nested = {key: value for key, value in tree.items.items() if not _is_config_value(value)}
        for key, value in nested.items():
            self.problems.say(value.place, node, f"config key '{key}' holds a mapping", "Use a scalar or a list of scalars.")
        return Mapped({k: v for k, v in tree.items.items() if k not in nested}, tree.key_places, tree.place)

    def _edge(self, tree: Tree) -> EdgeSpec | None:
        entry = self._mapping(tree, EDGE_KEYS, "an edge", None)
        if entry is None:
            return None
        source, target = self._text(entry, "from", None, required=True), self._text(entry, "to", None, required=True)
        from_slot, to_slot = self._slot(entry, "from_slot"), self._slot(entry, "to_slot")
        if source is None or target is None or from_slot is None or to_slot is None:
            return None
        return EdgeSpec(source, target, from_slot, to_slot, entry.place, entry.key_places)

    def _sinks(self, top: Mapped, key: str, known: tuple[str, ...]) -> tuple[SinkSpec, ...]:
        found = []
        for item in self._list(top, key, None):
            entry = self._mapping(item, known, f"an entry of '{key}'", None)
            if entry is None:
                continue
            name, node = self._text(entry, "name", None, required=True), self._text(entry, "node_id", None, required=True)
            of_type = self._text(entry, "type", None, required=True) if "type" in known else None
            slot = self._slot(entry, "slot_id")
            if name is not None and node is not None and slot is not None:
                found.append(SinkSpec(name, node, slot, of_type, entry.place, entry.key_places))
        return tuple(found)

    # -- values -------------------------------------------------------------------------------------------------------

    def _mapping(self, tree: Tree, known: tuple[str, ...], what: str, node: str | None) -> Mapped | None:
        if not isinstance(tree, Mapped):
            self.problems.say(tree.place, node, f"{kind(tree)} stands where {what} should", f"Write it with the keys {', '.join(known)}.")
            return None
        said = tree.items.get("id") if "id" in known else None
        node = said.text if isinstance(said, Leaf) else node
        for key in tree.items:
            if key not in known:
                self.problems.say(tree.key_places[key], node, f"unknown key '{key}' in {what}", nearest(key, known, "keys"))
        return tree

    def _list(self, entry: Mapped, key: str, node: str | None) -> tuple[Tree, ...]:
        tree = entry.items.get(key)
        if tree is None or (isinstance(tree, Leaf) and tree.value is None):
            return ()
        if not isinstance(tree, Sequence):
            self.problems.say(tree.place, node, f"'{key}' is {kind(tree)}, not a list", f"Write {key}: [ … ].")
            return ()
        return tree.items

    def _text(self, entry: Mapped, key: str, node: str | None, required: bool = False) -> str | None:
        tree = entry.items.get(key)
        if tree is None:
            if required:
                self.problems.say(entry.place, node, f"the key '{key}' is missing", f"Add {key}: … here.")
            return None
        if not isinstance(tree, Leaf) or tree.value is None:
            self.problems.say(tree.place, node, f"'{key}' is {kind(tree)}, not a word", f"Write {key}: as one word.")
            return None
        return tree.text

    def _slot(self, entry: Mapped, key: str) -> int | None:
        tree = entry.items.get(key)
        if tree is None:
            return 0
        if not isinstance(tree, Leaf) or not _SLOT.fullmatch(tree.text):
            self.problems.say(tree.place, None, f"'{key}' is {kind(tree)}, not a slot number", "Use 0, 1, 2, …")
            return None
        return int(tree.text)

    def _shapes(self, entry: Mapped, key: str, node: str) -> tuple[tuple[int, ...], ...] | None:
        tree = entry.items.get(key)
        if tree is None or (isinstance(tree, Leaf) and tree.value is None):
            return None
        shapes = _shapes_of(tree)
        if shapes is None:
            self.problems.say(
                tree.place, node, f"'{key}' is not a list of shapes", "Write one list of whole numbers per slot: [[128, 512]]."
            )
        return shapes


def _shapes_of(tree: Tree) -> tuple[tuple[int, ...], ...] | None:
    if not isinstance(tree, Sequence):
        return None
    shapes = []
    for shape in tree.items:
        if not isinstance(shape, Sequence):
            return None
        texts = [extent.text for extent in shape.items if isinstance(extent, Leaf)]
        if len(texts) != len(shape.items) or not all(re.fullmatch(r"[1-9][0-9]{0,11}", text) for text in texts):
            return None
        shapes.append(tuple(int(text) for text in texts))
    return tuple(shapes)


def _is_config_value(tree: Tree) -> bool:
    match tree:
        case Leaf():
            return True
        case Sequence(items):
            return all(_is_config_value(item) for item in items)
        case Mapped():
            return False


def _plain(tree: Tree) -> ConfigValue:
    match tree:
        case Leaf(_, value):
            return value
        case Sequence(items):
            return tuple(_plain(item) for item in items)
        case Mapped():
            raise InvariantError("a mapping among config values")
