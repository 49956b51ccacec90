"""A network that uses every node type, run by the emulator, needs the host for nothing inside a pass."""

from __future__ import annotations

import pytest

from dcnr.backends.base import Precision
from dcnr.backends.cupy.backend import CupyBackend
from dcnr.backends.load import load_backend
from tests.backends.cupy.emulator.device import EmulatedDevice
from tests.nodes.network import EveryType, check_recorded_passes


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
def test_recorded_passes_equal_the_definition(precision: Precision) -> None:
    """Several steps, each with its own masks, of which all but two are replays."""
    check_recorded_passes(CupyBackend(EmulatedDevice(90)), load_backend("numpy"), precision)


@pytest.mark.parametrize("capability", [70, 80, 90])
def test_a_pass_neither_copies_from_the_host_nor_waits(capability: int) -> None:
    """Whatever the device: its counters stand still from the first pass on."""
    device = EmulatedDevice(capability)
    network = EveryType(CupyBackend(device), "float16")
    network.run()
    before = device.uploads, device.fetches, device.waits
    network.run()
    assert (device.uploads, device.fetches, device.waits) == before
