"""How fast a hop is: latency and throughput between two processes, over each lane, beside a bare nats-py loop with the same window.

    python bench/bench_bus.py

Everything runs against one server of its own, in one go, so that the numbers can be compared with each other; the machine decides the rest.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import nats
import numpy as np
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


def hop(target: NodeId) -> Hop:
    """A header as training sends it."""
    return Hop(NETWORK, SessionId("s"), Epoch(1), 1, 0, 0, "fwd", NodeId("n"), 0, ((target, 0),), NEAR, "float32", ())


def info(pnode: PNodeId, host: str) -> PNodeInfo:
    """A peer at `host`."""
    return PNodeInfo(pnode, "1", host, "cpu", "cpu", 0, 0, 1, 0, "0")


async def far_end(url: str, host: str) -> None:
    """The other process: hops to `sink` are taken, hops to `echo` come back; and the bare loop's receiver. Until stdin ends."""
    bus = await connect(url, "far")
    echoes: asyncio.Queue[Array] = asyncio.Queue()

    def on_hop(header: Hop, array: Array) -> None:
        if header.targets[0][0] == ECHO:
            echoes.put_nowait(array)

    transport = HopTransport(bus, FAR, host, on_hop)
    transport.set_peers([info(NEAR, "here")])
    await transport.listen(NETWORK, [ECHO, SINK])
    bare = await nats.connect(url)
    await bare_receiver(bare)

    async def echo() -> None:
        while True:
            await transport.send(NEAR, hop(BACK), await echoes.get())

    task = asyncio.create_task(echo())
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    task.cancel()
    await transport.close()
    await bus.close()
    await bare.close()


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


async def near_end(url: str, far_host: str, table: Table) -> None:
    """Measure against a far end that says it is on `far_host`."""
    returned: asyncio.Queue[Array] = asyncio.Queue()
    bus = await connect(url, "near")
    transport = HopTransport(bus, NEAR, "here", lambda _, array: returned.put_nowait(array))
    transport.set_peers([info(FAR, far_host)])
    await transport.listen(NETWORK, [BACK])
    same = far_host == "here"
    if not same:
        for nbytes in LATENCY_BYTES:
            median, worst = await latency(transport, returned, nbytes)
            table.add_row(f"hop of {nbytes} bytes, one way", f"{median:.2f} ms", f"p99 {worst:.2f} ms")
        bare = await nats.connect(url)
        bare_send = await bare_sender(bare)
    for mib in SIZES_MIB:
        ours = await rate(lambda array: transport.send(FAR, hop(SINK), array), mib)
        if same:
            table.add_row(f"{mib} MiB through shared memory", f"{ours:.0f} MB/s", "")
        else:
            theirs = await rate(one_at_a_time(bare_send), mib)
            table.add_row(f"{mib} MiB in chunks over NATS", f"{ours:.0f} MB/s", f"bare nats-py {theirs:.0f} MB/s, {ours / theirs:.2f} x")
    await transport.close()
    await bus.close()
    if not same:
        await bare.close()


def one_at_a_time(send: Callable[[Array], Awaitable[None]]) -> Callable[[Array], Awaitable[None]]:
    """The bare loop has one stream."""
    lock = asyncio.Lock()

    async def locked(array: Array) -> None:
        async with lock:
            await send(array)

    return locked


async def measure() -> None:
    """One server, two far ends, one table."""
    table = Table("what", "DCNR", "beside it", title="bus")
    with tempfile.TemporaryDirectory() as store:
        server = NatsServer(Path(store))
        await server.start()
        for far_host in ("elsewhere", "here"):
            command = [sys.executable, __file__, server.url, far_host]
            far = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert far.stdout is not None
            await far.stdout.readline()
            await near_end(server.url, far_host, table)
            await far.communicate(b"")
        await server.stop()
    Console().print(table)


if __name__ == "__main__":
    uvloop.run(far_end(*sys.argv[1:]) if len(sys.argv) > 1 else measure())
