"""The fast backend of machines without a GPU: OpenBLAS products through NumPy, all else in kernels that Numba compiles."""

from __future__ import annotations

import importlib

from dcnr.backends.cpu.jit import cache_folder, fill_cache


def warm_up() -> None:
    """Compile all kernels, or load them from the cache: seconds the first time on a machine, a fraction of one later."""
    fill_cache(cache_folder())
    importlib.import_module("dcnr.backends.cpu.backend")
