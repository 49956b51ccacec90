"""From what a file says to what it means: types, configs, connections, order and shapes, every one of them checked.

What a node's own trouble makes unknowable (its shapes, its slots) is not reported a second time at its neighbours.
Rules that concern several nodes at once (ties, vocabulary, sinks) are in `agree`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from pydantic import AliasChoices, ValidationError

from dcnr.ids import ID_RULE, NetworkId, NodeId, is_id
from dcnr.network.agree import Draft, check_groups, check_reach, check_sinks, check_ties, check_vocabulary
from dcnr.network.graph import Graph, GraphNode, Port, Sink, Wire, sort_ids
from dcnr.network.problems import Problems, nearest
from dcnr.network.shapes import feed_of, is_cost, node_shapes, show, show_slots
from dcnr.network.spec import EdgeSpec, NetworkSpec, NodeSpec, Place, SinkSpec
from dcnr.nodes.base import Shape
from dcnr.nodes.registry import NODE_TYPES, find_type
from dcnr.nodes.spec import NodeConfig, NodeType, ShapeError, StorePrecision, store_precision
from dcnr.optim.hyper import OptimizerName

RESERVED = "trainer"
"""`Hop.source` of what the trainer feeds."""

MAX_SLOTS = 1024

WIRES: tuple[Wire, ...] = get_args(Wire)

PRECISION_KEYS = ("precision", "param_precision", "activation_precision")


def resolve(spec: NetworkSpec, problems: Problems) -> Graph:
    """The graph of `spec`. Raises `NetworkFileError` with `problems`, to which it adds what it finds."""
    resolver = _Resolver(spec, problems)
    resolver.check_network()
    resolver.draft_nodes()
    resolver.connect()
    order = resolver.order()
    resolver.infer_shapes(order)
    drafts = [resolver.drafts[name] for name in order]
    check_ties(drafts, problems)
    check_groups(drafts, problems)
    check_vocabulary(drafts, problems)
    check_sinks(spec, resolver.drafts, resolver.known, problems)
    if not problems.found:  # any other trouble may be what cuts a node off
        check_reach(drafts, problems)
    problems.raise_if_any()
    return _graph(spec, drafts)


@dataclass(slots=True)
class _Resolver:
    spec: NetworkSpec
    problems: Problems
    drafts: dict[NodeId, Draft] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)
    """Every id of the file, also of nodes that have no draft because something is wrong with them."""

    def check_network(self) -> None:
        """The network's name, default precisions and wire."""
        spec = self.spec
        if spec.name and not is_id(spec.name):
            self.problems.say(_at(spec, "name"), None, f"'{spec.name}' is not a network name", f"Use {ID_RULE}.")
        for key in PRECISION_KEYS:
            self._check_precision(getattr(spec, key), _at(spec, key), None, key)
        if spec.wire is not None and spec.wire not in WIRES:
            self.problems.say(_at(spec, "wire"), None, f"unknown wire '{spec.wire}'", f"Use {', '.join(WIRES[:-1])} or {WIRES[-1]}.")
        if not spec.nodes and spec.name:
            self.problems.say(spec.place, None, "the network has no nodes", "List them under nodes:.")

    def draft_nodes(self) -> None:
        """One draft per node whose type and config are right."""
        for node in self.spec.nodes:
            if node.id in self.known:
                self.problems.say(_at(node, "id"), node.id, "the id is taken by an earlier node", "Give each node its own id.")
                continue
            self.known.add(node.id)
            if not is_id(node.id):
                self.problems.say(_at(node, "id"), node.id, "this is not a node id", f"Use {ID_RULE}.")
            elif node.id == RESERVED:
                self.problems.say(_at(node, "id"), node.id, "this id is reserved for the trainer", "Choose another one.")
            node_type = self._type(node)
            config = self._config(node, node_type) if node_type is not None else None
            if node_type is not None and config is not None:
                self.drafts[NodeId(node.id)] = Draft(node, node_type, config)

    def _type(self, node: NodeSpec) -> NodeType | None:
        found = find_type(node.type)
        if found is not None and not found.internal:
            return found
        if found is not None:
            message = f"the type '{found.name}' is only made by fusion"
            self.problems.say(_at(node, "type"), node.id, message, "Write the nodes that it stands for.")
        elif node.type:
            names = [name for row in NODE_TYPES.values() if not row.internal for name in (row.name, *row.aliases)]
            self.problems.say(_at(node, "type"), node.id, f"unknown type '{node.type}'", nearest(node.type, names, "types"))
        return None

    def _config(self, node: NodeSpec, node_type: NodeType) -> NodeConfig | None:
        try:
            config = node_type.config.model_validate(dict(node.config))
        except ValidationError as error:
            for found in error.errors(include_url=False):
                self._say_config(node, node_type, found)
            return None
        if node_type.outputs(config) > MAX_SLOTS:
            self.problems.say(node.place, node.id, f"it has more than {MAX_SLOTS} outputs", "Use fewer.")
            return None
        for key in PRECISION_KEYS:
            self._check_precision(getattr(config, key), _at(node, key), node.id, key)
        if config.optimizer is not None and config.optimizer.lower() not in get_args(OptimizerName):
            remedy = nearest(config.optimizer, get_args(OptimizerName), "optimizers")
            self.problems.say(_at(node, "optimizer"), node.id, f"unknown optimizer '{config.optimizer}'", remedy)
        return config

    def _say_config(self, node: NodeSpec, node_type: NodeType, error: Any) -> None:
        key = str(error["loc"][0]) if error["loc"] else ""
        place = _at(node, key)
        match error["type"]:
            case "extra_forbidden":
                message = f"unknown config key '{key}' for type '{node_type.name}'"
                remedy = nearest(key, config_keys(node_type.config), "keys")
            case "missing":
                message, remedy = f"config key '{key}' is missing", f"Add {key}: … to the config."
            case _ if key:
                message, remedy = f"config key '{key}' is {error['input']!r}: {_clause(error['msg'])}", f"Mend the value of {key}."
            case _:
                message, remedy = _clause(error["msg"]), "Mend the config."
        self.problems.say(place, node.id, message, remedy)

    def _check_precision(self, text: str | None, place: Place, node: str | None, key: str) -> None:
        if text is None:
            return
        try:
            store_precision(text)
        except ValueError:
            self.problems.say(place, node, f"unknown {key} '{text}'", "Use float32, float16 or bfloat16.")

    # -- edges ------------------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Give every draft its inputs."""
        served: dict[tuple[str, int], EdgeSpec] = {}
        for edge in self.spec.edges:
            ends = [self._end(edge, edge.source, "from"), self._end(edge, edge.target, "to")]
            first = served.setdefault((edge.target, edge.to_slot), edge)
            if first is not edge and edge.target in self.known:
                message = f"input slot {edge.to_slot} of '{edge.target}' is already served in line {first.place.line}"
                self.problems.say(edge.place, edge.target, message, "Remove one of the two edges, or use another to_slot.")
            elif all(ends):
                self._join(edge)
        named: dict[str, set[int]] = defaultdict(set)
        for target, slot in served:
            named[target].add(slot)
        for draft in self.drafts.values():
            self._fill(draft, named[draft.id])

    def _end(self, edge: EdgeSpec, name: str, key: str) -> bool:
        if name not in self.known:
            self.problems.say(_at(edge, key), None, f"an edge goes {key} '{name}', which is no node", nearest(name, self.known, "nodes"))
        return name in self.drafts

    def _join(self, edge: EdgeSpec) -> None:
        source, target = self.drafts[NodeId(edge.source)], self.drafts[NodeId(edge.target)]
        outputs = source.type.outputs(source.config)
        inputs = target.type.inputs(target.config)
        right = True
        if is_cost(source.type):
            self.problems.say(_at(edge, "from"), source.id, "a cost is the end of the graph; no edge may leave it", "Remove the edge.")
            right = False
        elif edge.from_slot >= outputs:
            message = f"there is no output slot {edge.from_slot}; it has {show_slots(outputs)}"
            self.problems.say(_at(edge, "from_slot"), source.id, message, "Correct from_slot.")
            right = False
        if edge.to_slot >= (MAX_SLOTS if inputs is None else inputs):
            message = f"there is no input slot {edge.to_slot}; it has {show_slots(MAX_SLOTS if inputs is None else inputs)}"
            self.problems.say(_at(edge, "to_slot"), target.id, message, "Correct to_slot.")
            right = False
        if right:
            target.joined[edge.to_slot] = Port(source.id, edge.from_slot)

    def _fill(self, draft: Draft, served: set[int]) -> None:
        """Lay out the input slots; `served` are those that an edge names, be it a wrong one."""
        count = draft.type.inputs(draft.config)
        if count is None:
            count = max((slot + 1 for slot in served if slot < MAX_SLOTS), default=0)
            if count < 2:
                message = f"it needs at least two inputs and has {count}"
                self.problems.say(draft.spec.place, draft.id, message, "Add edges to its slots 0, 1, ….")
                draft.sound = False
        missing = [slot for slot in range(count) if slot not in served and feed_of(draft.type, slot) is None]
        if missing:
            message = f"nothing is connected to input slot {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else "")
            remedy = f"Add an edge {{from: …, to: {draft.id}, to_slot: {missing[0]}}}."
            self.problems.say(draft.spec.place, draft.id, message, remedy)
        draft.inputs = tuple(draft.joined.get(slot) for slot in range(count))
        draft.sound &= not missing and served <= draft.joined.keys()

    # -- order and shapes -------------------------------------------------------------------------------------------------

    def order(self) -> list[NodeId]:
        """Ids with sources first; every cycle is reported, and its nodes left out."""
        sources = {draft.id: {port.node for port in draft.joined.values()} for draft in self.drafts.values()}
        while True:
            order, stuck = sort_ids(sources)
            if not stuck:
                return order
            cycle = _find_cycle(sources, stuck)
            path = " → ".join([*cycle, cycle[0]])
            place = self.drafts[cycle[0]].spec.place
            self.problems.say(place, cycle[0], f"the edges form a cycle: {path}", "Remove one of its edges; data must flow one way.")
            for name in cycle:
                self.drafts[name].sound = False
                del sources[name]

    def infer_shapes(self, order: Sequence[NodeId]) -> None:
        """Give every draft its shapes, where those of its inputs are known."""
        for name in order:
            draft = self.drafts[name]
            inputs = tuple(self._incoming(port) for port in draft.inputs)
            if not draft.sound or any(shape is None and port is not None for shape, port in zip(inputs, draft.inputs, strict=True)):
                continue
            try:
                draft.shapes = node_shapes(draft.type, draft.config, inputs)
            except ShapeError as error:
                self.problems.say(draft.spec.place, draft.id, f"{_clause(str(error))}{_brought(draft, inputs)}", "Make the two ends agree.")
                continue
            self._compare(draft, "input_shapes", draft.spec.input_shapes, draft.shapes.inputs)
            self._compare(draft, "output_shapes", draft.spec.output_shapes, draft.shapes.outputs)

    def _incoming(self, port: Port | None) -> Shape | None:
        if port is None:
            return None
        shapes = self.drafts[port.node].shapes
        return shapes.outputs[port.slot] if shapes is not None else None

    def _compare(self, draft: Draft, key: str, declared: tuple[Shape, ...] | None, found: tuple[Shape, ...]) -> None:
        place = _at(draft.spec, key)
        for slot, shape in enumerate(declared or ()):
            if slot >= len(found):
                self.problems.say(
                    place, draft.id, f"{key} lists {len(declared or ())} slots; it has {show_slots(len(found))}", f"Correct {key}."
                )
                return
            if shape != found[slot]:
                port = draft.inputs[slot] if key == "input_shapes" else None
                by = f" ('{port.node}' brings it)" if port is not None else ""
                message = f"{key} says {show(shape)} for slot {slot}, but it is {show(found[slot])}{by}"
                self.problems.say(place, draft.id, message, f"Correct {key} or the config.")


def config_keys(config: type[NodeConfig]) -> set[str]:
    """Every key that a config understands, aliases of keys too."""
    aliases = (field.validation_alias for field in config.model_fields.values())
    return set(config.model_fields) | {str(name) for alias in aliases if isinstance(alias, AliasChoices) for name in alias.choices}


def _graph(spec: NetworkSpec, drafts: Sequence[Draft]) -> Graph:
    param = _default(spec.param_precision or spec.precision)
    activation = _default(spec.activation_precision or spec.precision)
    nodes = tuple(
        GraphNode(draft.id, draft.type.name, draft.config, draft.inputs, *draft.known_shapes, param, activation, (draft.id,))
        for draft in drafts
    )
    wire: Wire = next((known for known in WIRES if known == spec.wire), "native")
    return Graph(NetworkId(spec.name), nodes, _sinks(spec.outputs), _sinks(spec.costs), _sinks(spec.metrics), wire)


def _default(text: str | None) -> StorePrecision:
    return store_precision(text) if text is not None else "float32"


def _sinks(specs: Sequence[SinkSpec]) -> tuple[Sink, ...]:
    return tuple(Sink(spec.name, Port(NodeId(spec.node_id), spec.slot_id), spec.type) for spec in specs)


def _find_cycle(sources: Mapping[NodeId, set[NodeId]], stuck: Sequence[NodeId]) -> list[NodeId]:
    """One cycle, in the direction of its edges, beginning with the node that stands first in the file.

    Every stuck node has a stuck source, so walking from source to source must come back.
    """
    position = {name: index for index, name in enumerate(stuck)}
    visited: dict[NodeId, int] = {}
    here = stuck[0]
    while here not in visited:
        visited[here] = len(visited)
        here = min(sources[here] & position.keys(), key=position.__getitem__)
    cycle = list(visited)[visited[here] :][::-1]
    start = cycle.index(min(cycle, key=position.__getitem__))
    return cycle[start:] + cycle[:start]


def _at(spec: NetworkSpec | NodeSpec | EdgeSpec, key: str) -> Place:
    return spec.key_places.get(key, spec.place)


def _clause(sentence: str) -> str:
    text = sentence.removeprefix("Value error, ").rstrip(".")
    return text[:1].lower() + text[1:]


def _brought(draft: Draft, inputs: Sequence[Shape | None]) -> str:
    parts = [f"{show(shape)} from '{port.node}'" for port, shape in zip(draft.inputs, inputs, strict=True) if port and shape is not None]
    return f" (it gets {', '.join(parts)})" if parts else ""
