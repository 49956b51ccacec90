"""A cluster, as a client sees it: what is there, and how training begins.

Rule 1: everything is asked of the orchestrator that leads; what it refuses is raised here as the error that it was there.
Rule 2: a network is named, or its file comes along: a path, or its text. The file is registered in place of an older one of its name;
sessions keep the text that they began with.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

from dcnr.bus.api import call
from dcnr.bus.base import Bus
from dcnr.client.answers import (
    ClusterInfo,
    NetworkDetails,
    NetworkInfo,
    PNodeDetails,
    PNodeInfo,
    Registered,
    SessionInfo,
    read,
    read_all,
)
from dcnr.client.follow import Follower, follower
from dcnr.client.generation import GenerateOptions, Piece, generate
from dcnr.client.session import Session
from dcnr.errors import NotFound, UserError
from dcnr.ids import SessionId, check_id

BATCH = 8
"""Rows of a step, if nothing is said."""


@dataclass(frozen=True, slots=True)
class NetworkFile:
    """A network as text; `name` is what errors call it."""

    text: str
    name: str = "network.yml"


class TrainOptions(TypedDict, total=False):
    """How to train, beside what on what. Everything has a default: a batch of 8 in one piece, seed 0, fused, on all PNodes."""

    batch: int
    """Rows of a step."""
    micro_batches: int
    """Parts that a batch is sent in."""
    seed: int
    """Of weights, batches and dropout."""
    hyper: Mapping[str, str | int | float | bool | None]
    """Hyper-parameters by name, as `dcnr train --set` takes them: `{"lr": 1e-3, "schedule": "cosine"}`."""
    fuse: bool
    """Whether nodes may be fused; False runs the graph as written."""
    pnodes: int
    """Spread over so many PNodes; 0 for all."""


class Cluster:
    """What `dcnr.connect` gives: the cluster behind a NATS server. As a context, it stops listening at the end.

    A session that was followed is heard until then: a program that follows thousands opens a `connect()` for each.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._listening = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._listening.aclose()

    async def info(self) -> ClusterInfo:
        """The cluster in a line."""
        return read(ClusterInfo, await call(self._bus, "cluster.info"))

    # -- networks ----------------------------------------------------------------------------------------------------------

    async def networks(self) -> list[NetworkInfo]:
        """Every registered network."""
        return read_all(NetworkInfo, await call(self._bus, "network.list"), "networks")

    async def network(self, name: str) -> NetworkDetails:
        """One registered network, with its file. Raises `NotFound`."""
        return read(NetworkDetails, await call(self._bus, "network.show", name=name))

    async def register(self, network: NetworkFile | Path | str, replace: bool = False) -> Registered:
        """Register a network file. Raises `NetworkFileError` in words with all that is wrong, `AlreadyExists` without `replace`."""
        file = network if isinstance(network, NetworkFile) else read_network(network)
        return read(Registered, await call(self._bus, "network.create", file=file.text, file_name=file.name, replace=replace))

    async def delete_network(self, name: str) -> None:
        """Forget a registered network that no session uses."""
        await call(self._bus, "network.delete", name=name)

    # -- PNodes ------------------------------------------------------------------------------------------------------------

    async def pnodes(self) -> list[PNodeInfo]:
        """Every PNode that the cluster knows, and how it is."""
        return read_all(PNodeInfo, await call(self._bus, "pnode.list"), "pnodes")

    async def pnode(self, name: str) -> PNodeDetails:
        """One PNode with its VNodes. Raises `NotFound`."""
        return read(PNodeDetails, await call(self._bus, "pnode.show", pnode=name))

    async def drain(self, name: str) -> PNodeDetails:
        """Move everything off a PNode, so that it can be stopped."""
        return read(PNodeDetails, await call(self._bus, "pnode.drain", pnode=name))

    # -- sessions ----------------------------------------------------------------------------------------------------------

    async def sessions(self) -> list[SessionInfo]:
        """Every session."""
        return read_all(SessionInfo, await call(self._bus, "session.list"), "sessions")

    async def session(self, name: str) -> Session:
        """One session, to be followed, suspended, resumed or deleted. Raises `NotFound`."""
        await call(self._bus, "session.show", session=name)
        return Session(self._bus, SessionId(name), self._listen)

    async def train(
        self, network: NetworkFile | Path | str, dataset: str, steps: int, session: str | None = None, **options: Unpack[TrainOptions]
    ) -> Session:
        """Start a training run of `steps` steps. What is wrong is raised here, before anything is started.

        `network`: a registered name, or a file; `dataset`: a name of the cluster's data directory; `session`: a name, made up if not given.
        """
        fields: dict[str, Any] = {"batch": BATCH, **options, "hyper": dict(options.get("hyper", {}))}
        if isinstance(network, str) and not is_file(network):
            fields["network"], stem = network, network
        else:
            file = network if isinstance(network, NetworkFile) else read_network(network)
            fields |= {"file": file.text, "file_name": file.name}
            stem = Path(file.name).stem
        name = SessionId(check_id(session, "session") if session is not None else made_up(stem))
        async with AsyncExitStack() as listening:
            heard = await listening.enter_async_context(follower(self._bus, name))
            await call(self._bus, "session.create", dataset=dataset, steps=steps, session=name, start=True, **fields)
            self._listening.push_async_callback(listening.pop_all().aclose)
        return Session(self._bus, name, self._listen, heard)

    async def generate(self, session: str, prompt: str, **options: Unpack[GenerateOptions]) -> AsyncGenerator[str, None]:
        """The text that follows `prompt` by the newest checkpoint of `session`, piece by piece as it comes."""
        async with aclosing(self.pieces(session=session, prompt=prompt, **options)) as pieces:
            async for piece in pieces:
                if piece.text:
                    yield piece.text

    def pieces(self, **wanted: object) -> AsyncGenerator[Piece, None]:
        """The same with where it stands; `wanted` are the fields of the verb `generate`."""
        return generate(self._bus, wanted)

    async def _listen(self, name: SessionId) -> Follower:
        return await self._listening.enter_async_context(follower(self._bus, name))


def is_file(name: str) -> bool:
    """Whether `name` means a file rather than a registered network, whose names hold neither dots nor slashes."""
    return "." in name or "/" in name


def read_network(path: Path | str) -> NetworkFile:
    """Read a network file."""
    try:
        return NetworkFile(Path(path).read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        raise NotFound(f"there is no network file '{path}'", "check the path; the shipped ones lie in networks/") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: invalid UTF-8 at byte {error.start}", "a network file is YAML text") from None
    except IsADirectoryError:
        raise UserError(f"'{path}' is a folder", "name one network file in it") from None


def made_up(stem: str) -> str:
    """A new name for a session of a network."""
    return f"{re.sub(r'[^A-Za-z0-9_-]+', '-', stem)[:50]}-{secrets.token_hex(3)}"
