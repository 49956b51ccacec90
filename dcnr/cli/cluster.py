"""A whole cluster on this machine: server, orchestrator and agents as children of this process.

Rule 1: with `NATS_URL` set, and no port asked for, no server is started; orchestrator and agents join that one.
Rule 2: it is ready when every agent was heard, and the orchestrator lists it as alive.
Rule 3: while it starts, a death is the end. Later whoever dies is started again in its place, under its name, and that is a line; one that
ends by itself time after time is the end (cli/children).
Rule 4: a stop takes at most `AGENT_PATIENCE + SERVER_PATIENCE` seconds.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar
from urllib.parse import urlsplit

import click

from dcnr.bus import subjects
from dcnr.bus.api import call
from dcnr.bus.base import Bus
from dcnr.bus.codec import decode
from dcnr.bus.lanes import segment
from dcnr.bus.messages import Heartbeat
from dcnr.bus.server import NatsServer
from dcnr.cli.children import KILLED, PAUSES, Children, DirectoryLock, Guard, is_hopeless, soon_again
from dcnr.client.connect import connection
from dcnr.config import from_environment
from dcnr.errors import BusUnavailable, DcnrError, WorldError

T = TypeVar("T")
Note = Callable[[str], None]

BACKENDS = ("auto", "numpy", "cpu", "cupy", "mlx")
SHARE = 80
"""Percent of a device's memory that all its agents together may hold."""
START_PATIENCE = 300.0
"""Seconds until every agent must be alive; on a slow and busy machine the first start compiles kernels for minutes."""
NOTICE_AFTER = 5.0
"""Seconds of waiting after which a person is told what takes so long."""
NOTICE = "still starting; the first start on a machine compiles kernels, which takes about half a minute"
AGENT_PATIENCE = 0.6
SERVER_PATIENCE = 0.3
ASK_EVERY = 0.1
"""Seconds between two looks at whether the agents are there, or the server still is."""


class LocalCluster:
    """An async context manager; `url` is where its NATS server answers."""

    def __init__(self, data_dir: Path, agents: int, backend: str = "auto", port: int | None = None, devices: Sequence[int] = ()) -> None:
        """`port` of the server; 0, or nothing said, for any free one.

        `devices` are GPUs that the agents take in turn; the first one if none is named.
        """
        self._data_dir = data_dir.absolute()
        self._backend = backend
        self._devices = devices
        self.url = os.environ.get("NATS_URL", "") if port is None else ""
        self._store = from_environment(self._data_dir).nats_store
        self._server = None if self.url else NatsServer(self._store, port or 0)
        self._server_pid = 0
        suffix = "" if self._server else f"-{os.getpid()}"
        self.agents = tuple(f"agent-{index + 1}{suffix}" for index in range(agents))

    async def __aenter__(self) -> Self:
        """Start everything, and wait until it is ready."""
        self._lock = DirectoryLock(self._data_dir)
        self._guard = Guard(self._lock)
        self._children = Children(self._guard, self._data_dir / "logs")
        try:
            await self._start()
            await self._run_beside(self._wait_until_ready(), self._fail_with_server(), self._fail_with_children())
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._stop()

    async def run_beside(self, work: Coroutine[Any, Any, T], note: Note) -> T:
        """Do `work` while the children live, or live again. One that cannot cancels it and is raised as `DcnrError`."""
        return await self._run_beside(work, self._keep_server(note), *(self._keep_child(name, note) for name in self._children.names))

    async def _run_beside(self, work: Coroutine[Any, Any, T], *watches: Coroutine[Any, Any, NoReturn]) -> T:
        working = asyncio.ensure_future(work)
        watching = [asyncio.ensure_future(watch) for watch in watches]
        try:
            await asyncio.wait([working, *watching], return_when=asyncio.FIRST_COMPLETED)
            for watch in watching:
                if watch.done() and not working.done():
                    watch.result()
        finally:
            for task in (working, *watching):
                task.cancel()
            await asyncio.gather(working, *watching, return_exceptions=True)
        return working.result()

    async def _fail_with_children(self) -> NoReturn:
        raise (await self._children.next_death()).failure()

    async def _fail_with_server(self) -> NoReturn:
        await self._server_death()
        raise DcnrError("nats-server ended", self._server_log)

    async def _keep_child(self, name: str, note: Note) -> NoReturn:
        while True:
            dead = await self._children.death(name)
            if is_hopeless(dead):
                raise dead.failure()
            note(f"{dead.epitaph()}; it is started again")
            await self._children.again(dead)

    async def _keep_server(self, note: Note) -> NoReturn:
        deaths = 0
        while True:
            born = time.monotonic()
            dead = await self._server_death()
            deaths = soon_again(born, deaths)
            if deaths >= len(PAUSES) and dead.exit_code not in KILLED:
                raise DcnrError("nats-server ended again and again", self._server_log)
            note(f"nats-server ended ({self._server_log}); it is started again")
            await asyncio.sleep(PAUSES[min(deaths, len(PAUSES) - 1)])
            await dead.stop()
            await self._start_server(NatsServer(self._store, urlsplit(self.url).port or 0))

    async def _server_death(self) -> NatsServer:
        """Wait until our server ends; for ever if we have none."""
        while self._server is None or self._server.pid is not None:
            await asyncio.sleep(ASK_EVERY)
        self._guard.reaped(self._server_pid)
        return self._server

    async def _start_server(self, server: NatsServer) -> None:
        await server.start()
        self._server, self.url = server, server.url
        if (pid := server.pid) is not None:  # else somebody killed it the moment it answered
            self._guard.born(pid)
            self._server_pid = pid

    async def _find_server(self) -> None:
        try:
            async with connection(self.url):
                pass
        except BusUnavailable as error:
            raise BusUnavailable(error.message, "start that server; or unset NATS_URL, and one is started here") from error

    @property
    def _server_log(self) -> str:
        return f"its log is in {self._store}"

    async def _start(self) -> None:
        if self._server is not None:
            await self._start_server(self._server)
        else:
            await self._find_server()
        click.echo(f"starting orchestrator and {len(self.agents)} {'agent' if len(self.agents) == 1 else 'agents'} at {self.url}", err=True)
        env = {"NATS_URL": self.url, "DCNR_DATA_DIR": str(self._data_dir)}
        await self._children.start("orchestrator", _program("dcnr.cli.main", "orchestrator"), env)
        for name, place in zip(self.agents, places(len(self.agents), self._devices), strict=True):
            options = ("--name", name, "--backend", self._backend, *place)
            await self._children.start(name, _program("dcnr.agents.main", *options), env)

    async def _wait_until_ready(self) -> None:
        notice = asyncio.get_running_loop().call_later(NOTICE_AFTER, click.echo, NOTICE, None, True, True)
        try:
            async with asyncio.timeout(START_PATIENCE), connection(self.url) as bus:
                await _hear(bus, {self._children.pid(name) for name in self.agents})
                while not set(self.agents) <= await _alive(bus):
                    await asyncio.sleep(ASK_EVERY)
        except TimeoutError:
            where = self._data_dir / "logs"
            raise WorldError(f"the cluster was not ready after {START_PATIENCE:.0f} s", f"look into {where}") from None
        finally:
            notice.cancel()

    async def _stop(self) -> None:
        """Agents and orchestrator first: they say good-bye to the server. An agent that was killed left shared memory behind."""
        await self._children.stop(self._children.names, AGENT_PATIENCE)
        if self._server is not None:
            await _stop_server(self._server)
        self._guard.close()
        segment.sweep()
        self._lock.release()


def places(agents: int, devices: Sequence[int]) -> list[tuple[str, ...]]:
    """Options of each agent: devices are taken in turn, and those who share one, or the only one, share its memory."""
    turns = max(1, len(devices))
    found = []
    for index in range(agents):
        sharing = len(range(index % turns, agents, turns))
        device = ("--device", str(devices[index % turns])) if devices else ()
        found.append((*device, "--memory", f"{SHARE / sharing:.3f}%"))
    return found


async def _stop_server(server: NatsServer) -> None:
    try:
        async with asyncio.timeout(SERVER_PATIENCE):
            await server.stop()
    except TimeoutError:
        server.kill()
        await server.stop()


def _program(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


async def _hear(bus: Bus, pids: set[int]) -> None:
    """Wait for a heartbeat of each process: the orchestrator may still remember agents of these names from before."""
    beats: asyncio.Queue[bytes] = asyncio.Queue()
    listening = await bus.subscribe(subjects.HEARTBEATS, beats.put_nowait)
    while pids:
        message = decode(await beats.get())
        if isinstance(message, Heartbeat):
            pids = pids - {message.info.pid}
    await listening.stop()


async def _alive(bus: Bus) -> set[str]:
    """Names of the PNodes that are alive; nobody while the orchestrator is not there yet."""
    try:
        rows = (await call(bus, "pnode.list"))["pnodes"]
    except (BusUnavailable, WorldError):
        return set()
    return {row["pnode"] for row in rows if row["state"] == "alive"}
