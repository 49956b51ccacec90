"""Text to a tree of YAML values that know their place; nothing about networks is decided here.

Rule 1: scalars are those of the YAML 1.2 core schema: `1e-4` is a number, `no` and `on` are strings. Quoted ones are always strings.
Rule 2: what a careful reader would stumble over is refused: duplicate keys, tags, several documents, keys that are not plain words.
Rule 3: size, depth and the number of values (aliases counted each time they are used) are limited, so no file can exhaust memory or stack.
Rule 4: a syntax error ends the reading, since nothing after it can be trusted; everything else is collected and reading goes on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from dcnr.errors import NetworkFileError, Problem
from dcnr.network.problems import Problems
from dcnr.network.spec import Place, Scalar

MAX_BYTES = 4 * 1024 * 1024
MAX_DEPTH = 32
MAX_VALUES = 200_000

_FORBIDDEN = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_INTEGER = re.compile(r"[-+]?[0-9]{1,18}")
_BASED = re.compile(r"0o[0-7]{1,18}|0x[0-9a-fA-F]{1,15}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]{1,40}|[0-9]{1,40}(\.[0-9]{0,40})?)([eE][-+]?[0-9]{1,4})?")
_WORDS: Mapping[str, Scalar] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INFINITE = re.compile(r"([-+]?)\.(inf|Inf|INF)|(\.nan|\.NaN|\.NAN)")


@dataclass(frozen=True, slots=True)
class Leaf:
    """One scalar; `text` is what the file says, `value` what it means."""

    text: str
    value: Scalar
    place: Place


@dataclass(frozen=True, slots=True)
class Sequence:
    """A YAML sequence."""

    items: tuple[Tree, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class Mapped:
    """A YAML mapping; `key_places` says where each key stands."""

    items: Mapping[str, Tree]
    key_places: Mapping[str, Place]
    place: Place


Tree = Leaf | Sequence | Mapped


def kind(tree: Tree) -> str:
    """The tree's kind in a user's words."""
    match tree:
        case Leaf(text, value):
            return "nothing" if value is None else f"'{text}'"
        case Sequence():
            return "a list"
        case Mapped():
            return "a mapping"


def read_tree(text: str, file: str, problems: Problems) -> Tree:
    """The single document of `text`; adds to `problems`, or raises `NetworkFileError` where there is no tree to speak of."""
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise _fatal(Place(file), f"the file is larger than {MAX_BYTES} bytes", "Write a smaller network, or split it.")
    if odd := _FORBIDDEN.search(text):
        where = _place_of_offset(text, file, odd.start())
        raise _fatal(where, f"character U+{ord(odd[0]):04X} is not allowed in YAML", "Remove it; save the file as UTF-8 text.")
    reader = _Reader(file, problems)
    try:
        return reader.document(yaml.parse(text, Loader=_LOADER))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = Place(file, mark.line + 1, mark.column + 1) if mark else Place(file)
        raise _fatal(where, f"this is not YAML: {error.problem or error.context}", "Mend the syntax here or just before.") from error


_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Only its parser is used; libyaml's is ten times as fast where the wheel has it."""


def _fatal(place: Place, message: str, remedy: str) -> NetworkFileError:
    return NetworkFileError([Problem(place.file, place.line, place.column, None, message, remedy)])


def _place_of_offset(text: str, file: str, offset: int) -> Place:
    before = text[:offset]
    return Place(file, before.count("\n") + 1, offset - (before.rfind("\n") + 1) + 1)


@dataclass(slots=True)
class _Reader:
    """Builds the tree from parse events, counting what it has built."""

    file: str
    problems: Problems
    anchors: dict[str, tuple[Tree, int, int]] = field(default_factory=dict)
    """What each anchor names, how many values it holds and how deep it is."""
    values: int = 0

    def document(self, events: Iterator[Any]) -> Tree:
        tree: Tree | None = None
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent) and tree is not None:
                raise _fatal(self._place(event), "there is a second document", "Keep one network per file; remove the '---'.")
            if isinstance(event, yaml.NodeEvent):
                tree, _ = self._tree(event, events, 1)
        if tree is None:
            raise _fatal(Place(self.file, 1, 1), "the file is empty", "Write a network: name, nodes, edges, costs.")
        return tree

    def _tree(self, event: Any, events: Iterator[Any], depth: int) -> tuple[Tree, int]:
        """The value that `event` begins, and its own depth."""
        place = self._place(event)
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event.anchor, place, depth)
        self._count(1, depth, place)
        if event.tag not in (None, "!"):
            self.problems.say(place, None, f"the tag {event.tag} is not allowed", "Remove it; put strings in quotes.")
        before = self.values - 1
        tree: Tree
        if isinstance(event, yaml.ScalarEvent):
            tree, height = Leaf(event.value, event.value if event.style else scalar(event.value), place), 1
        elif isinstance(event, yaml.SequenceStartEvent):
            tree, height = self._sequence(place, events, depth)
        else:
            tree, height = self._mapping(place, events, depth)
        if event.anchor is not None:
            self.anchors[event.anchor] = (tree, self.values - before, height)
        return tree, height

    def _alias(self, name: Any, place: Place, depth: int) -> tuple[Tree, int]:
        if name not in self.anchors:
            raise _fatal(place, f"the alias *{name} has no anchor before it", f"Write &{name} on the value it stands for, further up.")
        tree, size, height = self.anchors[name]
        self._count(size, depth + height - 1, place)
        return tree, height

    def _sequence(self, place: Place, events: Iterator[Any], depth: int) -> tuple[Tree, int]:
        items: list[Tree] = []
        height = 0
        for event in events:
            if isinstance(event, yaml.SequenceEndEvent):
                break
            item, below = self._tree(event, events, depth + 1)
            items.append(item)
            height = max(height, below)
        return Sequence(tuple(items), place), height + 1

    def _mapping(self, place: Place, events: Iterator[Any], depth: int) -> tuple[Tree, int]:
        items: dict[str, Tree] = {}
        places: dict[str, Place] = {}
        height = 0
        for event in events:
            if isinstance(event, yaml.MappingEndEvent):
                break
            key, _ = self._tree(event, events, depth + 1)
            value, below = self._tree(next(events), events, depth + 1)
            height = max(height, below)
            if not isinstance(key, Leaf):
                self.problems.say(key.place, None, f"a key is {kind(key)}", "Use a plain word as the key.")
            elif key.text in items:
                first = places[key.text].line
                self.problems.say(key.place, None, f"the key '{key.text}' stands twice (first in line {first})", "Remove one of the two.")
            else:
                items[key.text], places[key.text] = value, key.place
        return Mapped(items, places, place), height + 1

    def _count(self, values: int, depth: int, place: Place) -> None:
        self.values += values
        if depth > MAX_DEPTH:
            raise _fatal(place, f"values are nested more than {MAX_DEPTH} deep", "A network needs no such depth; check the brackets.")
        if self.values > MAX_VALUES:
            raise _fatal(place, f"the file has more than {MAX_VALUES} values, aliases expanded", "Use fewer aliases.")

    def _place(self, event: Any) -> Place:
        return Place(self.file, event.start_mark.line + 1, event.start_mark.column + 1)


def scalar(text: str) -> Scalar:
    """What a plain scalar means in YAML 1.2's core schema."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _BASED.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    if special := _INFINITE.fullmatch(text):
        return float("nan") if special[3] else float(special[1] + "inf")
    return text
