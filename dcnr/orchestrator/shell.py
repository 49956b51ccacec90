"""Does what the machine decides: one inbox, one loop, and slow work in tasks and threads.

Rule 1: only the leader listens, serves and writes; who has no lease stands by. A leader whose lease is too old performs nothing.
Rule 2: whoever leads again begins a new term from the records alone, whose epochs are larger than those of every earlier term.
Rule 3: what a peer sends wrong is logged, counted and dropped; what is our own fault ends the process with its last events.
Rule 4: trouble with the server or the storage never ends the process; a store that lost its records does, because a person must decide.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from secrets import token_hex
from typing import assert_never, get_args

import numpy as np
import structlog

from dcnr import __version__
from dcnr.bus import codec, subjects
from dcnr.bus.api import arguments, failure, ok
from dcnr.bus.base import Bus, Handler
from dcnr.bus.disconnect import closed_connection, pnode_of
from dcnr.bus.messages import Echo, Heartbeat, Hop, Message, Metric, PNodeInfo, Report, SessionMetrics, StepMetrics, ValidationMetrics
from dcnr.bus.transport import HopTransport
from dcnr.clock import Clock
from dcnr.errors import DcnrError, InvariantError, PeerError, UserError, WorldError
from dcnr.ids import Epoch, NodeId, PNodeId
from dcnr.machine import drive
from dcnr.metrics.history import History, Validations
from dcnr.metrics.publish import subject_of
from dcnr.orchestrator.api import Api, Verb
from dcnr.orchestrator.batches import Batches
from dcnr.orchestrator.cluster import Cluster
from dcnr.orchestrator.commands import (
    Answer,
    Command,
    Drop,
    Erase,
    Measured,
    Prune,
    Publish,
    ReadBatch,
    ReadWindows,
    SendHop,
    SetPeers,
    Spoke,
    WriteManifest,
)
from dcnr.orchestrator.commands import Store as StoreRecord
from dcnr.orchestrator.events import (
    Ask,
    BatchFailed,
    Disconnected,
    Echoed,
    Erased,
    Event,
    Heard,
    LogitsRead,
    ManifestFailed,
    ManifestWritten,
    Reported,
    Tick,
)
from dcnr.orchestrator.generation import Generation
from dcnr.orchestrator.identity import identify
from dcnr.orchestrator.leader import BUCKET, Lease, LeaseLost
from dcnr.orchestrator.outbox import Hops, Outbox, RecordWriter
from dcnr.orchestrator.planning import graphs_of
from dcnr.orchestrator.session import Settings
from dcnr.orchestrator.state import CheckpointRecord
from dcnr.orchestrator.store import Store, caught_up
from dcnr.orchestrator.trainer import scaler_of
from dcnr.storage.base import Storage
from dcnr.storage.checkpoint import Manifest, checkpoint_prefix, delete_checkpoints, write_manifest

log = structlog.get_logger()

STORY = 200
"""Events that are kept for the report of a crash."""
RETRY_AFTER = 0.5
"""Seconds before an orchestrator that lost the lease, or the server, stands by again."""
ECHO_EVERY = 0.5
EPOCHS = 1_000_000
"""How many epochs a term has."""
PROBES = "probes/"


@dataclass(frozen=True, slots=True)
class Outside:
    """What an orchestrator process stands on. `me`: its name, unique to it."""

    bus: Bus
    transport: HopTransport
    storage: Storage
    data_dir: Path
    me: PNodeId
    clock: Clock
    hops: asyncio.Queue[tuple[Hop, np.ndarray]]
    """Tensors that came for us, as the transport gives them."""


class Shell:
    """An orchestrator process: it stands by, leads while it has the lease, and stands by again."""

    def __init__(self, outside: Outside) -> None:
        self._outside = outside

    async def run(self, accept: bool = False) -> None:
        """Until cancelled; then the lease is free. Raises `StoreVanished` if the store is not that of the data directory.

        `accept`: at the start, whatever store there is becomes that of the data directory.
        """
        while True:
            try:
                await identify(self._outside.bus, self._outside.data_dir, accept)
                accept = False
                await self._stand_by()
            except (LeaseLost, WorldError) as lost:
                log.warning("stands by", reason=str(lost))
            await asyncio.sleep(RETRY_AFTER)

    async def _stand_by(self) -> None:
        """Wait for the lease, and lead while it lasts."""
        lease = Lease(await self._outside.bus.kv(BUCKET), self._outside.me, self._outside.clock)
        try:
            log.info("waits for the lease")
            await lease.acquire()
            await self._lead(lease)
        except ExceptionGroup as group:
            raise _cause(group) from group
        finally:
            await lease.release()

    async def _lead(self, lease: Lease) -> None:
        out = self._outside
        async with asyncio.TaskGroup() as group:
            group.create_task(lease.keep())
            cluster_id = await identify(out.bus, out.data_dir)  # it may have waited for days since it looked
            store = await Store.open(out.bus, lease.term)
            records = await caught_up(await store.take_over(), out.storage)
            graphs = await asyncio.to_thread(graphs_of, records.sessions)
            async with probe(out.storage, cluster_id) as probed:
                settings = Settings(out.me, out.storage.url, Epoch(lease.term * EPOCHS), probed)
                cluster = Cluster(records, graphs, settings, out.clock.now())
                log.info("leads", term=lease.term, sessions=len(cluster.sessions), networks=len(cluster.networks))
                await Term(out, cluster, store, lease, group).run()


class Term:
    """One time of leading."""

    def __init__(self, outside: Outside, cluster: Cluster, store: Store, lease: Lease, group: asyncio.TaskGroup) -> None:
        self.cluster = cluster
        self.dropped = 0
        """Messages that broke the protocol."""
        self._out = outside
        self._lease = lease
        self._group = group
        self._history = History(outside.data_dir)
        self._validations = Validations(outside.data_dir)
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()
        self._outbox = Outbox()
        self._hops: dict[PNodeId, tuple[Hops, asyncio.Task[None]]] = {}
        self._rows: asyncio.Queue[StepMetrics | ValidationMetrics] = asyncio.Queue()
        self._records = RecordWriter(store, lease.check)
        self._answers: dict[int, asyncio.Future[None]] = {}
        self._numbers = count(1)
        self._batches = Batches(outside.data_dir, outside.storage)
        self._story: deque[Event] = deque(maxlen=STORY)
        self._generation = Generation(cluster, self.ask, self._inbox.put_nowait, outside.storage, outside.data_dir)

    async def run(self) -> None:
        """Lead until cancelled."""
        out = self._out
        logs = (self._history, self._validations)
        api = Api(self.cluster, self.ask, out.storage, out.data_dir, logs, self._generation)
        for work in (self._publish_all(), self._keep_rows(), self._records.run(), self._take_logits()):
            self._group.create_task(work)
        for command in self.cluster.opening():
            self.perform(command)
        heard = {
            subjects.HEARTBEATS: self._on_heartbeat,
            subjects.REPORTS: self._on_report,
            subjects.DISCONNECTS: self._on_disconnect,
            subjects.peer(out.me, "echo"): self._on_echo,
        }
        async with AsyncExitStack() as leaving:
            await out.transport.listen(subjects.ANY_NETWORK, [NodeId(out.me)])
            leaving.push_async_callback(out.transport.unlisten, subjects.ANY_NETWORK, [NodeId(out.me)])
            for subject, hear in heard.items():
                leaving.push_async_callback((await out.bus.subscribe(subject, hear)).stop)
            for verb in api.verbs:
                leaving.push_async_callback((await out.bus.serve(subjects.api(verb.name), answering(verb))).stop)
            leaving.callback(self._give_up)
            self._group.create_task(self._echo())
            await self._drive(out.clock)

    def _give_up(self) -> None:
        """Nobody waits for an answer that will not come."""
        for waiting in self._answers.values():
            if not waiting.done():
                waiting.set_exception(WorldError("this orchestrator stopped before it could answer", "ask again"))
        self._records.give_up()

    async def _drive(self, clock: Clock) -> None:
        try:
            await drive(self.cluster, self._inbox, self.perform, clock, Tick, self._story)
        except LeaseLost:
            raise
        except Exception:  # the shell's border: whatever it is, it is our fault
            log.exception("a bug of ours; the last events were", story=[repr(event) for event in self._story])
            raise

    async def ask(self, make: Callable[[int], Ask]) -> None:
        """Put a request to the machine; returns when what it changed is written. Raises the `UserError` that refuses it."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._inbox.put_nowait(make(number))
        await answer
        await self._records.settled()

    def perform(self, command: Command) -> None:
        """Do one thing, or start it. Raises `LeaseLost` if another may lead by now: we may have been stopped for a while."""
        self._lease.check()
        match command:
            case Publish(subject, message):
                self._outbox.put(subject, codec.encode(message))
            case SendHop(to):
                self._hops_to(to).put(command)
            case SetPeers(peers):
                self._set_peers(peers)
            case ReadBatch() | ReadWindows():
                self._group.create_task(self._read(command))
            case WriteManifest():
                self._group.create_task(self._write_manifest(command))
            case Prune():
                self._group.create_task(self._prune(command))
            case Measured(metric):
                self._measured(metric)
            case StoreRecord(record):
                self._records.put(record)
            case Drop(bucket, key):
                self._records.drop(bucket, key)
            case Erase():
                self._group.create_task(self._erase(command))
            case Spoke():
                self._generation.news.tell()
            case Answer(request, error):
                self._answer(request, error)
            case _:
                assert_never(command)

    # -- in ----------------------------------------------------------------------------------------------------------------

    def _on_heartbeat(self, data: bytes) -> None:
        message = self._decoded(data)
        if isinstance(message, Heartbeat):
            self._inbox.put_nowait(Heard(message))

    def _on_report(self, data: bytes) -> None:
        message = self._decoded(data)
        if isinstance(message, get_args(Report)):
            self._inbox.put_nowait(Reported(message))

    def _on_disconnect(self, data: bytes) -> None:
        try:
            pnode = pnode_of(closed_connection(data))
        except PeerError as error:
            self._drop(error)
        else:
            if pnode is not None:
                self._inbox.put_nowait(Disconnected(pnode))

    def _on_echo(self, data: bytes) -> None:
        message = self._decoded(data)
        if isinstance(message, Echo) and message.sender == self._out.me:
            self._inbox.put_nowait(Echoed())

    async def _take_logits(self) -> None:
        while True:
            hop, logits = await self._out.hops.get()
            self._inbox.put_nowait(LogitsRead(hop, logits))

    def _decoded(self, data: bytes) -> Message | None:
        try:
            return codec.decode(data)
        except PeerError as error:
            self._drop(error)
            return None

    def _drop(self, error: PeerError) -> None:
        self.dropped += 1
        log.warning("dropped a message", reason=str(error), dropped=self.dropped)

    # -- out ---------------------------------------------------------------------------------------------------------------

    def _answer(self, request: int, error: UserError | None) -> None:
        waiting = self._answers.pop(request)
        if waiting.done():
            return
        if error is None:
            waiting.set_result(None)
        else:
            waiting.set_exception(error)

    def _measured(self, metric: Metric) -> None:
        self._outbox.put(subject_of(metric), codec.encode(metric), metric=True)
        if not isinstance(metric, SessionMetrics):
            self._rows.put_nowait(metric)
        else:
            log.info("session", session=metric.session, state=metric.state, step=metric.step, reason=metric.reason)

    async def _publish_all(self) -> None:
        while True:
            subject, data = await self._outbox.get()
            await self._publish(subject, data)

    async def _publish(self, subject: str, data: bytes) -> None:
        try:
            await self._out.bus.publish(subject, data)
        except DcnrError as error:
            log.warning("could not publish", subject=subject, reason=str(error))

    async def _echo(self) -> None:
        """Say something to ourselves over the server, for as long as it lets us."""
        for number in count(1):
            await self._publish(subjects.peer(self._out.me, "echo"), codec.encode(Echo(self._out.me, number)))
            await asyncio.sleep(ECHO_EVERY)

    def _set_peers(self, peers: tuple[PNodeInfo, ...]) -> None:
        self._out.transport.set_peers(peers)
        for gone in self._hops.keys() - {peer.pnode for peer in peers}:
            _, sending = self._hops.pop(gone)
            sending.cancel()

    def _hops_to(self, pnode: PNodeId) -> Hops:
        if pnode not in self._hops:
            hops = Hops()
            self._hops[pnode] = hops, self._group.create_task(self._send_hops(hops))
        return self._hops[pnode][0]

    async def _send_hops(self, hops: Hops) -> None:
        while True:
            command = await hops.get()
            if not self.cluster.uses(command.hop.session, command.to, command.hop.epoch):
                continue
            try:
                await self._out.transport.send(command.to, command.hop, command.payload)
            except DcnrError as error:
                log.warning("could not send a hop", to=command.to, step=command.hop.step, reason=str(error))

    async def _keep_rows(self) -> None:
        while True:
            rows = [await self._rows.get()]
            while not self._rows.empty():
                rows.append(self._rows.get_nowait())
            try:
                await asyncio.to_thread(self._keep, rows)
            except UserError as error:
                log.warning("the training log is incomplete", reason=str(error))

    def _keep(self, rows: Sequence[StepMetrics | ValidationMetrics]) -> None:
        self._history.append([row for row in rows if isinstance(row, StepMetrics)])
        self._validations.append([row for row in rows if isinstance(row, ValidationMetrics)])

    # -- slow work ---------------------------------------------------------------------------------------------------------

    async def _read(self, ask: ReadBatch | ReadWindows) -> None:
        event: Event
        try:
            event = await asyncio.to_thread(self._batches.read, ask)
        except (DcnrError, OSError) as error:
            event = BatchFailed(ask.session, ask.epoch, ask.step, str(error))
        self._inbox.put_nowait(event)

    async def _write_manifest(self, ask: WriteManifest) -> None:
        record, manifest = ask.record, manifest_of(ask)
        try:
            await write_manifest(self._out.storage, manifest)
        except DcnrError as error:
            log.error("could not write a manifest", session=record.session, step=ask.step, reason=str(error))
            self._inbox.put_nowait(ManifestFailed(record.session, record.epoch, ask.step, str(error)))
        else:
            self._inbox.put_nowait(ManifestWritten(record.session, record.epoch, CheckpointRecord(ask.step, manifest.key, ask.scaler)))

    async def _prune(self, ask: Prune) -> None:
        try:
            for step in ask.steps:
                await delete_checkpoints(self._out.storage, ask.session, step)
            await self._out.storage.sweep(checkpoint_prefix(ask.session))
        except DcnrError as error:
            log.warning("could not remove old checkpoints", session=ask.session, steps=ask.steps, reason=str(error))

    async def _erase(self, ask: Erase) -> None:
        """Checkpoints last: with them the name becomes free."""
        self._batches.forget(ask.session)
        try:
            await asyncio.to_thread(self._history.erase, ask.session)
            await asyncio.to_thread(self._validations.erase, ask.session)
            await delete_checkpoints(self._out.storage, ask.session)
        except (DcnrError, OSError) as error:
            log.error("could not remove everything of a deleted session", session=ask.session, reason=str(error))
            self._inbox.put_nowait(Erased(ask.request, ask.session, str(error)))
        else:
            self._inbox.put_nowait(Erased(ask.request, ask.session))


def _cause(group: ExceptionGroup[Exception]) -> Exception:
    """What ended a term: of several things the one that may not be passed over."""
    return min(group.exceptions, key=lambda error: isinstance(error, LeaseLost | WorldError))


@asynccontextmanager
async def probe(storage: Storage, cluster: str) -> AsyncIterator[str | None]:
    """The key of a blob by which PNodes see that they have the same storage; None where a URL means the same on every host.

    None too while storage takes nothing, so that training may go on.
    """
    key = await _probe(storage, f"{PROBES}{cluster}/") if storage.url.startswith("file:") else None
    try:
        yield key
    finally:
        if key is not None:
            try:
                await storage.delete(key)
            except DcnrError as error:
                log.warning("could not remove a probe", key=key, reason=str(error))


async def _probe(storage: Storage, folder: str) -> str | None:
    """`folder`: of this cluster; others may use the same storage."""
    key = f"{folder}{token_hex(16)}"
    try:
        await storage.delete(folder)
        await storage.put(key, b"")
    except DcnrError as error:
        log.warning("whether all hosts see the same storage is not known", reason=str(error))
        return None
    return key


def manifest_of(ask: WriteManifest) -> Manifest:
    """The manifest of a checkpoint whose parts are all in storage."""
    record = ask.record
    return Manifest(
        session=record.session,
        network=record.network,
        network_file=record.network_file,
        dataset=record.dataset,
        step=ask.step,
        epoch=record.epoch,
        seed=record.seed,
        total_steps=record.steps,
        batch=record.batch,
        micro_batches=record.micro_batches,
        fuse=record.fuse,
        hyper=record.hyper,
        state=scaler_of(ask.scaler),
        parts=ask.parts,
        kernel=ask.kernel,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        dcnr_version=__version__,
    )


def answering(verb: Verb) -> Handler:
    """The handler of a verb: whatever happens is an answer."""

    async def handler(data: bytes) -> bytes:
        try:
            return ok(await verb.answer(arguments(data)))
        except DcnrError as error:
            return failure(error)
        except Exception as error:  # the shell's border: a bug becomes an answer and a log entry
            log.exception("a bug of ours", verb=verb.name)
            return failure(InvariantError(f"{verb.name} failed inside the orchestrator: {type(error).__name__}: {error}", "see its log"))

    return handler
