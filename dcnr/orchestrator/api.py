"""The verbs of the orchestrator: what is asked is checked here, decided by the machine, and answered from its state.

Rule 1: fields are validated before anything else happens; unknown fields are errors.
Rule 2: slow checks (graphs, datasets, manifests) run in threads, before the machine is asked; nothing partial is ever registered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from dcnr import __version__
from dcnr.errors import AlreadyExists, NotFound, UserError
from dcnr.ids import NetworkId, PNodeId, SessionId, check_id
from dcnr.metrics.history import History, Validations
from dcnr.network.graph import Graph
from dcnr.network.load import load_graph
from dcnr.optim.hyper import Hyper
from dcnr.orchestrator import events, views
from dcnr.orchestrator.cluster import Cluster
from dcnr.orchestrator.generation import Generation
from dcnr.orchestrator.planning import check_data, check_hyper, check_tokenizer, count_parameters, prepared, validated
from dcnr.orchestrator.requests import (
    CreateNetwork,
    CreateSession,
    Generate,
    ImportSession,
    NamedNetwork,
    NamedPNode,
    NamedSession,
    NextText,
    Nothing,
    ResumeSession,
    SessionRows,
    StopText,
)
from dcnr.orchestrator.session import Session
from dcnr.orchestrator.state import CheckpointRecord, NetworkRecord, SessionRecord, SessionState
from dcnr.orchestrator.store import newest_checkpoint
from dcnr.orchestrator.trainer import scaler_fields
from dcnr.storage.base import Storage
from dcnr.storage.checkpoint import Manifest, checkpoint_prefix, read_manifest
from dcnr.storage.export import imported_tokenizer

MAX_ROWS = 200
"""So many fit a message of any server."""

Answer = dict[str, Any]
Logs = tuple[History, Validations]
Put = Callable[[Callable[[int], events.Ask]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb: its name and what its request looks like."""

    name: str
    request: type[BaseModel]
    do: Callable[[Any], Awaitable[Answer]]

    async def answer(self, fields: dict[str, Any]) -> Answer:
        """Check the fields and do it. Raises `DcnrError`."""
        try:
            request = self.request.model_validate(fields)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise UserError(f"{self.name}: '{where}': {first['msg']}") from error
        return await self.do(request)


class Api:
    """All verbs, over the machine of the leader."""

    def __init__(self, cluster: Cluster, ask: Put, storage: Storage, data_dir: Path, logs: Logs, generation: Generation) -> None:
        self._cluster = cluster
        self._ask = ask
        self._storage = storage
        self._data_dir = data_dir
        self._history, self._validations = logs
        self.verbs = (
            Verb("cluster.info", Nothing, self._info),
            Verb("network.create", CreateNetwork, self._create_network),
            Verb("network.list", Nothing, self._list_networks),
            Verb("network.show", NamedNetwork, self._show_network),
            Verb("network.delete", NamedNetwork, self._delete_network),
            Verb("session.create", CreateSession, self._create_session),
            Verb("session.import", ImportSession, self._import_session),
            Verb("session.start", NamedSession, self._start_session),
            Verb("session.resume", ResumeSession, self._resume_session),
            Verb("session.suspend", NamedSession, self._suspend_session),
            Verb("session.rebalance", NamedSession, self._rebalance_session),
            Verb("session.list", Nothing, self._list_sessions),
            Verb("session.show", NamedSession, self._show_session),
            Verb("session.rows", SessionRows, self._show_rows),
            Verb("session.delete", NamedSession, self._delete_session),
            Verb("pnode.list", Nothing, self._list_pnodes),
            Verb("pnode.show", NamedPNode, self._show_pnode),
            Verb("pnode.drain", NamedPNode, self._drain_pnode),
            Verb("generate", Generate, generation.start),
            Verb("generate.next", NextText, generation.next),
            Verb("generate.stop", StopText, generation.stop),
        )

    async def _info(self, _request: Nothing) -> Answer:
        return views.cluster_info(self._cluster, self._storage.url, __version__)

    # -- networks ----------------------------------------------------------------------------------------------------------

    async def _create_network(self, request: CreateNetwork) -> Answer:
        record = await asyncio.to_thread(_read_network, request.file, request.file_name)
        await self._ask(lambda number: events.PutNetwork(number, record, request.replace))
        return {"name": record.name, "vnodes": record.vnodes, "parameters": record.parameters}

    async def _list_networks(self, _request: Nothing) -> Answer:
        return {"networks": [views.network_row(record) for _, record in sorted(self._cluster.networks.items())]}

    async def _show_network(self, request: NamedNetwork) -> Answer:
        record = self._network(request.name)
        return {**views.network_row(record), "file": record.file, "file_name": record.file_name}

    async def _delete_network(self, request: NamedNetwork) -> Answer:
        await self._ask(lambda number: events.DropNetwork(number, NetworkId(request.name)))
        return {"name": request.name}

    # -- sessions ----------------------------------------------------------------------------------------------------------

    async def _create_session(self, request: CreateSession) -> Answer:
        network = await self._network_of(request)
        hyper = check_hyper(request.hyper)
        graph = await asyncio.to_thread(prepared, network.file, network.file_name, request.fuse)
        await asyncio.to_thread(check_data, graph, self._data_dir, request.dataset, self._storage, validated(hyper))
        record = SessionRecord(
            session=await self._new_name(request.session, network.name),
            network=network.name,
            network_file=network.file,
            file_name=network.file_name,
            dataset=request.dataset,
            steps=request.steps,
            batch=request.batch,
            micro_batches=request.micro_batches,
            seed=request.seed,
            hyper=hyper.model_dump(),
            fuse=request.fuse,
            pnodes=request.pnodes,
        )
        start, new = graph if request.start else None, network if request.file is not None else None
        await self._ask(lambda number: events.CreateSession(number, record, start, new))
        return {"session": record.session}

    async def _network_of(self, request: CreateSession) -> NetworkRecord:
        """The registered one, or the one that comes along."""
        if request.file is None:
            assert request.network is not None
            return self._network(request.network)
        record = await asyncio.to_thread(_read_network, request.file, request.file_name)
        if request.network not in (None, record.name):
            raise UserError(
                f"{request.file_name} holds network '{record.name}', not '{request.network}'", "ask for the network of the file"
            )
        return record

    async def _new_name(self, wanted: str | None, network: str) -> SessionId:
        if wanted is not None:
            name = SessionId(check_id(wanted, "session"))
            if await self._storage.list(checkpoint_prefix(name)) and name not in self._cluster.sessions:
                raise AlreadyExists(f"there are checkpoints of an earlier session '{name}'", "choose another name")
            return name
        number = 1
        while await self._taken(name := SessionId(f"{network[:56]}-{number}")):
            number += 1
        return name

    async def _taken(self, name: SessionId) -> bool:
        return name in self._cluster.sessions or bool(await self._storage.list(checkpoint_prefix(name)))

    async def _import_session(self, request: ImportSession) -> Answer:
        """What is in storage already becomes a session that is suspended. Its network is registered, if none of that name is."""
        name = SessionId(check_id(request.session, "session"))
        if name in self._cluster.sessions:
            raise AlreadyExists(f"session '{name}' exists", "choose another name, or delete that session")
        try:
            manifest = await read_manifest(self._storage, name)
        except NotFound as error:
            raise NotFound(
                error.message,
                "`dcnr checkpoint import` must see the storage of the orchestrator: run it on that machine, or share the storage",
            ) from error
        network = await asyncio.to_thread(_read_network, manifest.network_file, "network.yml")
        graph = await asyncio.to_thread(prepared, manifest.network_file, "network.yml", manifest.fuse)
        dataset = request.dataset if request.dataset is not None else manifest.dataset
        reason = f"imported; to train on: dcnr session resume {name} --steps N"
        try:
            await self._check_data(graph, name, dataset, manifest.hyper)
        except UserError as error:
            if request.dataset is not None:
                raise
            reason = f"imported; it cannot be trained on: {error.message}"
        new = network if network.name not in self._cluster.networks else None
        record = replace(_imported(manifest, reason), dataset=dataset)
        await self._ask(lambda number: events.CreateSession(number, record, None, new))
        return {**views.session_state(self._session(name)), "step": record.step, "dataset": dataset, "reason": reason}

    async def _check_data(self, graph: Graph, session: SessionId, dataset: str, hyper: Mapping[str, object]) -> None:
        """Raise `UserError` unless `session` can be trained on `dataset`."""
        also = validated(Hyper.model_validate(hyper))
        await asyncio.to_thread(check_data, graph, self._data_dir, dataset, self._storage, also)
        tokenizer = await imported_tokenizer(self._storage, session)
        if tokenizer is not None:
            await asyncio.to_thread(check_tokenizer, tokenizer, self._data_dir, dataset, self._storage)

    async def _start_session(self, request: NamedSession) -> Answer:
        session = self._session(request.session)
        if session.record.state is not SessionState.CREATED:
            raise UserError(f"session '{request.session}' was started before", "`dcnr session resume` goes on with it")
        return await self._go_on(session, None)

    async def _resume_session(self, request: ResumeSession) -> Answer:
        return await self._go_on(self._session(request.session), request.steps)

    async def _go_on(self, session: Session, steps: int | None) -> Answer:
        record = session.record
        graph: Graph = await asyncio.to_thread(prepared, record.network_file, record.file_name, record.fuse)
        await self._check_data(graph, record.session, record.dataset, record.hyper)
        checkpoint = await newest_checkpoint(self._storage, record.session)
        if checkpoint is None and record.step:
            lost = f"no checkpoint of session '{record.session}' in {self._storage.url} can be read, and it had done {record.step} steps"
            raise UserError(lost, f"see `dcnr checkpoint verify {record.session}`; to start over, delete the session")
        await self._ask(lambda number: events.StartSession(number, record.session, graph, checkpoint, steps))
        return views.session_state(session)

    async def _suspend_session(self, request: NamedSession) -> Answer:
        session = self._session(request.session)
        await self._ask(lambda number: events.SuspendSession(number, session.record.session))
        return views.session_state(session)

    async def _rebalance_session(self, request: NamedSession) -> Answer:
        session = self._session(request.session)
        await self._ask(lambda number: events.RebalanceSession(number, session.record.session))
        return views.session_state(session)

    async def _list_sessions(self, _request: Nothing) -> Answer:
        return {"sessions": [views.session_row(session) for _, session in sorted(self._cluster.sessions.items())]}

    async def _show_session(self, request: NamedSession) -> Answer:
        session = self._session(request.session)
        shown = views.session_details(session)
        if shown["loss"] is None:
            rows = await asyncio.to_thread(self._history.rows, session.record.session)
            shown["loss"] = rows[-1].loss if rows else None
        return shown

    async def _show_rows(self, request: SessionRows) -> Answer:
        """The rows and validations of those steps that are asked for of which anything is known, up to a step at which there are `MAX_ROWS`
        of either: who wants more asks from the step after the last one of both on.
        """
        session = self._session(request.session).record.session
        rows = await asyncio.to_thread(self._history.rows, session)
        validations = await asyncio.to_thread(self._validations.rows, session)
        shown = [row for row in rows if request.first <= row.step <= request.last and row.step % request.every == 0][:MAX_ROWS]
        told = [one for one in validations if request.first <= one.step <= request.last][:MAX_ROWS]
        last = min(part[-1].step if len(part) == MAX_ROWS else request.last for part in (shown, told))
        return {
            "rows": [asdict(row) for row in shown if row.step <= last],
            "validations": [asdict(one) for one in told if one.step <= last],
        }

    async def _delete_session(self, request: NamedSession) -> Answer:
        await self._ask(lambda number: events.DeleteSession(number, SessionId(request.session)))
        return {"session": request.session, "state": "deleted"}

    # -- PNodes ------------------------------------------------------------------------------------------------------------

    async def _list_pnodes(self, _request: Nothing) -> Answer:
        return {"pnodes": [views.pnode_row(member) for _, member in sorted(self._cluster.fleet.members.items())]}

    async def _show_pnode(self, request: NamedPNode) -> Answer:
        return views.pnode_details(self._cluster, self._pnode(request.pnode))

    async def _drain_pnode(self, request: NamedPNode) -> Answer:
        await self._ask(lambda number: events.DrainPNode(number, PNodeId(request.pnode)))
        return views.pnode_details(self._cluster, self._pnode(request.pnode))

    # -- what must exist ---------------------------------------------------------------------------------------------------

    def _network(self, name: str) -> NetworkRecord:
        if name not in self._cluster.networks:
            raise NotFound(f"no network '{name}'", "see `dcnr network list`, or register it with `dcnr network create`")
        return self._cluster.networks[NetworkId(name)]

    def _session(self, name: str) -> Session:
        if name not in self._cluster.sessions:
            raise NotFound(f"no session '{name}'", "see `dcnr session list`")
        return self._cluster.sessions[SessionId(name)]

    def _pnode(self, name: str) -> PNodeId:
        if name not in self._cluster.fleet.members:
            raise NotFound(f"no PNode '{name}'", "see `dcnr pnode list`")
        return PNodeId(name)


def _read_network(file: str, file_name: str) -> NetworkRecord:
    """What is registered of a network file. Blocks; raises `NetworkFileError`."""
    graph = load_graph(file, file_name)
    return NetworkRecord(graph.name, file, file_name, len(graph.nodes), count_parameters(graph))


def _imported(manifest: Manifest, reason: str) -> SessionRecord:
    """The session of a checkpoint that was made elsewhere, at rest."""
    checkpoint = CheckpointRecord(manifest.step, manifest.key, scaler_fields(manifest.state))
    return SessionRecord(
        session=manifest.session,
        network=manifest.network,
        network_file=manifest.network_file,
        file_name="network.yml",
        dataset=manifest.dataset,
        steps=manifest.total_steps,
        batch=manifest.batch,
        micro_batches=manifest.micro_batches,
        seed=manifest.seed,
        hyper=manifest.hyper,
        fuse=manifest.fuse,
        pnodes=0,
        state=SessionState.SUSPENDED,
        reason=reason,
        step=manifest.step,
        checkpoints=(checkpoint,),
    )
