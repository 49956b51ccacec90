"""Every kernel, in every variant that wrappers ask for, compiles for the architectures we promise; those of production spill nothing."""

from __future__ import annotations

import re

import pytest

from dcnr.backends.base import Precision
from dcnr.backends.cupy.compile import SOURCES
from tests.backends.cupy.ptxas import CAPABILITIES, everything, largest, production, usages

REGISTERS = 65536
"""Of one multiprocessor: a block that needs more is not launched."""
SOURCE_NAMES = sorted(path.stem for path in SOURCES.glob("*.cu"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("source", SOURCE_NAMES)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_variant_compiles_and_can_be_launched(source: str, capability: int) -> None:
    """A block of any kernel finds the registers it needs."""
    kernels = {kernel: block for kernel, block in everything(capability).items() if kernel.variant.source == source}
    for kernel, used in usages(largest(kernels), capability):
        assert used.registers * kernels[kernel] <= REGISTERS, f"{kernel}: {used.registers} registers, blocks of {kernels[kernel]}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_of_production_spill_nothing(capability: int, precision: Precision) -> None:
    """Every number of a training step stays in registers."""
    spilled = {kernel: used for kernel, used in usages(production(precision, capability), capability) if used.spilled}
    assert not spilled


def test_every_kernel_is_asked_for() -> None:
    """What no wrapper launches at any size is dead."""
    asked = {(kernel.variant.source, kernel.name) for capability in (70, *CAPABILITIES) for kernel in everything(capability)}
    exported = {(name, kernel) for name in SOURCE_NAMES for kernel in re.findall(r"EXPORT\((\w+)\)", (SOURCES / f"{name}.cu").read_text())}
    assert exported == asked
