"""Choosing a backend."""

from __future__ import annotations

import pytest

from dcnr.backends import load
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
    monkeypatch.setattr(load, "_has", lambda module: False)
    assert load_backend("auto").name == "cpu"


@pytest.mark.parametrize("name", ["cupy", "mlx"])
def test_a_gpu_that_is_not_there_is_an_error_with_a_remedy(name: str) -> None:
    """Named explicitly, nothing else is taken in its place."""
    with pytest.raises(BackendUnavailable, match=name) as caught:
        load_backend(name)
    assert caught.value.remedy


def test_an_unknown_name_lists_the_known_ones() -> None:
    """So that a typing error is mended at once."""
    with pytest.raises(BackendUnavailable, match=r"'gpu'.*auto, numpy, cpu, cupy, mlx"):
        load_backend("gpu")
