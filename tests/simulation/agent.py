"""A PNode process: the real machine, runner and arithmetic, and around them what `dcnr.agents.shell` does, on virtual time.

Rule 1: deploys and evictions are carried out one after the other; jobs are done one after the other on one thread, in the order given.
Rule 2: a process that dies takes its arrays and copies along.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, assert_never

import numpy as np

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
    Job,
    Pass,
    Prepare,
    Read,
    SendHop,
    SendReport,
    Settle,
    Snapshot,
    Tensors,
    Upload,
)  # fmt: skip
from dcnr.agents.events import Event, HopArrived, Installed, NameHeard, Prepared, SetupRefused, Stop, Tick, Told, Uploaded, UploadFailed
from dcnr.agents.plan import Plan, make_plan
from dcnr.agents.pnode import PNode
from dcnr.agents.restore import find_storage, restore, setup_failed
from dcnr.agents.runner import Runner, _failed
from dcnr.agents.telemetry import Telemetry
from dcnr.backends.numpy.backend import NumpyBackend
from dcnr.bus import codec, subjects
from dcnr.bus.messages import CommandMessage, Deploy, Heartbeat, Hop, PNodeInfo, StepMessage
from dcnr.errors import DcnrError
from dcnr.ids import NodeId, PNodeId
from dcnr.storage.checkpoint import part_key, write_part
from tests.simulation.disk import Disk
from tests.simulation.net import Interest
from tests.simulation.networks import NETWORK
from tests.simulation.process import Process
from tests.simulation.surroundings import Surroundings

_PLANS: dict[tuple[object, ...], Plan] = {}


def plan_of(deploy: Deploy, me: PNodeId) -> Plan:
    """The part of `me`: nothing in it changes, so runs share what was made once."""
    key = (me, deploy.network_file, deploy.micro_batches, tuple(deploy.hyper.items()), tuple(deploy.assignment.items()))
    if key not in _PLANS:
        _PLANS[key] = make_plan(deploy, me)
    return _PLANS[key]


class ComputeThread:
    """Stands in for the runner's executor: one call after the other, each after some work."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._line: deque[Callable[[], None]] = deque()
        self._at_work = False
        self._hangs = self._stuck = False
        self.breaks = False
        """The next job finds that something of the world is wrong."""

    def hang(self) -> None:
        """The job at work, or the next one, does not end."""
        self._hangs = True

    def go_on(self) -> None:
        """It ends after all."""
        self._hangs = False
        if self._stuck:
            self._stuck = False
            self._agent.after(0.0, self._run)

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        """Queue a call."""
        future: Future[Any] = Future()
        self._line.append(partial(self._call, future, call, args))
        self._next()
        return future

    def _next(self) -> None:
        if not self._at_work and self._line:
            self._at_work = True
            self._agent.work(*self._agent.around.plan.pace, self._run)

    def _run(self) -> None:
        if self._hangs:
            self._stuck = True
            return
        self._line.popleft()()
        self._at_work = False
        self._next()

    def _call(self, future: Future[Any], call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        for job in args:
            self._agent.begins(job)
        if not self._agent.alive:
            return
        if self.breaks and isinstance(args[0], Job):
            self.breaks = False
            self._agent.emit(_failed(args[0], MemoryError("somebody else took it all")))
            return
        try:
            result = call(*args)
        except Exception as error:  # noqa: BLE001 - as an executor does
            future.set_exception(error)
        else:
            future.set_result(result)


class Agent(Process[Event, Command]):
    """One life of an agent process."""

    machine: PNode

    def __init__(self, name: PNodeId, incarnation: str, around: Surroundings, rng: Random) -> None:
        super().__init__(name, around.scheduler, rng)
        self.around = around
        self.info = PNodeInfo(name, incarnation, "host", "numpy", "test", around.plan.memory, 0, 2, 1, "0")
        self.machine = PNode(self.info, Telemetry(), self.now)
        self.runner = Runner(NumpyBackend(), self.emit, 1)
        self.thread = ComputeThread(self)
        self.runner._thread = self.thread  # type: ignore[assignment]  # a thread on virtual time
        self._transfers = 0
        self._setups: deque[Prepare | Install | Evict] = deque()
        self._setting_up = False
        self._installed: dict[tuple[str, int], frozenset[NodeId]] = {}
        self._heard: dict[NodeId, list[Interest]] = {}
        self._steps: Interest | None = None
        net = around.net
        net.subscribe(self, subjects.command(name), self._hear)
        net.subscribe(self, subjects.heartbeat(name), self._hear_name)
        self._arm()

    def tick(self) -> Event:
        return Tick()

    def leave(self) -> None:
        """As SIGTERM."""
        self.put(Stop())

    # -- in ----------------------------------------------------------------------------------------------------------------

    def emit(self, event: Event) -> None:
        """The compute thread is done with a job."""
        self.after(0.0, lambda: self.put(event))

    def _hear(self, data: bytes) -> None:
        message = codec.decode(data)
        if isinstance(message, CommandMessage | StepMessage):
            self.put(Told(message))

    def _hear_name(self, data: bytes) -> None:
        message = codec.decode(data)
        if isinstance(message, Heartbeat):
            self.put(NameHeard(message))

    def _hear_hop(self, data: bytes) -> None:
        hop, payload = codec.decode_with_payload(data)
        assert isinstance(hop, Hop)
        if hop.source == "trainer":
            self.around.note("feeding", self)
        if self.alive:
            self.put(HopArrived(hop, np.frombuffer(payload, np.uint8).view(hop.dtype).reshape(hop.shape)))

    # -- out ---------------------------------------------------------------------------------------------------------------

    def begins(self, job: Job) -> None:
        """The compute thread takes a job."""
        match job:
            case Pass(inputs=inputs):
                self.around.note("forward" if inputs is not None else "backward", self)
            case Evaluate():
                self.around.note("evaluating", self)
            case Fold():
                self.around.note("folding", self)
            case Apply() | Settle():
                self.around.applies(self, job)
                self.around.note("applying", self)
            case Snapshot():
                self.around.note("copying", self)

    def perform(self, command: Command) -> None:
        match command:
            case Pass() | Evaluate() | Fold() | Abort() | Apply() | Settle() | Snapshot() | Read():
                self.runner.submit(command)
            case Prepare() | Install() | Evict():
                self._setups.append(command)
                self._set_up()
            case SendHop():
                self._send_hop(command)
            case SendReport(network, report):
                if type(report).__name__ in ("StepReport", "StepDone"):
                    self.around.note("reporting", self)
                if self.alive:
                    self.around.net.publish(self, subjects.report(network), codec.encode(report), type(report).__name__)
            case Upload():
                self.around.note("uploading", self)
                self.work(0.001, self.around.storage_takes, partial(self._upload, command))
            case Beat():
                self._beat(command)
            case GiveWay():
                self.around.seen["gave way"] += 1
            case _:
                assert_never(command)

    def _beat(self, beat: Beat) -> None:
        if not any(hosted.busy for hosted in beat.hosted):
            self.around.note("idle", self)
        if not self.alive:
            return
        message = Heartbeat(self.info, beat.hosted, beat.stopping, beat.age, ())
        self.around.net.publish(self, subjects.heartbeat(self.info.pnode), codec.encode(message), "Heartbeat")
        if beat.stopping:
            self.around.gone(self)

    def _send_hop(self, command: SendHop) -> None:
        self._transfers += 1
        payload = command.payload
        hop = replace(command.hop, sender=self.info.pnode, transfer=self._transfers, lane="inline", nbytes=payload.nbytes, codec="raw")
        data = codec.encode_with_payload(hop, np.ascontiguousarray(payload).data.cast("B"))
        subject = subjects.hop(hop.network, hop.targets[0][0], hop.phase)
        self.around.net.publish(self, subject, data, f"Hop {hop.phase}")

    # -- setting up --------------------------------------------------------------------------------------------------------

    def _set_up(self) -> None:
        if self._setting_up or not self._setups:
            return
        self._setting_up = True
        command = self._setups.popleft()
        match command:
            case Prepare(deploy):
                self.around.note("deploying", self)
                self.work(0.001, 0.02, partial(self._prepare, deploy))
            case Install():
                self.around.note("installing", self)
                self.work(0.001, 0.02, partial(self._install, command))
            case Evict():
                self._evict(command)
                self._done(None)
            case _:
                assert_never(command)

    def _done(self, event: Event | None) -> None:
        self._setting_up = False
        if event is not None:
            self.put(event)
        if not self._setups and not isinstance(event, Prepared):
            self._hear_no_more()
        self._set_up()

    def _prepare(self, deploy: Deploy) -> None:
        refused = self.around.now(find_storage(deploy, self._storage))
        self._done(refused or Prepared(deploy, plan_of(deploy, self.info.pnode)))

    def _install(self, command: Install) -> None:
        deploy, plan, net = command.deploy, command.plan, self.around.net
        tensors = self.around.now(restore(deploy, plan, command.kept, self._storage))
        self.around.seen["from memory"] += bool(command.kept)
        if isinstance(tensors, SetupRefused):
            self.around.seen["damaged"] += tensors.damaged
            self._done(tensors)
            return
        self._installed[deploy.session, deploy.epoch] = frozenset(plan.routes.hosted)
        for node in plan.routes.hosted:
            if node not in self._heard:
                self._heard[node] = [net.subscribe(self, subjects.hop(NETWORK, node, phase), self._hear_hop) for phase in ("fwd", "bwd")]
        if self._steps is None:
            self._steps = net.subscribe(self, subjects.step(NETWORK), self._hear)
        loaded = self.runner.load(deploy, plan, tensors)
        loaded.add_done_callback(lambda future: self.after(0.0, partial(self._loaded, deploy, tensors, future)))

    def _loaded(self, deploy: Deploy, tensors: Tensors | None, future: Future[None]) -> None:
        error = future.exception()
        if isinstance(error, Exception):
            self._done(setup_failed(deploy, error))
        else:
            self._done(Installed(deploy.session, deploy.epoch, tensors))

    def _evict(self, command: Evict) -> None:
        self.runner.drop(command.session, command.epoch)
        self._installed.pop((command.session, command.epoch), None)

    def _hear_no_more(self) -> None:
        """What the parts that are here do not need."""
        needed = frozenset[NodeId]().union(*self._installed.values())
        for node in self._heard.keys() - needed:
            for interest in self._heard.pop(node):
                self.around.net.unsubscribe(interest)
        if not needed and self._steps is not None:
            self.around.net.unsubscribe(self._steps)
            self._steps = None

    def _storage(self, _url: str) -> Disk:
        return self.around.disk

    # -- checkpoints -------------------------------------------------------------------------------------------------------

    def _upload(self, command: Upload) -> None:
        key = part_key(command.session, command.step, self.info.pnode, command.epoch)
        event: Event
        try:
            part = self.around.now(write_part(self.around.disk, key, command.tensors))
        except DcnrError as error:
            event = UploadFailed(command.session, command.epoch, command.step, str(error))
        else:
            self.around.note("uploaded", self)
            event = Uploaded(command.session, command.epoch, command.step, part, command.state)
        if self.alive:
            self.put(event)
