"""What the server says of a closed connection, where its configuration lets us hear it (`subjects.DISCONNECTS`).

Rule 1: it is news, not truth: whoever is heard afterwards is there.
Rule 2: a PNode and its control connection belong together by name: `<pnode>-control`.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from dcnr.errors import PeerError
from dcnr.ids import PNodeId, is_id

TYPE = "io.nats.server.advisory.v1.client_disconnect"
CONTROL = "-control"


@dataclass(frozen=True, slots=True)
class _Client:
    name: str = ""


@dataclass(frozen=True, slots=True)
class _Disconnect:
    type: str
    client: _Client


_READER = TypeAdapter(_Disconnect)


def closed_connection(data: bytes) -> str:
    """The name of the connection that was closed; '' for one without. Raises `PeerError` if these are no such news."""
    try:
        news = _READER.validate_json(data, strict=True)
    except ValidationError as error:
        raise PeerError(f"news of a closed connection: {error.errors(include_url=False)[0]['msg']}") from error
    if news.type != TYPE:
        raise PeerError(f"news of a closed connection: the type is '{news.type[:64]}'")
    return news.client.name


def pnode_of(connection: str) -> PNodeId | None:
    """The PNode whose control connection has this name, if it is one."""
    pnode = connection.removesuffix(CONTROL)
    return PNodeId(pnode) if pnode != connection and is_id(pnode) else None
