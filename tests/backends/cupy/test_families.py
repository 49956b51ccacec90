"""Every operation of the cupy backend, run by the emulator, equals the numpy backend; and nothing but the step's end looks at the host."""

from __future__ import annotations

import inspect
from functools import cache, partial

import pytest

from dcnr.backends.base import Backend, HostArray, Precision
from dcnr.backends.cupy.backend import CupyBackend
from dcnr.backends.load import load_backend
from tests.backends.cupy.emulator.device import EmulatedDevice
from tests.backends.families import SMALL, Given, attention, embedding, linear, lm_head, norm, on_host, residual
from tests.tolerances import assert_close

NUMPY = load_backend("numpy")
STORED: tuple[Precision, ...] = ("float32", "float16", "bfloat16")

MIXED = {
    "linear": partial(linear, kind="gelu", rows=7, inputs=16, outputs=8),
    "norm": partial(norm, rows=7, width=64),
    "residual": partial(residual, rate=0.1, rows=7, width=33),
    "attention": partial(attention, batch=1, length=33, heads=2, head_dim=32),
    "attention of odd heads": partial(attention, batch=1, length=7, heads=1, head_dim=6),
    "embedding": partial(embedding, batch=2, length=7, vocabulary=17, width=64),
    "lm head": partial(lm_head, rows=7, width=16, vocabulary=33, bias=True),
}
"""What reads parameters."""


@cache
def emulated(reverse: bool) -> CupyBackend:
    """One of each order of threads."""
    return CupyBackend(EmulatedDevice(90, reverse=reverse))


def same(name: str, operation: object, precision: Precision, parameters: Precision | None = None) -> None:
    """Equal to the numpy backend, and bit-equal in both orders of threads."""
    assert callable(operation)

    def results(backend: Backend) -> dict[str, HostArray]:
        return on_host(backend, operation(Given(backend, precision, parameters)))

    wanted, actual, again = results(NUMPY), results(emulated(False)), results(emulated(True))
    assert actual.keys() == wanted.keys() == again.keys()
    for part, array in wanted.items():
        assert_close(actual[part], array, precision, f"{name}, {part}")
        assert actual[part].tobytes() == again[part].tobytes(), f"{name}, {part}: other bits in another order of threads"


@pytest.mark.parametrize("precision", STORED)
@pytest.mark.parametrize("name", SMALL)
def test_operations_equal_the_definition(name: str, precision: Precision) -> None:
    """On the fast and on the general path, in every storage."""
    same(name, SMALL[name], precision)


@pytest.mark.parametrize(("precision", "parameters"), [("float16", "float32"), ("float32", "float16"), ("bfloat16", "float32")])
@pytest.mark.parametrize("name", MIXED)
def test_parameters_may_be_stored_otherwise(name: str, precision: Precision, parameters: Precision) -> None:
    """As `param_precision` and `activation_precision` allow."""
    same(name, MIXED[name], precision, parameters)


def test_every_operation_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operations above call every method of the Protocol, so none of them is without a kernel."""
    called = {"scalar"}
    wanted = {name for name, _ in inspect.getmembers(Backend, inspect.isfunction) if not name.startswith("_")}
    for name in wanted:
        monkeypatch.setattr(CupyBackend, name, _noted(called, name))
    backend = CupyBackend(EmulatedDevice(90))
    for operation in SMALL.values():
        on_host(backend, operation(Given(backend, "float16")))
    assert wanted - called == {"ipc", "memory", "recording", "set_scalars", "synchronize"}


def _noted(called: set[str], name: str) -> object:
    original = getattr(CupyBackend, name)

    def method(self: CupyBackend, *args: object, **kwargs: object) -> object:
        called.add(name)
        return original(self, *args, **kwargs)

    return method
