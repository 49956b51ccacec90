"""Does what the machine decides: one inbox, one loop, and slow work in tasks and threads.

Rule 1: only the leader listens, serves and writes; an orchestrator without the lease stands by.
Rule 2: messages keep their order; hops to one PNode keep theirs; a record that changed twice is written once.
Rule 3: what a peer sends wrong is logged, counted and dropped; what is our own fault ends the process with its last events.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import assert_never, get_args

import numpy as np
import structlog

from dcnr import __version__
from dcnr.bus import codec, subjects
from dcnr.bus.api import arguments, failure, ok
from dcnr.bus.base import Bus, Handler
from dcnr.bus.messages import Heartbeat, Message, Report, SessionMetrics, StepMetrics
from dcnr.bus.transport import HopTransport
from dcnr.clock import Clock
from dcnr.data.dataset import Dataset
from dcnr.errors import DcnrError, InvariantError, PeerError, UserError, WorldError
from dcnr.ids import Epoch, PNodeId, SessionId
from dcnr.machine import drive
from dcnr.metrics.history import History
from dcnr.metrics.publish import subject_of
from dcnr.orchestrator.api import Api, Verb
from dcnr.orchestrator.cluster import Cluster
from dcnr.orchestrator.commands import (
    Answer,
    Bucket,
    Command,
    Drop,
    Erase,
    Measured,
    Publish,
    ReadBatch,
    SendHop,
    SetPeers,
    WriteManifest,
)
from dcnr.orchestrator.commands import Store as StoreRecord
from dcnr.orchestrator.events import Ask, BatchFailed, BatchRead, Erased, Event, Heard, ManifestFailed, ManifestWritten, Reported, Tick
from dcnr.orchestrator.leader import BUCKET, Lease, LeaseLost
from dcnr.orchestrator.session import Settings
from dcnr.orchestrator.state import CheckpointRecord, Record, key_of
from dcnr.orchestrator.store import BUCKETS, Store, caught_up
from dcnr.orchestrator.trainer import scaler_of
from dcnr.storage.base import Storage
from dcnr.storage.checkpoint import Manifest, delete_checkpoints, write_manifest
from dcnr.storage.file import FileStorage

log = structlog.get_logger()

STORY = 200
"""Events that are kept for the report of a crash."""
RETRY_AFTER = 0.5
"""Seconds before what the bus did not take is tried again."""


class Shell:
    """An orchestrator process: it stands by, leads while it has the lease, and stands by again."""

    def __init__(self, bus: Bus, transport: HopTransport, data_dir: Path, me: PNodeId, clock: Clock) -> None:
        self._bus = bus
        self._transport = transport
        self._data_dir = data_dir
        self._me = me
        self._clock = clock

    async def run(self) -> None:
        """Until cancelled; then the lease is free."""
        lease = Lease(await self._bus.kv(BUCKET), self._me, self._clock)
        try:
            while True:
                await lease.acquire()
                try:
                    await self._lead(lease)
                except* (LeaseLost, WorldError) as lost:
                    log.warning("stands by", reason=str(lost.exceptions[0]))
                    await asyncio.sleep(RETRY_AFTER)
        finally:
            await lease.release()

    async def _lead(self, lease: Lease) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(lease.keep())
            store = await Store.open(self._bus)
            storage = FileStorage(self._data_dir)
            records = await caught_up(await store.read(), storage)
            cluster = Cluster(records, Settings(self._me, storage.url), self._clock.now())
            log.info("leads", sessions=len(cluster.sessions), networks=len(cluster.networks))
            term = Term(self._bus, self._transport, cluster, store, storage, self._data_dir, group)
            await term.run(self._clock)


class Term:
    """One time of leading."""

    def __init__(
        self,
        bus: Bus,
        transport: HopTransport,
        cluster: Cluster,
        store: Store,
        storage: Storage,
        data_dir: Path,
        group: asyncio.TaskGroup,
    ) -> None:
        self.cluster = cluster
        self.dropped = 0
        """Messages that broke the protocol."""
        self._bus = bus
        self._transport = transport
        self._storage = storage
        self._data_dir = data_dir
        self._group = group
        self._history = History(data_dir)
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()
        self._outbox: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
        self._hops: dict[PNodeId, asyncio.Queue[SendHop]] = {}
        self._rows: asyncio.Queue[StepMetrics] = asyncio.Queue()
        self._records = RecordWriter(store)
        self._answers: dict[int, asyncio.Future[None]] = {}
        self._numbers = count(1)
        self._datasets: dict[SessionId, tuple[Epoch, Dataset]] = {}
        self._story: deque[Event] = deque(maxlen=STORY)

    async def run(self, clock: Clock) -> None:
        """Lead until cancelled."""
        api = Api(self.cluster, self.ask, self._storage, self._data_dir, self._history)
        for work in (self._publish_all(), self._keep_rows(), self._records.run()):
            self._group.create_task(work)
        for command in self.cluster.opening():
            self.perform(command)
        async with AsyncExitStack() as leaving:
            for subject, hear in ((subjects.HEARTBEATS, self._on_heartbeat), (subjects.REPORTS, self._on_report)):
                leaving.push_async_callback((await self._bus.subscribe(subject, hear)).stop)
            for verb in api.verbs:
                leaving.push_async_callback((await self._bus.serve(subjects.api(verb.name), answering(verb))).stop)
            leaving.callback(self._give_up)
            await self._drive(clock)

    def _give_up(self) -> None:
        """Nobody waits for an answer that will not come."""
        for waiting in self._answers.values():
            if not waiting.done():
                waiting.set_exception(WorldError("this orchestrator stopped before it could answer", "ask again"))
        self._records.give_up()

    async def _drive(self, clock: Clock) -> None:
        try:
            await drive(self.cluster, self._inbox, self.perform, clock, Tick, self._story)
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
        """Do one thing, or start it."""
        match command:
            case Publish(subject, message):
                self._outbox.put_nowait((subject, codec.encode(message)))
            case SendHop(to):
                self._queue_to(to).put_nowait(command)
            case SetPeers(peers):
                self._transport.set_peers(peers)
            case ReadBatch():
                self._group.create_task(self._read_batch(command))
            case WriteManifest():
                self._group.create_task(self._write_manifest(command))
            case Measured(metric):
                self._measured(metric)
            case StoreRecord(record):
                self._records.put(record)
            case Drop(bucket, key):
                self._records.drop(bucket, key)
            case Erase():
                self._group.create_task(self._erase(command))
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

    def _decoded(self, data: bytes) -> Message | None:
        try:
            return codec.decode(data)
        except PeerError as error:
            self.dropped += 1
            log.warning("dropped a message", reason=str(error), dropped=self.dropped)
            return None

    # -- out ---------------------------------------------------------------------------------------------------------------

    def _answer(self, request: int, error: UserError | None) -> None:
        waiting = self._answers.pop(request)
        if waiting.done():
            return
        if error is None:
            waiting.set_result(None)
        else:
            waiting.set_exception(error)

    def _measured(self, metric: StepMetrics | SessionMetrics) -> None:
        self._outbox.put_nowait((subject_of(metric), codec.encode(metric)))
        if isinstance(metric, StepMetrics):
            self._rows.put_nowait(metric)
        else:
            log.info("session", session=metric.session, state=metric.state, step=metric.step, reason=metric.reason)

    async def _publish_all(self) -> None:
        while True:
            subject, data = await self._outbox.get()
            try:
                await self._bus.publish(subject, data)
            except DcnrError as error:
                log.warning("could not publish", subject=subject, reason=str(error))

    def _queue_to(self, pnode: PNodeId) -> asyncio.Queue[SendHop]:
        if pnode not in self._hops:
            self._hops[pnode] = asyncio.Queue()
            self._group.create_task(self._send_hops(self._hops[pnode]))
        return self._hops[pnode]

    async def _send_hops(self, queue: asyncio.Queue[SendHop]) -> None:
        while True:
            command = await queue.get()
            session = self.cluster.sessions.get(command.hop.session)
            if session is None or not session.uses(command.to, command.hop.epoch):
                continue
            try:
                await self._transport.send(command.to, command.hop, command.payload)
            except DcnrError as error:
                log.warning("could not send a hop", to=command.to, step=command.hop.step, reason=str(error))

    async def _keep_rows(self) -> None:
        while True:
            rows = [await self._rows.get()]
            while not self._rows.empty():
                rows.append(self._rows.get_nowait())
            try:
                await asyncio.to_thread(self._history.append, rows)
            except UserError as error:
                log.warning("the training log is incomplete", reason=str(error))

    # -- slow work ---------------------------------------------------------------------------------------------------------

    async def _read_batch(self, ask: ReadBatch) -> None:
        try:
            tokens_BS = await asyncio.to_thread(self._batch, ask)
        except DcnrError as error:
            self._inbox.put_nowait(BatchFailed(ask.session, ask.epoch, ask.step, str(error)))
        else:
            self._inbox.put_nowait(BatchRead(ask.session, ask.epoch, ask.step, tokens_BS))

    def _batch(self, ask: ReadBatch) -> np.ndarray:
        epoch, dataset = self._datasets.get(ask.session, (None, None))
        if dataset is None or epoch != ask.epoch:
            dataset = Dataset.open(self._data_dir, ask.dataset)
            self._datasets[ask.session] = (ask.epoch, dataset)
        return dataset.batch("train", ask.seed, ask.step, ask.batch, ask.seq_len)

    async def _write_manifest(self, ask: WriteManifest) -> None:
        record, manifest = ask.record, manifest_of(ask)
        try:
            await write_manifest(self._storage, manifest)
        except DcnrError as error:
            log.error("could not write a manifest", session=record.session, step=ask.step, reason=str(error))
            self._inbox.put_nowait(ManifestFailed(record.session, record.epoch, ask.step, str(error)))
        else:
            self._inbox.put_nowait(ManifestWritten(record.session, record.epoch, CheckpointRecord(ask.step, manifest.key, ask.scaler)))

    async def _erase(self, ask: Erase) -> None:
        """Checkpoints last: with them the name becomes free."""
        self._datasets.pop(ask.session, None)
        try:
            await asyncio.to_thread(self._history.erase, ask.session)
            await delete_checkpoints(self._storage, ask.session)
        except (DcnrError, OSError) as error:
            log.error("could not remove everything of a deleted session", session=ask.session, reason=str(error))
            self._inbox.put_nowait(Erased(ask.request, ask.session, str(error)))
        else:
            self._inbox.put_nowait(Erased(ask.request, ask.session))


class RecordWriter:
    """Writes records behind the machine's back, in the order of their first change, newest value only, until the bus takes them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: dict[tuple[Bucket, str], Record | None] = {}
        self._filled = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._given_up = False

    def put(self, record: Record) -> None:
        """Have `record` written."""
        self._add(BUCKETS[type(record)], key_of(record), record)

    def drop(self, bucket: Bucket, key: str) -> None:
        """Have a record removed."""
        self._add(bucket, key, None)

    async def settled(self) -> None:
        """Wait until everything is written. Raises `WorldError` if it never will be."""
        await self._idle.wait()
        if self._given_up:
            raise WorldError("this orchestrator stopped before everything was written", "ask again")

    def give_up(self) -> None:
        """Nothing is written any more."""
        self._given_up = not self._idle.is_set()
        self._idle.set()

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            self._idle.set()
            await self._filled.wait()
            while self._waiting:
                place = next(iter(self._waiting))
                await self._write(place, self._waiting.pop(place))
            self._filled.clear()

    def _add(self, bucket: Bucket, key: str, record: Record | None) -> None:
        self._waiting[bucket, key] = record
        self._filled.set()
        self._idle.clear()

    async def _write(self, place: tuple[Bucket, str], record: Record | None) -> None:
        while True:
            try:
                await (self._store.drop(*place) if record is None else self._store.put(record))
            except WorldError as error:
                log.warning("could not write a record, trying again", bucket=place[0], key=place[1], reason=str(error))
                await asyncio.sleep(RETRY_AFTER)
                record = self._waiting.pop(place, record)
            except UserError as error:
                log.error("a record cannot be written", bucket=place[0], key=place[1], reason=str(error))
                return
            else:
                return


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
