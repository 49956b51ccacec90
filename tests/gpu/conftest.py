"""One GPU for the whole session. Where there is none, everything here is left out and a line says why; `-m gpu` makes it fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dcnr.backends.base import Backend
from dcnr.backends.cupy import probe
from dcnr.backends.load import load_backend
from dcnr.errors import BackendUnavailable

if TYPE_CHECKING:
    from dcnr.backends.cupy.cuda import CudaDevice


def why_not(config: pytest.Config) -> str | None:
    """Why these tests cannot run; None if they can, or must."""
    if config.getoption("markexpr") == "gpu":
        return None
    try:
        probe.usable(0)
    except BackendUnavailable as error:
        return str(error)
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what cannot run, without a line for each."""
    if why_not(config) is not None:
        here = [item for item in items if item.get_closest_marker("gpu") is not None]
        config.hook.pytest_deselected(items=here)
        out = set(here)
        items[:] = [item for item in items if item not in out]


def pytest_report_collectionfinish(config: pytest.Config) -> str:
    """One line for all of them."""
    why = why_not(config)
    return "" if why is None else f"tests/gpu are left out: {why}"


@pytest.fixture(scope="session")
def device() -> CudaDevice:
    """The first one. Raises `BackendUnavailable` where there is none."""
    probe.usable(0)
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
