"""The declared outputs of a checkpoint, computed in this process: one forward, node by node, without dropout.

What a node gives does not depend on where it is placed, so nobody needs a cluster to see it; but the network must fit this machine.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from dcnr.agents.weights import read_only, tensor_names
from dcnr.backends.base import Array, Backend, HostArray
from dcnr.errors import UserError
from dcnr.ids import NodeId
from dcnr.network.graph import Graph, GraphNode, Port
from dcnr.network.instantiate import instantiate
from dcnr.network.shapes import feed_of
from dcnr.nodes.base import Env
from dcnr.nodes.registry import NODE_TYPES


class Outputs:
    """Of `graph`, as `outputs_graph` gives it, on one backend. First `load`, then `of`."""

    def __init__(self, backend: Backend, graph: Graph) -> None:
        self._backend = backend
        self._graph = graph
        self._nodes = {node.id: instantiate(node) for node in graph.nodes}
        self._params: Mapping[NodeId, Mapping[str, Array]] = {}
        last = {port: node.id for node in graph.nodes for port in node.inputs if port is not None}
        wanted = {sink.port for sink in graph.outputs}
        self._done = {node.id: [port for port, reader in last.items() if reader == node.id and port not in wanted] for node in graph.nodes}
        """By node: the tensors that nobody needs after it."""

    @property
    def names(self) -> list[str]:
        """The tensors that it needs of a checkpoint."""
        return tensor_names(self._graph, self._nodes, None)

    @property
    def seq_len(self) -> int:
        """How many ids a row has."""
        return next(shape[0] for node in self._graph.nodes for slot, shape in enumerate(node.input_shapes) if _reads_ids(node, slot))

    def load(self, saved: Mapping[str, HostArray]) -> None:
        """Take the weights of a checkpoint."""
        self._params = read_only(self._backend, self._graph, self._nodes, saved)

    def of(self, ids_BT: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[np.float32]]:
        """Every output by its name, rows first. Raises `UserError` for an id that the network does not know."""
        there: dict[Port, Array] = {}
        for node in self._graph.nodes:
            inputs = tuple(self._input(node, slot, there, ids_BT) for slot in range(len(node.inputs)))
            env = Env.reading(self._backend, self._params[node.id], node.activation_precision)
            outputs, _ = self._nodes[node.id].forward(env, inputs)
            there |= {Port(node.id, slot): output for slot, output in enumerate(outputs)}
            for port in self._done[node.id]:
                del there[port]
        return {sink.name: np.array(self._backend.to_host(there[sink.port]), np.float32) for sink in self._graph.outputs}

    def _input(self, node: GraphNode, slot: int, there: Mapping[Port, Array], ids_BT: npt.NDArray[np.int64]) -> Array:
        port = node.inputs[slot]
        if port is not None:
            differs = self._graph.by_id[port.node].activation_precision != node.activation_precision
            return self._backend.cast(there[port], node.activation_precision) if differs else there[port]
        known = getattr(node.config, "vocab_size", None)
        if known is not None and ids_BT.max() >= known:
            raise UserError(f"id {ids_BT.max()} is not in the vocabulary of node '{node.id}' ({known})", "use the dataset of the session")
        return self._backend.from_host(ids_BT)


def _reads_ids(node: GraphNode, slot: int) -> bool:
    return node.inputs[slot] is None and feed_of(NODE_TYPES[node.type], slot) == "ids"
