"""Descriptors as the driver encodes them; the attention kernels of Hopper read through them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from dcnr.errors import InvariantError

if TYPE_CHECKING:
    from dcnr.backends.cupy.cuda import CudaDevice

pytestmark = pytest.mark.gpu


def test_a_descriptor_has_128_bytes_and_knows_its_address(device: CudaDevice) -> None:
    """The same one for the same array, another for another."""
    x, y = (device.empty((4, 64, 8, 64), np.dtype(np.float16)) for _ in range(2))
    args = ((64, 8, 64, 4), (128, 1024, 65536), (64, 1, 64, 1))
    first = device.tensor_map(x, *args)
    assert len(first) == 128
    assert device.tensor_map(x, *args) == first != device.tensor_map(y, *args)


def test_what_the_hardware_does_not_take_is_a_bug(device: CudaDevice) -> None:
    """A box of more than 128 bytes in its first axis."""
    x = device.empty((64, 128), np.dtype(np.float16))
    with pytest.raises(InvariantError, match="tensor map"):
        device.tensor_map(x, (128, 64), (256,), (128, 64))
