"""One GPU for the whole session; where there is none, everything here is skipped and says why, or fails if it was asked for by `-m gpu`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dcnr.backends.base import Backend
from dcnr.backends.cupy import probe
from dcnr.backends.load import load_backend
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


@pytest.fixture(scope="session")
def gpu(device: CudaDevice) -> Backend:
    """The backend on it, with every fast path; new memory is full of NaN."""
    from dcnr.backends.cupy.backend import CupyBackend
    from tests.gpu.poisoned import PoisonedDevice

    return CupyBackend(PoisonedDevice())


@pytest.fixture(scope="session")
def portable(device: CudaDevice) -> Backend:
    """The same as on a card before Hopper."""
    from dcnr.backends.cupy.backend import CupyBackend
    from tests.gpu.poisoned import PoisonedDevice

    return CupyBackend(PoisonedDevice(hopper=False))


@pytest.fixture(scope="session")
def exact(device: CudaDevice) -> Backend:
    """The same with every array in an allocation of its own."""
    from dcnr.backends.cupy.backend import CupyBackend
    from tests.gpu.poisoned import ExactDevice

    return CupyBackend(ExactDevice())


@pytest.fixture(scope="session")
def numpy() -> Backend:
    """The one that defines what is right."""
    return load_backend("numpy")
