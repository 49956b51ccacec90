"""Which backend a process computes on.

`auto` takes the first that this machine can run: CuPy on an NVIDIA GPU, MLX on Apple silicon, else the CPU.
Rule: a backend that is named and cannot run is an error that says what to do; nothing else is taken in its place.
"""

from __future__ import annotations

import importlib.util
import platform
from typing import Literal, get_args

from dcnr.backends.base import Backend
from dcnr.errors import BackendUnavailable

BackendName = Literal["auto", "numpy", "cpu", "cupy", "mlx"]


def load_backend(name: BackendName | str) -> Backend:
    """The backend called `name`, ready to compute: its kernels are compiled and its BLAS is limited to one thread.

    Raises `BackendUnavailable` for one that is unknown or cannot run here.
    """
    match _chosen() if name == "auto" else name:
        case "numpy":
            from dcnr.backends.numpy.backend import NumpyBackend

            return NumpyBackend()
        case "cpu":
            return _cpu()
        case "cupy" | "mlx" as gpu:
            raise BackendUnavailable(f"This version of DCNR has no {gpu} backend yet.", "Use --backend cpu, which runs on every machine.")
        case _:
            names = ", ".join(get_args(BackendName))
            raise BackendUnavailable(f"There is no backend called '{name}'.", f"Choose one of: {names}.")


def _cpu() -> Backend:
    from dcnr.backends.cpu import warm_up

    warm_up()
    from dcnr.backends.cpu.backend import CpuBackend

    return CpuBackend()


def _chosen() -> str:
    if _has("dcnr.backends.cupy") and _has_nvidia_gpu():
        return "cupy"
    if _has("dcnr.backends.mlx") and _has("mlx") and (platform.system(), platform.machine()) == ("Darwin", "arm64"):
        return "mlx"
    return "cpu"


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _has_nvidia_gpu() -> bool:
    if not _has("cupy"):
        return False
    import cupy

    try:
        return bool(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return False
