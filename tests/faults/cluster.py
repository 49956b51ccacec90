"""A cluster of real processes that a test may break: nats-server, orchestrators, agents, and a bad network between them.

Clients go through the proxy; the test's own connection does not, so that it always sees what happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dcnr.bus import subjects
from dcnr.bus.api import call
from dcnr.bus.base import Bus
from dcnr.bus.codec import decode
from dcnr.bus.messages import Heartbeat, SessionMetrics, StepMetrics
from dcnr.bus.nats import connect
from dcnr.bus.server import NatsServer
from dcnr.errors import BusUnavailable, PeerError, WorldError
from dcnr.ids import SessionId
from dcnr.storage.checkpoint import read_manifest, read_tensors
from dcnr.storage.file import FileStorage
from tests.acceptance.networks import VOCABULARY, small
from tests.acceptance.running import make_dataset
from tests.faults.processes import Processes, python
from tests.faults.proxy import FINE, Proxy

PATIENCE = 60.0
"""Seconds after which a test gives up on anything."""
START_PATIENCE = 120.0
"""The same for the start of agents: on a busy machine that takes long, and the first one compiles kernels."""
LOOK_EVERY = 0.02
NETWORK = "faulty"
SABOTEUR = "agent-1"
HYPER: dict[str, Any] = {
    "optimizer": "adamw",
    "lr": 0.01,
    "clip_norm": 1.0,
    "schedule": "cosine",
    "warmup_steps": 5,
    "decay_steps": 100_000,
}
OPTIONS: dict[str, Any] = {"network": NETWORK, "dataset": "text", "batch": 4, "micro_batches": 2, "seed": 3}
Tensors = dict[str, np.ndarray]
_AT_REST = {"created", "suspended", "done", "failed"}


class Cluster:
    """Made by `cluster`. Names: agent-1, agent-2, …, orchestrator-1, …; the server is no name."""

    def __init__(self, data_dir: Path, proxy: Proxy, store: Path) -> None:
        self.data_dir = data_dir
        self.proxy = proxy
        self.processes = Processes(data_dir)
        self.store = store
        self._orders = data_dir / "orders"
        self._orders.mkdir()
        self._server = NatsServer(store)
        self.agents: tuple[str, ...] = ()
        self._clients = ""
        self.bus: Bus
        self.beats: dict[str, tuple[float, Heartbeat]] = {}
        """The last heartbeat of each PNode, and when it came."""

    # -- starting ----------------------------------------------------------------------------------------------------------

    async def open(self, agents: int, orchestrators: int) -> None:
        """Start everything; returns when the orchestrator lists every agent as alive."""
        await self._server.start()
        self.proxy.target = self._server.url
        await self.join(self._server.url, self.proxy.url, agents, orchestrators)

    async def join(self, url: str, clients: str, agents: int, orchestrators: int) -> None:
        """The same where servers run already: at `url` for us, at `clients` for everybody else."""
        self.bus = await connect(url, "test")
        self._clients = clients
        await self.bus.subscribe(subjects.HEARTBEATS, self._hear)
        for number in range(orchestrators):
            self.start_orchestrator(f"orchestrator-{number + 1}")
        self.agents = tuple(f"agent-{number + 1}" for number in range(agents))
        for name in self.agents:
            self.start_agent(name)
        await self.until_some_alive(agents)

    async def close(self) -> None:
        """End everything; the proxy carries the good-byes meanwhile."""
        await asyncio.to_thread(self.processes.stop_all)
        if self._clients:
            await self.bus.close()
        await self._server.stop()

    def start_agent(self, name: str) -> None:
        """On the cpu backend. The first one goes wrong when it is ordered to (tests/faults/saboteur)."""
        program = python("tests.faults.saboteur", str(self._orders)) if name == SABOTEUR else python("dcnr.agents.main")
        self.processes.start(name, [*program, "--name", name, "--backend", "cpu", "--memory", "10%"], NATS_URL=self._clients)

    def sabotage(self, what: str, text: str = "") -> None:
        """An order to the saboteur."""
        (self._orders / what).write_text(text)

    def start_orchestrator(self, name: str) -> None:
        """One more."""
        command = python("dcnr.cli.main", "orchestrator", "--data-dir", str(self.data_dir), "--name", name)
        self.processes.start(name, command, NATS_URL=self._clients)

    # -- the server --------------------------------------------------------------------------------------------------------

    @property
    def server_pid(self) -> int | None:
        """While it runs."""
        return self._server.pid

    def kill_server(self) -> None:
        """SIGKILL."""
        self._server.kill()

    async def restart_server(self, store: Path | None = None) -> None:
        """Where it was, on the same store or on another one."""
        port = int(self._server.url.rsplit(":", 1)[1])
        await self._server.stop()
        self._server = NatsServer(store or self.store, port=port)
        await self._server.start()

    # -- mending -----------------------------------------------------------------------------------------------------------

    async def mend(self, enough: int) -> None:
        """Fine weather, every process that belongs here and no other, `enough` agents alive, and no session under way."""
        self.proxy.tap, self.proxy.weather = None, FINE
        self.proxy.flow()
        for name in self.processes.names():
            self.processes.signal(name, signal.SIGCONT)
        for name in self.processes.names("orchestrator"):
            if name != "orchestrator-1":
                self.processes.kill(name)
        self.start_missing()
        await self.until_some_alive(enough)
        for row in (await self.ask("session.list"))["sessions"]:
            if row["state"] not in _AT_REST:
                await self.ask("session.suspend", session=row["session"])

    def start_missing(self) -> None:
        """Start again who ended, but for extra orchestrators."""
        for name in ("orchestrator-1", *self.agents):
            if not self.processes.runs(name):
                self.processes.again(name)

    # -- looking -----------------------------------------------------------------------------------------------------------

    async def ask(self, verb: str, **fields: Any) -> dict[str, Any]:
        """One answer of the orchestrator, whichever leads; while there is none, it is asked again."""
        until = time.monotonic() + PATIENCE
        while True:
            try:
                return await call(self.bus, verb, **fields)
            except (BusUnavailable, WorldError) as error:
                if time.monotonic() >= until:
                    raise AssertionError(f"{verb}: {error}\n{self.story()}") from error
                await asyncio.sleep(LOOK_EVERY)

    async def until(self, condition: Callable[[], bool], what: str, within: float = PATIENCE) -> float:
        """Wait until `condition` holds; the seconds that took. A failure shows the logs."""
        began = time.monotonic()
        while not condition():
            took = time.monotonic() - began
            assert took < within, f"not within {within:g} s: {what}\n{self.story()}"
            await asyncio.sleep(LOOK_EVERY)
        return time.monotonic() - began

    async def leader(self) -> str:
        """The name of the process that leads."""
        leader = str((await self.ask("cluster.info"))["orchestrator"])
        return next(name for name in self.processes.names("orchestrator") if leader.startswith(name))

    async def pnodes(self) -> dict[str, str]:
        """The state of every PNode, as the orchestrator sees it."""
        return {row["pnode"]: row["state"] for row in (await self.ask("pnode.list"))["pnodes"]}

    async def until_alive(self, name: str) -> None:
        """Until it is heard under its newest process, and listed as alive."""
        await self.until(lambda: self._heard(name), f"a heartbeat of {name}", START_PATIENCE)
        while (await self.pnodes()).get(name) != "alive":
            await asyncio.sleep(LOOK_EVERY)

    async def until_some_alive(self, enough: int) -> None:
        """Until so many agents are heard under their newest process, and listed as alive."""
        began = time.monotonic()
        while True:
            listed = await self.pnodes()
            if sum(self._heard(name) and listed.get(name) == "alive" for name in self.agents) >= enough:
                return
            assert time.monotonic() - began < START_PATIENCE, f"{listed}: not {enough} are alive\n{self.story()}"
            await asyncio.sleep(LOOK_EVERY)

    async def until_gone(self, name: str) -> None:
        """Until it is not listed as present any more."""
        while (await self.pnodes()).get(name) in {"alive", "suspect"}:
            await asyncio.sleep(LOOK_EVERY)

    def story(self) -> str:
        """What a failure shows: the last heartbeats, and the ends of the logs."""
        now = time.monotonic()
        beats = [f"--- {name}, {now - at:.1f} s ago: {beat.hosted}" for name, (at, beat) in sorted(self.beats.items())]
        return "\n".join([*beats, self.processes.tails()])

    def _heard(self, name: str) -> bool:
        return name in self.beats and self.beats[name][1].info.pid == self.processes.pid(name)

    def _hear(self, data: bytes) -> None:
        with contextlib.suppress(PeerError):
            beat = decode(data)
            if isinstance(beat, Heartbeat):
                self.beats[beat.info.pnode] = (time.monotonic(), beat)

    # -- sessions ----------------------------------------------------------------------------------------------------------

    async def register(self) -> None:
        """The network of these tests."""
        await self.ask("network.create", file=small(NETWORK, "float32"), file_name="network.yml", replace=True)

    async def session(self, name: str, steps: int, every: int, pnodes: int = 2, **options: Any) -> Session:
        """Begin one: `steps` steps, a checkpoint after each `every` of them."""
        one = Session(self, name)
        await self.bus.subscribe(subjects.metrics("step", SessionId(name)), one.hear)
        await self.bus.subscribe(subjects.metrics("session", SessionId(name)), one.hear)
        hyper = {**HYPER, "checkpoint_every": every}
        await self.ask("session.create", session=name, steps=steps, pnodes=pnodes, hyper=hyper, **{**OPTIONS, **options})
        return one


class Session:
    """A training run as it is heard."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.name = name
        self.rows: list[tuple[float, StepMetrics]] = []
        """With the moment at which each was heard."""
        self.states: list[tuple[float, SessionMetrics]] = []
        self._cluster = cluster

    def hear(self, data: bytes) -> None:
        """Bus callback."""
        message = decode(data)
        if isinstance(message, StepMetrics):
            self.rows.append((time.monotonic(), message))
        elif isinstance(message, SessionMetrics):
            self.states.append((time.monotonic(), message))

    @property
    def step(self) -> int:
        """The last one heard."""
        return self.rows[-1][1].step if self.rows else 0

    @property
    def state(self) -> str:
        """The last one heard."""
        return self.states[-1][1].state if self.states else "created"

    async def until_step(self, step: int, within: float = PATIENCE) -> None:
        """Until that step was heard."""
        await self._cluster.until(lambda: self.check() and self.step >= step, f"step {step} of {self}", within)

    async def until_state(self, state: str, within: float = PATIENCE) -> float:
        """Until it is in that state; the seconds that took."""
        return await self._cluster.until(lambda: self.check(state) and self.state == state, f"{self} is {state}", within)

    async def until_trains(self, since: float, within: float = PATIENCE) -> float:
        """Until a step is heard that was done after `since`; the seconds from there to it."""
        await self._cluster.until(lambda: self.check() and self.rows[-1][0] > since, f"{self} trains again", within)
        return next(at for at, _ in self.rows if at > since) - since

    async def until_trains_anew(self, since: float, within: float = PATIENCE) -> float:
        """Until a step of a newer deployment than the one at `since` is heard; the seconds from there to it."""
        old = max((row.epoch for at, row in self.rows if at <= since), default=0)
        await self._cluster.until(lambda: self.check() and self.rows[-1][1].epoch > old, f"{self} trains anew", within)
        return next(at for at, row in self.rows if row.epoch > old) - since

    def found_after(self, since: float) -> float:
        """Seconds from `since` to the first word that it does not run any more."""
        return next(at for at, told in self.states if at > since and told.state != "running") - since

    def first_told_after(self, since: float) -> SessionMetrics:
        """The first change of state after `since`."""
        return next(told for at, told in self.states if at > since)

    async def ask(self, verb: str, **fields: Any) -> dict[str, Any]:
        """A verb about this session."""
        return await self._cluster.ask(f"session.{verb}", session=self.name, **fields)

    async def hosts(self) -> list[str]:
        """PNodes that hold it, by name."""
        return sorted(set((await self.ask("show"))["assignment"].values()))

    async def log(self) -> dict[int, float]:
        """The loss of every step up to the last, as the orchestrator keeps them; rows are written a moment after they are told."""
        last, began = (await self.ask("show"))["step"], time.monotonic()
        while True:
            rows = (await self.ask("rows", first=1, last=last))["rows"]
            if [row["step"] for row in rows] == list(range(1, last + 1)):
                return {row["step"]: row["loss"] for row in rows}
            assert time.monotonic() - began < PATIENCE, f"{self}: its log has {[row['step'] for row in rows]}"
            await asyncio.sleep(LOOK_EVERY)

    async def tensors(self, step: int) -> Tensors:
        """All weights and moments of its checkpoint."""
        storage = FileStorage(self._cluster.data_dir)
        manifest = await read_manifest(storage, SessionId(self.name), step)
        return dict(await read_tensors(storage, manifest, manifest.tensors))

    def check(self, wanted: str = "") -> bool:
        """Raises once it failed, where that is not what is waited for."""
        if self.states and self.state != wanted:
            told = self.states[-1][1]
            assert told.state != "failed", f"{told}\n{self._cluster.story()}"
        return True

    def __str__(self) -> str:
        told = self.states[-1][1] if self.states else "never heard of"
        return f"session {self.name} (step {self.step}, {told})"


def losses_of(session: Session) -> dict[int, float]:
    """The loss of every step; a step that was rolled back has the same loss again."""
    found: dict[int, float] = {}
    for _, row in session.rows:
        assert found.setdefault(row.step, row.loss) == row.loss, f"step {row.step} has two losses"
    return found


@asynccontextmanager
async def cluster(data_dir: Path, agents: int, orchestrators: int = 1, seed: int = 0) -> AsyncIterator[Cluster]:
    """Everything started, with network `faulty` registered and dataset `text`; nothing is left afterwards."""
    make_dataset(data_dir, VOCABULARY)
    async with Proxy("", seed) as proxy:
        one = Cluster(data_dir, proxy, data_dir / "nats")
        try:
            await one.open(agents, orchestrators)
            await one.register()
            yield one
        finally:
            await one.close()
