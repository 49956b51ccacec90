"""Running a case on a backend: inputs drawn from a seed, one forward, one backward, everything back on the host."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from dcnr.backends.base import Array, Backend, HostArray, Precision
from dcnr.nodes.base import Env, Node, Parameter
from dcnr.nodes.cost import CostConfig
from tests.nodes.cases import Case

WEIGHT, LOSS_SCALE = 0.37, 8.0
SEED, STEP, FIRST_ROW = 12345678901234567, 5, 3


@dataclass(frozen=True)
class Example:
    """What goes in: inputs by slot (float64, or int64 ids), parameters, and the gradient of each output."""

    inputs: tuple[HostArray, ...]
    params: Mapping[str, HostArray]
    grads: tuple[HostArray, ...]


@dataclass(frozen=True)
class Outcome:
    """What comes out. A cost's output is its loss."""

    outputs: tuple[HostArray | float, ...]
    input_grads: tuple[HostArray | None, ...]
    param_grads: Mapping[str, HostArray]


def example(case: Case, backend: Backend) -> Example:
    """Drawn from the case's name, so that it is always the same."""
    draw = np.random.default_rng(zlib.crc32(case.name.encode()))
    inputs = tuple(_input(case, slot, draw) for slot in range(len(case.inputs)))
    params = {p.name: draw.normal(p.fill, _spread(p), p.shape) for p in case.build(tied=False).parameters}
    bare = Example(inputs, params, ())
    if case.is_cost:
        return bare
    outputs = forward(backend, case, bare, "float64")
    return replace(bare, grads=tuple(draw.normal(size=np.shape(output)) for output in outputs))


def _spread(parameter: Parameter) -> float:
    """Products keep the size of their inputs, so that softmax stays well-conditioned."""
    return 0.5 if len(parameter.shape) == 1 else float(1 / np.sqrt(parameter.shape[-1]))


def _input(case: Case, slot: int, draw: np.random.Generator) -> HostArray:
    shape = (case.rows, *case.inputs[slot])
    ids = case.ids[slot]
    if ids is not None:
        found = draw.integers(0, ids, shape)
        if case.is_cost and found.size > 2:
            found.reshape(-1)[1] = -1  # a target that does not count
        return found
    if isinstance(case.config, CostConfig) and case.config.cost_function == "ce":
        return draw.uniform(0.1, 1, shape)
    return draw.normal(size=shape)


def make_env(backend: Backend, node: Node, case: Case, params: Mapping[str, HostArray], precision: Precision) -> Env:
    """Parameters in `precision`; accumulators hold garbage, which the first micro-batch must overwrite."""
    accumulator: Precision = "float64" if precision == "float64" else "float32"
    return Env(
        backend=backend,
        params={name: backend.from_host(value, precision) for name, value in params.items()},
        grads={name: backend.from_host(np.full(value.shape, 1e6), accumulator) for name, value in params.items()},
        accumulate=False,
        activation=precision,
        seed=SEED,
        step=backend.scalar(STEP),
        first_row=FIRST_ROW,
        training=True,
        weight=backend.scalar(WEIGHT),
        loss_scale=backend.scalar(LOSS_SCALE),
    )


def forward(
    backend: Backend, case: Case, given: Example, precision: Precision, position: int = 0, cache: Array | None = None
) -> tuple[HostArray | float, ...]:
    """Outputs alone; of a piece of a sequence, where it begins and what is kept of it."""
    node = case.build()
    env = make_env(backend, node, case, given.params, precision)
    env.position, env.cache = position, cache
    outputs, _ = node.forward(env, _inputs(backend, given, precision))
    return _outputs(backend, case, outputs)


def run(backend: Backend, case: Case, given: Example, precision: Precision, micro_batches: int = 1) -> Outcome:
    """Forward and backward, `micro_batches` times over the same example."""
    node = case.build()
    env = make_env(backend, node, case, given.params, precision)
    arrays = _inputs(backend, given, precision)
    for micro in range(micro_batches):
        env.accumulate = micro > 0
        outputs, saved = node.forward(env, arrays)
        grads = tuple(backend.from_host(grad, precision) for grad in given.grads) or (None,)
        input_grads = node.backward(env, saved, grads)
    return Outcome(
        _outputs(backend, case, outputs),
        tuple(None if grad is None else backend.to_host(grad) for grad in input_grads),
        {name: backend.to_host(grad) for name, grad in env.grads.items()},
    )


def _inputs(backend: Backend, given: Example, precision: Precision) -> tuple[Array, ...]:
    return tuple(backend.from_host(x, precision) for x in given.inputs)


def _outputs(backend: Backend, case: Case, outputs: tuple[Array, ...]) -> tuple[HostArray | float, ...]:
    fetched = backend.fetch(outputs).wait()
    return tuple(float(loss) for loss in fetched) if case.is_cost else tuple(fetched)
