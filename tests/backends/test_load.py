"""Choosing a backend."""

from __future__ import annotations

import sys

import pytest

from dcnr.backends import load
from dcnr.backends.cupy import probe
from dcnr.backends.load import load_backend
from dcnr.errors import BackendUnavailable


@pytest.mark.parametrize("name", ["numpy", "cpu"])
def test_a_named_backend_is_that_backend(name: str) -> None:
    """Ready to compute."""
    backend = load_backend(name)
    assert backend.name == name
    assert backend.add([backend.zeros((3,), "float32")] * 2).tolist() == [0, 0, 0]


def test_auto_is_the_cpu_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU package is installed here."""
    monkeypatch.setattr(probe, "is_usable", lambda index: False)
    monkeypatch.setattr(load, "_has", lambda module: False)
    assert load_backend("auto").name == "cpu"


@pytest.mark.parametrize("name", ["cupy", "auto"])
def test_a_device_that_is_named_must_be_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the backend was left to us: a number is a GPU."""

    def nothing(index: int) -> None:
        raise BackendUnavailable(f"There is no GPU {index}.")

    monkeypatch.setattr(probe, "usable", nothing)
    with pytest.raises(BackendUnavailable, match="no GPU 7"):
        load_backend(name, 7)


@pytest.mark.parametrize("name", ["numpy", "cpu"])
def test_the_host_has_no_devices_to_choose(name: str) -> None:
    """A number that means nothing is an error."""
    with pytest.raises(BackendUnavailable, match="no device 0") as caught:
        load_backend(name, 0)
    assert caught.value.remedy


@pytest.mark.parametrize("name", ["cupy", "mlx"])
def test_a_gpu_that_is_not_there_is_an_error_with_a_remedy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named explicitly, nothing else is taken in its place."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(BackendUnavailable, match=name) as caught:
        load_backend(name)
    assert caught.value.remedy


def test_an_unknown_name_lists_the_known_ones() -> None:
    """So that a typing error is mended at once."""
    with pytest.raises(BackendUnavailable, match=r"'gpu'.*auto, numpy, cpu, cupy, mlx"):
        load_backend("gpu")
