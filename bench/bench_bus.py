"""How fast a hop is: latency and throughput between two processes, over each lane, beside the least that any program would have to do.

    python bench/bench_bus.py

Beside chunks: a bare nats-py loop with the same window. Beside TCP: a bare asyncio socket that receives into one array. Beside shared
memory: one copy within a process. Everything runs against one server of its own, in one go, so that the numbers can be compared with
each other; the machine decides the rest.
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import nats
import numpy as np
import structlog
import uvloop
from nats.aio.client import Client
from nats.aio.msg import Msg
from rich.console import Console
from rich.table import Table

from dcnr.bus.credit import ACK_EVERY, FLOW_WINDOW
from dcnr.bus.lanes.base import Array
from dcnr.bus.lanes.chunks import CHUNK
from dcnr.bus.messages import Hop, PNodeInfo
from dcnr.bus.nats import connect
from dcnr.bus.server import NatsServer
from dcnr.bus.transport import HopTransport
from dcnr.ids import Epoch, NetworkId, NodeId, PNodeId, SessionId

MIB = 1 << 20
SIZES_MIB = (1, 16, 64)
LATENCY_BYTES = (64, 4 << 10, 64 << 10)
ROUNDS = 5
PINGS = 200
ECHO = NodeId("echo")
SINK = NodeId("sink")
BACK = NodeId("back")
NETWORK = NetworkId("bench")
NEAR, FAR = PNodeId("near"), PNodeId("far")
HOSTS = {"chunks": "elsewhere", "tcp": "elsewhere", "shm": "here"}
"""Where the far end claims to be, so that a lane is taken."""


def hop(target: NodeId) -> Hop:
    """A header as training sends it."""
    return Hop(NETWORK, SessionId("s"), Epoch(1), 1, 0, 0, "fwd", NodeId("n"), 0, ((target, 0),), NEAR, "float32", ())


def info(pnode: PNodeId, host: str) -> PNodeInfo:
    """A peer at `host`."""
    return PNodeInfo(pnode, "1", host, "cpu", "cpu", 0, 0, 1, 0, "0")


async def far_end(url: str, lane: str) -> None:
    """The other process: hops to `sink` are taken, hops to `echo` come back; and the bare receivers. Until stdin ends."""
    bus = await connect(url, "far")
    echoes: asyncio.Queue[Array] = asyncio.Queue()

    def on_hop(header: Hop, array: Array) -> None:
        if header.targets[0][0] == ECHO:
            echoes.put_nowait(array)

    transport = HopTransport(bus, FAR, HOSTS[lane], on_hop, direct=lane == "tcp")
    transport.set_peers([info(NEAR, "here")])
    await transport.listen(NETWORK, [ECHO, SINK])
    bare = await nats.connect(url)
    await bare_receiver(bare)
    door = socket.create_server(("127.0.0.1", 0))
    sink = asyncio.create_task(bare_socket_receiver(door))

    async def echo() -> None:
        while True:
            await transport.send(NEAR, hop(BACK), await echoes.get())

    task = asyncio.create_task(echo())
    sys.stdout.write(f"{door.getsockname()[1]}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    task.cancel()
    sink.cancel()
    door.close()
    await transport.close()
    await bus.close()
    await bare.close()


async def bare_socket_receiver(door: socket.socket) -> None:
    """Into an array as large as what comes; one byte back for each."""
    loop = asyncio.get_running_loop()
    door.setblocking(False)
    connection, _ = await loop.sock_accept(door)
    array = np.zeros(max(SIZES_MIB) * MIB, np.uint8)
    while head := await loop.sock_recv(connection, 8):
        size = int.from_bytes(head, "little")
        filled = 0
        while filled < size:
            filled += await loop.sock_recv_into(connection, array.data[filled:size])
        await loop.sock_sendall(connection, b"!")
    connection.close()


async def bare_socket_sender(port: int) -> Callable[[Array], Awaitable[None]]:
    """Returns a function that sends an array and waits until it is there."""
    loop = asyncio.get_running_loop()
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setblocking(False)

    async def send(array: Array) -> None:
        await loop.sock_sendall(connection, array.nbytes.to_bytes(8, "little"))
        await loop.sock_sendall(connection, array.view(np.uint8).data)
        await loop.sock_recv(connection, 1)

    return send


def copier() -> Callable[[Array], Awaitable[None]]:
    """A function that copies an array within this process."""
    room = np.zeros(max(SIZES_MIB) * MIB, np.uint8)

    async def copy(array: Array) -> None:
        np.copyto(room[: array.nbytes], array.view(np.uint8))

    return copy


async def bare_receiver(client: Client) -> None:
    """What any program on nats-py must do at least: copy chunks into an array and acknowledge every MiB."""
    array = np.zeros(max(SIZES_MIB) * MIB, np.uint8)
    offset = acknowledged = 0

    async def on_chunk(msg: Msg) -> None:
        nonlocal offset, acknowledged
        if offset + len(msg.data) > len(array):
            offset = 0
        array.data[offset : offset + len(msg.data)] = msg.data
        offset += len(msg.data)
        acknowledged += len(msg.data)
        if acknowledged >= ACK_EVERY:
            await client.publish("bare.credit", b"%d" % acknowledged)
            acknowledged = 0

    await client.subscribe("bare.chunk", cb=on_chunk, pending_bytes_limit=0)
    await client.flush()


async def bare_sender(client: Client) -> Callable[[Array], Awaitable[None]]:
    """Returns a function that sends an array (a multiple of 1 MiB) within the window and waits for the last credit."""
    under_way = 0
    credited = asyncio.Event()

    async def on_credit(msg: Msg) -> None:
        nonlocal under_way
        under_way -= int(msg.data)
        credited.set()

    await client.subscribe("bare.credit", cb=on_credit)

    async def room(limit: int) -> None:
        while under_way > limit:
            credited.clear()
            await credited.wait()

    async def send(array: Array) -> None:
        nonlocal under_way
        data = array.view(np.uint8)
        for start in range(0, len(data), CHUNK):
            await room(FLOW_WINDOW - CHUNK)
            part = data[start : start + CHUNK]
            under_way += len(part)
            await client.publish("bare.chunk", part.tobytes())
        await room(0)

    return send


async def rate(send: Callable[[Array], Awaitable[None]], mib: int) -> float:
    """MB/s, the median of `ROUNDS`, with two tensors under way."""
    array = np.ones(mib * MIB // 4, np.float32)
    repeats = max(2, 64 // mib)
    await send(array)
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        gate = asyncio.Semaphore(2)

        async def one(gate: asyncio.Semaphore = gate) -> None:
            async with gate:
                await send(array)

        await asyncio.gather(*(one() for _ in range(repeats)))
        rounds.append(repeats * array.nbytes / (time.perf_counter() - start) / 1e6)
    return statistics.median(rounds)


async def latency(transport: HopTransport, returned: asyncio.Queue[Array], nbytes: int) -> tuple[float, float]:
    """Half of a round trip in ms, median and 99th percentile."""
    array = np.ones(nbytes // 4, np.float32)
    times = []
    for _ in range(PINGS):
        start = time.perf_counter()
        await asyncio.gather(transport.send(FAR, hop(ECHO), array), returned.get())
        times.append((time.perf_counter() - start) * 500)
    return statistics.median(times), sorted(times)[int(0.99 * PINGS)]


async def near_end(url: str, lane: str, port: int, table: Table) -> None:
    """Measure `lane` against a far end with a bare socket at `port`."""
    returned: asyncio.Queue[Array] = asyncio.Queue()
    bus = await connect(url, "near")
    transport = HopTransport(bus, NEAR, "here", lambda _, array: returned.put_nowait(array), direct=lane == "tcp")
    transport.set_peers([info(FAR, HOSTS[lane])])
    await transport.listen(NETWORK, [BACK])
    bare = await nats.connect(url)
    if lane == "chunks":
        for nbytes in LATENCY_BYTES:
            median, worst = await latency(transport, returned, nbytes)
            table.add_row(f"hop of {nbytes} bytes, one way", f"{median:.2f} ms", f"p99 {worst:.2f} ms")
        what, beside, bare_send = "in chunks over NATS", "bare nats-py", await bare_sender(bare)
    elif lane == "tcp":
        await transport.met(FAR)
        what, beside, bare_send = "over TCP", "bare asyncio socket", await bare_socket_sender(port)
    else:
        what, beside, bare_send = "through shared memory", "one copy", copier()
    for mib in SIZES_MIB:
        ours = await rate(lambda array: transport.send(FAR, hop(SINK), array), mib)
        theirs = await rate(one_at_a_time(bare_send), mib)
        table.add_row(f"{mib} MiB {what}", f"{ours:.0f} MB/s", f"{beside} {theirs:.0f} MB/s, {ours / theirs:.2f} x")
    await transport.close()
    await bus.close()
    await bare.close()


def one_at_a_time(send: Callable[[Array], Awaitable[None]]) -> Callable[[Array], Awaitable[None]]:
    """The bare loop has one stream."""
    lock = asyncio.Lock()

    async def locked(array: Array) -> None:
        async with lock:
            await send(array)

    return locked


async def measure() -> None:
    """One server, a far end for each lane, one table."""
    table = Table("what", "DCNR", "beside it", title="bus")
    with tempfile.TemporaryDirectory() as store:
        server = NatsServer(Path(store))
        await server.start()
        for lane in HOSTS:
            command = [sys.executable, __file__, server.url, lane]
            far = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert far.stdout is not None
            port = int(await far.stdout.readline())
            await near_end(server.url, lane, port, table)
            await far.communicate(b"")
        await server.stop()
    Console().print(table)


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    uvloop.run(far_end(*sys.argv[1:]) if len(sys.argv) > 1 else measure())
