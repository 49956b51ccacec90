"""Two processes on one GPU: what one puts into memory for others, the other reads; and tensors travel there and back."""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import ml_dtypes
import numpy as np
import pytest

from dcnr.backends.cupy import arrays
from dcnr.backends.cupy.array import DeviceArray
from dcnr.bus.lanes.base import DeviceBuffer, DeviceSide
from dcnr.bus.messages import Hop, PNodeInfo
from dcnr.bus.nats import connect
from dcnr.bus.transport import HopTransport
from dcnr.errors import BackendUnavailable
from dcnr.ids import Epoch, NetworkId, NodeId, PNodeId, SessionId

if TYPE_CHECKING:
    from dcnr.backends.cupy.cuda import CudaDevice

pytestmark = [pytest.mark.gpu, pytest.mark.nats]

NETWORK, THERE, BACK = NetworkId("ipc"), NodeId("there"), NodeId("back")
NEAR, FAR = PNodeId("near"), PNodeId("far")
HOST = "one"
MIB = 1 << 20

_READER = """
import hashlib, sys
import numpy as np
from dcnr.backends.cupy.cuda import CudaDevice
device = CudaDevice(0)
port = device.ipc()
handle, nbytes = bytes.fromhex(sys.argv[1]), int(sys.argv[2])
source = port.open(handle)
ours = port.empty((nbytes,), np.dtype(np.uint8))
port.copy(ours.ptr, source, nbytes)
port.close(source)
print(hashlib.sha256(port.fetch(ours).tobytes()).hexdigest())
"""


def info(pnode: PNodeId) -> PNodeInfo:
    """A process with the GPU."""
    return PNodeInfo(pnode, "1", HOST, "cupy", "gpu", 0, 0, 1, 0, "0")


def hop(target: NodeId) -> Hop:
    """A header as training sends it."""
    return Hop(NETWORK, SessionId("s"), Epoch(1), 1, 0, 0, "fwd", NodeId("n"), 0, ((target, 0),), NEAR, "", ())


def on(device: CudaDevice, array: np.ndarray) -> DeviceArray:
    """On the device, as it is."""
    there = device.empty(array.shape, array.dtype)
    device.upload(there, array)
    return there


def test_another_process_reads_what_was_copied_for_it(device: CudaDevice) -> None:
    """Through a handle; the copy waits for the upload that was issued before it."""
    port = device.ipc()
    data = np.random.default_rng(1).integers(0, 255, 8 * MIB + 5, np.uint8)
    address, handle = port.stage(data.nbytes)
    source = on(device, data)
    port.copy(address, source.ptr, data.nbytes)
    command = [sys.executable, "-c", _READER, handle.hex(), str(data.nbytes)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    port.unstage(address)
    assert done.stdout.strip() == hashlib.sha256(data.tobytes()).hexdigest()


def test_a_handle_of_nobody_is_refused(device: CudaDevice) -> None:
    """And the device goes on."""
    port = device.ipc()
    with pytest.raises(BackendUnavailable, match="opening memory of another process"):
        port.open(bytes(64))
    assert port.fetch(on(device, np.arange(5))).tolist() == [0, 1, 2, 3, 4]


async def far_end(url: str) -> None:
    """The other process: whatever comes on the device goes back from the device, until stdin ends."""
    from dcnr.backends.cupy.cuda import CudaDevice

    bus = await connect(url, "far")
    came: asyncio.Queue[tuple[Hop, DeviceBuffer]] = asyncio.Queue()
    side = DeviceSide(CudaDevice(0).ipc(), lambda header, buffer: came.put_nowait((header, buffer)))
    transport = HopTransport(bus, FAR, HOST, lambda *_: None, device=side)
    transport.set_peers([info(NEAR)])
    await transport.listen(NETWORK, [THERE])

    async def echo() -> None:
        while True:
            header, buffer = await came.get()
            await transport.send(NEAR, replace(hop(BACK), micro=header.micro), buffer)

    task = asyncio.create_task(echo())
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    task.cancel()
    await transport.close()
    await bus.close()


@pytest.mark.timeout(180)
async def test_tensors_go_to_another_process_and_back_without_leaving_the_device(device: CudaDevice, nats_url: str) -> None:
    """Bit for bit, of every dtype, of sizes that are no multiple of anything, larger and smaller than the ring."""
    root = Path(__file__).parent.parent.parent
    command = [sys.executable, "-c", f"import asyncio; from tests.gpu.test_ipc import far_end; asyncio.run(far_end({nats_url!r}))"]
    far = await asyncio.create_subprocess_exec(*command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert far.stdout is not None
    assert await far.stdout.readline() == b"ready\n"
    got: dict[int, tuple[Hop, DeviceArray]] = {}
    news = asyncio.Event()

    def on_hop(header: Hop, buffer: DeviceBuffer) -> None:
        got[header.micro] = (header, cast("DeviceArray", buffer))
        news.set()

    bus = await connect(nats_url, "near")
    transport = HopTransport(bus, NEAR, HOST, lambda *_: None, device=DeviceSide(device.ipc(), on_hop))
    transport.set_peers([info(FAR)])
    await transport.listen(NETWORK, [BACK])
    rng = np.random.default_rng(2)
    shapes = [(1,), (7, 33), (513, 1023), (4 * MIB + 1,), (3, 16 * MIB)]
    sent = [rng.standard_normal(shape, np.float32).astype(dtype) for shape in shapes for dtype in (np.float16, ml_dtypes.bfloat16)]
    for number, array in enumerate(sent):
        await transport.send(FAR, replace(hop(THERE), micro=number), on(device, array))
    while len(got) < len(sent):
        news.clear()
        await news.wait()
    assert {header.lane.partition(":")[0] for header, _ in got.values()} == {"cuda"}
    for number, array in enumerate(sent):
        assert device.fetch([got[number][1]]).wait()[0].tobytes() == array.tobytes()
    (link,) = transport.links()
    assert link.lane == "cuda"
    sys.stdout.write(f"device to device between two processes: {link.mb_per_s:.0f} MB/s\n")
    got.clear()
    await transport.close()
    await bus.close()
    await far.communicate(b"")


def test_arrays_of_the_ordinary_kind_are_as_good(device: CudaDevice) -> None:
    """What operations make can be sent: it has an address, a shape and a dtype."""
    made: DeviceBuffer = arrays.zeros(device, (3, 4), np.dtype(np.float32))
    assert (made.shape, made.nbytes, made.ptr != 0) == ((3, 4), 48, True)
