"""An orchestrator on a memory bus, its data directory, and a user of its API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dcnr.bus import codec, subjects
from dcnr.bus.api import call
from dcnr.bus.base import Bus
from dcnr.bus.memory import MemoryBroker
from dcnr.bus.messages import Deploy, Heartbeat, Hop, Message, Report, SessionMetrics, StepMetrics
from dcnr.bus.transport import HopTransport
from dcnr.clock import MonotonicClock
from dcnr.data.dataset import Dataset
from dcnr.errors import BusUnavailable
from dcnr.ids import NetworkId, NodeId, PNodeId, SessionId
from dcnr.orchestrator.shell import Outside, Shell
from dcnr.storage.base import Storage
from dcnr.storage.file import FileStorage
from dcnr.text.tokenizer import Tokenizer, add_tokenizer
from tests.orchestrator.fakes import FakePNodes, Told, info

TEXT = "abcd bcda cdab " * 40
PATIENCE = 20.0
"""Seconds after which a test gives up."""


def make_data(data_dir: Path) -> None:
    """A dataset `text` with a vocabulary of five characters."""
    file = data_dir / "text.txt"
    data_dir.mkdir(parents=True, exist_ok=True)
    file.write_text(TEXT)
    add_tokenizer(data_dir, "chars", Tokenizer.train([file], "char"))
    Dataset.create(data_dir, "text", [file], "chars", seq_len=4)


class User:
    """Asks the API, and remembers every metric of session `s`."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.steps: list[StepMetrics] = []
        self.states: list[SessionMetrics] = []
        self._news = asyncio.Event()

    async def listen(self, session: str = "s") -> None:
        """Hear the metrics of a session."""
        await self._bus.subscribe(subjects.metrics("step", SessionId(session)), self._hear)
        await self._bus.subscribe(subjects.metrics("session", SessionId(session)), self._hear)

    async def ask(self, verb: str, **fields: Any) -> dict[str, Any]:
        """One request."""
        return await call(self._bus, verb, **fields)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until what was heard satisfies `condition`; a failed session ends the wait with its reason."""
        async with asyncio.timeout(PATIENCE):
            while not condition():
                if self.states and self.states[-1].state == "failed":
                    raise AssertionError(self.states[-1].reason)
                self._news.clear()
                await self._news.wait()

    async def until_state(self, state: str) -> None:
        """Wait until the session's newest state is this."""
        await self.until(lambda: bool(self.states) and self.states[-1].state == state)

    def _hear(self, data: bytes) -> None:
        message = codec.decode(data)
        if isinstance(message, StepMetrics):
            self.steps.append(message)
        elif isinstance(message, SessionMetrics):
            self.states.append(message)
        self._news.set()


@asynccontextmanager
async def orchestrator(
    broker: MemoryBroker, data_dir: Path, name: str = "orchestrator", storage: Storage | None = None
) -> AsyncIterator[Shell]:
    """A running orchestrator; cancelled at the end."""
    control, tensors = broker.connect(), broker.connect()
    me = PNodeId(name)
    hops: asyncio.Queue[tuple[Hop, np.ndarray]] = asyncio.Queue()
    transport = HopTransport(tensors, me, "elsewhere", lambda hop, payload: hops.put_nowait((hop, payload)))
    shell = Shell(Outside(control, transport, storage or FileStorage(data_dir), data_dir, me, MonotonicClock(), hops))
    task = asyncio.create_task(shell.run())
    try:
        yield shell
        if task.done():
            task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await transport.close()
        await tensors.close()
        await control.close()


@asynccontextmanager
async def user(broker: MemoryBroker) -> AsyncIterator[User]:
    """A user, once an orchestrator answers."""
    bus = broker.connect()
    one = User(bus)
    await one.listen()
    async with asyncio.timeout(PATIENCE):
        while not await _answers(one):
            await asyncio.sleep(0.01)
    yield one
    await bus.close()


async def _answers(one: User) -> bool:
    try:
        await one.ask("cluster.info")
    except BusUnavailable:
        return False
    return True


class FakeAgent:
    """A PNode on the bus that speaks through `pnodes`, which all of them share."""

    def __init__(self, broker: MemoryBroker, name: str, pnodes: FakePNodes) -> None:
        self._bus = broker.connect()
        self._me = info(name)
        self._pnodes = pnodes
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._transport = HopTransport(self._bus, self._me.pnode, f"host of {name}", self._on_hop)
        self._said: asyncio.Queue[Report] = asyncio.Queue()

    async def run(self) -> None:
        """Until cancelled."""
        await self._bus.subscribe(subjects.command(self._me.pnode), lambda data: self._inbox.put_nowait(codec.decode(data)))
        await self._bus.subscribe(subjects.step(NetworkId("small")), lambda data: self._inbox.put_nowait(codec.decode(data)))
        try:
            async with asyncio.TaskGroup() as group:
                for work in (self._obey(), self._report(), self._beat()):
                    group.create_task(work)
        finally:
            await self._transport.close()
            await self._bus.close()

    def _on_hop(self, hop: Hop, payload: np.ndarray) -> None:
        for report in self._pnodes.fed(self._me.pnode, hop, payload):
            self._said.put_nowait(report)

    async def _obey(self) -> None:
        while True:
            message = await self._inbox.get()
            assert isinstance(message, Told)
            if isinstance(message, Deploy):
                here = [NodeId(node) for node, home in message.assignment.items() if home == self._me.pnode]
                await self._transport.listen(message.network, here)
            for report in self._pnodes.told(self._me.pnode, message):
                self._said.put_nowait(report)

    async def _report(self) -> None:
        while True:
            await self._bus.publish(subjects.report(NetworkId("small")), codec.encode(await self._said.get()))

    async def _beat(self) -> None:
        while True:
            beat = Heartbeat(self._me, self._pnodes.hosted_by(self._me.pnode))
            await self._bus.publish(subjects.heartbeat(self._me.pnode), codec.encode(beat))
            for report in self._pnodes.repeats(self._me.pnode):
                self._said.put_nowait(report)
            await asyncio.sleep(0.1)


@asynccontextmanager
async def fake_agents(broker: MemoryBroker, *names: str, beside: FakePNodes | None = None) -> AsyncIterator[FakePNodes]:
    """Fake PNodes of these names, perhaps beside others; gone without a good-bye at the end."""
    pnodes = beside or FakePNodes()
    tasks = [asyncio.create_task(FakeAgent(broker, name, pnodes).run()) for name in names]
    try:
        yield pnodes
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        if failed := [end for end in ends if isinstance(end, Exception)]:
            raise ExceptionGroup("fake agents failed", failed)
