"""The cupy backend as a whole, on the emulated device; what its operations compute is tested family by family and node by node."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from dcnr.backends.base import Backend, HostArray, Precision
from dcnr.backends.cupy.backend import CupyBackend
from dcnr.errors import BackendUnavailable
from tests.backends.cupy.emulator.device import EmulatedDevice
from tests.tolerances import assert_close


@pytest.fixture
def backend() -> CupyBackend:
    """On a fresh device."""
    return CupyBackend(EmulatedDevice())


def draw(*shape: int, seed: int = 0) -> HostArray:
    """Normal numbers that depend on the shape and the seed alone."""
    return np.random.default_rng((seed, *shape)).standard_normal(shape, np.float32)


def test_it_has_every_operation_of_the_protocol_with_its_parameters() -> None:
    """By name and in order."""
    for name, wanted in inspect.getmembers(Backend, inspect.isfunction):
        if not name.startswith("_"):
            assert [*inspect.signature(getattr(CupyBackend, name)).parameters] == [*inspect.signature(wanted).parameters], name


def test_what_it_says_of_itself(backend: CupyBackend) -> None:
    """Its name, its device, and that micro-batches run whole."""
    assert (backend.name, backend.device, backend.runs_shards) == ("cupy", "emulated GPU", False)
    before = backend.memory()
    held = backend.empty((1000,), "float32")
    assert backend.memory().used == before.used + held.nbytes
    assert backend.memory().total == before.total > 0


def test_arrays_come_and_go(backend: CupyBackend) -> None:
    """Ids as int64, numbers in the precision asked for, in their own, or in float32; NumPy shows bfloat16 as ml_dtypes does."""
    cases: list[tuple[str, Precision | None, str]] = [
        ("i4", None, "int64"), ("f4", None, "float32"), ("f2", None, "float16"), ("f8", None, "float32"),
        ("f4", "float16", "float16"), ("f8", "bfloat16", "bfloat16"), ("f2", "float32", "float32"),
    ]  # fmt: skip
    for given, precision, wanted in cases:
        x = np.arange(12).reshape(3, 4).astype(given)
        back = backend.to_host(backend.from_host(x, precision))
        assert (back.dtype.name, back.shape) == (wanted, x.shape)
        assert np.array_equal(back.astype(np.float64), x)
    assert backend.to_host(backend.from_host(draw(3).astype(ml_dtypes.bfloat16))).dtype == ml_dtypes.bfloat16
    assert not backend.to_host(backend.zeros((2, 3), "float16")).any()


def test_several_arrays_are_fetched_at_once(backend: CupyBackend) -> None:
    """Scalars as 0-d arrays; the copies are of when it was asked for."""
    x, step = backend.from_host(draw(3)), backend.scalar(7)
    fetch = backend.fetch([x, step])
    backend.copy_into(x, backend.zeros((3,), "float32"))
    assert [np.shape(array) for array in fetch.wait()] == [(3,), ()]
    assert np.array_equal(fetch.wait()[0], draw(3))
    assert fetch.wait()[1].item() == 7


@pytest.mark.parametrize("capability", [70, 75])
def test_bfloat16_needs_a_device_that_has_it(capability: int) -> None:
    """One sentence with the numbers and the way out, wherever an array would be made."""
    old = CupyBackend(EmulatedDevice(capability))
    x = old.zeros((2,), "float32")
    makers: tuple[Callable[[], object], ...] = (
        lambda: old.empty((2,), "bfloat16"),
        lambda: old.zeros((2,), "bfloat16"),
        lambda: old.cast(x, "bfloat16"),
        lambda: old.from_host(draw(2), "bfloat16"),
        lambda: old.from_host(draw(2).astype(ml_dtypes.bfloat16)),
    )
    for make in makers:
        with pytest.raises(BackendUnavailable, match=rf"capability {capability / 10}, bfloat16 needs 8\.0") as caught:
            make()
        assert caught.value.remedy == "Use float16."


def test_float64_is_for_the_numpy_backend(backend: CupyBackend) -> None:
    """As on the CPU."""
    with pytest.raises(BackendUnavailable, match="float64"):
        backend.empty((1,), "float64")


def attention(backend: CupyBackend) -> tuple[HostArray, HostArray]:
    """(o, dqkv) of two heads of 32."""
    qkv, do = backend.from_host(draw(2, 9, 192), "float16"), backend.from_host(draw(2, 9, 64), "float16")
    o, saved = backend.attention(qkv, None, 2, True, None)
    dqkv = backend.attention_backward(do, o, None, saved, 2, True, None, None, False)
    return backend.to_host(o), backend.to_host(dqkv)


def test_without_the_fused_attention_plain_kernels_give_the_same() -> None:
    """Within rounding, and they are other kernels."""
    plain, fused = EmulatedDevice(), EmulatedDevice()
    got = attention(CupyBackend(plain, fused_attention=False))
    for a, b in zip(got, attention(CupyBackend(fused)), strict=True):
        assert_close(a, b, "float16")
    assert {asked.source for asked in plain.asked} != {asked.source for asked in fused.asked}
