"""Which backend a process computes on.

`auto` takes the first that this machine can run: CuPy on an NVIDIA GPU, MLX on Apple silicon, else the CPU.
Rule: a backend that is named and cannot run is an error that says what to do; nothing else is taken in its place.
"""

from __future__ import annotations

import importlib.util
import platform
from typing import Literal, get_args

from dcnr.backends.base import Backend
from dcnr.backends.cupy import probe
from dcnr.config import environment, fused_paths
from dcnr.errors import BackendUnavailable

BackendName = Literal["auto", "numpy", "cpu", "cupy", "mlx"]


def load_backend(name: BackendName | str, device: int | None = None) -> Backend:
    """The backend called `name`, ready to compute: its kernels are compiled and its BLAS is limited to one thread.

    `device` is the number of the GPU (the first by default). Raises `BackendUnavailable` for a backend that is unknown or cannot run here.
    """
    match _chosen(device) if name == "auto" else name:
        case "numpy" | "cpu" as host if device is not None:
            raise BackendUnavailable(f"The {host} backend has no device {device} to choose.", "Leave --device away, or use --backend cupy.")
        case "numpy":
            from dcnr.backends.numpy.backend import NumpyBackend

            return NumpyBackend()
        case "cpu":
            return _cpu()
        case "cupy":
            return _cupy(device or 0)
        case "mlx":
            raise BackendUnavailable("This version of DCNR has no mlx backend yet.", "Use --backend cpu, which runs on every machine.")
        case _:
            names = ", ".join(get_args(BackendName))
            raise BackendUnavailable(f"There is no backend called '{name}'.", f"Choose one of: {names}.")


def _cupy(device: int) -> Backend:
    probe.usable(device)
    from dcnr.backends.cupy.backend import CupyBackend
    from dcnr.backends.cupy.cuda import CudaDevice

    paths = fused_paths(environment())
    return CupyBackend(CudaDevice(device, paths.hopper), fused_attention=paths.attention, fused_lm_head=paths.lm_head)


def _cpu() -> Backend:
    from dcnr.backends.cpu import warm_up

    warm_up()
    from dcnr.backends.cpu.backend import CpuBackend

    return CpuBackend()


def _chosen(device: int | None) -> str:
    """A device that is named is a GPU, usable or not."""
    if device is not None or probe.is_usable(0):
        return "cupy"
    if _has("dcnr.backends.mlx") and _has("mlx") and (platform.system(), platform.machine()) == ("Darwin", "arm64"):
        return "mlx"
    return "cpu"


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
