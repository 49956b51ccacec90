"""Rules of a network file that concern several nodes at once: ties, groups, one vocabulary, sinks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dcnr.errors import InvariantError
from dcnr.ids import NodeId
from dcnr.network.graph import GraphNode, Port
from dcnr.network.instantiate import instantiate
from dcnr.network.problems import Problems, nearest
from dcnr.network.shapes import NodeShapes, is_cost, show, show_slots
from dcnr.network.spec import NetworkSpec, NodeSpec, Place, SinkSpec
from dcnr.nodes.base import Parameter, Shape
from dcnr.nodes.spec import NodeConfig, NodeType

METRIC_TYPES = ("learning_rate",)


@dataclass(slots=True)
class Draft:
    """A node of the file on its way into the graph."""

    spec: NodeSpec
    type: NodeType
    config: NodeConfig
    joined: dict[int, Port] = field(default_factory=dict)
    """Input slots that a right edge serves."""
    inputs: tuple[Port | None, ...] = ()
    shapes: NodeShapes | None = None
    sound: bool = True
    """False where its inputs are known to be wrong, and have been reported."""

    @property
    def id(self) -> NodeId:
        return NodeId(self.spec.id)

    @property
    def known_shapes(self) -> NodeShapes:
        """Its shapes, where nothing was wrong."""
        if self.shapes is None:
            raise InvariantError(f"node '{self.id}' has no shapes, and nobody said why")
        return self.shapes


def check_ties(drafts: Sequence[Draft], problems: Problems) -> None:
    """Every alias that is tied to has one owner, and a weight of the same shape."""
    owners: dict[str, list[Draft]] = defaultdict(list)
    for draft in drafts:
        if draft.config.shared_weight_alias is not None:
            owners[draft.config.shared_weight_alias].append(draft)
    for alias, sharing in owners.items():
        for extra in sharing[1:]:
            message = f"the alias '{alias}' is already shared by '{sharing[0].id}'"
            problems.say(_at(extra, "shared_weight_alias"), extra.id, message, "Let one node own it; give the others tie_weight_alias.")
    for draft in drafts:
        wanted = draft.config.tie_weight_alias
        if wanted is None:
            continue
        if wanted not in owners:
            remedy = nearest(wanted, owners, "aliases") if owners else f"Give the owner shared_weight_alias: {wanted}."
            problems.say(_at(draft, "tie_weight_alias"), draft.id, f"no node shares its weight as '{wanted}'", remedy)
        else:
            _check_tie(draft, owners[wanted][0], problems)


def _check_tie(tied: Draft, owner: Draft, problems: Problems) -> None:
    place = _at(tied, "tie_weight_alias")
    if owner.config.tie_weight_alias is not None:
        message = f"'{owner.id}' shares a weight that is itself tied"
        problems.say(place, tied.id, message, "Tie to the node that owns the weight.")
        return
    if tied.shapes is None or owner.shapes is None:
        return
    mine, theirs = _weight_shape(tied), _weight_shape(owner)
    for draft, shape in ((tied, mine), (owner, theirs)):
        if shape is None:
            problems.say(place, tied.id, f"'{draft.id}' ({draft.type.name}) has no weight that could be tied", "Remove the alias.")
    if mine is not None and theirs is not None and mine != theirs:
        message = f"its weight is {show(mine)}, but that of '{owner.id}' is {show(theirs)}"
        problems.say(place, tied.id, message, "Tied weights need the same vocabulary and width.")


def _weight_shape(draft: Draft) -> Shape | None:
    return next((parameter.shape for parameter in _parameters(draft) if parameter.name == "weight"), None)


def _parameters(draft: Draft) -> tuple[Parameter, ...]:
    """As if the node owned them all."""
    return instantiate(GraphNode(draft.id, draft.type.name, draft.config, draft.inputs, *draft.known_shapes)).parameters


def check_groups(drafts: Sequence[Draft], problems: Problems) -> None:
    """`recompute` is said of a whole `colocate_group`: every node of it says the same."""
    first_of: dict[str, Draft] = {}
    for draft in drafts:
        group, recompute = draft.config.colocate_group, draft.config.recompute
        if group is None:
            if recompute:
                message = "recompute is said of a group, and it has none"
                problems.say(_at(draft, "recompute"), draft.id, message, "Give it, and its neighbours, a colocate_group.")
            continue
        first = first_of.setdefault(group, draft)
        if first.config.recompute != recompute:
            message = f"recompute is {_word(recompute)}, but at '{first.id}' of colocate_group '{group}' it is {_word(not recompute)}"
            problems.say(_at(draft, "recompute"), draft.id, message, "Say the same at every node of the group.")


def _word(value: bool) -> str:
    return "true" if value else "false"


def check_vocabulary(drafts: Sequence[Draft], problems: Problems) -> None:
    """Ids and targets come from one data set, so embedders and costs must agree on its vocabulary."""
    first: tuple[Draft, int] | None = None
    for draft in drafts:
        size = _vocabulary(draft)
        if size is None:
            continue
        if first is None:
            first = (draft, size)
        elif size != first[1]:
            message = f"its vocabulary is {size}, but that of '{first[0].id}' is {first[1]}"
            problems.say(_at(draft, "vocab_size"), draft.id, message, "Give embedder, head and cost the same vocabulary.")


def _vocabulary(draft: Draft) -> int | None:
    """Of a node that ids or targets of the data set enter; None for others."""
    stated = getattr(draft.config, "vocab_size", None)
    if not any(draft.type.feeds):
        return None
    if isinstance(stated, int):
        return stated
    if is_cost(draft.type) and draft.shapes is not None and draft.inputs[1:] == (None,):
        return draft.shapes.inputs[0][-1]
    return None


def check_reach(drafts: Sequence[Draft], problems: Problems) -> None:
    """Every node with parameters leads to a cost: otherwise it would never learn, most likely for want of an edge."""
    reached = {draft.id for draft in drafts if is_cost(draft.type)}
    for draft in reversed(drafts):
        if draft.id in reached:
            reached.update(port.node for port in draft.joined.values())
    for draft in drafts:
        if draft.id not in reached and _parameters(draft):
            problems.say(draft.spec.place, draft.id, "it leads to no cost, so it would never learn", "Connect it, or remove it.")


def check_sinks(spec: NetworkSpec, drafts: Mapping[NodeId, Draft], known: set[str], problems: Problems) -> None:
    """Outputs, costs and metrics name what exists; costs are exactly the cost nodes, at least one."""
    for what, sinks in (("outputs", spec.outputs), ("costs", spec.costs), ("metrics", spec.metrics)):
        names: set[str] = set()
        for sink in sinks:
            if sink.name in names:
                problems.say(_place(sink, "name"), None, f"'{sink.name}' stands twice in {what}", "Give each entry its own name.")
            names.add(sink.name)
            _check_sink(what, sink, drafts, known, problems)
    listed = {sink.node_id for sink in spec.costs}
    costs = [draft for draft in drafts.values() if is_cost(draft.type)]
    if not costs and len(drafts) == len(known) and known:
        problems.say(spec.place, None, "the network has no cost node, so there is nothing to train for", "Add a node of type cost.")
    for draft in costs:
        if draft.id not in listed:
            remedy = f"Add {{name: {draft.id}, node_id: {draft.id}}} to costs."
            problems.say(draft.spec.place, draft.id, "this cost node is not listed under costs", remedy)


def _check_sink(what: str, sink: SinkSpec, drafts: Mapping[NodeId, Draft], known: set[str], problems: Problems) -> None:
    if sink.node_id not in known:
        problems.say(
            _place(sink, "node_id"), None, f"{what} names '{sink.node_id}', which is no node", nearest(sink.node_id, known, "nodes")
        )
        return
    if what == "metrics" and sink.type is not None and sink.type not in METRIC_TYPES:
        remedy = nearest(sink.type, METRIC_TYPES, "metric types")
        problems.say(_place(sink, "type"), None, f"unknown metric type '{sink.type}'", remedy)
    draft = drafts.get(NodeId(sink.node_id))
    if draft is None:
        return
    if what == "costs" and not is_cost(draft.type):
        problems.say(_place(sink, "node_id"), draft.id, f"it is listed under costs but is a {draft.type.name}", "Name a node of type cost.")
    slots = draft.type.outputs(draft.config)
    if sink.slot_id >= slots:
        message = f"there is no output slot {sink.slot_id}; it has {show_slots(slots)}"
        problems.say(_place(sink, "slot_id"), draft.id, message, "Correct slot_id.")


def _at(draft: Draft, key: str) -> Place:
    return draft.spec.key_places.get(key, draft.spec.place)


def _place(sink: SinkSpec, key: str) -> Place:
    return sink.key_places.get(key, sink.place)
