"""What a lane is: one way to move the bytes of a tensor from a sender to one receiver.

The header always travels as a message on the subject of the target VNode and names its lane; a lane adds where the bytes are.
A lane for direct TCP or CUDA IPC is one more class and one more entry in `transport`; `tests/bus/lanes/contract.py` is what it must pass.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar, cast

import ml_dtypes
import numpy as np
import structlog

from dcnr.bus import codec, subjects, wire
from dcnr.bus.base import Bus
from dcnr.bus.credit import Seen
from dcnr.bus.messages import VERSION, Credit, Hop
from dcnr.errors import DcnrError, PeerError, UserError, WorldError
from dcnr.ids import PNodeId

HEADER_ROOM = 4096
"""Bytes of a message left for the header before an inline payload."""
TENSOR_LIMIT = 4 << 30
REFUSED = -1
"""`Credit.received` of a receiver that cannot use this lane."""

Array = wire.Array
Bytes = wire.Bytes
T = TypeVar("T")
OnHop = Callable[[Hop, Array], None]

DTYPES: Mapping[str, np.dtype[Any]] = {
    dtype.name: dtype
    for dtype in map(np.dtype, (ml_dtypes.bfloat16, "f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?"))
}

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class LaneBroken(DcnrError):
    """This lane does not reach the peer; the next one is tried."""


class DeviceBuffer(Protocol):
    """A contiguous tensor in the memory of a device."""

    @property
    def ptr(self) -> int:
        """Its address there."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the elements."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes."""
        ...


class DevicePort(Protocol):
    """The device of this process, as far as moving tensors needs it. Everything may be called on any thread, and may wait.

    Raises `BackendUnavailable` where the device refuses.
    """

    def stage(self, nbytes: int) -> tuple[int, bytes]:
        """Memory that other processes may open: its address, and the handle by which they do."""
        ...

    def unstage(self, address: int) -> None:
        """Give it back; nobody may use it any more."""
        ...

    def open(self, handle: bytes) -> int:
        """The address of another process's memory here."""
        ...

    def close(self, address: int) -> None:
        """Let go of what was opened."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceBuffer:
        """Memory of our own, of any content."""
        ...

    def copy(self, into: int, source: int, nbytes: int) -> None:
        """Copy behind everything that was issued to the device so far, and return when it is done."""
        ...

    def fetch(self, buffer: Any) -> Array:
        """The tensor (of the device's own kind) in host memory, as it is when everything issued so far is done."""
        ...


OnDeviceHop = Callable[[Hop, DeviceBuffer], None]


@dataclass(frozen=True, slots=True)
class DeviceSide:
    """What a process with a device gives its transport: the device, and who gets the tensors that arrive on it (as with `OnHop`)."""

    port: DevicePort
    on_hop: OnDeviceHop


class Receives(Protocol):
    """The receiving half of a lane, and what it hears of what it sent."""

    name: ClassVar[str]

    def on_header(self, hop: Hop, payload: memoryview) -> None:
        """A checked header of this lane came, with what followed it. Raises `PeerError`."""
        ...

    def on_credit(self, credit: Credit) -> None:
        """A receiver speaks of a transfer, perhaps of another lane."""
        ...

    def release(self, peer: PNodeId) -> None:
        """A peer takes no part any more, or was started anew: what is on its way to it fails, what it had begun to send is let go."""
        ...

    async def close(self) -> None:
        """Let go of everything; transfers under way fail."""
        ...


class Lane(Receives, Protocol):
    """One way to move bytes. Calls of `send` for one receiver come one after the other."""

    async def start(self) -> None:
        """Called once, before anything else."""
        ...

    def serves(self, to: PNodeId, nbytes: int) -> bool:
        """Whether this lane can and should take `nbytes` bytes to `to`."""
        ...

    async def send(self, to: PNodeId, hop: Hop, data: Bytes) -> asyncio.Future[None]:
        """Publish the header and send the bytes; returns once all have left. The future is done when the receiver has them.

        Until then `data` must not change. Raises, or the future raises, `LaneBroken` or `WorldError`.
        """
        ...


class Port:
    """What lanes share of one process: its bus and its tasks, which transfers came, and where they go."""

    def __init__(self, bus: Bus, me: PNodeId, on_hop: OnHop) -> None:
        self.bus = bus
        self.me = me
        self.seen = Seen()
        self.dropped: Counter[str] = Counter()
        # From the clock, so that a restarted process does not repeat numbers that its peers have seen.
        self._numbers = itertools.count(time.time_ns())
        self._on_hop = on_hop
        self._decoding = asyncio.Lock()
        self._closed = False
        self._tasks: set[asyncio.Task[Any]] = set()

    def next_transfer(self) -> int:
        """A number that this PNode never used before."""
        return next(self._numbers)

    async def publish(self, hop: Hop, payload: memoryview | bytes = b"") -> None:
        """Send a header to the VNode that it is for."""
        subject = subjects.hop(hop.network, hop.targets[0][0], hop.phase)
        await self.bus.publish(subject, codec.encode_with_payload(hop, payload))

    def deliver(self, hop: Hop, data: Bytes) -> None:
        """Hand over the tensor; its memory is valid as long as anything refers to it. One that was encoded is first decoded on a thread."""
        if hop.codec == "raw":
            self._on_hop(hop, data.view(DTYPES[hop.dtype]).reshape(hop.shape))
        else:
            self.start(self._decode(hop, data))

    def acknowledge(self, sender: PNodeId, transfer: int, received: int) -> None:
        """Tell the sender how far we are. One that gets lost is made good by the sender's asking again."""
        if not self._closed:
            self.start(self._publish_credit(sender, Credit(self.me, transfer, received)))

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run `work` in the background until `close`; what it raises, asyncio reports.

        A task that `close` cancels may never have begun, so what must be done at its end is done by a callback of the task.
        """
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def drop(self, error: PeerError) -> None:
        """Something from outside breaks the protocol: count and go on."""
        self.dropped[error.message.partition(":")[0]] += 1
        _log.warning("hop dropped", pnode=self.me, error=str(error))

    def check_open(self) -> None:
        """Raise `WorldError` after `close`; lanes ask wherever they waited."""
        if self._closed:
            raise WorldError("the transport was closed before a tensor had arrived")

    async def close(self) -> None:
        """End the background work."""
        self._closed = True
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _decode(self, hop: Hop, data: Bytes) -> None:
        async with self._decoding:  # in the order in which they came
            array = await asyncio.to_thread(wire.decode, cast("wire.Codec", hop.codec), data, DTYPES[hop.dtype], hop.shape)
        self._on_hop(hop, array)

    async def _publish_credit(self, sender: PNodeId, credit: Credit) -> None:
        try:
            await self.bus.publish(subjects.peer(sender, "credit"), codec.encode(credit))
        except (UserError, WorldError) as error:
            _log.debug("credit not sent", to=sender, error=str(error))


def gone(peer: PNodeId) -> WorldError:
    """What a send to a peer that was released ends with."""
    return WorldError(f"{peer} takes no part any more")


def silent(peer: PNodeId) -> WorldError:
    """What a send ends with of which the peer gave no sign for too long."""
    return WorldError(f"{peer} does not take tensors", "is it alive? see: dcnr pnode list")


def check(hop: Hop) -> None:
    """Raise `PeerError` unless the header describes a tensor that we can take."""
    if hop.version != VERSION or hop.codec not in wire.CODECS:
        ours = f"this side speaks version {VERSION}, {', '.join(wire.CODECS)}"
        raise PeerError(f"hop: version {hop.version}, codec '{hop.codec[:64]}'; {ours}")
    dtype = DTYPES.get(hop.dtype)
    if dtype is None:
        raise PeerError(f"hop: unknown dtype '{hop.dtype}'")
    if not hop.targets:
        raise PeerError("hop: no targets")
    encoding, count = wire.codec_for(hop.codec, dtype), math.prod(hop.shape)
    negative = any(size < 0 for size in hop.shape)
    if negative or encoding != hop.codec or wire.size(encoding, dtype, count) != hop.nbytes or count * dtype.itemsize > TENSOR_LIMIT:
        raise PeerError(f"hop: {hop.nbytes} bytes for shape {hop.shape} of {hop.dtype} as {hop.codec}")


def bytes_of(array: Array) -> Bytes:
    """The bytes of an array, without a copy if it is contiguous."""
    return wire.encode("raw", array)


def resolve(future: asyncio.Future[None], error: Exception | None = None) -> None:
    """Finish a future that its waiter may have given up."""
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
