"""What of an NVIDIA GPU's software is here: CuPy, driver, GPUs, compiler, product library. Each question has its own remedy.

Rule: looking needs no working backend; CuPy is imported when it is asked for, since most machines have none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dcnr.backends.cupy import cublaslt
from dcnr.backends.cupy.compile import architecture, compile_source, nvrtc_version
from dcnr.errors import BackendUnavailable

LEAST_CAPABILITY = 70
LEAST_MEMORY = 1 << 30
"""Bytes that must be free for anything worth the name."""
INSTALL = "pip install 'dcnr[cuda13]' (driver 580 or newer) or 'dcnr[cuda12]' (driver 525 or newer)"


def cupy() -> Any:
    """The package. Raises `BackendUnavailable` if it is missing or does not load."""
    try:
        import cupy as package
    except ImportError as error:
        raise BackendUnavailable(f"The cupy backend needs CuPy, which does not load: {error}.", INSTALL) from error
    return package


def asked(question: Callable[[Any], Any]) -> Any:
    """What `question` gives for CuPy's CUDA runtime. Raises `BackendUnavailable` where there is no driver, or none that CuPy can use."""
    runtime = cupy().cuda.runtime
    try:
        return question(runtime)
    except runtime.CUDARuntimeError as error:
        raise BackendUnavailable(
            f"The NVIDIA driver does not answer cupy: {error}.",
            "nvidia-smi must work here (in a container: --gpus all), with a driver that CuPy can use (CUDA 13: 580 or newer, CUDA 12: 525)",
        ) from error


def device_count() -> int:
    """GPUs that the driver shows."""
    return int(asked(lambda runtime: runtime.getDeviceCount()))


def usable(index: int) -> dict[str, Any]:
    """Properties of GPU `index`. Raises `BackendUnavailable` if it is not there or too old."""
    count = device_count()
    if not 0 <= index < count:
        remedy = f"choose --device 0 to {count - 1}" if count else "is one plugged in, and not hidden by CUDA_VISIBLE_DEVICES?"
        raise BackendUnavailable(f"There is no GPU {index}: the driver shows {count}.", remedy)
    properties: dict[str, Any] = asked(lambda runtime: runtime.getDeviceProperties(index))
    capability = capability_of(properties)
    if capability < LEAST_CAPABILITY:
        raise BackendUnavailable(
            f"{title(properties, index)} has compute capability {capability / 10}, DCNR needs {LEAST_CAPABILITY / 10}.",
            "use another --device, or --backend cpu",
        )
    return properties


def capability_of(properties: dict[str, Any]) -> int:
    """Compute capability times ten."""
    return int(properties["major"]) * 10 + int(properties["minor"])


def title(properties: dict[str, Any], index: int) -> str:
    """`NVIDIA H200 (0)`."""
    return f"{properties['name'].decode()} ({index})"


def is_usable(index: int) -> bool:
    """Whether the whole of it works: the choice of `--backend auto`."""
    try:
        usable(index)
        nvrtc_version()
        cublaslt.version()
    except BackendUnavailable:
        return False
    return True


def look_at_package() -> str:
    """CuPy's own version, and that of the CUDA runtime it was made for."""
    return f"CuPy {cupy().__version__} for CUDA {_release(asked(lambda runtime: runtime.runtimeGetVersion()))}"


def look_at_driver() -> str:
    """What the driver can run, and how many GPUs it shows."""
    count = device_count()
    return f"up to CUDA {_release(asked(lambda runtime: runtime.driverGetVersion()))}, {count} {'GPU' if count == 1 else 'GPUs'}"


def look_at_compiler() -> str:
    """Compile something of ours, for the first GPU if there is one; no header of a toolkit is needed."""
    major, minor = nvrtc_version()
    arch = architecture(capability_of(usable(0)))
    compile_source("moves", (), arch)
    return f"NVRTC {major}.{minor} compiles for {arch}"


def look_at_products() -> str:
    """The library of matrix products."""
    return f"cuBLASLt {cublaslt.version()}"


def look_at_device(index: int) -> str:
    """What GPU `index` is, and what is free on it."""
    properties = usable(index)
    free, total = asked(lambda runtime: _memory(runtime, index))
    name = title(properties, index)
    if free < LEAST_MEMORY:
        raise BackendUnavailable(f"{name} has only {free >> 20} of {total >> 20} MiB free.", "nvidia-smi lists what else runs on it")
    return f"{name}: compute capability {capability_of(properties) / 10}, {free >> 20} of {total >> 20} MiB free"


def _memory(runtime: Any, index: int) -> tuple[int, int]:
    """(free, all) bytes; the thread's current device stays what it was."""
    with cupy().cuda.Device(index):
        free, total = runtime.memGetInfo()
    return free, total


def _release(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
