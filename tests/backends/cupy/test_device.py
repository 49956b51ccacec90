"""What wrappers tell kernels about dtypes, and how many blocks they ask for."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from dcnr.backends.cupy.device import blocks, parameter, storage


@pytest.mark.parametrize(("kind", "code"), [(np.float16, 1), (ml_dtypes.bfloat16, 2), (np.float32, 3)])
def test_dtypes_have_numbers(kind: type, code: int) -> None:
    """As `device.cuh` and `group.cuh` read them."""
    assert storage(np.dtype(kind)) == f"STORAGE={code}"
    assert parameter(np.dtype(kind)) == f"PARAMETER={code}"


@pytest.mark.parametrize(("count", "size", "wanted"), [(0, 256, 1), (1, 256, 1), (256, 256, 1), (257, 256, 2), (1 << 40, 1 << 10, 1 << 30)])
def test_blocks_cover_everything(count: int, size: int, wanted: int) -> None:
    """And there is always one."""
    assert blocks(count, size) == wanted
