"""A cluster of NATS servers, each of which a test may end."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

import nats

from dcnr.bus.server import ACCOUNTS, find_binary
from dcnr.config import environment

CONFIGURATION = """\
server_name: {name}
host: "127.0.0.1"
port: {port}
log_file: "{log}"
lame_duck_grace_period: "100ms"
lame_duck_duration: "30s"
cluster {{
  name: test
  listen: "127.0.0.1:{route}"
  routes: [{routes}]
}}
{more}
"""


def jetstream(folder: Path, number: int) -> str:
    """`more` for servers that keep buckets and tell of closed connections, as deploy/nats/cluster.conf has it."""
    return f'jetstream {{ store_dir: "{folder / f"store-{number}"}", sync_interval: always }}\n{ACCOUNTS}'


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody uses at this moment."""
    doors = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [door.getsockname()[1] for door in doors]
    for door in doors:
        door.close()
    return ports


@dataclass(frozen=True, slots=True)
class NatsCluster:
    """Servers by their number."""

    ports: Sequence[int]
    processes: Sequence[subprocess.Popen[bytes]]

    def url(self, *numbers: int, user: str = "") -> str:
        """The addresses of some of the servers."""
        return ",".join(f"nats://{user}127.0.0.1:{self.ports[number]}" for number in numbers)

    async def leader_of(self, stream: str) -> int:
        """The number of the server that leads a stream."""
        client = await nats.connect([f"nats://127.0.0.1:{port}" for port in self.ports])
        try:
            cluster = (await client.jetstream().stream_info(stream)).cluster
            assert cluster is not None
            assert cluster.leader is not None
            return int(cluster.leader.removeprefix("n"))
        finally:
            await client.close()

    def end(self, number: int, how: signal.Signals = signal.SIGKILL) -> None:
        """Send one a signal."""
        self.processes[number].send_signal(how)


def _start(configuration: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([find_binary(environment()), "-c", str(configuration)])


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    with closing(writer):
        return True


@asynccontextmanager
async def nats_cluster(folder: Path, size: int = 3, more: str | Callable[[Path, int], str] = "") -> AsyncIterator[NatsCluster]:
    """`size` servers that know each other. `more`: for the configuration of each, or what makes it of the folder and the number."""
    ports, routes = free_ports(size), free_ports(size)
    processes = []
    for number in range(size):
        path = folder / f"{number}.conf"
        others = ", ".join(f'"nats://127.0.0.1:{route}"' for route in routes)
        text = CONFIGURATION.format(
            name=f"n{number}",
            port=ports[number],
            route=routes[number],
            routes=others,
            log=folder / f"{number}.log",
            more=more if isinstance(more, str) else more(folder, number),
        )
        path.write_text(text)
        processes.append(_start(path))
    try:
        async with asyncio.timeout(20):
            for port in ports:
                while not await _listens(port):
                    await asyncio.sleep(0.05)
        yield NatsCluster(ports, processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
