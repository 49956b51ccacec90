"""The device: memory, copies, launches, recordings, threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import pytest

from dcnr.backends.base import HostArray
from dcnr.backends.cupy import arrays
from dcnr.backends.cupy import compile as compiling
from dcnr.backends.cupy.array import DeviceArray
from dcnr.backends.cupy.constants import MOST
from dcnr.errors import BackendUnavailable, InvariantError

if TYPE_CHECKING:
    from dcnr.backends.cupy.cuda import CudaDevice

pytestmark = pytest.mark.gpu

F4 = np.dtype(np.float32)
MOST_HOST_MICROSECONDS = 15.0
"""Of one launch with a dozen arguments."""


def put(device: CudaDevice, x: HostArray) -> DeviceArray:
    """On the device, as it is."""
    array = device.empty(x.shape, x.dtype)
    device.upload(array, x)
    return array


def get(device: CudaDevice, array: DeviceArray) -> HostArray:
    """Back on the host."""
    return device.fetch([array]).wait()[0]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.uint32])
@pytest.mark.parametrize("shape", [(), (1,), (7, 33), (0, 4), (1000, 1000)])
def test_what_is_uploaded_comes_back(device: CudaDevice, shape: tuple[int, ...], dtype: type) -> None:
    """Bit for bit, from arrays that change right after, whatever their layout."""
    x: HostArray = np.asarray(np.random.default_rng(1).integers(0, 100, shape)).astype(dtype)
    given = np.array(x.T, order="C").T
    array = device.empty(shape, given.dtype)
    device.upload(array, given)
    given[...] = 0
    back = get(device, array)
    assert (back.dtype, back.shape) == (x.dtype, x.shape)
    assert np.array_equal(back, x)


def test_large_uploads_are_not_mixed_up(device: CudaDevice) -> None:
    """Many megabytes on their way at once."""
    hosts = [np.full(64 << 20, number, np.uint32) for number in range(6)]
    placed = [put(device, host) for host in hosts]
    for number, array in enumerate(placed):
        assert np.array_equal(get(device, array[-5:]), [number] * 5)


def test_a_fetch_is_of_the_time_it_was_asked_for(device: CudaDevice) -> None:
    """Later work overwrites the array at once, and its memory goes to others."""
    fetches = []
    for number in range(20):
        x = put(device, np.full(1 << 20, number, np.float32))
        fetches.append(device.fetch([x, x[:3]]))
        device.clear(x)
        del x
        device.clear(device.empty((1 << 20,), F4))
    for number, fetch in enumerate(fetches):
        whole, part = fetch.wait()
        assert whole[0] == whole[-1] == number
        assert part.tolist() == [number] * 3


def test_copies_and_zeros(device: CudaDevice) -> None:
    """Within the device; sizes that differ are a bug."""
    x = put(device, np.arange(10, dtype=np.float32))
    y = device.empty((10,), F4)
    device.copy(y, x)
    device.clear(x[2:4])
    assert get(device, y).tolist() == list(range(10))
    assert get(device, x).tolist() == [0, 1, 0, 0, 4, 5, 6, 7, 8, 9]
    with pytest.raises(InvariantError, match="do not fit"):
        device.copy(y, x[:3])


def test_memory_returns_to_the_pool(device: CudaDevice) -> None:
    """It is given out again, is aligned, and the driver is not asked twice."""
    x = device.empty((12345,), F4)
    place, held = x.ptr, device.memory().used
    assert place % 256 == 0
    del x
    assert device.empty((12345,), F4).ptr == place
    assert held == device.memory().used <= device.memory().total


def test_too_much_is_an_error_with_numbers(device: CudaDevice) -> None:
    """And the device still works."""
    with pytest.raises(BackendUnavailable, match=r"no room for 1048576 MiB: .* MiB are free") as caught:
        device.empty((1 << 40,), np.dtype(np.uint8))
    assert caught.value.remedy
    assert get(device, arrays.zeros(device, (3,), F4)).tolist() == [0, 0, 0]


def test_every_thread_may_issue(device: CudaDevice) -> None:
    """Each with its own arrays; sums and copies come out right."""

    def work(number: int) -> float:
        x = put(device, np.full(5000, number, np.float32))
        for _ in range(50):
            x = arrays.add(device, [x, x[:], x])
            x = arrays.cast(device, arrays.cast(device, x, F4), F4)
            arrays.set_scalars(device, [x[0]], [float(number)])
            x = put(device, np.full(5000, number, np.float32))
        return float(get(device, arrays.add(device, [x, x]))[1])

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(work, range(16))) == [2.0 * number for number in range(16)]


def test_recorded_work_is_done_again(device: CudaDevice) -> None:
    """Run, recorded, replayed: with the numbers and inputs of now, in memory that does not grow, and no other thread's work in it."""
    x, factor = put(device, np.arange(1000, dtype=np.float32)), arrays.scalar(device, 1.0)
    results: list[DeviceArray] = []
    runs = 0

    def work() -> None:
        nonlocal runs
        runs += 1
        scratch = arrays.add(device, [x, x])
        whole = device.empty((1000,), F4)
        device.copy(whole, scratch)
        device.copy(whole[:1], factor.reshape(1))
        results[:] = [arrays.add(device, [whole, scratch])]

    recording = device.recording()
    held = []
    for number in range(6):
        arrays.set_scalars(device, [factor], [float(number)])
        device.upload(x, np.arange(1000, dtype=np.float32) + number)
        recording.run(work)
        back = get(device, results[0])
        assert back[0] == number + 2 * number
        assert np.array_equal(back[1:], 4 * (np.arange(1, 1000) + number))
        held.append(device.memory().used)
    assert runs == 2
    assert held[-1] == held[1]


Results = dict[str, DeviceArray]


def doubling(device: CudaDevice, x: DeviceArray, results: Results, name: str) -> Callable[[], None]:
    """Work that leaves 4 x, and takes room for 2 x that it gives back."""

    def work() -> None:
        scratch = arrays.add(device, [x, x])
        results[name] = arrays.add(device, [scratch, scratch])

    return work


def test_recordings_keep_to_their_own_memory(device: CudaDevice) -> None:
    """What one gave stays what it is while another runs, in whatever order."""
    x, results = put(device, np.ones(1000, np.float32)), Results()
    first, second = device.recording(), device.recording()
    for name, recording in (("first", first), ("second", second)):
        for _ in range(2):
            recording.run(doubling(device, x, results, name))
    second.run(doubling(device, x, results, "second"))
    device.upload(x, np.full(1000, 2, np.float32))
    first.run(doubling(device, x, results, "first"))
    assert np.array_equal(get(device, results["second"]), np.full(1000, 4))
    assert np.array_equal(get(device, results["first"]), np.full(1000, 8))


def test_recordings_share_memory_if_they_are_told_to(device: CudaDevice) -> None:
    """What one gives back the next one takes."""
    x, results = put(device, np.ones(1 << 20, np.float32)), Results()
    first = device.recording()
    for _ in range(2):
        first.run(doubling(device, x, results, "first"))
        get(device, results["first"])
    held = device.memory().used
    second = device.recording(first)
    for number in range(3):
        device.upload(x, np.full(1 << 20, number, np.float32))
        first.run(doubling(device, x, results, "first"))
        assert get(device, results["first"])[-1] == 4 * number
        second.run(doubling(device, x, results, "second"))
        assert get(device, results["second"])[-1] == 4 * number
    assert device.memory().used <= held + 2 * x.nbytes  # results of a first run, and those of a recording


def test_memory_returns_when_recordings_go(device: CudaDevice) -> None:
    """With the last of them and of what they gave; until then the numbers are there."""
    x, results = put(device, np.ones(1 << 20, np.float32)), Results()
    get(device, x[:5])
    held = device.memory().used
    first = device.recording()
    second = device.recording(first)
    for _ in range(3):
        first.run(doubling(device, x, results, "first"))
        second.run(doubling(device, x, results, "second"))
    assert device.memory().used >= held + 3 * x.nbytes
    last = results.pop("second")
    results.clear()
    del first, second
    assert np.array_equal(get(device, last[:5]), np.full(5, 4))
    del last
    assert device.memory().used == held


def test_no_room_leaves_recordings_alone(device: CudaDevice) -> None:
    """CuPy's pools then give back all that is free, but a graph still has the addresses."""
    x, results = put(device, np.ones(1 << 20, np.float32)), Results()
    first = device.recording()
    for _ in range(2):
        first.run(doubling(device, x, results, "first"))

    def too_much() -> None:
        device.empty((1 << 40,), F4)

    for refused in (device.recording(first), device.recording()):
        with pytest.raises(BackendUnavailable, match="no room"):
            refused.run(too_much)
    with pytest.raises(BackendUnavailable, match="no room"):
        too_much()
    device.upload(x, np.full(1 << 20, 3, np.float32))
    first.run(doubling(device, x, results, "first"))
    assert np.array_equal(get(device, results["first"]), np.full(1 << 20, 12))
    device.synchronize()


def test_recordings_keep_their_constants(device: CudaDevice) -> None:
    """However many others came by since; few of those are kept."""
    key, found = object(), Results()

    def work() -> None:
        constant = device.constant((key, "table"), lambda: np.arange(7, dtype=np.float32))
        found["sum"] = arrays.add(device, [constant, constant])

    recording = device.recording()
    for _ in range(3):
        recording.run(work)
        held = device.memory().used
        for number in range(3 * MOST):
            device.constant((key, number), lambda: np.zeros(1 << 20, np.float32))
        assert np.array_equal(get(device, found["sum"]), 2 * np.arange(7))
        assert device.memory().used <= held + (MOST + 2) * (4 << 20)


def test_any_thread_may_ask_for_memory(device: CudaDevice) -> None:
    """One that has never issued anything."""
    held = device.memory()
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(device.memory).result() == held


def test_a_kernel_that_was_cut_off_is_compiled_again(device: CudaDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver would crash on it; the next process finds a whole one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiling.cache_folder.cache_clear()
    try:
        type(device)(0).kernel("moves", "set_words")
        (kept,) = tmp_path.rglob("moves-*.cubin")
        whole = kept.read_bytes()
        kept.write_bytes(whole[: len(whole) // 2])
        again = type(device)(0)
        x = arrays.scalar(again, 5.0)
        assert get(again, x) == 5
        assert kept.read_bytes() == whole
    finally:
        compiling.cache_folder.cache_clear()


def test_what_cannot_be_recorded_is_a_bug(device: CudaDevice) -> None:
    """Copies to and from the host; the device works on."""
    x = device.empty((4,), F4)

    def upload() -> None:
        device.upload(x, np.zeros(4, np.float32))

    def fetch() -> None:
        device.fetch([x])

    for work in (upload, fetch):
        recording = device.recording()
        recording.run(work)
        with pytest.raises(InvariantError, match="recording"):
            recording.run(work)  # the second time it is recorded
    assert get(device, arrays.zeros(device, (2,), F4)).tolist() == [0, 0]


def test_a_launch_costs_the_host_little(device: CudaDevice) -> None:
    """The best of ten rounds, with as many arguments as our largest kernels have."""
    parts = [put(device, np.zeros((4, 8), np.float32)) for _ in range(8)]
    kernel = device.kernel("arrays", "add_terms", "STORAGE=3", "GROUP=8", "TERMS=8")
    packed, y, size = bytes(64), parts[0], np.uint64(0)
    rounds = []
    for _ in range(10):
        device.synchronize()
        began = time.perf_counter()
        for _ in range(300):
            device.launch(kernel, (1, 1), 256, (packed, y, size))
        rounds.append((time.perf_counter() - began) / 300 * 1e6)
    assert min(rounds) < MOST_HOST_MICROSECONDS, rounds


def test_errors_of_a_launch_name_the_kernel(device: CudaDevice) -> None:
    """More threads than a block may have."""
    kernel = device.kernel("moves", "set_words")
    with pytest.raises(BackendUnavailable, match="set_words"):
        device.launch(kernel, (1, 1), 4096, (bytes(192), 0))
