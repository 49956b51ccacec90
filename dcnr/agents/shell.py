"""Does what the machine decides: one inbox, one loop, one compute thread, and slow work in tasks.

Rule 1: callbacks of the bus, the transport and the compute thread only enqueue.
Rule 2: control messages keep their order and have their own connection.
Rule 3: deploys and evictions are carried out one after the other, so what the machine let go of is gone before it is set up again.
Rule 4: whatever goes wrong in slow work becomes an event; a lost hop or message is logged, and the protocol repeats it.
Rule 5: nothing grows while nobody takes it: of messages that wait for a way out, at most `BACKLOG` are kept.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, TypeVar, assert_never

import structlog

from dcnr.agents.commands import (
    Abort,
    Apply,
    Beat,
    Command,
    Evaluate,
    Evict,
    Fold,
    GiveWay,
    Install,
    Pass,
    Prepare,
    Read,
    SendHop,
    SendReport,
    Settle,
    Snapshot,
    Upload,
)
from dcnr.agents.events import (
    Event,
    HopArrived,
    Installed,
    JobEvent,
    NameHeard,
    Prepared,
    SetupRefused,
    Stop,
    Tick,
    Told,
    Uploaded,
    UploadFailed,
)
from dcnr.agents.plan import make_plan
from dcnr.agents.pnode import PNode
from dcnr.agents.restore import find_storage, restore, setup_failed, told
from dcnr.agents.runner import Runner
from dcnr.agents.telemetry import Telemetry
from dcnr.backends.base import Array, Backend
from dcnr.bus import codec, subjects
from dcnr.bus.base import Bus, Subscription
from dcnr.bus.lanes.base import DeviceSide
from dcnr.bus.messages import Complete, Decision, Deploy, Failed, Heartbeat, Hop, Message, PNodeInfo, Save, SaveFailed, Undeploy
from dcnr.bus.transport import HopTransport
from dcnr.clock import Clock
from dcnr.errors import AlreadyExists, DcnrError, InvariantError, PeerError
from dcnr.ids import Epoch, NetworkId, NodeId, SessionId
from dcnr.machine import drive
from dcnr.storage.base import open_storage
from dcnr.storage.checkpoint import part_key, write_part

log = structlog.get_logger()

PATIENCE = 1.0
"""Seconds that the job at work gets when the process ends."""
BACKLOG = 1000
"""Messages that wait for a connection; beyond that they are dropped, and the protocol says again what matters."""
STORY = 100
"""Events that are kept for the report of a bug."""

SUMMED_UP = ("session", "epoch", "step", "micro", "phase", "segment", "targets")

T = TypeVar("T")
Connect = Callable[[str], Awaitable[Bus]]
"""Opens a connection of its own for the given purpose."""


class Shell:
    """One agent process. `info.memory_total` is what it may hold; `threads` how many row shards run at once."""

    def __init__(self, info: PNodeInfo, backend: Backend, clock: Clock, threads: int) -> None:
        self.telemetry = Telemetry()
        self.machine = PNode(info, self.telemetry, clock.now())
        self._info = info
        self._backend = backend
        self._clock = clock
        self._threads = threads
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()

    def stop(self) -> None:
        """Ask `run` to say good-bye and return."""
        self._inbox.put_nowait(Stop())

    async def run(self, connect: Connect, ready: Callable[[], None]) -> bool:
        """Serve until `stop`; `ready` is called once orders are heard. Returns whether the compute thread ended in time.

        Raises `AlreadyExists` if an older process has the name.
        """
        loop = asyncio.get_running_loop()

        def emit(event: JobEvent) -> None:
            loop.call_soon_threadsafe(self._inbox.put_nowait, event)

        def on_hop(hop: Hop, payload: Array) -> None:
            self._inbox.put_nowait(HopArrived(hop, payload))

        runner = Runner(self._backend, emit, self._threads)
        try:
            async with AsyncExitStack() as stack:
                control = await connect("control")
                stack.push_async_callback(control.close)
                tensors = await connect("tensors")
                stack.push_async_callback(tensors.close)
                port = self._backend.ipc()
                device = None if port is None else DeviceSide(port, on_hop)
                transport = HopTransport(tensors, self._info.pnode, self._info.host, on_hop, device=device)
                stack.push_async_callback(transport.close)
                service = Service(self._info, self.telemetry, self._inbox, control, transport, runner)
                await service.listen()
                ready()
                await self._serve(service)
        finally:
            ended = await asyncio.to_thread(runner.close, PATIENCE)
        log.info("stopped", dropped=dict(self.telemetry.dropped), received=dict(self.telemetry.received))
        if service.other is not None:
            where = f"host {service.other.host}, process {service.other.pid}"
            raise AlreadyExists(f"another agent named '{self._info.pnode}' is alive at {where}", "choose another --name")
        return ended

    async def _serve(self, service: Service) -> None:
        remembering = Remembering(self.machine)
        async with asyncio.TaskGroup() as group:
            service.group = group
            work = [
                group.create_task(service.publish()),
                group.create_task(service.set_up()),
                group.create_task(remembering.drive(self._inbox, service, self._clock)),
            ]
            await service.said_good_bye.wait()
            for task in (*work, *service.tasks):
                task.cancel()


class Remembering:
    """The machine, and its last events without their tensors: what a report of a bug needs."""

    def __init__(self, machine: PNode) -> None:
        self._machine = machine
        self._story: deque[str] = deque(maxlen=STORY)

    async def drive(self, inbox: asyncio.Queue[Event], service: Service, clock: Clock) -> None:
        """Feed the machine until cancelled. A bug ends the process, with the story in the log."""
        try:
            await drive(self, inbox, service.perform, clock, service.tick)
        except InvariantError:
            log.exception("a bug of ours; the last events were", story=list(self._story))
            raise

    def handle(self, event: Event, now: float) -> list[Command]:
        """Remember, and pass on."""
        self._story.append(summary(event))
        return self._machine.handle(event, now)

    def deadline(self) -> float | None:
        """The machine's."""
        return self._machine.deadline()

    def validate(self) -> None:
        """The machine's."""
        self._machine.validate()


def summary(event: Event) -> str:
    """The name of an event, and what it is about."""
    about = event.hop if isinstance(event, HopArrived) else event.message if isinstance(event, Told) else event
    fields = [f"{name}={getattr(about, name)}" for name in SUMMED_UP if hasattr(about, name)]
    return " ".join([type(event).__name__, type(about).__name__, *fields])


class Service:
    """Performs commands. `group` is set before the first."""

    group: asyncio.TaskGroup

    def __init__(
        self,
        info: PNodeInfo,
        telemetry: Telemetry,
        inbox: asyncio.Queue[Event],
        control: Bus,
        transport: HopTransport,
        runner: Runner,
    ) -> None:
        self.tasks: set[asyncio.Task[None]] = set()
        self.said_good_bye = asyncio.Event()
        self.other: PNodeInfo | None = None
        """The process that has our name."""
        self._info = info
        self._telemetry = telemetry
        self._inbox = inbox
        self._control = control
        self._transport = transport
        self._runner = runner
        self._outbox: asyncio.Queue[tuple[str, bytes] | None] = asyncio.Queue()
        self._setups: asyncio.Queue[Prepare | Install | Evict] = asyncio.Queue()
        self._installed: dict[tuple[SessionId, Epoch], tuple[Deploy, frozenset[NodeId]]] = {}
        """Deploys, and the VNodes that are here."""
        self._readings: dict[tuple[SessionId, Epoch], asyncio.Future[Any]] = {}
        """Of a deploy that is carried out: what it awaits of storage."""
        self._evicting: set[tuple[SessionId, Epoch]] = set()
        """Whose eviction is queued: nothing is read for them any more."""
        self._heard: dict[NetworkId, frozenset[NodeId]] = {}
        """Whose hops are heard."""
        self._steps: dict[NetworkId, Subscription] = {}
        """Where decisions are heard."""
        self._sending: Counter[tuple[SessionId, Epoch]] = Counter()
        """Hops on their way; no zeros."""

    def perform(self, command: Command) -> None:
        """Do one thing, or start it."""
        match command:
            case Pass() | Evaluate() | Fold() | Abort() | Apply() | Settle() | Snapshot() | Read():
                self._runner.submit(command)
            case Prepare() | Install():
                self._setups.put_nowait(command)
            case Evict(session, epoch):
                self._setups.put_nowait(command)
                self._evicting.add((session, epoch))
                if (reading := self._readings.get((session, epoch))) is not None:
                    reading.cancel()
            case SendHop():
                self._sending[command.hop.session, command.hop.epoch] += 1
                self._start(self._send_hop(command))
            case SendReport(network, report):
                if isinstance(report, Failed):
                    log.error("failed", session=report.session, reason=report.message, traceback=report.traceback)
                elif isinstance(report, SaveFailed):
                    log.warning("not saved", session=report.session, step=report.step, reason=report.message)
                self._post(subjects.report(network), codec.encode(report))
            case Upload():
                self._start(self._upload(command))
            case Beat():
                self._beat(command)
            case GiveWay(other):
                self.other = other
            case _:
                assert_never(command)

    @property
    def waiting(self) -> int:
        """Messages that wait for a way out."""
        return self._outbox.qsize()

    def tick(self) -> Tick:
        """The event for a passed deadline."""
        return Tick(frozenset(self._sending))

    # -- control ------------------------------------------------------------------------------------------------------

    async def listen(self) -> None:
        """Hear orders, and whoever uses our name, from now on."""
        await self._control.subscribe(subjects.command(self._info.pnode), self._hear)
        await self._control.subscribe(subjects.heartbeat(self._info.pnode), self._hear_name)

    def _hear(self, data: bytes) -> None:
        message = self._decoded(data)
        if isinstance(message, Deploy | Undeploy | Save | Decision | Complete):
            self._inbox.put_nowait(Told(message))

    def _hear_name(self, data: bytes) -> None:
        message = self._decoded(data)
        if isinstance(message, Heartbeat):
            self._inbox.put_nowait(NameHeard(message))

    def _decoded(self, data: bytes) -> Message | None:
        try:
            return codec.decode(data)
        except PeerError as error:
            self._telemetry.drop("malformed")
            log.warning("dropped a message", reason=str(error))
            return None

    def _beat(self, beat: Beat) -> None:
        info = replace(self._info, memory_used=self._runner.memory_used)
        message = Heartbeat(info, beat.hosted, beat.stopping, beat.age, self._transport.links())
        self._post(subjects.heartbeat(info.pnode), codec.encode(message))
        if beat.stopping:
            self._outbox.put_nowait(None)

    def _post(self, subject: str, data: bytes) -> None:
        if self.waiting < BACKLOG:
            self._outbox.put_nowait((subject, data))
        else:
            log.warning("could not publish", subject=subject, reason=f"{BACKLOG} messages wait")

    async def publish(self) -> None:
        """Send control messages in order, until the good-bye is sent."""
        while (item := await self._outbox.get()) is not None:
            try:
                await self._control.publish(*item)
            except DcnrError as error:
                log.warning("could not publish", subject=item[0], reason=str(error))
        self.said_good_bye.set()

    # -- tensors ------------------------------------------------------------------------------------------------------

    async def _send_hop(self, command: SendHop) -> None:
        try:
            await self._transport.send(command.to, command.hop, command.payload)
        except DcnrError as error:
            log.warning("could not send a hop", to=command.to, step=command.hop.step, reason=str(error))
        of = (command.hop.session, command.hop.epoch)
        self._sending[of] -= 1
        if not self._sending[of]:
            del self._sending[of]

    # -- setting up ---------------------------------------------------------------------------------------------------

    async def set_up(self) -> None:
        """Carry out deploys and evictions, one after the other. What a deploy takes over from an older one is not given up in between."""
        while True:
            command = await self._setups.get()
            match command:
                case Prepare(deploy):
                    await self._guard_setup(deploy, self._prepare(deploy))
                    continue  # something follows
                case Install(deploy):
                    await self._guard_setup(deploy, self._install(command))
                case Evict():
                    self._evict(command)
                case _:
                    assert_never(command)
            if self._setups.empty():
                await self._tidy()

    async def _guard_setup(self, deploy: Deploy, work: Awaitable[Event]) -> None:
        try:
            event = await work
        except Exception as error:  # noqa: BLE001 - the shell's border: a bug in a pass or node fails this session, not the process
            event = setup_failed(deploy, error)
        self._inbox.put_nowait(event)

    async def _prepare(self, deploy: Deploy) -> Event:
        refused = await self._read(deploy, find_storage(deploy))
        return refused or Prepared(deploy, await asyncio.to_thread(make_plan, deploy, self._info.pnode))

    async def _install(self, command: Install) -> Event:
        deploy, plan = command.deploy, command.plan
        tensors = await self._read(deploy, restore(deploy, plan, command.kept))
        if isinstance(tensors, SetupRefused):
            return tensors
        self._installed[deploy.session, deploy.epoch] = deploy, frozenset(plan.routes.hosted)
        self._name_peers()
        self._heard[deploy.network] = self._heard.get(deploy.network, frozenset()).union(plan.routes.hosted)
        await self._transport.listen(deploy.network, plan.routes.hosted)
        if deploy.network not in self._steps:
            self._steps[deploy.network] = await self._control.subscribe(subjects.step(deploy.network), self._hear)
        await asyncio.wrap_future(self._runner.load(deploy, plan, tensors))
        return Installed(deploy.session, deploy.epoch, tensors)

    async def _read(self, deploy: Deploy, work: Coroutine[None, None, T]) -> T | SetupRefused:
        """Look into storage. It may take long: an eviction gives it up."""
        of = (deploy.session, deploy.epoch)
        reading = asyncio.ensure_future(work)
        self._readings[of] = reading
        if of in self._evicting:
            reading.cancel()
        try:
            await asyncio.wait([reading])
        finally:
            del self._readings[of]
            reading.cancel()
        return SetupRefused(*of, "it was given up", damaged=False) if reading.cancelled() else reading.result()

    def _evict(self, command: Evict) -> None:
        self._evicting.discard((command.session, command.epoch))
        self._runner.drop(command.session, command.epoch)
        self._installed.pop((command.session, command.epoch), None)

    async def _tidy(self) -> None:
        """Let go of peers and subscriptions that no session needs; those of one network share theirs."""
        self._name_peers()
        for network, heard in list(self._heard.items()):
            needed = frozenset[NodeId]().union(*(nodes for deploy, nodes in self._installed.values() if deploy.network == network))
            await self._transport.unlisten(network, heard - needed)
            self._heard[network] = needed
            if not needed:
                del self._heard[network]
                if (steps := self._steps.pop(network, None)) is not None:
                    await steps.stop()

    def _name_peers(self) -> None:
        """Peers of all sessions: what a newer deploy says of one goes before what an older one said."""
        peers = {info.pnode: info for deploy, _ in self._installed.values() for info in deploy.peers}
        self._transport.set_peers(peers.values())

    # -- checkpoints --------------------------------------------------------------------------------------------------

    async def _upload(self, command: Upload) -> None:
        key = part_key(command.session, command.step, self._info.pnode, command.epoch)
        event: Event
        try:
            part = await write_part(open_storage(command.storage), key, command.tensors)
        except (DcnrError, OSError, MemoryError) as error:
            event = UploadFailed(command.session, command.epoch, command.step, told(error))
        else:
            event = Uploaded(command.session, command.epoch, command.step, part, command.state)
        self._inbox.put_nowait(event)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = self.group.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
