"""Every node type on the cupy backend, its kernels run by the emulator, equals the numpy backend, in every precision that can be stored.

Each case runs twice: as an `sm_90` with threads and blocks in order, and again in the opposite order, which must change no bit.
"""

from __future__ import annotations

from functools import cache

import pytest

from dcnr.backends.base import Precision
from dcnr.backends.cupy.backend import CupyBackend
from dcnr.backends.load import load_backend
from tests.backends.cupy.emulator.device import EmulatedDevice
from tests.nodes.cases import ATTENTION, CASES, Case
from tests.nodes.outcomes import bits, compare
from tests.nodes.runs import Example, Outcome, example, run

NUMPY = load_backend("numpy")
STORED: tuple[Precision, ...] = ("float32", "float16", "bfloat16")
OLDER = ((70, "float32"), (70, "float16"), (80, "float32"), (80, "float16"), (80, "bfloat16"))


@cache
def backend(capability: int, reverse: bool) -> CupyBackend:
    """One per kind of device, so that each kernel is loaded once."""
    return CupyBackend(EmulatedDevice(capability, reverse=reverse))


@cache
def wanted(one: Case, precision: Precision) -> tuple[Example, Outcome]:
    """The inputs of a case, and what the numpy backend makes of them in two micro-batches."""
    given = example(one, NUMPY)
    return given, run(NUMPY, one, given, precision, micro_batches=2)


@pytest.mark.parametrize("precision", STORED)
@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_nodes_equal_the_definition(one: Case, precision: Precision) -> None:
    """Outputs, input gradients and parameter gradients over two micro-batches, in either order of threads."""
    given, right = wanted(one, precision)
    actual, again = (run(backend(90, reverse), one, given, precision, micro_batches=2) for reverse in (False, True))
    compare(actual, right, precision)
    assert bits(actual) == bits(again)


@pytest.mark.parametrize(("capability", "precision"), OLDER)
@pytest.mark.parametrize("one", ATTENTION, ids=lambda one: one.name)
def test_attention_of_older_devices_equals_it_too(one: Case, capability: int, precision: Precision) -> None:
    """They have other kernels: `mma.sync` from 8.0, plain arithmetic before."""
    given, right = wanted(one, precision)
    actual, again = (run(backend(capability, reverse), one, given, precision, micro_batches=2) for reverse in (False, True))
    compare(actual, right, precision)
    assert bits(actual) == bits(again)
