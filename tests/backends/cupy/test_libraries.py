"""Where NVIDIA's libraries are looked for."""

from __future__ import annotations

import _ctypes
import importlib.machinery
import importlib.util
import shutil
from pathlib import Path

import pytest

from dcnr.backends.cupy.libraries import load_library
from dcnr.errors import BackendUnavailable

LIBRARY = Path(_ctypes.__file__)
"""One that is on every machine."""


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site-packages with a `nvidia` namespace package, as wheels make it."""
    spec = importlib.machinery.ModuleSpec("nvidia", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path / "nvidia")]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "nvidia" else None)
    return tmp_path / "nvidia"


def test_a_missing_library_has_the_callers_remedy(wheels: Path) -> None:
    """And its name."""
    with pytest.raises(BackendUnavailable, match="CUDA library nothing is not to be found") as caught:
        load_library("nothing", "install it")
    assert caught.value.remedy == "install it"


def test_libraries_of_wheels_are_found(wheels: Path) -> None:
    """Whatever folder a wheel has for them, the newest release first; a file that does not load is passed over."""
    folders = [wheels / "cuda_thing" / "lib", wheels / "cu13" / "lib"]
    for folder in folders:
        folder.mkdir(parents=True)
    (folders[1] / "libthing.so.13").write_text("no library")
    shutil.copy(LIBRARY, folders[0] / "libthing.so.12")
    assert load_library("thing", "")._name == str(folders[0] / "libthing.so.12")
