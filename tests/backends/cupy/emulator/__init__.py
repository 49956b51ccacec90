"""The CPU runs the kernels: `EmulatedDevice` is a `Device` for the wrappers of `dcnr/backends/cupy`; g++ compiles the real `.cu` files.

How to test a family:

    from dcnr.backends.cupy import norm
    from tests.backends.cupy.emulator.device import EmulatedDevice, get, put

    device = EmulatedDevice(90)                      # or 70, 80: what the wrappers may choose; reverse=True: threads and blocks backwards
    x = put(device, np.ones((7, 33), np.float32))    # a DeviceArray; device.empty(...) is full of NaN
    y, mean, rstd = norm.layernorm(device, x, g, None, 1e-5)
    get(y)                                           # a copy, as NumPy; `view(y)` is the memory itself

Compile errors are `BuildFailed`; everything a GPU would not forgive is `EmulationError`: misaligned 16-byte accesses, writes outside of
arrays and of shared memory, deadlocks, wrong argument types (an fp16 array for `const float*`), too large launches. Sizes: keep them small.

In kernels, plain CUDA: `__shared__ float a[32];` (NaN at the start of each block, except inside templates), and for dynamic shared memory
`extern __shared__ V4 name[];` (no `#ifdef EMULATED` around it) with `smem_addr(name)`. Each `KERNEL name(...) {...}` needs `EXPORT(name)`.
Only whole warps take part in shuffles (mask 0xffffffff). The words of `wgmma.cuh` and `tma.cuh` are in `hopper.h`, all others in
`emulator.h`: add a word that is missing there.
A run in both orders (`reverse=False` and `True`) that differs in one bit has a race.
"""
