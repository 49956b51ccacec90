"""What is said of a GPU and its software, with a stand-in for CuPy: every fault has a sentence and a remedy of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from dcnr.backends.cupy import probe
from dcnr.errors import BackendUnavailable


class CUDARuntimeError(RuntimeError):
    """As CuPy's."""


def package(*gpus: tuple[str, int, int], free: int = 100 << 30, works: bool = True) -> Any:
    """CuPy on a machine with GPUs of those names and capabilities."""

    def count() -> int:
        if not works:
            raise CUDARuntimeError("cudaErrorInsufficientDriver")
        return len(gpus)

    def properties(index: int) -> dict[str, Any]:
        name, major, minor = gpus[index]
        return {"name": name.encode(), "major": major, "minor": minor}

    runtime = SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError, getDeviceCount=count, getDeviceProperties=properties, memGetInfo=lambda: (free, 140 << 30),
        driverGetVersion=lambda: 13000, runtimeGetVersion=lambda: 13020,
    )  # fmt: skip
    return SimpleNamespace(__version__="14.2.0", cuda=SimpleNamespace(runtime=runtime, Device=lambda index: nullcontext()))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a stand-in in the place of CuPy."""

    def put(stand_in: Any) -> None:
        monkeypatch.setitem(sys.modules, "cupy", stand_in)

    return put


def test_a_good_machine(machine: Any) -> None:
    """Versions and numbers, in words."""
    machine(package(("NVIDIA H200", 9, 0), ("NVIDIA T4", 7, 5)))
    assert probe.look_at_package() == "CuPy 14.2.0 for CUDA 13.2"
    assert probe.look_at_driver() == "up to CUDA 13.0, 2 GPUs"
    assert probe.look_at_device(1) == "NVIDIA T4 (1): compute capability 7.5, 102400 of 143360 MiB free"
    assert probe.title(probe.usable(0), 0) == "NVIDIA H200 (0)"
    assert probe.capability_of(probe.usable(1)) == 75


@pytest.mark.parametrize(
    ("stand_in", "index", "said", "remedy"),
    [
        (None, 0, "needs CuPy", "pip install 'dcnr[cuda13]'"),
        (package(works=False), 0, "driver does not answer cupy: cudaErrorInsufficientDriver", "nvidia-smi"),
        (package(), 0, "no GPU 0: the driver shows 0", "CUDA_VISIBLE_DEVICES"),
        (package(("NVIDIA H200", 9, 0)), 3, "no GPU 3: the driver shows 1", "--device 0 to 0"),
        (package(("Tesla P100", 6, 0)), 0, r"Tesla P100 \(0\) has compute capability 6\.0, DCNR needs 7\.0", "another --device"),
    ],
    ids=["no package", "no driver", "no gpu", "no such gpu", "too old"],
)
def test_faults_have_remedies(machine: Any, stand_in: Any, index: int, said: str, remedy: str) -> None:
    """`auto` then goes on to the next backend."""
    machine(stand_in)
    with pytest.raises(BackendUnavailable, match=said) as caught:
        probe.usable(index)
    assert caught.value.remedy is not None
    assert remedy in caught.value.remedy
    assert not probe.is_usable(index)


@pytest.mark.parametrize(
    ("question", "look"),
    [
        ("getDeviceProperties", lambda: probe.usable(0)),
        ("memGetInfo", lambda: probe.look_at_device(0)),
        ("driverGetVersion", probe.look_at_driver),
        ("runtimeGetVersion", probe.look_at_package),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_a_driver_that_fails_later_is_a_fault_too(machine: Any, question: str, look: Callable[[], object]) -> None:
    """Whichever question it does not answer; `auto` goes on if it is one of its own."""

    def refuse(*_: object) -> None:
        raise CUDARuntimeError("cudaErrorECCUncorrectable")

    stand_in = package(("NVIDIA H200", 9, 0))
    setattr(stand_in.cuda.runtime, question, refuse)
    machine(stand_in)
    with pytest.raises(BackendUnavailable, match="does not answer cupy: cudaErrorECCUncorrectable"):
        look()
    assert not (question == "getDeviceProperties" and probe.is_usable(0))


def test_little_memory_is_a_fault(machine: Any) -> None:
    """With the numbers."""
    machine(package(("NVIDIA H200", 9, 0), free=100 << 20))
    with pytest.raises(BackendUnavailable, match="only 100 of 143360 MiB free"):
        probe.look_at_device(0)


def test_the_compiler_is_tried(machine: Any) -> None:
    """On a kernel of ours, for the GPU that is there."""
    machine(package(("NVIDIA H200", 9, 0)))
    assert probe.look_at_compiler().endswith("compiles for sm_90a")
