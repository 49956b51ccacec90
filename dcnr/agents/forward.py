"""The arithmetic of one deployment that generates: pieces of sequences run forward through the programs of its segments.

Rule 1: what attention keeps of a sequence is per slot, of a whole window, made when the slot is first used, and written over ever after.
Rule 2: nothing here knows attempts: pieces run in the order in which they are given, and a piece reads what stands before its position.
Rule 3: as in `execution`, nothing waits for a device: what goes through host memory is given as a `Later`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dcnr.agents.commands import Read
from dcnr.agents.ending import Later
from dcnr.agents.events import Handoff
from dcnr.agents.plan import Plan
from dcnr.agents.program import Program
from dcnr.agents.routing import Remote
from dcnr.agents.weights import read_only
from dcnr.backends.base import Array, Backend, HostArray, Precision
from dcnr.errors import InvariantError
from dcnr.ids import NodeId
from dcnr.nodes.base import Env
from dcnr.nodes.registry import NODE_TYPES


class _Segment(NamedTuple):
    program: Program
    envs: list[Env]
    """One per node."""


class Forward:
    """Everything of one (session, epoch) that generates and that the compute thread needs."""

    def __init__(self, backend: Backend, plan: Plan) -> None:
        self._backend = backend
        self._plan = plan
        self._segments: dict[int, _Segment] = {}
        self._caches: dict[tuple[int, NodeId], Array] = {}
        """By slot and node."""

    def load(self, saved: Mapping[str, HostArray] | None) -> None:
        """Make the arrays of a checkpoint, and compile the segments."""
        if saved is None:
            raise InvariantError("a deployment that generates has no checkpoint")
        params = read_only(self._backend, self._plan.graph, self._plan.nodes, saved)
        for routes in self._plan.routes.segments:
            program = Program(self._plan.graph, routes, self._plan.nodes)
            precisions = [self._plan.graph.by_id[node].activation_precision for node in routes.nodes]
            envs = [Env.reading(self._backend, params[node], each) for node, each in zip(routes.nodes, precisions, strict=True)]
            self._segments[routes.index] = _Segment(program, envs)

    def read(self, job: Read) -> Later[tuple[Handoff, ...]]:
        """One piece goes through one segment: its external outputs."""
        program, envs = self._segments[job.segment]
        for node, env in zip(program.nodes, envs, strict=True):
            env.position = job.position
            env.cache = self._cache(job.slot, node) if job.caches else None
        entries = zip(job.inputs, program.routes.inputs, strict=True)
        inputs = [self._on_device(tensor) if entry.from_host else tensor for tensor, entry in entries]
        outputs, _ = program.evaluate(envs, inputs)
        return self._handed(program, outputs)

    def _cache(self, slot: int, node: NodeId) -> Array | None:
        """Every row is written before it is read."""
        if (slot, node) not in self._caches:
            known = self._plan.graph.by_id[node]
            shape = NODE_TYPES[known.type].cache(known.config, known.input_shapes)
            precision: Precision = "float32" if self._backend.wide_caches else known.activation_precision
            self._caches[slot, node] = None if shape is None else self._backend.empty((1, *shape), precision)
        return self._caches[slot, node]

    def _on_device(self, tensor: Array) -> Array:
        return self._backend.from_host(tensor) if isinstance(tensor, np.ndarray) else tensor

    def _handed(self, program: Program, outputs: Sequence[Array]) -> Later[tuple[Handoff, ...]]:
        travels = [any(self._is_far(to) for to in output.remote) for output in program.routes.outputs]
        wanted = [tensor for tensor, leaves in zip(outputs, travels, strict=True) if leaves]
        hosts = self._hosts(wanted)

        def later() -> tuple[Handoff, ...]:
            there = iter(hosts())
            return tuple(Handoff(tensor, next(there) if leaves else None) for tensor, leaves in zip(outputs, travels, strict=True))

        return later

    def _is_far(self, to: Remote) -> bool:
        return to.pnode not in self._plan.near

    def _hosts(self, arrays: Sequence[Array]) -> Later[Sequence[HostArray]]:
        if self._backend.runs_shards or not arrays:
            return lambda: arrays
        return self._backend.fetch(arrays).wait
