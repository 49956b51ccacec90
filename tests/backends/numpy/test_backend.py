"""The whole backend: every node in every precision."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from dcnr.backends.base import HostArray, Precision
from dcnr.backends.dtypes import dtype_of
from dcnr.backends.numpy.backend import NumpyBackend
from tests.nodes.cases import CASES, Case
from tests.nodes.runs import Example, Outcome, example, run
from tests.tolerances import assert_close

backend = NumpyBackend()


def rounded(given: Example, precision: Precision) -> Example:
    """The example as the precision stores it, in float64."""

    def store(x: HostArray) -> HostArray:
        return x if x.dtype == np.int64 else x.astype(np.float32).astype(dtype_of(precision)).astype(np.float64)

    return replace(
        given,
        inputs=tuple(store(x) for x in given.inputs),
        params={name: store(x) for name, x in given.params.items()},
        grads=tuple(store(x) for x in given.grads),
    )


def compare(found: Outcome, wanted: Outcome, precision: Precision) -> None:
    """Outputs, input gradients and parameter gradients, with their dtypes."""
    for slot, (a, b) in enumerate(zip(found.outputs, wanted.outputs, strict=True)):
        reachable = b if isinstance(b, float) else backend.cast(b, precision)  # float16 does not reach every fill
        assert_close(a, reachable, precision, f"output {slot}")
    for slot, (da, db) in enumerate(zip(found.input_grads, wanted.input_grads, strict=True)):
        if db is not None:
            assert da is not None
            assert da.dtype == dtype_of(precision)
            assert_close(da, db, precision, f"gradient of input {slot}")
    for name, grad in wanted.param_grads.items():
        assert found.param_grads[name].dtype == np.float32
        assert_close(found.param_grads[name], grad, precision, f"gradient of {name}")


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_storage_costs_rounding_and_nothing_else(case: Case, precision: Precision) -> None:
    """Each precision equals float64 on the same stored numbers, within its tolerance."""
    given = rounded(example(case, backend), precision)
    wanted = run(backend, case, given, "float64")
    compare(run(backend, case, given, precision), wanted, precision)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_operations_write_to_nothing_but_accumulators(case: Case) -> None:
    """Inputs and parameters are read only."""
    given = example(case, backend)
    for x in (*given.inputs, *given.params.values(), *given.grads):
        x.flags.writeable = False
    run(_ByReference(), case, given, "float64")


class _ByReference(NumpyBackend):
    """Hands out the very arrays it gets, except accumulators, which hold 1e6."""

    def from_host(self, x: HostArray, precision: Precision | None = None) -> HostArray:
        return x if not x.size or x.flat[0] != 1e6 else x.copy()


def test_threads_share_a_backend() -> None:
    """Same bits from several threads at once, overflow included."""
    given = [example(case, backend) for case in CASES]
    alone = [run(backend, case, one, "float16") for case, one in zip(CASES, given, strict=True)]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(lambda case, one: run(backend, case, one, "float16"), CASES * 2, given * 2))
    for found, wanted in zip(together, alone * 2, strict=True):
        for a, b in zip(found.outputs, wanted.outputs, strict=True):
            np.testing.assert_array_equal(a, b)
        for name, grad in wanted.param_grads.items():
            np.testing.assert_array_equal(found.param_grads[name], grad)


def test_it_says_what_it_is() -> None:
    """By name; a micro-batch is cut into shards on it."""
    assert (NumpyBackend().name, NumpyBackend().runs_shards, NumpyBackend().wide_caches) == ("numpy", True, True)
