"""A real process at the other end of a transport, which a test may kill or stop.

    python -m tests.bus.peers NATS_URL NAME HOST FOLDER

It has its segments in FOLDER, hosts a VNode of its own name, and sends every tensor that it gets back to VNode `here` of PNode `a`.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from dcnr.bus.lanes import segment
from dcnr.bus.lanes.base import Array
from dcnr.bus.messages import Hop, PNodeInfo
from dcnr.bus.nats import connect
from dcnr.bus.transport import HopTransport
from dcnr.errors import WorldError
from dcnr.ids import Epoch, NetworkId, NodeId, PNodeId, SessionId

NET, HERE = NetworkId("net"), NodeId("here")
ME = PNodeId("a")
HOP = Hop(NET, SessionId("s"), Epoch(1), 1, 0, 0, "fwd", NodeId("src"), 0, ((HERE, 0),), PNodeId("unset"), "", ())


def info(pnode: PNodeId, host: str, incarnation: str = "1") -> PNodeInfo:
    """A peer on `host`."""
    return PNodeInfo(pnode, incarnation, host, "cpu", "cpu", 0, 0, 1, 0, "0")


async def echo(url: str, name: str, host: str, folder: Path) -> None:
    """What the process does."""
    segment.directory = lambda: folder
    bus = await connect(url, name)
    got: asyncio.Queue[tuple[Hop, Array]] = asyncio.Queue()
    transport = HopTransport(bus, PNodeId(name), host, lambda hop, array: got.put_nowait((hop, array)))
    transport.set_peers([info(ME, "here")])
    await transport.listen(NET, [NodeId(name)])
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        hop, array = await got.get()
        try:
            await transport.send(ME, replace(HOP, micro=hop.micro), array)
        except WorldError as error:
            sys.stderr.write(f"{error}\n")


@asynccontextmanager
async def peer(url: str, name: str, host: str, folder: Path) -> AsyncIterator[subprocess.Popen[bytes]]:
    """Such a process, once it hears."""
    arguments = [sys.executable, "-m", "tests.bus.peers", url, name, host, str(folder)]
    process = await asyncio.to_thread(subprocess.Popen, arguments, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == b"ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


if __name__ == "__main__":
    asyncio.run(echo(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4])))
