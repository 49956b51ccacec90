"""Does what the machine decides: one inbox, one loop, one compute thread, and slow work in tasks.

Rule 1: callbacks of the bus, the transport and the compute thread only enqueue.
Rule 2: control messages keep their order and have their own connection.
Rule 3: deploys and evictions are carried out one after the other, so what the machine let go of is gone before it is set up again.
Rule 4: whatever goes wrong in slow work becomes an event; a lost hop or message is logged, and the protocol repeats it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import assert_never

import structlog

from dcnr.agents.commands import (
    Apply,
    Beat,
    Command,
    Evict,
    Fold,
    GiveWay,
    Install,
    Pass,
    Prepare,
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
    SetupFailed,
    Stop,
    Tick,
    Told,
    Uploaded,
    UploadFailed,
)
from dcnr.agents.plan import make_plan
from dcnr.agents.pnode import PNode
from dcnr.agents.runner import Runner, describe, trace_of
from dcnr.agents.telemetry import Telemetry
from dcnr.agents.weights import tensor_names
from dcnr.backends.base import Array, Backend, HostArray
from dcnr.bus import codec, subjects
from dcnr.bus.base import Bus, Subscription
from dcnr.bus.lanes.base import DeviceSide
from dcnr.bus.messages import Decision, Deploy, Failed, Heartbeat, Hop, Message, PNodeInfo, Save, Undeploy
from dcnr.bus.transport import HopTransport
from dcnr.clock import Clock
from dcnr.errors import AlreadyExists, DcnrError, InvariantError, PeerError
from dcnr.ids import Epoch, NetworkId, SessionId
from dcnr.machine import drive
from dcnr.optim.hyper import Hyper
from dcnr.storage.base import open_storage
from dcnr.storage.checkpoint import part_key, read_manifest_at, read_tensors, write_part

log = structlog.get_logger()

PATIENCE = 1.0
"""Seconds that the job at work gets when the process ends."""
STORY = 100
"""Events that are kept for the report of a bug."""

SUMMED_UP = ("session", "epoch", "step", "micro", "phase", "segment", "targets")

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
                group.create_task(remembering.drive(self._inbox, service.perform, self._clock)),
            ]
            await service.said_good_bye.wait()
            for task in (*work, *service.tasks):
                task.cancel()


class Remembering:
    """The machine, and its last events without their tensors: what a report of a bug needs."""

    def __init__(self, machine: PNode) -> None:
        self._machine = machine
        self._story: deque[str] = deque(maxlen=STORY)

    async def drive(self, inbox: asyncio.Queue[Event], perform: Callable[[Command], None], clock: Clock) -> None:
        """Feed the machine until cancelled. A bug ends the process, with the story in the log."""
        try:
            await drive(self, inbox, perform, clock, Tick)
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
        self._installed: dict[tuple[SessionId, Epoch], Install] = {}
        self._steps: dict[NetworkId, Subscription] = {}
        """Where decisions are heard."""

    def perform(self, command: Command) -> None:
        """Do one thing, or start it."""
        match command:
            case Pass() | Fold() | Apply() | Settle() | Snapshot():
                self._runner.submit(command)
            case Prepare() | Install() | Evict():
                self._setups.put_nowait(command)
            case SendHop():
                self._start(self._send_hop(command))
            case SendReport(network, report):
                if isinstance(report, Failed):
                    log.error("failed", session=report.session, reason=report.message, traceback=report.traceback)
                self._outbox.put_nowait((subjects.report(network), codec.encode(report)))
            case Upload():
                self._start(self._upload(command))
            case Beat():
                self._beat(command)
            case GiveWay(other):
                self.other = other
            case _:
                assert_never(command)

    # -- control ------------------------------------------------------------------------------------------------------

    async def listen(self) -> None:
        """Hear orders, and whoever uses our name, from now on."""
        await self._control.subscribe(subjects.command(self._info.pnode), self._hear)
        await self._control.subscribe(subjects.heartbeat(self._info.pnode), self._hear_name)

    def _hear(self, data: bytes) -> None:
        message = self._decoded(data)
        if isinstance(message, Deploy | Undeploy | Save | Decision):
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
        self._outbox.put_nowait((subjects.heartbeat(info.pnode), codec.encode(message)))
        if beat.stopping:
            self._outbox.put_nowait(None)

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

    # -- setting up ---------------------------------------------------------------------------------------------------

    async def set_up(self) -> None:
        """Carry out deploys and evictions, one after the other."""
        while True:
            command = await self._setups.get()
            match command:
                case Prepare(deploy):
                    await self._guard_setup(deploy, self._prepare(deploy))
                case Install(deploy):
                    await self._guard_setup(deploy, self._install(command))
                case Evict():
                    await self._evict(command)
                case _:
                    assert_never(command)

    async def _guard_setup(self, deploy: Deploy, work: Awaitable[Event]) -> None:
        try:
            event = await work
        except DcnrError as error:
            event = SetupFailed(deploy.session, deploy.epoch, str(error), trace_of(error))
        except Exception as error:  # noqa: BLE001 - the shell's border: a bug in a pass or node fails this session, not the process
            event = SetupFailed(deploy.session, deploy.epoch, describe(error), trace_of(error))
        self._inbox.put_nowait(event)

    async def _prepare(self, deploy: Deploy) -> Event:
        return Prepared(deploy, await asyncio.to_thread(make_plan, deploy, self._info.pnode))

    async def _install(self, command: Install) -> Event:
        deploy, plan = command.deploy, command.plan
        self._installed[deploy.session, deploy.epoch] = command
        self._name_peers()
        await self._transport.listen(deploy.network, plan.routes.hosted)
        if deploy.network not in self._steps:
            self._steps[deploy.network] = await self._control.subscribe(subjects.step(deploy.network), self._hear)
        saved = await self._saved(command) if deploy.checkpoint is not None else None
        await asyncio.wrap_future(self._runner.load(deploy, plan, saved))
        return Installed(deploy.session, deploy.epoch)

    async def _saved(self, command: Install) -> dict[str, HostArray]:
        deploy, plan = command.deploy, command.plan
        storage = open_storage(deploy.storage)
        manifest = await read_manifest_at(storage, deploy.checkpoint or "")
        names = tensor_names(plan.graph, plan.nodes, Hyper.model_validate(deploy.hyper))
        return dict(await read_tensors(storage, manifest, names))

    async def _evict(self, command: Evict) -> None:
        """Sessions of one network share subscriptions: only what no other one needs is closed."""
        self._runner.drop(command.session, command.epoch)
        gone = self._installed.pop((command.session, command.epoch), None)
        if gone is None:
            return
        self._name_peers()
        network = gone.deploy.network
        others = [other.plan.routes.hosted for other in self._installed.values() if other.deploy.network == network]
        needed = {node for nodes in others for node in nodes}
        await self._transport.unlisten(network, [node for node in gone.plan.routes.hosted if node not in needed])
        if not others and network in self._steps:
            await self._steps.pop(network).stop()

    def _name_peers(self) -> None:
        """Peers of all sessions: what a newer deploy says of one goes before what an older one said."""
        peers = {info.pnode: info for installed in self._installed.values() for info in installed.deploy.peers}
        self._transport.set_peers(peers.values())

    # -- checkpoints --------------------------------------------------------------------------------------------------

    async def _upload(self, command: Upload) -> None:
        key = part_key(command.session, command.step, self._info.pnode, command.epoch)
        event: Event
        try:
            part = await write_part(open_storage(command.storage), key, command.tensors)
        except DcnrError as error:
            event = UploadFailed(command.session, command.epoch, command.step, str(error), trace_of(error))
        else:
            event = Uploaded(command.session, command.epoch, command.step, part, command.state)
        self._inbox.put_nowait(event)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = self.group.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
