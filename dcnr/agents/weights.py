"""The arrays of one session on one PNode: parameters, float32 masters, moments, and gradient accumulators.

Rule 1: in and out only canonical tensors travel: `<node>.<parameter>`, moments `…:m` and `…:v`, all float32, whatever passes merged.
Rule 2: a parameter stored in 16 bit has a float32 master; the optimizer updates the master, and rounds it into what the nodes read.
Rule 3: an accumulator has one layer per row shard, [S, *shape]; at the end of a step layers are added in order.
Rule 4: a tied node reads its owner's array and has an accumulator of its own, which joins the owner's, in node order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from dcnr.backends.base import AdamStep, Array, Backend, HostArray, Trained
from dcnr.ids import NodeId
from dcnr.network.graph import Graph, GraphNode
from dcnr.nodes.base import Node, Parameter
from dcnr.nodes.initial import initial_value
from dcnr.optim.hyper import Hyper
from dcnr.optim.update import Moment, StepNumbers, moments_of, update_of

TIED = "weight"
"""The parameter that a tie shares, in its owner and in the node tied to it."""


@dataclass(slots=True, eq=False)
class Owned:
    """One parameter, and all that trains it.

    `low` is None if nodes read the master itself; `gradients` is [S, *shape], None if it never gets any.
    """

    node: GraphNode
    parameter: Parameter
    master: Array
    low: Array | None
    moments: Mapping[Moment, Array]
    gradients: Array | None
    tied: list[Array] = field(default_factory=list)
    """Accumulators of the nodes tied to it, in node order."""

    def fold(self, backend: Backend, shards: int) -> tuple[float, bool]:
        """Add up the gradients of `shards` shards: (sum of squares, all finite). Zero where there are none."""
        if self.gradients is None:
            return 0.0, True
        measured = backend.fold_shards(self.gradients[:shards])
        for tied in self.tied:
            backend.fold_shards(tied[:shards])
            backend.add_into(self.gradients[0], tied[0])
        return backend.fold_shards(self.gradients[:1]) if self.tied else measured

    def update(self, backend: Backend, hyper: Hyper, numbers: StepNumbers) -> None:
        """One optimizer step on the folded gradient."""
        if self.gradients is None:
            return
        step = update_of(hyper, self.node.config, self.parameter.decay, numbers)
        if isinstance(step, AdamStep):
            backend.adam(step, self.master, self.gradients[0], self.moments["m"], self.moments["v"], self.low)
        else:
            backend.sgd(step, self.master, self.gradients[0], self.moments.get("m"), self.low)

    def trained(self) -> Trained:
        """For a device that ends a step for all parameters at once; there is one shard."""
        return Trained(self.master, self.low, self.gradients, tuple(self.tied), self.moments.get("m"), self.moments.get("v"))

    def arrays(self) -> dict[str, Array]:
        """What a checkpoint holds of it, by the suffix of its canonical names."""
        return {"": self.master, **{f":{moment}": array for moment, array in self.moments.items()}}

    def canonical(self, suffix: str, copy: HostArray) -> dict[str, HostArray]:
        """The canonical tensors in a copy of one of its arrays."""
        return {f"{part.node}.{part.name}{suffix}": copy[part.start : part.stop] for part in self.parameter.parts}


class Weights:
    """All parameters of the hosted nodes. `learns` are the nodes that get gradients; `shards` layers are made for each."""

    def __init__(self, backend: Backend, graph: Graph, nodes: Mapping[NodeId, Node], learns: frozenset[NodeId], shards: int) -> None:
        self._backend = backend
        self._shards = shards
        self.params: dict[NodeId, dict[str, Array]] = {node: {} for node in nodes}
        """What each node reads, by parameter name."""
        self.gradients: dict[NodeId, dict[str, Array]] = {node: {} for node in nodes}
        """Each node's accumulators [S, *shape]."""
        self.owned: list[Owned] = []
        """In node order, then in the order of the node's parameters."""
        self._learns = learns
        self._members = [(graph.by_id[name], nodes[name]) for name in sorted(nodes, key=list(graph.by_id).index)]

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of each owned parameter."""
        return [math.prod(owned.parameter.shape) for owned in self.owned]

    def load(self, hyper: Hyper, seed: int, saved: Mapping[str, HostArray] | None) -> None:
        """Make every array: from `saved` canonical tensors, or from the seed."""
        for node, compute in self._members:
            for parameter in compute.parameters:
                value = initial_value(seed, parameter) if saved is None else _joined(saved, parameter, "")
                start = {
                    moment: None if saved is None else _joined(saved, parameter, f":{moment}") for moment in moments_of(hyper, node.config)
                }
                self._add(node, parameter, value, start)
        of = {(owned.node.id, owned.parameter.name): owned for owned in self.owned}
        for node, _ in self._members:
            if node.tied_to is None:
                continue
            owner = of[node.tied_to, TIED]
            self.params[node.id][TIED] = self.params[node.tied_to][TIED]
            if node.id in self._learns:
                self.gradients[node.id][TIED] = self._accumulator(owner.parameter)
                owner.tied.append(self.gradients[node.id][TIED])

    def snapshot(self) -> Callable[[], dict[str, HostArray]]:
        """Begin to copy everything that a checkpoint holds; later steps do not change what is given when it is there."""
        places = [(owned, suffix, array) for owned in self.owned for suffix, array in owned.arrays().items()]
        fetched = self._backend.fetch([array for _, _, array in places])

        def later() -> dict[str, HostArray]:
            found = zip(places, fetched.wait(), strict=True)
            return {name: part for (owned, suffix, _), copy in found for name, part in owned.canonical(suffix, copy).items()}

        return later

    def _add(self, node: GraphNode, parameter: Parameter, value: HostArray, start: Mapping[Moment, HostArray | None]) -> None:
        backend = self._backend
        master = backend.from_host(value, "float32")
        low = None if node.param_precision == "float32" else backend.from_host(value, node.param_precision)
        moments = {
            moment: backend.zeros(parameter.shape, "float32") if saved is None else backend.from_host(saved, "float32")
            for moment, saved in start.items()
        }
        gradients = self._accumulator(parameter) if node.id in self._learns else None
        self.params[node.id][parameter.name] = master if low is None else low
        if gradients is not None:
            self.gradients[node.id][parameter.name] = gradients
        self.owned.append(Owned(node, parameter, master, low, moments, gradients))

    def _accumulator(self, parameter: Parameter) -> Array:
        return self._backend.empty((self._shards, *parameter.shape), "float32")


def read_only(
    backend: Backend, graph: Graph, nodes: Mapping[NodeId, Node], saved: Mapping[str, HostArray]
) -> dict[NodeId, dict[str, Array]]:
    """What each of `nodes` reads, by parameter name, and nothing that trains it: from canonical tensors."""
    params = {
        name: {parameter.name: backend.from_host(_joined(saved, parameter, ""), graph.by_id[name].param_precision)
               for parameter in node.parameters}
        for name, node in nodes.items()
    }  # fmt: skip
    for name in nodes:
        owner = graph.by_id[name].tied_to
        if owner is not None:
            params[name][TIED] = params[owner][TIED]
    return params


def tensor_names(graph: Graph, nodes: Mapping[NodeId, Node], hyper: Hyper | None) -> list[str]:
    """The canonical tensors that `nodes` need from a checkpoint; without `hyper` the weights alone."""
    return [
        f"{part.node}.{part.name}{suffix}"
        for name, node in nodes.items()
        for parameter in node.parameters
        for part in parameter.parts
        for suffix in ("", *(f":{moment}" for moment in (moments_of(hyper, graph.by_id[name].config) if hyper else ())))
    ]


def squared_norms(measured: Iterable[tuple[Owned, tuple[float, bool]]]) -> tuple[dict[NodeId, float], bool]:
    """(sum of squares per node, all finite) of folded parameters, summed per node in the order of its parameters."""
    norms: dict[NodeId, float] = {}
    finite = True
    for owned, (squares, is_finite) in measured:
        norms[owned.node.id] = norms.get(owned.node.id, 0.0) + squares
        finite = finite and is_finite
    return norms, finite


def _joined(saved: Mapping[str, HostArray], parameter: Parameter, suffix: str) -> HostArray:
    parts = [saved[f"{part.node}.{part.name}{suffix}"] for part in parameter.parts]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)  # backends copy what they are given
