"""NVIDIA GPUs: kernels of our own (`*.cu` beside their wrappers), cuBLASLt for large products, CuPy for memory, streams and graphs.

Layers, each knows only those before it: `array` (what an array is) · `device` (what a device does: memory, launches, products, copies) ·
one file per family of operations (pure arithmetic of launches, no CUDA call) · `backend` (the `Backend`).
`cuda` is the device of a real GPU; the tests have another one, which runs the same kernels on the CPU.
"""
