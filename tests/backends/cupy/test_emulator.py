"""The emulator itself: what it computes, and that it finds each kind of fault that a GPU would not forgive."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from dcnr.backends.cupy.array import DeviceArray
from dcnr.backends.cupy.device import Argument, Product, storage
from tests.backends.cupy.emulator.build import BuildFailed, library
from tests.backends.cupy.emulator.device import EmulatedDevice, EmulationError, get, put
from tests.tolerances import assert_close

PROBES = Path(__file__).parent / "emulator"
F32 = np.dtype(np.float32)
STORED = tuple(np.dtype(kind) for kind in (np.float32, np.float16, ml_dtypes.bfloat16))


@pytest.fixture
def device() -> EmulatedDevice:
    """One that runs the probes."""
    return EmulatedDevice(kernels=PROBES)


def draw(*shape: int, dtype: np.dtype = F32) -> np.ndarray:
    """Normal numbers that depend on the shape alone."""
    return np.random.default_rng(shape).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", STORED, ids=str)
@pytest.mark.parametrize("count", [1, 7, 1000, 1001])
def test_vectors_and_tails(device: EmulatedDevice, dtype: np.dtype, count: int) -> None:
    """A kernel of `device.cuh` computes what NumPy computes, in every storage."""
    x, y = draw(count, dtype=dtype), device.empty((count,), dtype)
    device.launch(device.kernel("probes", "scale", storage(dtype)), (1, 1), 128, [put(device, x), y, 2.0, count])
    np.testing.assert_array_equal(get(y), x * dtype.type(2))


@pytest.mark.parametrize("reverse", [False, True])
def test_shared_memory_barriers_and_shuffles(reverse: bool) -> None:
    """Rows summed by blocks of 96 threads, in either order of threads."""
    device = EmulatedDevice(kernels=PROBES, reverse=reverse)
    x, y = draw(5, 70), device.empty((5,), F32)
    device.launch(device.kernel("probes", "row_sum", "STORAGE=3"), (5, 1), 96, [put(device, x), y, 70], 280)
    assert_close(get(y), x.sum(1), "float32")


@pytest.mark.parametrize("dtype", STORED[1:], ids=str)
def test_tensor_cores(device: EmulatedDevice, dtype: np.dtype) -> None:
    """cp.async, ldmatrix and mma.sync agree about where elements lie."""
    a, b, c = draw(16, 16, dtype=dtype), draw(8, 16, dtype=dtype), device.empty((16, 8), F32)
    device.launch(device.kernel("probes", "tile", storage(dtype)), (1, 1), 32, [put(device, a), put(device, b), c], 1024)
    assert_close(get(c), a.astype(F32) @ b.astype(F32).T, "float32")


FAULTS = (
    (0, "wrote outside of an array of 256 bytes"),
    (1, "deadlock: 64 threads wait"),
    (2, "16 bytes written to unaligned"),
    (3, "lie outside the 512 of this launch"),
    (5, "wrote behind the 512 bytes of shared memory"),
    (6, "more arrivals at the mbarrier"),
    (7, "only whole warps"),
    (8, "is not in shared memory"),
)


def fault(device: EmulatedDevice, kind: int) -> DeviceArray:
    """Launch a fault over 64 threads with 512 bytes of shared memory and 64 floats."""
    y = device.empty((64,), F32)
    device.launch(device.kernel("probes", "fault", "STORAGE=1"), (1, 1), 64, [y, kind, 512 if kind == 5 else 64], 512)
    return y


@pytest.mark.parametrize(("kind", "told"), FAULTS, ids=[told for _, told in FAULTS])
def test_faults_are_told(device: EmulatedDevice, kind: int, told: str) -> None:
    """Which, and in which kernel; and the device works on."""
    with pytest.raises(EmulationError, match=told):
        fault(device, kind)
    assert fault(device, -1).size == 64


def test_a_race_shows_in_the_other_order() -> None:
    """Threads that read what their neighbour writes without a barrier between get different numbers."""
    forward, backward = (get(fault(EmulatedDevice(kernels=PROBES, reverse=reverse), 4)) for reverse in (False, True))
    assert forward.tobytes() != backward.tobytes()


def test_memory_is_nan_until_written(device: EmulatedDevice) -> None:
    """So that a kernel that leaves something out is found, and one that reads what nobody wrote."""
    assert np.isnan(get(device.empty((7,), F32))).all()
    assert np.isnan(get(device.empty((7,), STORED[2])).astype(F32)).all()


def arguments(device: EmulatedDevice) -> list[Argument]:
    """Right ones for `scale` in float16."""
    return [device.empty((8,), STORED[1]), device.empty((8,), STORED[1]), 2.0, 8]


@pytest.mark.parametrize(
    ("at", "wrong"),
    [(0, F32), (0, STORED[0]), (0, 8), (2, 2), (2, np.float64(2)), (3, 8.0), (3, np.int64(8)), (3, None), (3, b"1234")],
    ids=str,
)
def test_arguments_are_compared_with_the_kernel(device: EmulatedDevice, at: int, wrong: object) -> None:
    """A GPU would take another type without a word."""
    args = arguments(device)
    args[at] = device.empty((8,), wrong) if isinstance(wrong, np.dtype) else wrong  # type: ignore[call-overload]
    with pytest.raises(EmulationError, match=f"scale, argument {at}"):
        device.launch(device.kernel("probes", "scale", "STORAGE=1"), (1, 1), 32, args)


@pytest.mark.parametrize(("grid", "block", "shared"), [((0, 1), 32, 0), ((1, 1), 1025, 0), ((1, 65536), 32, 0), ((1, 1), 32, 300 << 10)])
def test_launches_stay_within_limits(device: EmulatedDevice, grid: tuple[int, int], block: int, shared: int) -> None:
    """Those of the hardware."""
    with pytest.raises(EmulationError, match="grid"):
        device.launch(device.kernel("probes", "scale", "STORAGE=1"), grid, block, arguments(device), shared)


def test_products_in_every_direction(device: EmulatedDevice) -> None:
    """Transposed, accumulated, with a bias, float32 out of float16."""
    a, b, bias = draw(5, 7, dtype=STORED[1]), draw(7, 3, dtype=STORED[1]), draw(3)
    wanted = a.astype(F32) @ b.astype(F32)
    for transpose_a in (False, True):
        for transpose_b in (False, True):
            kind = Product(transpose_a, transpose_b, accumulate=True)
            left, right = a.T.copy() if transpose_a else a, b.T.copy() if transpose_b else b
            out = put(device, np.ones((5, 3), F32))
            device.product(kind, put(device, left), put(device, right), out, put(device, bias))
            assert_close(get(out), wanted + 1 + bias, "float32")
    with pytest.raises(EmulationError, match="product"):
        device.product(Product(False, False), put(device, b), put(device, a), device.empty((7, 7), F32))


def test_a_recording_runs_with_the_arrays_of_then(device: EmulatedDevice) -> None:
    """It reads what they hold at the replay; the host stays out of it."""
    x, y = put(device, np.ones(8, np.float16)), device.empty((8,), STORED[1])
    kernel, calls, recording = device.kernel("probes", "scale", "STORAGE=1"), [], device.recording()

    def work() -> None:
        calls.append(1)
        device.launch(kernel, (1, 1), 32, [x, y, 2.0, 8])

    for value in range(4):
        device.upload(x, np.full(8, value, np.float16))
        recording.run(work)
        np.testing.assert_array_equal(get(y), np.full(8, 2 * value, np.float16))
    assert len(calls) == 2
    with pytest.raises(EmulationError, match="cannot be recorded"):
        device.capture(lambda: device.upload(x, np.ones(8, np.float16)))


def test_transfers_are_counted(device: EmulatedDevice) -> None:
    """Uploads, fetches, waits."""
    x = put(device, draw(3))
    np.testing.assert_array_equal(device.fetch([x]).wait()[0], draw(3))
    device.synchronize()
    assert (device.uploads, device.fetches, device.waits) == (1, 1, 2)


def test_a_kernel_that_does_not_compile_tells_why(tmp_path: Path) -> None:
    """With the compiler's words."""
    (tmp_path / "broken.cu").write_text('#include "device.cuh"\nKERNEL broken(float* x) { *x = nothing; }\nEXPORT(broken)\n')
    with pytest.raises(BuildFailed, match="nothing"):
        library(tmp_path / "broken.cu", ["STORAGE=1"])
    with pytest.raises(EmulationError, match="exports no"):
        EmulatedDevice(kernels=PROBES).kernel("probes", "absent", "STORAGE=1")


def test_two_builds_at_once_give_one_library(tmp_path: Path) -> None:
    """Each writes its own file first."""
    (tmp_path / "one.cu").write_text(f"// {tmp_path}\n" + (PROBES / "probes.cu").read_text())
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda _: library(tmp_path / "one.cu", ["STORAGE=1"]), range(2)))
    assert found[0] == found[1]
    assert found[0].exists()
    found[0].unlink()
