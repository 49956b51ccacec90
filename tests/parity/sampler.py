"""A network as its file says it, unfused and in one piece: runs the graph forward, node by node.

Rule 1: it is the real thing: the graph of the network file, unfused, with the checkpoint's weights, on the `numpy` backend.
Rule 2: a window always has the network's full length, so every static shape of the graph holds; attention is causal, so what pads it
on the right is never seen.

B batch rows (1), T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from dcnr.backends.base import Array, Backend
from dcnr.errors import UserError
from dcnr.network.graph import Graph, Port
from dcnr.network.instantiate import instantiate
from dcnr.nodes.base import Env, Parameter
from dcnr.passes import prepare

Weights = Mapping[str, npt.NDArray[np.float32]]


class Sampler:
    """A network with weights, ready to say what comes next."""

    def __init__(self, graph: Graph, weights: Weights, backend: Backend) -> None:
        self._backend = backend
        self._graph = prepare(graph, fuse=False)
        self._logits, self._length = _logits_port(self._graph), _length(self._graph)
        self._nodes = {node.id: instantiate(node) for node in self._graph.nodes}
        self._params: dict[str, dict[str, Array]] = {}
        for node in self._graph.nodes:
            own = {p.name: backend.from_host(_stored(p, weights), node.param_precision) for p in self._nodes[node.id].parameters}
            tied = {"weight": self._params[node.tied_to]["weight"]} if node.tied_to else {}
            self._params[node.id] = own | tied

    def logits(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """[V] of the token that follows `ids` (the last of them, if they are more than a window)."""
        window = ids[-self._length :]
        logits_TV = self.window_logits(window)
        return np.asarray(logits_TV[len(window) - 1])

    def window_logits(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """[T, V] of the token that follows each position of the window that `ids` begin."""
        ids_BT = np.zeros((1, self._length), np.int64)
        ids_BT[0, : len(ids)] = ids
        values: dict[Port, Array] = {}
        for node in self._graph.nodes:
            if self._logits in values:
                break
            inputs = tuple(self._backend.from_host(ids_BT) if port is None else values[port] for port in node.inputs)
            env = Env.reading(self._backend, self._params[node.id], node.activation_precision)
            outputs, _ = self._nodes[node.id].forward(env, inputs)
            values.update((Port(node.id, slot), output) for slot, output in enumerate(outputs))
        return np.asarray(self._backend.to_host(values[self._logits])[0], np.float32)


def _stored(parameter: Parameter, weights: Weights) -> npt.NDArray[np.float32]:
    return np.concatenate([weights[f"{part.node}.{part.name}"] for part in parameter.parts]).reshape(parameter.shape)


def _logits_port(graph: Graph) -> Port:
    """What the first cost reads, if that is a plain cost."""
    for sink in graph.costs:
        node = graph.by_id[sink.port.node]
        if node.type == "cost" and node.inputs[0] is not None:
            return node.inputs[0]
    raise UserError(f"network '{graph.name}' has no cost over logits, so it cannot write text", "use one with an lm_head and a cost")


def _length(graph: Graph) -> int:
    fed = next((node for node in graph.nodes if node.inputs == (None,)), None)
    if fed is None:
        raise UserError(f"network '{graph.name}' reads no token ids", "use one with an embedder")
    return fed.input_shapes[0][0]
