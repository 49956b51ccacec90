"""Three servers that are one cluster, with the configuration that is shipped for them."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

from dcnr.bus.base import Bus
from dcnr.bus.nats import connect
from dcnr.bus.server import find_binary
from dcnr.config import environment
from dcnr.errors import BusUnavailable, WorldError
from tests.bus.clusters import free_ports
from tests.faults.processes import Processes

DEPLOY = Path(__file__).parents[2] / "deploy" / "nats"
NODES = ("n1", "n2", "n3")
START_PATIENCE = 60.0


class Trio:
    """Processes n1, n2 and n3."""

    def __init__(self, folder: Path) -> None:
        self.processes = Processes(folder)
        ports = free_ports(2 * len(NODES))
        self._ports = dict(zip(NODES, ports[: len(NODES)], strict=True))
        self._routes = dict(zip(NODES, ports[len(NODES) :], strict=True))
        self._folder = folder

    @property
    def url(self) -> str:
        """All three."""
        return ",".join(f"nats://127.0.0.1:{port}" for port in self._ports.values())

    async def start(self) -> None:
        """Returns when all have a part in JetStream."""
        binary = str(find_binary(environment()))
        for node in NODES:
            self.processes.start(node, [binary, "-c", str(self._write(node))], NODE=node)
        async with asyncio.timeout(START_PATIENCE):
            bus = await connect(self.url, "test", patient=True)
            while "error" in await _asked(bus, "INFO"):
                await asyncio.sleep(0.1)
            await bus.close()

    async def leader_of(self, bucket: str) -> str:
        """The server that leads the stream of a bucket."""
        bus = await connect(self.url, "test")
        answer = await _asked(bus, f"STREAM.INFO.KV_{bucket}")
        await bus.close()
        return str(answer["cluster"]["leader"])

    def _write(self, node: str) -> Path:
        folder = self._folder / node
        folder.mkdir(parents=True)
        shutil.copy(DEPLOY / "open.conf", folder)
        routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in self._routes.values())
        text = (DEPLOY / "cluster.conf").read_text()
        replaced = {
            'host: "0.0.0.0"': 'host: "127.0.0.1"',
            "port: 4222": f"port: {self._ports[node]}",
            '"/var/lib/nats"': f'"{folder / "store"}"',
            'listen: "0.0.0.0:6222"': f'listen: "127.0.0.1:{self._routes[node]}"',
            'routes: [ "nats://10.0.0.1:6222", "nats://10.0.0.2:6222", "nats://10.0.0.3:6222" ]': f"routes: [ {routes} ]",
        }
        for old, new in replaced.items():
            assert old in text, f"cluster.conf has no {old}"
            text = text.replace(old, new)
        path = folder / "cluster.conf"
        path.write_text(text)
        return path


async def _asked(bus: Bus, what: str) -> dict[str, Any]:
    """JetStream's answer, or why there is none, as `error`."""
    try:
        answer: dict[str, Any] = json.loads(await bus.request(f"$JS.API.{what}", b"", 2.0))
    except (BusUnavailable, WorldError) as error:
        return {"error": str(error)}
    return answer
