"""One GPU for the whole session; where there is none, everything here is skipped and says why, or fails if it was asked for by `-m gpu`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dcnr.backends.cupy import probe
from dcnr.errors import BackendUnavailable

if TYPE_CHECKING:
    from dcnr.backends.cupy.cuda import CudaDevice


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> CudaDevice:
    """The first one."""
    try:
        probe.usable(0)
    except BackendUnavailable as error:
        if request.config.getoption("markexpr") == "gpu":
            raise
        pytest.skip(str(error))
    from dcnr.backends.cupy.cuda import CudaDevice

    return CudaDevice(0)
